/* The Index view: every row of the site with what it costs, filtered and sorted; two chosen rows can be compared. */
(() => {
  "use strict";

  const { h } = CF;
  const PAGES = { index: "All rows", compare: "Compare two rows", playground: "Playground", learn: "Study path" };
  const COMPARED = 2; // rows that stand side by side
  const GLYPH = { scale: 0.11, gap: 3, height: 22 }; // pixels an element, between the tiles, of the tallest tile
  const O_COLOUR = 3; // as in the Budget view
  const S_COLOUR = 5;

  const text = (value) => h("td", {}, value);
  const number = (value) => h("td", { class: "num" }, value);

  /* key, heading, what sorts it, and its cell; a row's heading is its head dim. */
  const COLUMNS = [
    { key: "arch", head: "arch", by: (row) => row.arch, cell: (row) => text(row.arch) },
    { key: "family", head: "family", by: (row) => row.family, cell: (row) => text(row.family) },
    { key: "head_dim", head: "head dim", by: (row) => row.head_dim * 1000 + row.head_dim_v, cell: rowHead },
    { key: "mask", head: "masks", by: (row) => row.mask, cell: (row) => text(row.mask) },
    { key: "dtype", head: "dtypes", by: (row) => row.dtype, cell: (row) => text(row.dtype) },
    { key: "shape", head: "lengths", by: (row) => row.shape, cell: (row) => text(row.shape) },
    { key: "tile", head: "tile", by: (row) => extents(row)[0] * 1000 + extents(row)[1], cell: tileCell },
    { key: "threads", head: "threads", by: (row) => row.threads, cell: (row) => number(row.threads) },
    { key: "smem_bytes", head: "smem", by: (row) => row.smem_bytes, cell: smemCell },
    { key: "blocks_per_sm", head: "blocks", by: (row) => row.blocks_per_sm, cell: (row) => number(row.blocks_per_sm) },
    { key: "worst_ways", head: "bank ways", by: (row) => row.worst_ways, cell: waysCell },
  ];

  const NUMBERS = ["threads", "smem_bytes", "blocks_per_sm", "worst_ways"];

  const dimsOf = ({ head_dim: own, head_dim_v: other }) => [...new Set([own, other])].map(String);

  /* key, label and the values that a row has; a row may serve several masks, dtypes and classes of lengths. */
  const FILTERS = [
    { key: "arch", label: "Arch", values: (row) => [row.arch] },
    { key: "family", label: "Family", values: (row) => [row.family] },
    { key: "dim", label: "Head dim", values: dimsOf },
    { key: "mask", label: "Mask", values: (row) => row.mask.split(", ") },
    { key: "dtype", label: "Dtype", values: (row) => row.dtype.split(", ") },
    { key: "shape", label: "Lengths", values: (row) => row.shape.split(", ") },
  ];

  for (const { key } of FILTERS) CF.state.define(key, { param: key });
  CF.state.define("sort", { param: "sort" });

  /** What a filter can ask for: every value that some row has, numbers in order. */
  function choices(rows, { values }) {
    const found = [...new Set(rows.flatMap(values))];
    return found.every((value) => /^\d+$/.test(value)) ? found.sort((a, b) => a - b) : found;
  }

  /** The rows that have all the values of `wanted` (`{key: value or null}`). */
  const filtered = (rows, wanted) =>
    rows.filter((row) => FILTERS.every(({ key, values }) => !wanted[key] || values(row).includes(wanted[key])));

  /** Rows in the order of a column, `-key` the other way round; null: as they came. Equal rows keep their order. */
  function sorted(rows, sort) {
    const column = COLUMNS.find(({ key }) => key === sort?.replace(/^-/, ""));
    if (!column) return [...rows];
    const sign = sort.startsWith("-") ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    return [...rows].sort((a, b) => sign * compare(column.by(a), column.by(b)));
  }

  /** The sort after a click on a column's head: upwards, downwards, as the tables have it. */
  const nextSort = (sort, key) => (sort === key ? `-${key}` : sort === `-${key}` ? null : key);

  /** The rows to compare after `id` was chosen or let go: `[a, b]`, null where none is; the older of two gives way. */
  function chosen([a, b], id) {
    const ids = [a, b].filter(Boolean);
    const next = ids.includes(id) ? ids.filter((other) => other !== id) : [...ids, id].slice(-COMPARED);
    return [next[0] ?? null, next[1] ?? null];
  }

  const extents = ({ tile }) => tile.split("x").map(Number);
  const dims = (row) => dimsOf(row).join(" × ");

  /* A row's link covers all of the row. */
  function rowHead(row) {
    return h("th", { scope: "row" }, h("a", { href: row.file, "aria-label": row.title }, dims(row)));
  }

  /* The tiles of S and O to one scale for all rows, and the size of the former. */
  function tileCell(row) {
    const [m, n] = extents(row);
    const [high, wide, deep] = [m, n, row.head_dim_v].map((size) => size * GLYPH.scale);
    const y = (GLYPH.height - high) / 2;
    const box = (x, width, colour) =>
      CF.svg("rect", { x, y, width, height: high, fill: CF.palette.css(CF.palette.category(colour)) });
    const label = `Tiles of S, ${m} by ${n}, and O, ${m} by ${row.head_dim_v}`;
    const glyph = CF.svg(
      "svg",
      { class: "tile-glyph", width: wide + GLYPH.gap + deep, height: GLYPH.height, role: "img", "aria-label": label },
      CF.svg("title", {}, label),
      box(0, wide, S_COLOUR),
      box(wide + GLYPH.gap, deep, O_COLOUR),
    );
    return h("td", {}, h("span", { class: "tile" }, h("span", {}, `${m} × ${n}`), glyph));
  }

  function smemCell(row) {
    return number(CF.budget.bytes(row.smem_bytes));
  }

  function waysCell({ worst_ways: ways }) {
    return h("td", { class: ways > 1 ? "num bad" : "num" }, ways > 1 ? `${ways}-way ▲` : "1-way");
  }

  /** Links to the other common pages of the site, from the page `here`. */
  function links(here) {
    const others = Object.entries(PAGES).filter(([page]) => page !== here);
    return h(
      "nav",
      { class: "site-links", "aria-label": "Pages" },
      others.map(([page, text]) => h("a", { href: `${page}.html` }, text)),
    );
  }

  class Index {
    constructor(container, rows) {
      this.rows = rows;
      this.count = h("p", { class: "gallery-count", role: "status" });
      this.filters = FILTERS.map((filter) => this.#filter(filter));
      this.clear = h("button", { type: "button", onclick: () => CF.state.set(noFilters()) }, "Show all");
      this.picked = h("div", { class: "gallery-picked", role: "status" });
      this.heads = COLUMNS.map((column) => this.#head(column));
      this.body = h("tbody");
      container.append(
        links("index"),
        intro(rows),
        h("div", { class: "gallery-bar", role: "group", "aria-label": "Filter" }, this.filters, this.clear, this.count),
        h(
          "table",
          { class: "facts-table gallery", "aria-label": "Rows" },
          h("thead", {}, h("tr", {}, this.heads, h("td", {}, "compare"))),
          this.body,
        ),
        this.picked,
      );
      const keys = FILTERS.map(({ key }) => key);
      this.stops = [
        CF.state.on([...keys, "sort"], () => this.update()),
        CF.state.on(["a", "b"], () => this.#drawPicked()),
      ];
      this.update();
    }

    destroy() {
      for (const stop of this.stops) stop();
    }

    #filter(filter) {
      const { key, label } = filter;
      const pairs = [["", "all"], ...choices(this.rows, filter).map((value) => [value, value])];
      const choose = (value) => CF.state.set({ [key]: value || null });
      const select = CF.select(label, pairs, CF.state.get(key) ?? "", choose);
      select.dataset.filter = key;
      return h("label", {}, h("span", {}, label), select);
    }

    #head({ key, head }) {
      const turn = () => CF.state.set({ sort: nextSort(CF.state.get("sort"), key) });
      const kind = NUMBERS.includes(key) ? "num" : null;
    const button = h("button", { type: "button", onclick: turn }, head);
    return h("th", { scope: "col", class: kind, dataset: { key } }, button);
    }

    update() {
      const wanted = Object.fromEntries(FILTERS.map(({ key }) => [key, CF.state.get(key)]));
      const found = sorted(filtered(this.rows, wanted), CF.state.get("sort"));
      const some = found.length < this.rows.length;
      this.count.textContent = some ? `${found.length} of ${this.rows.length} rows` : `${found.length} rows`;
      this.clear.disabled = !some;
      for (const label of this.filters) {
        const select = label.querySelector("select");
        select.value = wanted[select.dataset.filter] ?? "";
      }
      for (const head of this.heads) head.setAttribute("aria-sort", direction(head.dataset.key));
      this.body.replaceChildren(...(found.length ? found.map((row) => this.#row(row)) : [none()]));
      this.#drawPicked();
    }

    #row(row) {
      const choose = () => {
        const [a, b] = chosen([CF.state.get("a"), CF.state.get("b")], row.id);
        CF.state.set({ a, b });
      };
      const box = h("input", { type: "checkbox", "aria-label": `Compare ${row.title}`, onchange: choose });
      const cells = COLUMNS.map(({ head, cell }) => {
        const made = cell(row);
        made.dataset.head = head;
        return made;
      });
      return h("tr", { dataset: { id: row.id } }, cells, h("td", { class: "pick" }, h("label", {}, box)));
    }

    #drawPicked() {
      const ids = [CF.state.get("a"), CF.state.get("b")].filter(Boolean);
      for (const row of this.body.querySelectorAll("tr[data-id]")) {
        const picked = ids.includes(row.dataset.id);
        row.classList.toggle("chosen", picked);
        row.querySelector("input").checked = picked;
      }
      const names = ids.map((id) => this.rows.find((row) => row.id === id)?.title ?? id);
      this.picked.hidden = !ids.length;
      const link = h("a", { href: CF.compare.link(ids[0], ids[1]) }, "Compare them");
      const drop = h("button", { type: "button", onclick: () => CF.state.set({ a: null, b: null }) }, "Clear");
      this.picked.replaceChildren(
        h("span", {}, names.join("  and  ")),
        ids.length === COMPARED ? link : h("span", { class: "hint" }, "Tick another to compare it with."),
        drop,
      );
    }
  }

  const noFilters = () => Object.fromEntries(FILTERS.map(({ key }) => [key, null]));

  function direction(key) {
    const sort = CF.state.get("sort");
    return sort === key ? "ascending" : sort === `-${key}` ? "descending" : "none";
  }

  const none = () => h("tr", {}, h("td", { colspan: COLUMNS.length + 1 }, "No row has all of this."));

  const intro = (rows) =>
    h(
      "p",
      { class: "lead" },
      `The ${rows.length} rows of the shipped tables, each with a page that shows how its kernel moves and multiplies `,
      "its data. Tick two to see them side by side. The boxes are the tiles of S and O, to one scale; smem is the ",
      "shared memory of a block; blocks are those that fit on a multiprocessor; bank ways are the most passes that ",
      "one phase of any access takes.",
    );

  let view = null;
  CF.views.index = {
    title: "Rows",
    mount(container, { data }) {
      if (data.gallery) view = new Index(container, data.gallery);
      else container.append(h("p", { class: "hint" }, "This page has no list of rows."));
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };

  CF.gallery = { FILTERS, choices, filtered, sorted, nextSort, chosen, links };
})();
