/* Lessons 3 and 4: swizzle and banks, ldmatrix and the fragments of mma. */
(() => {
  "use strict";

  const { Grid, prose, figure, slider, choice, stateSwitch, checks } = CF.lessons;
  const LANES_OF_A_PHASE = 8;
  const WORDS = 4; // 16 bytes of a lane

  /** `[row, col]` of the first element of each of a warp's 32 lanes in an instruction of a touch. */
  function lanes(scene, touch, instruction, warp) {
    const part = scene.part(touch.id);
    const values = scene.touchValues(touch);
    return Array.from({ length: CF.scene.WARP }, (_, lane) => {
      const cell = values.cell(warp * CF.scene.WARP + lane, 0, instruction);
      return [cell % part.rows, Math.floor(cell / part.rows)];
    });
  }

  /** For the eight lanes of a phase: their 4-byte words by bank, and the most words in one bank. */
  function phaseBanks(scene, part, places, swizzled) {
    const banks = Array.from({ length: CF.scene.BANKS }, () => new Map());
    places.forEach(([row, col], lane) => {
      const first = scene.address(part, row, col, 0, swizzled) / 4;
      for (let word = first; word < first + WORDS; word++) {
        const bank = banks[word % CF.scene.BANKS];
        bank.set(word, [...(bank.get(word) ?? []), lane]);
      }
    });
    return { banks, ways: Math.max(...banks.map((words) => words.size)) };
  }

  /** Lanes of a phase down, banks across: which lane accesses which bank. */
  class BankFigure {
    constructor(kit) {
      this.kit = kit;
      this.scene = kit.scene("sm80");
      this.part = this.scene.tile("sK");
      this.touch = this.scene.step("ldmatrix_k").touches.find(({ id }) => id === "sK");
      this.phase = 0;
      this.grid = new Grid("Banks that the lanes of a phase access", {
        rows: LANES_OF_A_PHASE,
        cols: CF.scene.BANKS,
        text: () => "",
        rgb: (lane, bank) => (this.asked?.(lane, bank) ? CF.palette.category(lane) : null),
        rowHead: (lane) => `lane ${lane + LANES_OF_A_PHASE * this.phase}`,
        corner: "bank",
        pick: (lane) => CF.state.set({ hover: this.part.element(...this.places[lane]) }),
        follow: true,
      });
      this.grid.table.classList.add("narrow");
      this.ways = CF.h("p", { class: "lesson-message", role: "status" });
      const phases = choice(
        "matrix",
        [0, 1, 2, 3].map((phase) => [phase, `${phase}`]),
        0,
        (phase) => {
          this.phase = phase;
          this.show();
        },
      );
      this.element = figure(
        "One ldmatrix of K, matrix by matrix",
        [stateSwitch(kit, "Swizzle", "swizzle"), phases],
        kit.panel("sm80", "sK", { color: "bank" }),
        this.grid.element,
        this.ways,
      );
      kit.follow(["swizzle", "theme", "instruction"], () => this.show());
      kit.onEnd(() => CF.state.set({ hover: null }));
    }

    show() {
      const all = lanes(this.scene, this.touch, CF.state.get("instruction") ?? 0, 0);
      const places = all.slice(LANES_OF_A_PHASE * this.phase, LANES_OF_A_PHASE * (this.phase + 1));
      this.places = places;
      const { banks, ways } = phaseBanks(this.scene, this.part, places, CF.state.get("swizzle"));
      this.asked = (lane, bank) => [...banks[bank].values()].some((asking) => asking.includes(lane));
      this.grid.paint();
      this.grid.table
        .querySelectorAll("tbody th")
        .forEach((head, lane) => (head.textContent = `lane ${lane + LANES_OF_A_PHASE * this.phase}`));
      const used = banks.filter((words) => words.size).length;
      const times = ways === 1 ? "once: free of conflicts" : `${ways} times, one after the other`;
      this.ways.replaceChildren(
        CF.h("b", { class: ways === 1 ? "good" : "bad" }, `${ways}-way`),
        ` · keys ${places[0][0]} to ${places.at(-1)[0]}, columns ${places[0][1]} to ${places[0][1] + 7} · ${used} banks asked, the busiest ${times}`,
      );
    }
  }

  /* One row's arithmetic: number of a 16-byte chunk XOR the row. */
  function chunks(scene) {
    const tile = scene.tile("sK");
    const place = (row, chunk) => (scene.address(tile, row, chunk * 8, 0, true) - tile.spec.base - row * 128) / 16;
    const grid = new Grid("New places of a row's 16-byte chunks", {
      rows: 8,
      cols: 8,
      text: (row, chunk) => String(place(row, chunk)),
      rgb: (row, chunk) => CF.palette.category(place(row, chunk)),
      rowHead: (row) => `key ${row}`,
      corner: "chunk",
    });
    return figure("The chunk's new place is chunk XOR key", null, grid.element);
  }

  CF.lessons.add({
    id: "swizzle",
    title: "Swizzle and banks",
    question:
      "Eight rows of a tile lie exactly below each other. Why is reading one column of chunks slow, and how can that be avoided without padding?",
    families: ["sm80"],
    state: { step: "ldmatrix_k", warp: 0, instruction: 0 },
    build(kit) {
      const scene = kit.scene("sm80");
      const tile = scene.tile("sK");
      const [bits, base, shift] = tile.spec.swizzle;
      const slab = tile.spec.layout.shape[1][0];
      const touch = scene.step("ldmatrix_k").touches.find(({ id }) => id === "sK");
      const { ways } = phaseBanks(scene, tile, lanes(scene, touch, 0, 0).slice(0, LANES_OF_A_PHASE), false);
      const banks = (swizzled) => {
        const first = scene.bank(scene.address(tile, 5, 3 * 8, 0, swizzled));
        return `banks ${first} to ${first + WORDS - 1}`;
      };
      return [
        prose(`Shared memory has 32 banks, each 4 bytes wide; bank = address / 4 mod 32. In one pass every bank serves
          one word. A row of K's slab is ${slab} elements, ${slab * scene.elementBytes} bytes: exactly all banks once.
          So a column of chunks has the same banks in every row.

          \`ldmatrix\` reads 8 × 8 matrices: eight lanes give the addresses of eight rows, 16 bytes each, and the unit
          serves one matrix at a time. Without a swizzle these eight rows are in the same four banks: ${ways} passes, a
          conflict of ${ways} ways. Padding each row by 16 bytes would help, but takes memory, and neither TMA nor
          WGMMA can read it.

          A swizzle permutes instead. \`S<${bits},${base},${shift}>\` takes ${bits} bits of the offset, ${shift}
          places above bit ${base}, and XORs them onto the ${bits} bits at ${base}: \`x ^ (((x >> ${base + shift}) &
          ${2 ** bits - 1}) << ${base})\`. Bits ${base + shift} to ${base + shift + bits - 1} are the row in its group
          of eight; bits ${base} to ${base + bits - 1} are the 16-byte chunk in the row. Below bit ${base} nothing
          moves, so a chunk stays whole. XOR with a constant is one-to-one, so no memory is lost: each row is a
          permutation of itself.

          Switch it off and on. The marked cells are those that warp 0 reads in one instruction; point at a lane to see
          the row whose address it gives.`),
        new BankFigure(kit).element,
        chunks(scene),
        kit.seeInKernel(
          "sm80",
          { panel: "sK", step: "ldmatrix_k", instruction: 0, warp: 0, color: "bank" },
          "ldmatrix of K, with banks",
          "swizzled_tile, cuteflash/atoms/sm80.py",
        ),
        checks(
          [
            "Key 5, chunk 3: which banks does it take with the swizzle, which without?",
            `Without: chunk 3, ${banks(false)}. With: chunk 3 XOR 5 = ${3 ^ 5}, ${banks(true)}.`,
          ],
          [
            "Do the writes of cp.async conflict?",
            "No. Eight neighbouring lanes write the eight chunks of one row: all 32 banks once, in any order of the chunks.",
          ],
          [
            "Why would a swizzle with base 2 be wrong here?",
            "It would split 16-byte chunks: the eight elements that one lane reads at once would not lie side by side.",
          ],
        ),
      ];
    },
  });

  /** Four 8 x 8 matrices of an ldmatrix.x4: rows are addressed by lanes, elements arrive in others. */
  class MatrixFigure {
    constructor(kit) {
      this.scene = kit.scene("sm80");
      const step = this.scene.step("ldmatrix_q");
      this.from = step.touches.find(({ mode }) => mode === "read");
      this.to = this.scene.touchValues(step.touches.find(({ mode }) => mode === "write"));
      this.part = this.scene.tile("sQ");
      this.grids = [0, 1, 2, 3].map((matrix) => this.#grid(matrix));
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      this.lane = slider("lane", { to: CF.scene.WARP - 1, value: 9 }, () => this.#show());
      const instructions = this.scene.touchValues(this.from).instructions;
      this.instruction = slider("instruction", { to: instructions - 1 }, (i) => CF.state.set({ instruction: i }));
      this.element = figure(
        "ldmatrix.x4 of Q by warp 0: a cell names the thread that receives it, a row's head the one that gives its address",
        [this.instruction, this.lane],
        CF.h(
          "div",
          { class: "lesson-matrices" },
          this.grids.map((grid, matrix) =>
            CF.h("figure", {}, grid.element, CF.h("figcaption", {}, `matrix ${matrix}: register ${matrix}`)),
          ),
        ),
        this.line,
        CF.h(
          "div",
          { class: "lesson-pair" },
          kit.panel("sm80", "sQ", { color: "plain", height: 250 }),
          kit.panel("sm80", "rQ", { color: "owner", height: 250 }),
        ),
      );
      kit.follow(["instruction"], () => this.#show());
    }

    get at() {
      return CF.state.get("instruction") ?? 0;
    }

    /* The cell of the tile at a matrix's row and column: the row that its lane addresses, and columns from there on. */
    #cell(matrix, row, col) {
      const places = lanes(this.scene, this.from, this.at, 0);
      const [m, d] = places[matrix * LANES_OF_A_PHASE + row];
      return this.part.cell(m, d + col);
    }

    #receiver(matrix, row, col) {
      return this.received?.get(this.#cell(matrix, row, col));
    }

    #grid(matrix) {
      const grid = new Grid(`Matrix ${matrix}`, {
        rows: 8,
        cols: 8,
        corner: "",
        text: (row, col) => (this.received ? `${this.#receiver(matrix, row, col)}` : ""),
        rgb: (row, col) =>
          this.received ? CF.palette.category(Math.floor(this.#receiver(matrix, row, col) / 4)) : null,
        rowHead: (row) => `t${matrix * 8 + row}`,
        colHead: () => "",
      });
      grid.table.classList.add("small");
      return grid;
    }

    #show() {
      const lane = Number(this.lane.querySelector("input").value);
      this.instruction.to(this.at);
      this.received = new Map();
      this.to.each(
        this.at,
        { first: 0, last: CF.scene.WARP - 1 },
        (cell, thread) => this.received.set(cell, thread),
        true,
      );
      const addressed = [Math.floor(lane / 8), lane % 8];
      this.grids.forEach((grid, matrix) => {
        grid.paint();
        grid.mark((row, col) => this.#receiver(matrix, row, col) === lane);
        grid.mark((row) => matrix === addressed[0] && row === addressed[1], "addressed");
      });
      const [m, d] = lanes(this.scene, this.from, this.at, 0)[lane];
      this.line.textContent = `Lane ${lane} gives the address of row ${addressed[1]} of matrix ${addressed[0]} (query ${m}, columns ${d} to ${d + 7}) and receives the outlined pair of each matrix in one register.`;
    }
  }

  /* How many elements of P are with another thread, or at another value, than the score that they come from. */
  function moved(scene) {
    const [s, p] = ["acc_S", "rP"].map((id) => scene.fragment(id));
    let count = 0;
    for (let thread = 0; thread < s.owned.threads; thread++) {
      for (let value = 0; value < s.owned.values; value++)
        count += Number(s.owned.cell(thread, value) !== p.owned.cell(thread, value));
    }
    return `${count} of ${s.size} elements change their thread or their register number.`;
  }

  CF.lessons.add({
    id: "mma",
    title: "ldmatrix and the fragments of mma",
    question:
      "mma needs Q spread over a warp in a certain way. What brings it there, and why does P need no shuffle at all?",
    families: ["sm80"],
    state: { step: "ldmatrix_q", warp: 0, instruction: 0 },
    build(kit) {
      const scene = kit.scene("sm80");
      const tv = (id) => CF.algebra.toText(scene.fragment(id).spec.tv);
      const step = scene.step("ldmatrix_q");
      const [query, column] = lanes(
        scene,
        step.touches.find(({ mode }) => mode === "read"),
        0,
        0,
      )[9];
      return [
        prose(`\`mma.m16n8k16\` multiplies A (16 × 16) with B (16 × 8) for a whole warp. Lane l holds of A the rows l
          / 4 and l / 4 + 8, and there pairs of columns at 2·(l mod 4) and 8 further: four registers of two elements.

          \`ldmatrix.x4\` loads exactly this. It reads four 8 × 8 matrices. Lane l only gives an address: that of row
          l mod 8 of matrix l / 8. The unit distributes each row over the four lanes of a quad, two elements each. So
          the lane that gives an address and the lanes that receive the row are different threads, and no shuffle
          instruction is needed. Four matrices, two down and two across, are A's four registers.`),
        new MatrixFigure(kit).element,
        prose(`For the second product, O += P V, the scores become operand A. The accumulator C of the first product
          gives lane l pairs of columns at 2·(l mod 4) in rows l / 4 and l / 4 + 8, one n8 tile after the other. Two
          such tiles side by side are 16 columns: the same places as in A. The layouts show it: \`acc_S\` has
          \`${tv("acc_S")}\`, \`rP\` has \`${tv("rP")}\`. So a thread rounds its own scores and multiplies; nothing
          moves.`),
        figure(
          "acc_S and rP: the same owners",
          null,
          CF.h(
            "div",
            { class: "lesson-pair" },
            kit.panel("sm80", "acc_S", { color: "owner", height: 240 }),
            kit.panel("sm80", "rP", { color: "owner", height: 240 }),
          ),
          CF.h("p", { class: "lesson-message" }, moved(scene)),
        ),
        prose(`V is different: its k extent runs over rows of the tile, not over columns. \`ldmatrix.trans\` distributes
          columns instead of rows, so V keeps its layout in memory.`),
        kit.seeInKernel(
          "sm80",
          { panel: "rQ", step: "ldmatrix_q", instruction: 0, warp: 0 },
          "ldmatrix of Q, instruction by instruction",
          "acc_as_operand_a, cuteflash/core/views.py; product_pv, cuteflash/kernels/sm80/fwd_mma.py",
        ),
        checks(
          [
            "Lane 9 gives which address, and which elements does it receive?",
            `The address of row 1 of matrix 1: query ${query}, columns ${column} to ${column + 7}. It receives columns 2 and 3 of row 2 of each matrix, since 9 = 4·2 + 1.`,
          ],
          [
            `How many ldmatrix does a warp issue for its 16 × ${scene.data.axes.d.size} part of Q?`,
            `${step.instructions}: each brings 16 × 16 elements. They stay in ${scene.fragment("rQ").spec.registers} registers for the whole tile (\`q_in_regs\`).`,
          ],
          [
            "Why does P lose precision but no time to shared memory?",
            "It is rounded from fp32 to bf16 in its registers, two values an instruction, and never goes through shared memory.",
          ],
        ),
      ];
    },
  });

  Object.assign(CF.lessons, { phaseBanks, lanes });
})();
