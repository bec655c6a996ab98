/* Lessons 1 and 2: what a layout is, and what a thread-value layout is. */
(() => {
  "use strict";

  const { Grid, inline, prose, figure, slider, checks } = CF.lessons;
  const MOST_CELLS = 256; // of a layout that a reader types

  /** A layout's sum at a coordinate, as text: `5·64 + 2·1 = 322`. Coordinates count within each top mode. */
  function workings(layout, coordinates) {
    const terms = [];
    let total = 0;
    CF.algebra.modes(layout).forEach((mode, i) => {
      const [extents, strides] = [mode.shape, mode.stride].map(CF.algebra.flatten);
      let rest = coordinates[i];
      extents.forEach((extent, j) => {
        const index = j === extents.length - 1 ? rest : rest % extent;
        rest = Math.floor(rest / extent);
        if (extent === 1) return;
        terms.push(`${index}·${strides[j]}`);
        total += index * strides[j];
      });
    });
    return `${terms.join(" + ") || 0} = ${total}`;
  }

  const EXAMPLES = [
    ["(4,8):(1,4)", "columns follow each other"],
    ["(4,8):(8,1)", "rows follow each other"],
    ["(4,8):(9,1)", "padded rows"],
    ["((2,2),(2,4)):((1,4),(2,8))", "2×2 blocks"],
    ["(4,8):(0,1)", "one row, seen four times"],
  ];

  /** A layout that a reader types, as the grid of its indices and as the memory that it fills. */
  class LayoutFigure {
    constructor() {
      this.input = CF.h("input", {
        type: "text",
        value: EXAMPLES[0][0],
        spellcheck: "false",
        autocomplete: "off",
        "aria-label": "Layout, as shape:stride",
        oninput: () => this.#read(),
      });
      this.message = CF.h("p", { class: "lesson-message", role: "status" });
      this.host = CF.h("div");
      this.memory = CF.h("div", { class: "lesson-memory", role: "img" });
      const example = ([text, words]) =>
        CF.h(
          "button",
          { type: "button", title: words, onclick: () => this.#take(text) },
          CF.h("code", {}, text),
          CF.h("small", {}, words),
        );
      this.element = figure(
        "A layout of your own",
        [CF.h("label", { class: "lesson-input" }, "layout ", this.input)],
        CF.h("div", { class: "lesson-examples" }, EXAMPLES.map(example)),
        this.host,
        this.memory,
        this.message,
      );
      this.#read();
    }

    #take(text) {
      this.input.value = text;
      this.#read();
    }

    #read() {
      try {
        const { value } = CF.text.evaluate(this.input.value);
        if (value.tv || CF.algebra.modes(CF.algebra.plain(value)).length !== 2)
          throw new RangeError("this experiment takes a layout of two modes: rows and columns");
        if (CF.algebra.size(value) > MOST_CELLS)
          throw new RangeError(`this experiment takes at most ${MOST_CELLS} elements`);
        this.#show(value);
        this.input.setAttribute("aria-invalid", "false");
      } catch (error) {
        if (!(error instanceof Error)) throw error;
        this.input.setAttribute("aria-invalid", "true");
        this.message.textContent = error.message;
      }
    }

    #show(value) {
      const [rows, cols] = CF.algebra.modes(CF.algebra.plain(value)).map(CF.algebra.size);
      const indices = CF.algebra.evaluate(value);
      const last = indices.reduce((a, b) => Math.max(a, b), 1);
      const index = (row, col) => indices[row + rows * col];
      const rgb = (number) => CF.palette.ramp(number / last);
      this.grid = new Grid(`Indices of ${this.input.value}`, {
        rows,
        cols,
        text: (row, col) => String(index(row, col)),
        rgb: (row, col) => rgb(index(row, col)),
        pick: (row, col) => this.#pick(value, row, col, index(row, col)),
        follow: true,
      });
      this.host.replaceChildren(this.grid.element);
      const used = new Set(indices);
      this.slots = Array.from({ length: last + 1 }, (_, at) =>
        CF.h("i", { title: String(at), style: used.has(at) ? `background:${CF.palette.css(rgb(at))}` : null }),
      );
      this.memory.setAttribute("aria-label", `Memory of ${last + 1} elements, ${used.size} of them used`);
      this.memory.replaceChildren(...this.slots);
      this.#pick(value, rows > 1 ? 1 : 0, cols > 2 ? 2 : 0, index(rows > 1 ? 1 : 0, cols > 2 ? 2 : 0));
    }

    #pick(value, row, col, found) {
      const sum = CF.algebra.isComposed(value) ? `${found} after the swizzle` : workings(value, [row, col]);
      this.message.textContent = `(${row}, ${col}) → ${sum}`;
      this.grid.mark((r, c) => r === row && c === col);
      this.slots.forEach((slot, at) => slot.classList.toggle("marked", at === found));
    }
  }

  CF.lessons.add({
    id: "layout",
    title: "Layout = shape : stride",
    question: "Where in memory is element (row, column) of a tile?",
    families: ["sm80"],
    build(kit) {
      const scene = kit.scene("sm80");
      const tile = scene.tile("sK");
      const { shape, stride } = tile.spec.layout;
      const text = CF.algebra.toText(tile.spec.layout);
      const slab = shape[1][0];
      const line = CF.h("p", { class: "lesson-message", role: "status" });
      const told = (row, col) =>
        row !== null &&
        (line.textContent = `sK(${row}, ${col}, stage 0) → ${workings(tile.spec.layout, [row, col, 0])} elements, before the swizzle`);
      told(5, 70);
      return [
        prose(`A layout is a function from coordinates to integers, written \`shape:stride\`. The shape gives the extent
          of each coordinate, the stride is added for each step of it: under \`(4,8):(8,1)\` element (row, column) has
          index row·8 + column·1. Row-major, column-major, padded and broadcast layouts differ only in their strides.

          Shape and stride may nest, in the same way. A nested mode counts with several digits, the leftmost fastest:
          in \`(2,4):(1,8)\` as one mode of extent 8, coordinate 5 is the digits (1, 2) and stands for 1·1 + 2·8 = 17.
          So a tile still has plain rows and columns, although its memory is arranged in blocks of blocks.`),
        new LayoutFigure().element,
        prose(`All tiles of the kernels are such layouts. This is the shared-memory tile of K of \`FlashFwdSm80\`:
          ${tile.rows} keys by ${tile.cols} columns, in ${tile.stages} stages. Its layout is \`${text}\`. Columns count with two
          digits: ${slab} of them lie side by side, so that a row is ${slab * scene.elementBytes} bytes, as long as
          all ${CF.scene.BANKS} banks together. The next ${slab} columns start ${stride[1][1]} elements later, in a
          second slab. The third mode is the stage, ${CF.algebra.flatten(stride[2]).at(-1)} elements further.`),
        figure("sK, coloured by address", null, kit.panel("sm80", "sK", { color: "address", onHover: told }), line),
        CF.h(
          "p",
          {},
          "In the playground: ",
          kit.playground("divide((8,16):(16,1), (4,4))"),
          " cuts a tile into blocks, ",
          kit.playground("S<3,3,3> o (8,64):(64,1)"),
          " is eight rows of sK with its swizzle.",
        ),
        kit.seeInKernel(
          "sm80",
          { panel: "sK", color: "address" },
          "sK among all tiles",
          "FlashFwdSm80.smem_layout_k, cuteflash/kernels/sm80/fwd.py",
        ),
        checks(
          [
            "Which layout stores a 4 × 8 tile so that columns are contiguous and each starts at a multiple of 5?",
            "`(4,8):(1,5)`: a step down adds 1, a step right adds 5. One slot after each column stays unused.",
          ],
          [
            "What does a stride of 0 mean?",
            "All coordinates of that mode name the same element: a broadcast, as for bias vectors and shared operands.",
          ],
          [
            "Under sK's layout, what is the offset of key 9, column 64, stage 1, before the swizzle?",
            `Digit by digit, each times its stride: ${workings(tile.spec.layout, [9, 64, 1])} elements.`,
          ],
        ),
      ];
    },
  });

  CF.lessons.add({
    id: "tv",
    title: "TV layouts: who owns what",
    question: "A tile of scores is spread over the registers of all threads. Which scores does a thread hold?",
    families: ["sm80"],
    state: { thread: 5 },
    build(kit) {
      const scene = kit.scene("sm80");
      const part = scene.fragment("acc_S");
      const { tv } = part.spec;
      const [[quad, groups, warps], extents] = tv.shape;
      const [[byLane, byGroup, byWarp], [next, below, on]] = tv.stride;
      const line = CF.h("p", { class: "lesson-message", role: "status" });
      let value = 0;
      const threads = slider("thread", { to: part.owned.threads - 1 }, (thread) =>
        CF.state.set({ thread, warp: null, warpgroup: null }),
      );
      const values = slider("value", { to: part.owned.values - 1 }, (chosen) => {
        value = chosen;
        show();
      });
      let panel = null;
      function show() {
        const thread = CF.state.get("thread") ?? 0;
        threads.to(thread);
        const cell = part.owned.cell(thread, value);
        const at = [cell % part.rows, Math.floor(cell / part.rows)];
        line.textContent = `tv(${thread}, ${value}) → ${workings(tv, [thread, value])} → query ${at[0]}, key ${at[1]}`;
        CF.state.set({ pin: part.element(...at), hover: null });
        panel?.update();
      }
      kit.follow(["thread"], show);
      return [
        prose(`A thread cannot read the registers of another by address; a tile in registers is spread over threads.
          CuTe describes this with one more layout, with two modes: (thread, value) to the place in the tile. The
          value counts a thread's own registers. The place is a number, too: row + rows · column.

          The scores of \`FlashFwdSm80\` have \`${CF.algebra.toText(tv)}\` over ${part.rows} × ${part.cols}. Read the
          thread's digits: ${quad} neighbouring lanes step by ${byLane}, that is ${byLane / part.rows} columns;
          ${groups} groups of them step by ${byGroup}, a row; ${warps} warps step by ${byWarp} rows. Read the value's:
          ${next} is the next column, ${below} is ${below} rows below, ${on} is ${on / part.rows} columns on. The
          kernel does not choose this: \`mma.m16n8k16\` leaves its result so, and the tile repeats it.`),
        figure(
          "acc_S: pick a thread, then one of its values",
          [threads, values],
          kit.panel("sm80", "acc_S", { color: "owner", height: 470 }, (made) => (panel = made)),
          line,
        ),
        prose(`Four lanes, a quad, hold a row together. That is why a row's maximum needs only two shuffles
          (\`quad_max\`), and why each thread keeps two row maxima: its rows g and g + 8.

          An operand may have copies. Every warp multiplies its own query rows with all keys, so every warp needs all
          of K: in \`rK\` the warp's digit has stride 0, and each element has ${warps} owners.`),
        figure(
          `rK: every element ${warps} times`,
          null,
          kit.panel("sm80", "rK", { color: "owner", height: 240 }),
          copies(scene),
        ),
        CF.h(
          "p",
          {},
          "In the playground, the C operand of one mma: ",
          kit.playground("TV ((4,8),(2,2)):((32,1),(16,8)) on (16,8)"),
          ".",
        ),
        kit.seeInKernel(
          "sm80",
          { panel: "acc_S", thread: 5 },
          "thread 5 in every fragment",
          "make_fragments, cuteflash/kernels/sm80/fwd_mma.py",
        ),
        checks(
          [
            "How many scores does a thread hold, and in how many rows?",
            `${part.rows} · ${part.cols} / ${part.owned.threads} threads = ${part.owned.values} scores (${extents.join("·")} values), in ${extents[1]} rows that are ${below} apart.`,
          ],
          ["Which threads hold query row 0?", "Lanes 0 to 3 of warp 0: the quad whose row digit and warp digit are 0."],
          [
            "What would `TV` layout strides of 0 in the value mode mean?",
            "Several registers of a thread would hold the same element.",
          ],
        ),
      ];
    },
  });

  function copies(scene) {
    const owners = scene.owners("rK", 0, 0).map(({ thread }) => `t${thread}`);
    return CF.h(
      "p",
      { class: "lesson-message" },
      inline(`Key 0, column 0 is in registers of ${owners.join(", ")}: the same lane of each warp.`),
    );
  }

  Object.assign(CF.lessons, { workings });
})();
