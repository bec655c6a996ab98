/* Everything about one candidate: traits, what it takes of a multiprocessor, its times beside the winner's. */
(() => {
  const { h, words } = R;
  const WARP = 32;

  /** What changes from one candidate to another, as chips: "tile_n 128 → 224". */
  R.changes = (space, from, to) =>
    h(
      "ul",
      { class: "changes" },
      R.model
        .differences(space, from, to)
        .map((one) => h("li", null, h("code", null, one.name), ` ${words.value(one.from)} → ${words.value(one.to)}`)),
    );

  const fact = (name, ...value) => h("div", null, h("dt", null, name), h("dd", null, value));

  function traits(space, who) {
    return R.model
      .traitsOf(space, who)
      .map((trait) =>
        h(
          "span",
          { class: R.model.isOwn(space, trait, who) ? "own" : "", title: trait.doc },
          `${trait.name} `,
          h("b", null, words.value(R.model.valueOf(trait, who))),
        ),
      );
  }

  function costs(space, who) {
    const at = (name) => space.costs[name][who];
    if (at("threads") === null) return null;
    const kib = (bytes) => words.digits(bytes / 1024, 4);
    return h(
      "dl",
      { class: "facts" },
      fact("shared memory", `${kib(at("smem_bytes"))} of ${kib(space.costs.smem_limit)} KiB`),
      fact("registers a thread", `${at("registers")}, fragments ${at("fragment_regs")}`),
      fact(
        "on a multiprocessor",
        `${at("blocks")} × ${at("threads")} threads, ${(at("blocks") * at("threads")) / WARP} warps`,
      ),
      at("clocks") && fact("analytic score", `${words.digits(at("clocks"))} clocks for 1000 scores`),
    );
  }

  function times(space, who) {
    const rows = space.cells.flatMap((cell) => {
      const place = cell.who.indexOf(who);
      if (place < 0) return [];
      const [ms, low, high] = cell.times[place];
      const behind = ms / cell.times[0][0] - 1;
      const interval = `(${words.digits(low, 4)} to ${high === null ? "?" : words.digits(high, 4)})`;
      return h(
        "tr",
        null,
        h("th", { scope: "row" }, `${cell.mask} ${cell.dtype} ${cell.label}`),
        R.cell("time, ms", "", `${words.digits(ms, 4)} ${interval}`),
        R.cell("TFLOP/s", "number", words.digits(cell.work / ms)),
        R.cell("of the product", "number", cell.matmul ? words.percent(cell.work / ms / cell.matmul) : "–"),
        R.cell("place", "number", `${place + 1} of ${cell.who.length}`),
        R.cell("behind", "number", place ? words.percent(behind) : "fastest"),
      );
    });
    const heads = ["problem", "time, ms", "TFLOP/s", "of the product", "place", "behind the fastest"];
    return rows.length ? R.table("times", heads, rows) : null;
  }

  /** Its standing in the selected problem, in words. */
  function standing(data, space, who) {
    const { share, timed, of, estimated } = R.state.speed();
    const problem = R.state.problem();
    const reason = R.model.reasonOf(data, space, problem, who);
    if (reason) return `${R.model.stateWords(data, R.model.stateOf(space, problem, who))}: ${reason}`;
    if (estimated && !Number.isNaN(share[who]))
      return `${words.percent(share[who])} of the first's speed by the analytic score; not timed`;
    if (!timed[who]) return R.model.stateWords(data, R.model.stateOf(space, problem, who));
    const part = timed[who] < of ? `, on ${timed[who]} of ${of} lengths` : "";
    return `${words.percent(share[who])} of the fastest's speed here${part}`;
  }

  /** The panel of a candidate, for the selected problem. */
  R.detail = (data, who) => {
    const space = R.state.space();
    const slot = R.state.slot();
    const reference = R.state.reference();
    const pages = space.pages.filter((page) => page.who === who);
    return h(
      "div",
      { class: "detail" },
      h("h3", null, h("code", null, R.model.title(space, who)), R.roles(space, slot, who), h("small", null, space.ids[who])),
      h("p", null, standing(data, space, who)),
      pages.length
        ? h(
            "p",
            null,
            "Layouts: ",
            pages.map((page, place) => [place ? ", " : "", h("a", { href: page.href }, page.title)]),
          )
        : null,
      costs(space, who),
      h("div", { class: "traits" }, traits(space, who)),
      reference === null || reference === who
        ? null
        : h("div", null, h("b", null, slot ? "From the winner to this" : "From the first to this"), R.changes(space, reference, who)),
      times(space, who),
    );
  };

  R.roles = (space, slot, who) =>
    [
      ["winner", slot?.winner === who],
      ["default", slot?.default === who],
      ["table row", slot?.row === who],
      ["shipped", !slot && space.shipped.includes(who)],
    ]
      .filter(([, is]) => is)
      .map(([word]) => h("span", { class: `role ${word.split(" ")[0]}` }, word));
})();
