/* What each trait is worth: for each of its values the best candidate and the spread of the others. */
(() => {
  const { h, words } = R;
  const TICKS = 4;
  const STEP = 0.01 * TICKS; // so that every tick is a whole percentage
  const MARGIN = 0.005;

  /** The least share that the charts show, below every middle half; what lies below it is drawn to the edge. */
  function floorOf(found) {
    const lowest = Math.min(...found.flatMap(({ values }) => values.filter((one) => one.count).map((one) => one.q1)));
    return Math.max(0, 1 - STEP * Math.ceil((1 - lowest + MARGIN) / STEP));
  }

  const at = (share, floor) => `${(100 * (Math.max(share, floor) - floor)) / (1 - floor)}%`;
  const between = (low, high, floor) => `left: ${at(low, floor)}; right: calc(100% - ${at(high, floor)})`;

  function track(entry, floor) {
    if (!entry.count) return h("span", { class: "track none" }, entry.rejected ? "none came so far" : "none timed");
    return h(
      "span",
      { class: "track" },
      h("i", { class: `reach${entry.low < floor ? " cut" : ""}`, style: between(entry.low, entry.best, floor) }),
      h("i", { class: "box", style: between(entry.q1, entry.q3, floor) }),
      h("i", { class: "median", style: `left: ${at(entry.median, floor)}` }),
      h("i", { class: "best", style: `left: ${at(entry.best, floor)}` }),
    );
  }

  function line(trait, entry, floor, winner) {
    const chosen = R.state.now.filter[trait.name];
    const on = Boolean(chosen?.includes(String(entry.value)));
    const best = entry.count ? words.percent(entry.best) : "";
    const label = entry.count
      ? `${entry.count} timed, best ${best}, median ${words.percent(entry.median)}, ${entry.rejected} rejected`
      : `none timed, ${entry.rejected} rejected`;
    return h(
      "div",
      { class: `effect${winner === entry.value ? " of-winner" : ""}${chosen && !on ? " off" : ""}`, title: label },
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
      track(entry, floor),
      h("span", { class: "number" }, best, h("small", null, entry.count ? ` ${entry.count}` : "")),
    );
  }

  function card({ trait, influence, values }, floor, slot) {
    const winner = slot?.winner === undefined || slot.winner === null ? null : R.model.valueOf(trait, slot.winner);
    const ticks = Array.from({ length: TICKS + 1 }, (_, place) => floor + ((1 - floor) * place) / TICKS);
    return h(
      "section",
      { class: "effect-card", "aria-label": trait.name },
      h("h3", null, h("code", null, trait.name), h("small", null, `worth up to ${words.percent(influence)}`)),
      h("p", { class: "hint" }, trait.doc),
      values.map((entry) => line(trait, entry, floor, winner)),
      h(
        "div",
        { class: "effect effect-axis", "aria-hidden": "true" },
        h("span"),
        h(
          "span",
          { class: "track" },
          ticks.map((share) => h("em", { style: `left: ${at(share, floor)}` }, Math.round(share * 100))),
        ),
        h("span", { class: "number" }, "%"),
      ),
    );
  }

  R.effects = () => {
    const grid = h("div", { class: "effect-grid" });
    const draw = () => {
      const found = R.model.effects(R.state.space(), R.state.problem(), R.state.speed());
      const focus = document.activeElement?.getAttribute("aria-label")?.split(":")[0];
      if (!found.length) {
        grid.replaceChildren(
          h("p", { class: "hint" }, "No trait has been timed with several values for this selection."),
        );
        return;
      }
      const floor = floorOf(found);
      grid.replaceChildren(...found.map((one) => card(one, floor, R.state.slot())));
      const again =
        focus &&
        [...grid.querySelectorAll("button")].find((button) =>
          button.getAttribute("aria-label").startsWith(`${focus}:`),
        );
      again?.focus();
    };
    R.state.on([...R.WHERE, "filter"], draw);
    draw();
    const key = [
      ["best", "best candidate"],
      ["box", "middle half, and the median"],
      ["reach", "from the slowest"],
      ["of-winner", "the winner's value"],
    ].map(([name, word]) => h("span", null, h("i", { class: `effect-key ${name}` }), word));
    return [
      h(
        "p",
        { class: "hint" },
        "Speed as a share of the fastest's, over all candidates with a value, and how many they are. What counts is " +
          "how far the best of a value lies behind the best of all: the other traits then fit it as well as they can.",
      ),
      h("div", { class: "key" }, key),
      grid,
    ];
  };
})();
