/* For every slot (mask, dtype, length class) the winner, what it changes, the margin with its interval, and the peers. */
(() => {
  const { h, svg, words } = R;
  const OPEN = 4; // spaces whose tables are open at first; of more only the selected one's is
  const WIDTH = 132;
  const LIMITS = [-0.03, 0.3]; // what the common axis of a space's margins shows at most

  /** The margin that a slot is about: before the default or, where that wins or is not there, before the second. */
  const marginOf = (slot) => slot.margin || slot.ahead;

  function axis(space) {
    const ends = space.slots.flatMap((slot) => marginOf(slot) || []).filter((end) => end !== null);
    const low = Math.max(LIMITS[0], Math.min(-0.01, ...ends));
    const high = Math.min(LIMITS[1], Math.max(0.02, ...ends));
    const ticks = R.ticks(low, high, 8);
    return { low: ticks[0], high: ticks.at(-1) };
  }

  /** A dot with whiskers, and the line where nothing is gained. */
  function forest([middle, least, most], { low, high }, noise) {
    const x = (share) => 4 + ((Math.min(Math.max(share, low), high) - low) / (high - low)) * (WIDTH - 8);
    return svg(
      "svg",
      {
        class: `forest${noise ? " noise" : ""}`,
        width: WIDTH,
        height: 18,
        viewBox: `0 0 ${WIDTH} 18`,
        "aria-hidden": "true",
      },
      svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: 18 }),
      svg("line", { class: "whisker", x1: x(least ?? low), x2: x(most ?? high), y1: 9, y2: 9 }),
      noise
        ? svg("circle", { class: "dot hollow", cx: x(middle), cy: 9, r: 3.5 })
        : svg("circle", { class: "dot", cx: x(middle), cy: 9, r: 4 }),
    );
  }

  const end = (share) => (share === null ? "?" : words.signed(share));
  const range = ([middle, least, most]) => `${words.signed(middle)} (${end(least)} to ${end(most)})`;

  /** "612 TFLOP/s, 86 % of the product" of a slot's winner; decoding is bound by memory, so its rate is TB/s. */
  function rate(space, slot) {
    const { tflops, share, terabytes } = R.model.rates(R.model.cellsOf(space, slot), slot.winner);
    if (R.model.isDecoding(slot)) return `${words.digits(terabytes)} TB/s`;
    return `${words.digits(tflops)} TFLOP/s${share === null ? "" : `, ${words.percent(share)} of the product`}`;
  }

  const changes = (space, { winner, default: from }) =>
    from === winner ? "nothing" : from === null ? "–" : R.changes(space, from, winner);
  const name = (space, who) => h("code", null, R.model.title(space, who));

  function peerCell(found, word) {
    if (!found) return R.cell(word, "number empty", "–");
    const worst = found.worst === found.mean ? null : h("small", null, `worst ${found.worst.toFixed(2)}×`);
    const mean = `${found.behind ? "▾ " : ""}${found.mean.toFixed(2)}×`;
    return R.cell(word, `number${found.behind ? " behind" : ""}`, mean, worst);
  }

  function row(space, slot, scale, peers) {
    const title = `${slot.mask} · ${slot.dtype} · ${slot.lengths}`;
    const choose = () => {
      R.state.set({ space: space.title, mask: slot.mask, dtype: slot.dtype, lengths: slot.lengths, cell: "" });
      document.getElementById("selection").scrollIntoView({ block: "start" });
    };
    const head = h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: choose }, title));
    const line = h("tr", null, head);
    line.problem = { space: space.title, ...slot };
    if (slot.winner === null) {
      line.append(h("td", { colspan: 5 + peers.length }, slot.outcome));
      return line;
    }
    const margin = marginOf(slot);
    const before = slot.margin ? "before the default" : "before the second";
    line.append(
      R.cell("Winner", "", name(space, slot.winner), h("small", null, rate(space, slot))),
      R.cell("Default → winner", "", changes(space, slot)),
      R.cell(
        "Margin",
        "",
        margin
          ? [forest(margin, scale, !(margin[1] > 0)), h("small", null, `${range(margin)} ${before}`)]
          : "the only one timed",
      ),
      R.cell("Outcome", "", slot.outcome),
      R.cell(
        "Table row",
        "",
        slot.row === slot.winner ? "the winner" : slot.row === slot.default ? "the default" : name(space, slot.row),
        slot.row_worst ? h("small", null, `at most ${words.percent(slot.row_worst)} behind the best`) : null,
      ),
      ...peers.map(([peer, word]) => peerCell(slot.peers[peer], word)),
    );
    return line;
  }

  const summary = (space) =>
    h("summary", null, h("b", null, space.title), h("span", { class: "hint" }, space.verdict));

  /** What the analytic score says of a space that was not timed, and what it would change of the best shipped row. */
  function untimed(space) {
    const speed = R.model.estimates(space);
    const first = R.model.fastest(speed);
    const row = R.model.fastest({ share: speed.share.map((one, who) => (space.shipped.includes(who) ? one : NaN)) });
    const text = h("p", null, h("b", null, space.title), " ", space.verdict);
    if (row === null || row === first) return text;
    return [text, h("small", null, "From that row to the first:"), R.changes(space, row, first)];
  }

  R.winners = (data) => {
    const spaces = data.spaces.filter((space) => space.slots.length);
    const others = data.spaces.filter((space) => !space.slots.length);
    const blocks = spaces.map((space) => {
      const scale = axis(space);
      const peers = Object.entries(data.peers).filter(([peer]) => space.slots.some((slot) => slot.peers?.[peer]));
      const heads = [
        "Problem",
        "Winner",
        "Default → winner",
        "Margin",
        "Outcome",
        "Table row",
        ...peers.map(([, word]) => `against ${word}`),
      ];
      const rows = space.slots.map((slot) => row(space, slot, scale, peers));
      const block = h("details", { open: spaces.length <= OPEN }, summary(space), R.table("winners", heads, rows));
      block.space = space.title;
      return block;
    });
    const mark = () => {
      for (const block of blocks) {
        if (block.space === R.state.now.space) block.open = true;
        for (const line of block.querySelectorAll("tbody tr")) {
          const here = ["space", "mask", "dtype", "lengths"].every((key) => line.problem[key] === R.state.now[key]);
          line.classList.toggle("current", here);
          line.querySelector("button").setAttribute("aria-pressed", here);
        }
      }
    };
    R.state.on(R.WHERE, mark);
    mark();
    const note =
      "Margins are geometric means over the problem's lengths; the interval is a 95 % one " +
      "of both errors together, and where it reaches below zero the dot is hollow. The default is the shipped row's; " +
      "it is replaced where somebody is surely faster, and by more than 1 %. A table row may stand for several " +
      "problems, within 2 % of the best of each where that can be. ▾ marks a peer that is surely faster.";
    return [
      spaces.length > 0 && h("p", { class: "hint" }, note),
      ...blocks,
      others.map((space) => h("div", { class: "untimed" }, untimed(space))),
    ];
  };
})();
