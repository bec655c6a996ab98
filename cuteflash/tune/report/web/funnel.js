/* How many candidates each stage let through, and what the others were rejected for. */
(() => {
  const { h, words } = R;

  /* Each state has a pattern of its own beside its colour. */
  function bar(counts) {
    const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
    return h(
      "div",
      { class: "funnel-bar", "aria-hidden": "true" },
      R.model.ORDER.filter((state) => counts[state]).map((state) =>
        h("i", { class: `state-${state}`, style: `flex-grow: ${counts[state] / total}` }),
      ),
    );
  }

  const COLUMNS = {
    p: "cannot run",
    l: "left out before compiling",
    u: "not compiled yet",
    c: "rejected by the compiler",
    g: "wrong",
    t: "failed when timed",
    w: "not timed yet",
    T: "timed",
  };

  function overview(data) {
    const funnels = data.spaces.map((space) => R.model.funnel(space, null));
    const order = R.model.ORDER.filter((state) => state !== "u" || funnels.some((counts) => counts.u));
    const heads = ["Space", "considered", ...order.map((state) => COLUMNS[state]), h("td")];
    const rows = data.spaces.map((space, place) => {
      const counts = funnels[place];
      const count = (state) => [h("i", { class: `swatch state-${state}` }), words.whole(counts[state])];
      return h(
        "tr",
        null,
        h("th", { scope: "row" }, space.title),
        R.cell("considered", "number", words.whole(space.ids.length)),
        order.map((state) => R.cell(COLUMNS[state], "number", count(state))),
        h("td", { class: "funnel-cell" }, bar(counts)),
      );
    });
    return R.table("funnel figures", heads, rows);
  }

  function reasons(data) {
    const list = h("ul", { class: "reasons" });
    const head = h("summary");
    const draw = () => {
      const space = R.state.space();
      const common = R.model.commonReasons(data, space, null);
      const most = common.length ? common[0][1] : 1;
      head.textContent = `Reasons for leaving ${space.title}, by number`;
      list.replaceChildren(
        ...common.map(([template, count]) =>
          h(
            "li",
            null,
            h("span", { class: "count" }, words.whole(count)),
            h("span", { class: "length", "aria-hidden": "true" }, h("i", { style: `width: ${(100 * count) / most}%` })),
            h("span", null, template.replace(/#/g, "…")),
          ),
        ),
      );
    };
    R.state.on(["space"], draw);
    draw();
    return h("details", null, head, list);
  }

  R.funnel = (data) => [
    h("p", { class: "hint" }, "A candidate counts where it came furthest, of all masks and element types."),
    overview(data),
    reasons(data),
  ];
})();
