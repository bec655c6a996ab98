/* The Index view: three entries, then every row of the site, searched, filtered and sorted; two can be compared. */
(() => {
  "use strict";

  const { h } = CF;
  const { FILTERS, COMPARED, extents, dims } = CF.gallery;
  const GLYPH = { scale: 0.11, gap: 3, height: 22 }; // pixels an element, between the tiles, of the tallest tile
  const O_COLOUR = 3; // as in the Budget view
  const S_COLOUR = 5;
  const FAMILIES = {
    sm90: "TMA, WGMMA, producer and consumer warpgroups",
    sm80: "cp.async, ldmatrix, mma.sync",
  };
  const HEADS = {
    speed: "Forward speed over the cells that the row serves; the number's tooltip names the GPU. A row for short sequences or for decoding has less work in a launch than one for long sequences.",
    apart: "The traits in which a row differs from most rows of its table, and bank conflicts, if it has any. Tap a trait for its meaning.",
    smem_bytes: "Shared memory of one thread block.",
    tile: "Queries by keys of one tile. The boxes are the tiles of S and O, to one scale.",
  };

  const cell = (...children) => h("td", {}, children);

  /* key (null: not sorted by), heading, and its cell; a row's heading is its head dim. `most` is the highest speed. */
  const COLUMNS = [
    { key: "head_dim", head: "head dim", make: headCell },
    { key: "mask", head: "serves", make: servesCell },
    { key: "tile", head: "tile", make: tileCell },
    { key: null, head: "sets it apart", explain: "apart", make: apartCell },
    { key: "speed", head: "TFLOP/s", make: speedCell },
    { key: "smem_bytes", head: "smem", make: (row) => h("td", { class: "num" }, CF.budget.bytes(row.smem_bytes)) },
    { key: "arch", head: "arch", make: archCell },
  ];

  /* A row's link covers the whole row. */
  function headCell(row) {
    return h("th", { scope: "row" }, h("a", { class: "whole", href: row.file, "aria-label": row.title }, dims(row)));
  }

  function servesCell(row) {
    const masks = row.features ? `${row.mask}, with ${row.features}` : row.mask;
    const more = [row.dtype, row.lengths, row.part].filter(Boolean).join(" · ");
    return cell(h("span", {}, masks), h("small", {}, more));
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
    return cell(h("span", { class: "tile" }, h("span", {}, `${m} × ${n}`), glyph));
  }

  function apartCell(row) {
    const entries = Object.entries(row.apart);
    const chip = ([name, value]) => CF.explain.trait(row.kernel, name, CF.gallery.traitText(name, value));
    const ways = row.worst_ways > 1 ? h("span", { class: "bad" }, `${row.worst_ways}-way bank conflicts`) : null;
    if (!entries.length && !ways) return cell(h("span", { class: "hint" }, "as most"));
    return cell(h("span", { class: "apart" }, ways, entries.map(chip)));
  }

  function speedCell(row, most) {
    if (!row.speed) return h("td", { class: "speed" }, h("span", { class: "hint" }, "not measured"));
    const { tflops, gpu, date } = row.speed;
    const share = `width:${(100 * tflops) / most}%`;
    const bar = h("span", { class: "speed-bar", "aria-hidden": "true" }, h("i", { style: share }));
    return h("td", { class: "speed" }, CF.explain.term(String(tflops), `${gpu}, ${date}.`, `${tflops} TFLOP/s`), bar);
  }

  /* The same row of other targets has pages of its own: their budgets differ. */
  function archCell(row, _, [, ...others]) {
    const more = others.map(({ file, arch, title }) => [", ", h("a", { href: file, "aria-label": title }, arch)]);
    return cell(h("span", { class: "archs" }, row.arch, more), h("small", {}, row.family));
  }

  class Index {
    constructor(container, rows) {
      this.rows = rows;
      this.most = CF.gallery.fastest(rows).speed?.tflops ?? 1;
      this.count = h("p", { class: "gallery-count", role: "status" });
      this.filters = FILTERS.map((filter) => this.#filter(filter));
      this.clear = h("button", { type: "button", onclick: () => CF.state.set(noFilters()) }, "Show all");
      this.picked = h("div", { class: "gallery-picked", role: "status" });
      this.heads = COLUMNS.map((column) => this.#head(column));
      this.body = h("tbody");
      const table = h(
        "table",
        { class: "facts-table gallery", "aria-label": "Rows" },
        h("thead", {}, h("tr", {}, this.heads, h("td", {}, "compare"))),
        this.body,
      );
      const bar = { class: "gallery-bar", role: "group", "aria-label": "Search and filter" };
      container.append(
        doors(rows),
        h("h2", { id: "rows" }, "Rows"),
        h("div", bar, this.#search(), this.filters, this.clear, this.count),
        table,
        this.picked,
      );
      const keys = FILTERS.map(({ key }) => key);
      this.stops = [
        CF.state.on([...keys, "search", "sort"], () => this.update()),
        CF.state.on(["a", "b"], () => this.#drawPicked()),
      ];
      this.update();
    }

    destroy() {
      for (const stop of this.stops) stop();
    }

    #search() {
      this.search = h("input", {
        type: "search",
        "aria-label": "Search the rows",
        placeholder: "Search: d128 causal q_stage",
        value: CF.state.get("search") ?? "",
        oninput: () => CF.state.set({ search: this.search.value || null }),
      });
      return this.search;
    }

    #filter(filter) {
      const { key, label } = filter;
      const pairs = [["", "all"], ...CF.gallery.choices(this.rows, filter).map((value) => [value, value])];
      const choose = (value) => CF.state.set({ [key]: value || null });
      const select = CF.select(label, pairs, CF.state.get(key) ?? "", choose);
      select.dataset.filter = key;
      return h("label", {}, h("span", {}, label), select);
    }

    #head({ key, head, explain = key }) {
      const kind = key === "smem_bytes" ? "num" : null;
      const turn = () => CF.state.set({ sort: CF.gallery.nextSort(CF.state.get("sort"), key) });
      const words = HEADS[explain];
      const about = words ? CF.explain.term("?", words, head) : null;
      about?.setAttribute("aria-label", `What is ${head}?`);
      const name = key ? h("button", { type: "button", onclick: turn }, head) : h("span", {}, head);
      return h("th", { scope: "col", class: kind, dataset: { key: key ?? "" } }, name, about);
    }

    update() {
      const wanted = Object.fromEntries(FILTERS.map(({ key }) => [key, CF.state.get(key)]));
      const [search, sort] = [CF.state.get("search"), CF.state.get("sort")];
      const rows = CF.gallery.filtered(CF.gallery.searched(this.rows, search), wanted);
      const found = CF.gallery.kin(CF.gallery.sorted(rows, sort));
      const some = rows.length < this.rows.length;
      const merged = found.length < rows.length ? `, ${found.length} different ones` : "";
      this.count.textContent = some
        ? `${rows.length} of ${this.rows.length} rows${merged}`
        : `${rows.length} rows${merged}`;
      this.clear.disabled = !some;
      for (const label of this.filters) {
        const select = label.querySelector("select");
        select.value = wanted[select.dataset.filter] ?? "";
      }
      if (document.activeElement !== this.search) this.search.value = search ?? "";
      for (const head of this.heads) if (head.dataset.key) head.setAttribute("aria-sort", direction(head.dataset.key));
      this.body.replaceChildren(...(found.length ? this.#lines(found, sort) : [none()]));
      this.#drawPicked();
    }

    /* In the tables' order, rows are below the name of their table. */
    #lines(found, sort) {
      let table = null;
      return found.flatMap((group) => {
        const { arch, family } = group[0];
        const begins = !sort && table !== `${arch}/${family}`;
        table = `${arch}/${family}`;
        return begins ? [heading(group), this.#row(group)] : [this.#row(group)];
      });
    }

    #row(group) {
      const [row] = group;
      const choose = () => {
        const [a, b] = CF.gallery.chosen([CF.state.get("a"), CF.state.get("b")], row.id);
        CF.state.set({ a, b });
      };
      const box = h("input", { type: "checkbox", "aria-label": `Compare ${row.title}`, onchange: choose });
      const cells = COLUMNS.map(({ head, make }) => {
        const made = make(row, this.most, group);
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
        ids.length === COMPARED ? link : h("span", { class: "hint" }, "Tick another row to compare with."),
        drop,
      );
    }
  }

  const noFilters = () => ({ search: null, ...Object.fromEntries(FILTERS.map(({ key }) => [key, null])) });

  function direction(key) {
    const sort = CF.state.get("sort");
    return sort === key ? "ascending" : sort === `-${key}` ? "descending" : "none";
  }

  const none = () => h("tr", {}, h("td", { colspan: COLUMNS.length + 1 }, "No row matches."));

  function heading([{ arch, family }, ...others]) {
    const archs = [arch, ...others.map((row) => row.arch)].join(", ");
    const words = [h("b", {}, `${archs}, ${family} family`), ` ${FAMILIES[family] ?? ""}`];
    return h("tr", { class: "table-name" }, h("th", { colspan: COLUMNS.length + 1, scope: "rowgroup" }, words));
  }

  /* The three entries. */
  function doors(rows) {
    const door = (title, href, words, ...more) =>
      h("section", { class: "door" }, h("h2", {}, h("a", { href }, title)), h("p", {}, words), more);
    const best = CF.gallery.fastest(rows);
    const speed = best.speed ? `, ${best.speed.tflops} TFLOP/s` : "";
    const lessons = CF.lessons.all().length;
    return h(
      "div",
      { class: "doors" },
      door(
        "Learn",
        "learn.html",
        `From what a layout is to the loops of FlashAttention-2: ${lessons} short lessons on live panels of real kernels.`,
      ),
      door(
        "Explore",
        best.file,
        `How a kernel moves and multiplies its data, for each of the ${rows.length} rows below: every tile, thread and instruction. `,
        h("p", {}, `Start with the fastest: head dim ${dims(best)}, ${best.mask}${speed}. `),
        h("p", {}, h("a", { href: "compare.html" }, "Compare two rows")),
      ),
      door(
        "Play",
        "playground.html",
        "Type any CuTe layout, swizzle or thread-value layout, compose and divide them, and see every step drawn.",
      ),
    );
  }

  let view = null;
  CF.views.index = {
    title: "Rows",
    mount(container, { data }) {
      if (data.gallery) view = new Index(container, data.gallery);
      else container.append(h("p", { class: "hint" }, "This page does not have a list of rows."));
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };
})();
