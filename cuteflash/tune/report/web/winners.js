/* For every slot (mask, dtype, shape class) the winner, the default, the margin with its interval, and the peers. */
(() => {
  const { h, svg, words } = R;
  const OPEN = 4; // spaces whose tables are open at first; of more only the selected one's is
  const WIDTH = 132;
  const LIMITS = [-0.03, 0.3]; // what the common axis of a space's margins shows at most
  const ROUND = 0.02;

  /** The margin that a slot is about: before the default or, where that wins or is not there, before the second. */
  const marginOf = (slot) => slot.margin || slot.ahead;

  function axis(space) {
    const ends = space.slots.flatMap((slot) => marginOf(slot) || []).filter((end) => end !== null);
    const low = Math.max(LIMITS[0], Math.min(-0.01, ...ends));
    const high = Math.min(LIMITS[1], Math.max(0.02, ...ends));
    return { low: Math.floor(low / ROUND) * ROUND, high: Math.ceil(high / ROUND) * ROUND };
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

  /** Whether the table would have another row; the default stays also where it is within the tolerance of the best. */
  const replaced = (slot) => slot.replaces && slot.row !== slot.default;

  function outcome(slot) {
    if (slot.winner === null) return "no candidate was timed on all its lengths";
    if (slot.winner === slot.default) return "the default wins";
    if (!slot.has_default) return "nothing runs it yet";
    if (!slot.default_timed) return "the default was not timed";
    if (replaced(slot)) return "replaces the default";
    if (slot.replaces) return "beats the default, which is close enough to stay";
    return "the default stays";
  }

  /** "612 TFLOP/s, 86 % of the product" of a slot's winner, geometric means over its cells. */
  function rate(space, slot) {
    const cells = R.model.cellsOf(space, slot);
    const mean = (numbers) => Math.exp(numbers.reduce((sum, one) => sum + Math.log(one), 0) / numbers.length);
    const rates = cells.map((cell) => cell.work / cell.times[cell.who.indexOf(slot.winner)][0]);
    const known = cells.every((cell) => cell.matmul);
    const part = known ? mean(rates.map((one, place) => one / cells[place].matmul)) : null;
    return [`${words.digits(mean(rates))} TFLOP/s`, part === null ? null : `${words.percent(part)} of the product`];
  }

  const cell = (label, ...children) => h("td", { "data-label": label }, children);
  const name = (space, who) => h("code", null, R.model.title(space, who));

  function peerCells(slot, peers) {
    return peers.map((peer) => {
      const found = slot.peers[peer];
      if (!found) return h("td", { "data-label": R.model.PEERS[peer], class: "number empty" }, "–");
      const worst = found.worst === found.mean ? null : h("small", null, `worst ${found.worst.toFixed(2)}×`);
      return h(
        "td",
        { "data-label": R.model.PEERS[peer], class: `number${found.mean < 1 ? " behind" : ""}` },
        `${found.mean.toFixed(2)}×`,
        worst,
      );
    });
  }

  function row(space, slot, scale, peers) {
    const title = `${slot.mask} · ${slot.dtype} · ${slot.shape}`;
    const choose = () => {
      R.state.set({ space: space.title, mask: slot.mask, dtype: slot.dtype, shape: slot.shape, cell: "" });
      document.getElementById("selection").scrollIntoView({ block: "start" });
    };
    const head = h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: choose }, title));
    const line = h("tr", null, head);
    line.slot = { space: space.title, ...slot };
    if (slot.winner === null) {
      line.append(h("td", { colspan: 5 + peers.length }, outcome(slot)));
      return line;
    }
    const [speed, part] = rate(space, slot);
    const margin = marginOf(slot);
    const sure = slot.margin ? slot.replaces : margin && margin[1] > 0;
    const before = slot.margin ? "before the default" : "before the second";
    const same = slot.winner === slot.default;
    line.append(
      cell("Winner", name(space, slot.winner), h("small", null, [speed, part].filter(Boolean).join(", "))),
      cell("Default", same ? "the same" : slot.default === null ? "–" : name(space, slot.default)),
      cell(
        "Margin",
        margin ? [forest(margin, scale, !sure), h("small", null, `${range(margin)} ${before}`)] : "the only one timed",
      ),
      cell("Outcome", outcome(slot)),
      cell(
        "Table row",
        slot.row === slot.winner ? "the winner" : slot.row === slot.default ? "the default" : name(space, slot.row),
        slot.row_worst ? h("small", null, `at most ${words.percent(slot.row_worst)} behind the best`) : null,
      ),
      ...peerCells(slot, peers),
    );
    return line;
  }

  function summary(space) {
    const better = space.slots.filter((slot) => slot.margin && replaced(slot));
    const gains = better.map((slot) => slot.margin[0]);
    const text = [`${space.slots.length} problems`, `${better.length} with a better row`];
    if (gains.length) text.push(`by up to ${words.percent(Math.max(...gains))}`);
    for (const peer of peersOf([space])) {
      const ratios = space.slots.map((slot) => slot.peers[peer]?.mean).filter(Boolean);
      const mean = Math.exp(ratios.reduce((sum, one) => sum + Math.log(one), 0) / ratios.length);
      text.push(`${mean.toFixed(2)}× ${R.model.PEERS[peer]}`);
    }
    return h("summary", null, h("b", null, space.title), h("span", { class: "hint" }, text.join(" · ")));
  }

  const peersOf = (spaces) =>
    Object.keys(R.model.PEERS).filter((peer) => spaces.some((space) => space.slots.some((slot) => slot.peers[peer])));

  R.winners = (data) => {
    const spaces = data.spaces.filter((space) => space.slots.length);
    if (!spaces.length) return h("p", { class: "hint" }, "Nothing has been timed yet, so nobody has won.");
    const blocks = spaces.map((space) => {
      const scale = axis(space);
      const peers = peersOf([space]);
      const heads = [
        "Problem",
        "Winner",
        "Default",
        "Margin",
        "Outcome",
        "Table row",
        ...peers.map((peer) => `against ${R.model.PEERS[peer]}`),
      ];
      const table = h(
        "table",
        { class: "cards winners" },
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            heads.map((text) => h("th", { scope: "col" }, text)),
          ),
        ),
        h(
          "tbody",
          null,
          space.slots.map((slot) => row(space, slot, scale, peers)),
        ),
      );
      const block = h("details", { open: spaces.length <= OPEN }, summary(space), h("div", { class: "scroll" }, table));
      block.space = space.title;
      return block;
    });
    const mark = () => {
      for (const block of blocks) {
        if (block.space === R.state.now.space) block.open = true;
        for (const line of block.querySelectorAll("tbody tr")) {
          const here = ["space", "mask", "dtype", "shape"].every((key) => line.slot[key] === R.state.now[key]);
          line.classList.toggle("current", here);
          line.querySelector("button").setAttribute("aria-pressed", here);
        }
      }
    };
    R.state.on(R.WHERE, mark);
    mark();
    const note =
      "Margins are geometric means over the problem's lengths; the interval is a 95 % one " +
      "of both errors together. The default is the shipped row's; it is replaced " +
      "where somebody is surely faster, and by more than 1 %, else the dot is hollow. A table row may stand for " +
      "several problems, within 2 % of the best of each where that can be.";
    return [h("p", { class: "hint" }, note), ...blocks];
  };
})();
