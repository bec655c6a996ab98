/* Everything about one candidate: traits, what it takes of a multiprocessor, its times beside the winner's. */
(() => {
  const { h, words } = R;
  const WARP = 32;

  const fact = (name, ...value) => h("div", null, h("dt", null, name), h("dd", null, value));

  function traits(space, who) {
    return space.traits.map((trait) => {
      const value = R.model.valueOf(trait, who);
      const own = !("default" in trait) || value !== trait.default;
      return h(
        "span",
        { class: own ? "own" : "", title: trait.doc },
        `${trait.name} `,
        h("b", null, words.value(value)),
      );
    });
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
    );
  }

  function times(space, who) {
    const rows = space.cells.flatMap((cell) => {
      const place = cell.who.indexOf(who);
      if (place < 0) return [];
      const [ms, low, high] = cell.times[place];
      const behind = ms / cell.times[0][0] - 1;
      return h(
        "tr",
        null,
        h("th", { scope: "row" }, `${cell.mask} ${cell.dtype} ${cell.label}`),
        h(
          "td",
          { "data-label": "time, ms" },
          `${words.digits(ms, 4)} (${words.digits(low, 4)} to ${high === null ? "?" : words.digits(high, 4)})`,
        ),
        h("td", { "data-label": "TFLOP/s", class: "number" }, words.digits(cell.work / ms)),
        h(
          "td",
          { "data-label": "of the product", class: "number" },
          cell.matmul ? words.percent(cell.work / ms / cell.matmul) : "–",
        ),
        h("td", { "data-label": "place", class: "number" }, `${place + 1} of ${cell.who.length}`),
        h("td", { "data-label": "behind", class: "number" }, place ? words.percent(behind) : "fastest"),
      );
    });
    if (!rows.length) return null;
    const heads = ["problem", "time, ms", "TFLOP/s", "of the product", "place", "behind the fastest"];
    return h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "cards times" },
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            heads.map((text) => h("th", { scope: "col" }, text)),
          ),
        ),
        h("tbody", null, rows),
      ),
    );
  }

  /** Its standing in the selected problem, in words. */
  function standing(data, space, who) {
    const { share, timed, of } = R.state.speed();
    const problem = R.state.problem();
    const reason = R.model.reasonOf(data, space, problem, who);
    if (reason) return `${R.model.stateWords(data, R.model.stateOf(space, problem, who))}: ${reason}`;
    if (!timed[who]) return R.model.stateWords(data, R.model.stateOf(space, problem, who));
    const part = timed[who] < of ? `, on ${timed[who]} of ${of} lengths` : "";
    return `${words.percent(share[who])} of the fastest's speed here${part}`;
  }

  /** The panel of a candidate, for the selected problem. */
  R.detail = (data, who) => {
    const space = R.state.space();
    const slot = R.state.slot();
    const winner = slot?.winner ?? null;
    const apart = winner === null || winner === who ? [] : R.model.differences(space, who, winner);
    const pages = space.pages.filter((page) => page.who === who);
    return h(
      "div",
      { class: "detail" },
      h("h3", null, h("code", null, R.model.title(space, who)), roles(slot, who), h("small", null, space.ids[who])),
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
      apart.length ? h("p", null, h("b", null, "Beside the winner: "), apart.join("; ")) : null,
      times(space, who),
    );
  };

  function roles(slot, who) {
    return [
      ["winner", slot?.winner],
      ["default", slot?.default],
      ["table row", slot?.row],
    ]
      .filter(([, one]) => one === who)
      .map(([word]) => h("span", { class: `role ${word.split(" ")[0]}` }, word));
  }
  R.roles = roles;
})();
