/* The Index's logic: filters, search, order, equal rows. No drawing except links. */
(() => {
  "use strict";

  const { h } = CF;
  const PAGES = { compare: "Compare two rows", playground: "Playground", learn: "Study path" };
  const COMPARED = 2; // rows that stand side by side

  const extents = ({ tile }) => tile.split("x").map(Number);
  const dimsOf = ({ head_dim: own, head_dim_v: other }) => [...new Set([own, other])].map(String);

  /* The sort key of a column. */
  const ORDERS = {
    arch: (row) => row.arch,
    head_dim: (row) => row.head_dim * 1000 + row.head_dim_v,
    mask: (row) => row.mask,
    tile: (row) => extents(row)[0] * 1000 + extents(row)[1],
    speed: (row) => row.speed?.tflops ?? 0,
    smem_bytes: (row) => row.smem_bytes,
  };

  /* key, label and the values that a row has; a row may serve several masks, dtypes and classes of lengths. */
  const FILTERS = [
    { key: "arch", label: "Arch", values: (row) => [row.arch] },
    { key: "family", label: "Family", values: (row) => [row.family] },
    { key: "dim", label: "Head dim", values: dimsOf },
    { key: "mask", label: "Mask", values: (row) => row.mask.split(", ") },
    { key: "dtype", label: "Dtype", values: (row) => row.dtype.split(", ") },
    { key: "lengths", label: "Lengths", values: (row) => row.lengths.split(", ") },
  ];

  for (const { key } of FILTERS) CF.state.define(key, { param: key });
  CF.state.define("sort", { param: "sort" });
  CF.state.define("search", { param: "q" });

  /** The choices of a filter: every value that some row has, numbers in order. */
  function choices(rows, { values }) {
    const found = [...new Set(rows.flatMap(values))];
    return found.every((value) => /^\d+$/.test(value)) ? found.sort((a, b) => a - b) : found;
  }

  /** The rows that have all the values of `wanted` (`{key: value or null}`). */
  const filtered = (rows, wanted) =>
    rows.filter((row) => FILTERS.every(({ key, values }) => !wanted[key] || values(row).includes(wanted[key])));

  /** A trait in which a row differs from most of its table: `fixed_max`, `q_in_regs off`, `kv_stage 3`. */
  const traitText = (name, value) => (value === true ? name : `${name} ${value === false ? "off" : value}`);

  /* The whole text of a row in lower case. */
  function saidOf(row) {
    const traits = Object.entries(row.apart).map(([name, value]) => traitText(name, value));
    const speed = row.speed ? `${row.speed.tflops} tflop/s ${row.speed.gpu} measured` : "not measured";
    const tile = `${row.tile} ${row.tile.replace("x", " × ")}`;
    const dims = [...dimsOf(row).map((size) => `d${size}`), row.features];
    return [row.title, row.mask, row.dtype, row.lengths, tile, ...dims, ...traits, speed].join(" ").toLowerCase();
  }

  /** The rows whose text contains every word of `text`, or a word that starts with it. */
  function searched(rows, text) {
    const words = (text ?? "").toLowerCase().split(/[\s,]+/).filter(Boolean);
    const has = (said, word) => said.split(/[^a-z0-9_/×.]+/).some((part) => part.startsWith(word));
    return rows.filter((row) => words.every((word) => has(saidOf(row), word)));
  }

  /** Rows in the order of a column, `-key` the other way round; null: as they came. Equal rows keep their order. */
  function sorted(rows, sort) {
    const by = ORDERS[sort?.replace(/^-/, "")];
    if (!by) return [...rows];
    const sign = sort.startsWith("-") ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    return [...rows].sort((a, b) => sign * compare(by(a), by(b)));
  }

  /** The sort after a click on a column's head: upwards, downwards, as the tables have it. */
  const nextSort = (sort, key) => (sort === key ? `-${key}` : sort === `-${key}` ? null : key);

  /** The rows grouped with the equal ones of other targets: `[[row, ...], ...]`. */
  function kin(rows) {
    const found = new Map();
    for (const row of rows) {
      const key = [row.kin, row.head_dim_v, row.mask, row.dtype, row.lengths].join();
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(row);
    }
    return [...found.values()];
  }

  /** The rows to compare after `id` was ticked or unticked: `[a, b]`, null for none; a third replaces the older one. */
  function chosen([a, b], id) {
    const ids = [a, b].filter(Boolean);
    const next = ids.includes(id) ? ids.filter((other) => other !== id) : [...ids, id].slice(-COMPARED);
    return [next[0] ?? null, next[1] ?? null];
  }

  /** The row that ran fastest, or the first if no row was measured. */
  const fastest = (rows) => sorted(rows, "-speed")[0];

  /** Links to the other common pages of the site, from the page `here`; the bar on top leads to the index. */
  function links(here) {
    const others = Object.entries(PAGES).filter(([page]) => page !== here);
    return h(
      "nav",
      { class: "site-links", "aria-label": "Pages" },
      others.map(([page, text]) => h("a", { href: `${page}.html` }, text)),
    );
  }

  CF.gallery = {
    FILTERS,
    ORDERS,
    COMPARED,
    extents,
    dims: (row) => dimsOf(row).join(" × "),
    choices,
    filtered,
    searched,
    sorted,
    nextSort,
    kin,
    chosen,
    fastest,
    traitText,
    links,
  };
})();
