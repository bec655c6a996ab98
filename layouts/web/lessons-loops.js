/* Lesson 9: the loops of FlashAttention-1 and -2, tile by tile, and what they move. */
(() => {
  "use strict";

  const { Grid, Stepper, prose, figure, choice, source, checks } = CF.lessons;
  const NAMES = { fa1: "FlashAttention-1", fa2: "FlashAttention-2" };

  /* Thousands and millions with two digits, enough to compare. */
  function large(number) {
    if (number >= 1e6) return `${(number / 1e6).toFixed(number >= 1e8 ? 0 : 1)} M`;
    return `${(number / 1e3).toFixed(0)} k`;
  }

  /** Both algorithms at the same visit, side by side. */
  class OrderFigure {
    constructor(kit) {
      this.data = kit.data.loops;
      this.mask = "full";
      this.stepper = new Stepper(
        kit,
        "tile",
        () => Math.max(...Object.keys(NAMES).map((name) => this.order(name).length)),
        (at) => this.#show(at),
      );
      this.sides = Object.entries(NAMES).map(([name, title]) => this.#side(name, title));
      this.element = figure(
        `The order of tiles, ${this.data.blocks} × ${this.data.blocks} blocks`,
        [
          choice(
            "mask",
            ["full", "causal"].map((mask) => [mask, mask]),
            this.mask,
            (mask) => this.#setMask(mask),
          ),
          this.stepper.element,
        ],
        CF.h(
          "div",
          { class: "lesson-pair" },
          this.sides.map(({ element }) => element),
        ),
      );
      kit.then(() => this.stepper.go(0));
      kit.follow(["theme"], () => this.#show(this.stepper.at));
    }

    order(name) {
      return this.data.visits[name][this.mask];
    }

    #side(name, title) {
      const rank = (row, col) => this.order(name).findIndex(([i, j]) => i === row && j === col);
      const grid = new Grid(`Tiles of ${title}`, {
        rows: this.data.blocks,
        cols: this.data.blocks,
        corner: "i \\ j",
        text: (row, col) => (rank(row, col) < 0 ? "" : String(rank(row, col))),
        rgb: (row, col) => {
          const at = rank(row, col);
          return at >= 0 && at <= this.at ? CF.palette.ramp(at / (this.data.blocks ** 2 - 1)) : null;
        },
      });
      const line = CF.h("p", { class: "lesson-message" });
      const code = source(this.data.sources[name]);
      return { name, grid, line, code, element: CF.h("div", {}, CF.h("h4", {}, title), grid.element, line, code) };
    }

    #setMask(mask) {
      this.mask = mask;
      this.stepper.go(0);
    }

    #show(at) {
      this.at = at;
      for (const side of this.sides) {
        const order = this.order(side.name);
        const here = order[at];
        side.grid.paint();
        side.grid.mark((row, col) => here && row === here[0] && col === here[1], "now");
        side.line.textContent = here ? this.#told(side.name, order, at) : `Done after ${order.length} tiles.`;
        side.code.to(...(here ? this.#lines(side.name, order, at) : []));
      }
    }

    /* Whether a visit is the first, and whether the last, of an iteration of the outer loop. */
    #ends(name, order, at) {
      const outer = name === "fa1" ? 1 : 0;
      const other = (neighbour) => order[neighbour]?.[outer] !== order[at][outer];
      return [other(at - 1), other(at + 1)];
    }

    /* The lines of the reference that a visit executes: loops that begin, reads, writes. */
    #lines(name, order, at) {
      const { outer, inner, read, write } = this.data.lines[name];
      const [first, last] = this.#ends(name, order, at);
      return [...(first ? [outer] : []), inner, read, ...(name === "fa1" || last ? [write] : [])];
    }

    #told(name, order, at) {
      const [i, j] = order[at];
      const [first, last] = this.#ends(name, order, at);
      if (name === "fa1")
        return `${first ? `Load K${j}, V${j}. ` : ""}Read Q${i}, O${i}, m${i}, l${i}; write O${i}, m${i}, l${i} back.`;
      return `${first ? `Load Q${i}. ` : ""}Read K${j}, V${j}.${last ? ` Divide, write O${i} and LSE${i}.` : " O, m, l stay in registers."}`;
    }
  }

  /** Numbers that one head moves, for a size that the reader chooses. */
  class TrafficFigure {
    constructor(kit) {
      this.rows = kit.data.loops.traffic;
      const sizes = [...new Set(this.rows.map(({ seqlen }) => seqlen))];
      const dims = [...new Set(this.rows.map(({ head_dim: dim }) => dim))];
      Object.assign(this, { seqlen: 4096, dim: 128, mask: "full" });
      this.host = CF.h("div", { class: "lesson-scroll" });
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      const set = (key) => (value) => {
        this[key] = value;
        this.#show();
      };
      const select = CF.select(
        "Queries and keys",
        sizes.map((size) => [size, CF.number(size)]),
        this.seqlen,
        (size) => set("seqlen")(Number(size)),
      );
      this.element = figure(
        "Numbers that cross slow memory, for one head",
        [
          CF.h("label", { class: "lesson-input" }, "queries = keys ", select),
          choice(
            "head dim",
            dims.map((dim) => [dim, String(dim)]),
            this.dim,
            set("dim"),
          ),
          choice(
            "mask",
            ["full", "causal"].map((mask) => [mask, mask]),
            this.mask,
            set("mask"),
          ),
        ],
        this.host,
        this.line,
      );
      kit.follow(["theme"], () => this.#show());
    }

    /* The two algorithms in proportion. */
    #told(chosen) {
      const of = (name) => chosen.find(({ algorithm }) => algorithm === name);
      const times = (key) => (of("fa1")[key] / of("fa2")[key]).toFixed(1);
      return `${NAMES.fa1} reads ${times("reads")} times as much as ${NAMES.fa2}, and writes ${times("writes")} times as much.`;
    }

    #show() {
      const chosen = this.rows.filter(
        ({ seqlen, head_dim: dim, mask }) => seqlen === this.seqlen && dim === this.dim && mask === this.mask,
      );
      this.line.textContent = this.#told(chosen);
      const most = Math.max(...chosen.map(({ reads, writes }) => reads + writes));
      const bar = (share, rgb) => CF.h("i", { style: `width:${share * 100}%;background:${CF.palette.css(rgb)}` });
      const row = ({ algorithm, tiles, reads, writes }) =>
        CF.h(
          "tr",
          {},
          CF.h("th", { scope: "row" }, CF.h("abbr", { title: NAMES[algorithm] }, algorithm.toUpperCase())),
          [CF.number(tiles), large(reads), large(writes)].map((text) => CF.h("td", {}, text)),
          CF.h(
            "td",
            { class: "wide" },
            CF.h(
              "div",
              { class: "lesson-bar", "aria-hidden": "true" },
              bar(reads / most, CF.palette.category(1)),
              bar(writes / most, CF.palette.category(5)),
            ),
          ),
        );
      const heads = ["", "tiles", "read", "written", "read and written"].map((text) =>
        CF.h("th", { scope: "col" }, text),
      );
      this.host.replaceChildren(
        CF.h(
          "table",
          { class: "lesson-traffic" },
          CF.h("thead", {}, CF.h("tr", {}, heads)),
          CF.h("tbody", {}, chosen.map(row)),
        ),
      );
    }
  }

  CF.lessons.add({
    id: "loops",
    title: "Loops of FA1 and FA2",
    question: "The same tiles, the same sums. What does exchanging two loops gain?",
    families: ["sm90"],
    build(kit) {
      const { tile } = kit.data.loops;
      return [
        prose(`Both algorithms walk over tiles (i, j), a block of queries and a block of keys, and never store the
          scores. They differ in the data that stays in fast memory.

          FlashAttention-1 keeps a block of keys and visits all queries: the outer loop is j. Each block of queries is
          visited once for every j, and each time its unfinished O, m and l are read from slow memory and written
          back. Its O is also divided in every step.

          FlashAttention-2 keeps a block of queries: the outer loop is i. O, m and l stay in registers until the row
          is finished; O is divided and written once. The blocks of queries are independent, so each becomes a thread
          block of a GPU. The keys that a block of queries sees are known, too: \`block_bounds\` gives the first and the
          last, and tiles that the causal mask hides are not visited at all. The reference's FlashAttention-1 does not
          have this bound.`),
        new OrderFigure(kit).element,
        prose(`The counts below are those of these loops with tiles of ${tile} × ${tile}. Slow memory is everything
          outside the multiprocessor. A GPU's L2 cache serves part of the traffic, since thread blocks that run at the
          same time read the same K and V.`),
        new TrafficFigure(kit).element,
        prose(`The kernels here are FlashAttention-2 with two changes of order. They visit key blocks last to first
          (with \`fixed_max\` after the block of key 0), so that only the first steps mask the ragged end. And under a
          causal mask, the query tiles that see most keys start first, since otherwise the longest would start last.`),
        kit.seeInKernel(
          "sm90",
          { panel: "acc_O" },
          "acc_O, which stays in registers for the whole tile",
          "attend, cuteflash/kernels/sm90/fwd_mma.py",
        ),
        checks(
          [
            "Under a causal mask with 8 × 8 blocks, how many tiles does each version visit?",
            "FlashAttention-2 visits 8·9/2 = 36, the reference's FlashAttention-1 all 64.",
          ],
          [
            "Which of the two reads K and V more often?",
            "FlashAttention-2: once for every block of queries. FlashAttention-1 reads them once, but reads and writes O instead.",
          ],
          [
            "How does the written traffic grow with twice the sequence?",
            "FlashAttention-2: twice. FlashAttention-1: four times, since O is written once for every block of keys.",
          ],
        ),
      ];
    },
  });
})();
