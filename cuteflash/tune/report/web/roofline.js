/* The roof: what share of a matrix product of the same run each problem reaches, ours and the peers'. */
(() => {
  const { h, svg, words } = R;
  const HEIGHT = 230;
  const EDGE = { left: 44, right: 10, top: 14, bottom: 40 };
  const DODGE = 13; // pixels between the marks of one length

  /* Each series has a shape of its own beside its colour. Shapes are paths around (0, 0). */
  const SHAPES = {
    winner: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    default: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    fa4: "M0,-6L5.5,4.5L-5.5,4.5Z",
    cudnn: "M-4.6,-4.6H4.6V4.6H-4.6Z",
    fa2: "M0,-6L6,0L0,6L-6,0Z",
  };
  const WORDS = { winner: "winner", default: "default", ...R.model.PEERS };

  /** `[{name, tflops}]` of what a cell has: its slot's winner and default, then the peers. */
  function seriesOf(space, cell) {
    const slot = space.slots.find((one) => ["mask", "dtype", "shape"].every((key) => one[key] === cell[key]));
    const time = (who) => cell.times[cell.who.indexOf(who)]?.[0];
    const entries = [
      ["winner", time(slot?.winner)],
      ["default", slot?.default === slot?.winner ? undefined : time(slot?.default)],
      ...Object.keys(R.model.PEERS).map((peer) => [peer, cell.peers[peer]]),
    ];
    return entries.filter(([, ms]) => ms).map(([name, ms]) => ({ name, tflops: cell.work / ms }));
  }

  const mark = (name, x, y, title) =>
    svg(
      "path",
      { class: `mark ${name}`, d: SHAPES[name], transform: `translate(${x} ${y})` },
      title && svg("title", null, title),
    );

  function facet(space, mask, dtype) {
    const cells = space.cells.filter((cell) => cell.mask === mask && cell.dtype === dtype);
    const relative = cells.every((cell) => cell.matmul);
    const points = cells.map((cell) =>
      seriesOf(space, cell).map((one) => ({ ...one, value: relative ? one.tflops / cell.matmul : one.tflops })),
    );
    const top = relative
      ? Math.max(1.05, ...points.flat().map((one) => one.value))
      : 1.08 * Math.max(...points.flat().map((one) => one.value));
    const holder = h("div", { class: "facet-plot" });
    R.onWidth(holder, () => holder.replaceChildren(picture(holder.clientWidth, cells, points, top, relative)));
    return h("figure", { class: "facet" }, h("figcaption", null, `${mask} · ${dtype}`), holder);
  }

  function picture(width, cells, points, top, relative) {
    const inner = { w: width - EDGE.left - EDGE.right, h: HEIGHT - EDGE.top - EDGE.bottom };
    const y = (value) => EDGE.top + (1 - value / top) * inner.h;
    const x = (place) => EDGE.left + ((place + 0.5) / cells.length) * inner.w;
    const step = relative ? 0.2 : niceStep(top);
    const ticks = [];
    for (let value = 0; value <= top + 1e-9; value += step) ticks.push(value);
    const names = Object.keys(SHAPES).filter((name) => points.some((own) => own.some((one) => one.name === name)));
    const shift = (name) =>
      (names.indexOf(name) - (names.length - 1) / 2) * Math.min(DODGE, inner.w / cells.length / (names.length + 1));
    const text = (value) => (relative ? `${Math.round(value * 100)} %` : words.digits(value, 3));
    const line = points.flatMap((own, place) =>
      own
        .filter((one) => one.name === "winner")
        .map((one) => [x(place) + shift("winner"), y(one.value), cells[place].shape]),
    );
    return svg(
      "svg",
      {
        width,
        height: HEIGHT,
        viewBox: `0 0 ${width} ${HEIGHT}`,
        role: "img",
        "aria-label": "Rates by length; the table below has the numbers.",
      },
      ticks.map((value) => [
        svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)),
      ]),
      relative && [
        svg("line", { class: "roof", x1: EDGE.left, x2: width - EDGE.right, y1: y(1), y2: y(1) }),
        svg("text", { class: "roof-name", x: width - EDGE.right, y: y(1) - 4, "text-anchor": "end" }, "matrix product"),
      ],
      cells.map((cell, place) => [
        svg("text", { class: "tick", x: x(place), y: HEIGHT - EDGE.bottom + 20, "text-anchor": "middle" }, cell.label),
        svg(
          "text",
          { class: "tick faint", x: x(place), y: HEIGHT - EDGE.bottom + 33, "text-anchor": "middle" },
          cell.shape,
        ),
      ]),
      line
        .slice(1)
        .map(([toX, toY, shape], place) =>
          shape === "decode" || line[place][2] === "decode"
            ? null
            : svg("line", { class: "trend", x1: line[place][0], y1: line[place][1], x2: toX, y2: toY }),
        ),
      points.map((own, place) =>
        own.map((one) =>
          mark(
            one.name,
            x(place) + shift(one.name),
            y(one.value),
            `${WORDS[one.name]}, ${cells[place].label}: ${words.digits(one.tflops)} TFLOP/s`,
          ),
        ),
      ),
    );
  }

  /** A round distance that divides a range into four to eight. */
  function niceStep(top) {
    const power = 10 ** Math.floor(Math.log10(top / 4));
    return [1, 2, 5, 10].map((one) => one * power).find((one) => top / one <= 8);
  }

  function numbers(space) {
    const present = Object.keys(SHAPES).filter((name) =>
      space.cells.some((cell) => seriesOf(space, cell).some((one) => one.name === name)),
    );
    const rows = space.cells.map((cell) => {
      const series = Object.fromEntries(seriesOf(space, cell).map((one) => [one.name, one.tflops]));
      return h(
        "tr",
        null,
        h("th", { scope: "row" }, `${cell.mask} ${cell.dtype} ${cell.label}`),
        present.map((name) =>
          h(
            "td",
            { "data-label": WORDS[name], class: "number" },
            name in series ? words.digits(series[name]) : name === "default" ? "same" : "–",
            name in series && cell.matmul ? h("small", null, words.percent(series[name] / cell.matmul)) : null,
          ),
        ),
        h("td", { "data-label": "matrix product", class: "number" }, cell.matmul ? words.digits(cell.matmul) : "–"),
      );
    });
    const heads = ["problem", ...present.map((name) => WORDS[name]), "matrix product"];
    const table = h(
      "table",
      { class: "cards" },
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
    );
    return h("details", null, h("summary", null, "The numbers, TFLOP/s"), h("div", { class: "scroll" }, table));
  }

  R.roofline = () => {
    const body = h("div");
    const draw = () => {
      const space = R.state.space();
      if (!space.cells.length) {
        body.replaceChildren(h("p", { class: "hint" }, "Nothing has been timed yet."));
        return;
      }
      const pairs = [...new Map(space.cells.map((cell) => [`${cell.mask} ${cell.dtype}`, cell])).values()];
      const rates = [...new Set(space.cells.map((cell) => cell.matmul).filter(Boolean))].map((rate) =>
        words.digits(rate),
      );
      const names = Object.keys(SHAPES).filter((name) =>
        space.cells.some((cell) => seriesOf(space, cell).some((one) => one.name === name)),
      );
      body.replaceChildren(
        h(
          "p",
          { class: "hint" },
          rates.length
            ? `${space.title}: the roof is an 8192³ bf16 matrix product on random data, timed in the same run: ` +
                `${rates.join(", ")} TFLOP/s. Decoding is bound by memory, whose roof was not measured.`
            : `${space.title}: no matrix product was timed in these runs, so rates stand for themselves, in TFLOP/s.`,
        ),
        h(
          "div",
          { class: "key" },
          names.map((name) =>
            h(
              "span",
              null,
              svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" }, mark(name, 0, 0)),
              WORDS[name],
            ),
          ),
        ),
        h(
          "div",
          { class: "facets" },
          pairs.map(({ mask, dtype }) => facet(space, mask, dtype)),
        ),
        numbers(space),
      );
    };
    R.state.on(["space"], draw);
    draw();
    return body;
  };
  R.rooflineParts = { seriesOf, niceStep };
})();
