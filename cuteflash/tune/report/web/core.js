/* The page's name R: the base, labelled fields, ticks, numbers in words. Knows nothing of sweeps. */
const R = { ...Base };

(() => {
  /** A `<select>` with its label in sight; otherwise as `Base.select`. */
  R.field = (label, ...choice) => R.h("label", { class: "field" }, R.h("span", null, label), R.select(label, ...choice));

  /** A table whose rows become cards where the page is narrow; heads are texts or cells. */
  R.table = (kind, heads, body) => {
    const head = heads.map((one) => (typeof one === "string" ? R.h("th", { scope: "col" }, one) : one));
    const rows = body instanceof Node ? body : R.h("tbody", null, body);
    const table = R.h("table", { class: `cards ${kind}` }, R.h("thead", null, R.h("tr", null, head)), rows);
    return R.h("div", { class: "scroll" }, table);
  };

  /** A cell of such a table; a card shows its label. `kind` is a class: `number` or nothing. */
  R.cell = (label, kind, ...children) => R.h("td", { "data-label": label, class: kind }, children);

  /** Round numbers at equal distances, at most `most` of which cover what lies between `low` and `high`. */
  R.ticks = (low, high, most) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => (high - low) / one <= most);
    const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
    return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
  };

  /** Calls `draw` now and whenever the width of `node` changes. */
  R.onWidth = (node, draw) => {
    let width = null;
    const watch = new ResizeObserver(() => {
      if (node.clientWidth === width || !node.clientWidth) return;
      width = node.clientWidth;
      draw();
    });
    watch.observe(node);
  };
})();

/* Numbers in words. */
(() => {
  const THIN = "\u2009";

  /** A positive number with `digits` significant digits, never in powers of ten. */
  function digits(value, count = 3) {
    const places = Math.max(0, count - 1 - Math.floor(Math.log10(value)));
    return value === 0 ? "0" : value.toFixed(Math.min(places, 6));
  }

  /** 0.0512 as "5.1 %"; null is unknown. */
  const percent = (share, places = 1) =>
    share === null ? "unknown" : `${minus((100 * share).toFixed(places))}${THIN}%`;

  /** The same with a sign. */
  const signed = (share, places = 1) => (share === null ? "unknown" : (share > 0 ? "+" : "") + percent(share, places));

  const minus = (text) => text.replace("-", "−");

  /** Any value of a trait; null is that of a candidate of a kind without it. */
  const value = (one) => ({ true: "on", false: "off", null: "–" })[one] ?? String(one);

  /** "2026-03-02 09:30" of a moment in ISO form. */
  const moment = (text) => text.slice(0, 16).replace("T", " ");

  R.words = { whole: R.number, digits, percent, signed, value, moment };
})();
