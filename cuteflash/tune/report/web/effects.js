/* What each trait is worth: how much faster or slower candidates are that differ from another in that trait alone. */
(() => {
  const { h, words } = R;
  const TICKS = 3; // steps of the axis, at most
  const LEAST = 0.02; // that the axis reaches to both sides, so that its steps are whole percentages

  /** The common axis' ticks: every middle half lies between their ends; what does not is drawn to the edge. */
  function axisOf(found) {
    const told = found.flatMap(({ values }) => values.filter((one) => one.pairs));
    const low = Math.min(-LEAST, ...told.map((one) => one.q1));
    return R.ticks(low, Math.max(LEAST, ...told.map((one) => one.q3)), TICKS);
  }

  function at(change, axis) {
    const [low, high] = [axis[0], axis.at(-1)];
    return `${(100 * (Math.min(Math.max(change, low), high) - low)) / (high - low)}%`;
  }
  const between = (from, to, axis) => `left: ${at(from, axis)}; right: calc(100% - ${at(to, axis)})`;
  const zero = (axis) => h("i", { class: "zero", style: `left: ${at(0, axis)}` });

  function track(entry, axis, own) {
    if (own) return h("span", { class: "track" }, zero(axis), h("i", { class: "middle", style: `left: ${at(0, axis)}` }));
    const none = R.state.speed().estimated ? "none is left" : "none timed";
    if (!entry.pairs) return h("span", { class: "track none" }, entry.count ? "in no pair" : none);
    const cut = `${entry.low < axis[0] ? " cut-low" : ""}${entry.high > axis.at(-1) ? " cut-high" : ""}`;
    return h(
      "span",
      { class: "track" },
      zero(axis),
      h("i", { class: `reach${cut}`, style: between(entry.low, entry.high, axis) }),
      h("i", { class: "box", style: between(entry.q1, entry.q3, axis) }),
      h("i", { class: "middle", style: `left: ${at(entry.median, axis)}` }),
    );
  }

  /* Whose values the others are told against. */
  const whose = () => (R.state.slot() ? "the winner's" : "the first's");
  const pairs = (count) => `${count} ${count === 1 ? "pair" : "pairs"}`;

  function line(trait, entry, axis, own) {
    const chosen = R.state.now.filter[trait.name];
    const on = Boolean(chosen?.includes(String(entry.value)));
    const label = own
      ? `${whose()} value, ${entry.count} candidates`
      : entry.pairs
        ? `${words.signed(entry.median)} is the median of ${pairs(entry.pairs)}, ${entry.count} candidates`
        : `in no pair, ${entry.count} candidates`;
    return h(
      "div",
      { class: `effect${own ? " of-winner" : ""}${chosen && !on ? " off" : ""}`, title: label },
      h(
        "button",
        {
          type: "button",
          "aria-pressed": on,
          "aria-label": `${trait.name} ${words.value(entry.value)}: ${label}`,
          onclick: () => R.state.toggle(trait.name, entry.value),
        },
        words.value(entry.value),
      ),
      track(entry, axis, own),
      h(
        "span",
        { class: "number" },
        own ? whose() : entry.pairs ? words.signed(entry.median) : "",
        h("small", null, own || !entry.pairs ? "" : ` ${entry.pairs}`),
      ),
    );
  }

  function card({ trait, pairs: all, worth, values }, axis, kept) {
    return h(
      "section",
      { class: "effect-card", "aria-label": trait.name },
      h("h3", null, h("code", null, trait.name), h("small", null, `worth ${words.percent(worth)} in ${pairs(all)}`)),
      h("p", { class: "hint" }, trait.doc),
      values.map((entry, place) => line(trait, entry, axis, place === trait.column[kept])),
      h(
        "div",
        { class: "effect effect-axis", "aria-hidden": "true" },
        h("span"),
        h(
          "span",
          { class: "track" },
          axis.map((change) => h("em", { style: `left: ${at(change, axis)}` }, words.signed(change, 0))),
        ),
        h("span"),
      ),
    );
  }

  const KEY = [
    ["middle", "median of the pairs"],
    ["box", "their middle half"],
    ["reach", "all of them"],
  ];

  R.effects = () => {
    const hint = h("p", { class: "hint" });
    const key = h(
      "div",
      { class: "key" },
      KEY.map(([name, word]) => h("span", null, h("i", { class: `effect-key ${name}` }), word)),
    );
    const grid = h("div", { class: "effect-grid" });
    const alone = h("p", { class: "hint" });
    const draw = () => {
      const kept = R.state.reference();
      const found = kept === null ? [] : R.model.effects(R.state.space(), R.state.speed(), kept);
      const told = found.filter((one) => one.pairs);
      const without = found.filter((one) => !one.pairs).map((one) => one.trait.name);
      const focus = document.activeElement?.getAttribute("aria-label")?.split(":")[0];
      hint.textContent =
        `From pairs of candidates that differ in one trait alone, one of which has ${whose()} value: how much faster ` +
        "or slower the other one is. Beside each value stand the median and the number of its pairs. A trait is worth " +
        `what the other values lose, the median of all its pairs; below zero ${whose()} value pays only together ` +
        "with other traits.";
      alone.textContent = without.length
        ? `Without such a pair: ${without.join(", ")}.`
        : told.length
          ? ""
          : "No trait has several values among the candidates of this selection.";
      key.hidden = !told.length;
      const axis = told.length ? axisOf(told) : null;
      grid.replaceChildren(...told.map((one) => card(one, axis, kept)));
      const again =
        focus &&
        [...grid.querySelectorAll("button")].find((button) =>
          button.getAttribute("aria-label").startsWith(`${focus}:`),
        );
      again?.focus();
    };
    R.state.on([...R.WHERE, "filter"], draw);
    draw();
    return [hint, key, grid, alone];
  };
})();
