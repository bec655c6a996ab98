/* Every length beside its best peer; decoding, which memory bounds, by the bytes that it reads and writes a second. */
(() => {
  const { h, svg, words } = R;
  const HEIGHT = 230;
  const EDGE = { left: 44, right: 10, top: 14, bottom: 26 };
  const DODGE = 13; // pixels between the marks of one length
  const TICKS = 7; // steps of an axis, at most

  /* Each series has a shape of its own beside its colour. Shapes are paths around (0, 0). */
  const SHAPES = {
    winner: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    default: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    fa4: "M0,-6L5.5,4.5L-5.5,4.5Z",
    cudnn: "M-4.6,-4.6H4.6V4.6H-4.6Z",
    fa2: "M0,-6L6,0L0,6L-6,0Z",
  };
  const wordOf = (data, name) => data.peers[name] ?? name;

  /* What a chart may show of a series: key, unit, and how its numbers and those of its axis read. */
  const times = (value) => `${value.toFixed(2)}×`;
  const plain = (value) => String(Number(value.toPrecision(3)));
  const RATIO = { key: "ratio", unit: "× the best peer", text: times, tick: times };
  const TERABYTES = { key: "terabytes", unit: "TB/s", text: (value) => words.digits(value), tick: plain };
  const TFLOPS = { key: "tflops", unit: "TFLOP/s", text: (value) => words.digits(value), tick: plain };

  /** `[{title, what, cells}]`: a chart for each mask, dtype and kind of inputs, and one more for its decoding. */
  function charts(space) {
    const groups = new Map();
    for (const cell of space.cells) {
      const [, ...inputs] = cell.label.split(" "); // after the lengths; none if they are plain
      const decoding = R.model.isDecoding(cell) ? ["decoding"] : [];
      const title = [cell.mask, cell.dtype, ...inputs, ...decoding].join(" · ");
      groups.set(title, [...(groups.get(title) || []), cell]);
    }
    return [...groups].map(([title, cells]) => {
      const beside = cells.every((cell) => Object.keys(cell.peers).length);
      return { title, cells, what: R.model.isDecoding(cells[0]) ? TERABYTES : beside ? RATIO : TFLOPS };
    });
  }

  const mark = (name, x, y, title) =>
    svg(
      "path",
      { class: `mark ${name}`, d: SHAPES[name], transform: `translate(${x} ${y})` },
      title && svg("title", null, title),
    );

  function facet(data, space, { title, what, cells }) {
    const points = cells.map((cell) => R.model.series(space, cell));
    const holder = h("div", { class: "facet-plot" });
    R.onWidth(holder, () => holder.replaceChildren(picture(data, holder.clientWidth, cells, points, what)));
    return h("figure", { class: "facet" }, h("figcaption", null, title, h("small", null, ` ${what.unit}`)), holder);
  }

  /** A ratio's axis holds 1 and a little more on both sides, a rate's begins at 0. */
  function axisOf(values, what) {
    const [low, high] = what === RATIO ? [0.95, 1.05] : [0, 0];
    return R.ticks(Math.min(low, ...values), Math.max(high, ...values), TICKS);
  }

  function picture(data, width, cells, points, what) {
    const axis = axisOf(points.flatMap((own) => own.map((one) => one[what.key])), what);
    const inner = { w: width - EDGE.left - EDGE.right, h: HEIGHT - EDGE.top - EDGE.bottom };
    const [low, high] = [axis[0], axis.at(-1)];
    const y = (value) => EDGE.top + ((high - value) / (high - low)) * inner.h;
    const x = (place) => EDGE.left + ((place + 0.5) / cells.length) * inner.w;
    const names = present(points);
    const shift = (name) =>
      (names.indexOf(name) - (names.length - 1) / 2) * Math.min(DODGE, inner.w / cells.length / (names.length + 1));
    const across = (value) => ({ x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) });
    const trend = points.flatMap((own, place) =>
      own
        .filter((one) => one.name === "winner")
        .map((one) => `${x(place) + shift("winner")},${y(one[what.key])}`),
    );
    return svg(
      "svg",
      {
        width,
        height: HEIGHT,
        viewBox: `0 0 ${width} ${HEIGHT}`,
        role: "img",
        "aria-label": `${what.unit} by length; the table below has the numbers.`,
      },
      axis.map((value) => [
        svg("line", { class: "grid", ...across(value) }),
        svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, what.tick(value)),
      ]),
      what === RATIO && svg("line", { class: "one", ...across(1) }),
      cells.map((cell, place) => svg("text", { x: x(place), y: HEIGHT - 7, "text-anchor": "middle" }, cell.label)),
      svg("polyline", { class: "trend", points: trend.join(" ") }),
      points.map((own, place) =>
        own.map((one) => {
          const said = `${wordOf(data, one.name)}, ${cells[place].label}: ${what.text(one[what.key])} ${what.unit}`;
          return mark(one.name, x(place) + shift(one.name), y(one[what.key]), said);
        }),
      ),
    );
  }

  const present = (points) =>
    Object.keys(SHAPES).filter((name) => points.some((own) => own.some((one) => one.name === name)));

  function numbers(data, space, points) {
    const names = present(points);
    const rows = space.cells.map((cell, place) => {
      const series = Object.fromEntries(points[place].map((one) => [one.name, one]));
      const what = R.model.isDecoding(cell) ? TERABYTES : TFLOPS;
      const number = (name) => {
        const one = series[name];
        if (!one) return name === "default" ? "same" : "–";
        return [what.text(one[what.key]), one.ratio === null ? null : h("small", null, RATIO.text(one.ratio))];
      };
      const head = h("th", { scope: "row" }, `${cell.mask} ${cell.dtype} ${cell.label}, ${what.unit}`);
      const own = names.map((name) => R.cell(wordOf(data, name), "number", number(name)));
      const product = R.cell("matrix product", "number", cell.matmul ? words.digits(cell.matmul) : "–");
      return h("tr", null, head, own, product);
    });
    const heads = ["problem", ...names.map((name) => wordOf(data, name)), "matrix product, TFLOP/s"];
    const summary = h("summary", null, "The numbers, with each one's ratio to the best peer");
    return h("details", null, summary, R.table("figures", heads, rows));
  }

  R.peers = (data) => {
    const body = h("div");
    const draw = () => {
      const space = R.state.space();
      if (!space.cells.length) {
        body.replaceChildren(h("p", { class: "hint" }, `Nothing of ${space.title} has been timed yet.`));
        return;
      }
      const points = space.cells.map((cell) => R.model.series(space, cell));
      const found = charts(space);
      const said = {
        ratio: "The line at 1.00× is the fastest peer of each length; what lies above it is faster.",
        tflops: "Where no peer was timed, rates stand for themselves.",
        terabytes: "Decoding is bound by memory: its rate is what Q, K, V and O hold over the time.",
      };
      const keys = Object.keys(said).filter((key) => found.some(({ what }) => what.key === key));
      body.replaceChildren(
        h("p", { class: "hint" }, `${space.title}. ${keys.map((key) => said[key]).join(" ")}`),
        h(
          "div",
          { class: "key" },
          present(points).map((name) => {
            const box = { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" };
            return h("span", null, svg("svg", box, mark(name, 0, 0)), wordOf(data, name));
          }),
        ),
        h(
          "div",
          { class: "facets" },
          found.map((one) => facet(data, space, one)),
        ),
        numbers(data, space, points),
      );
    };
    R.state.on(["space"], draw);
    draw();
    return body;
  };
  R.peersParts = { charts, axisOf };
})();
