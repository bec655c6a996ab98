/* Lesson 8: the online softmax of a small case, value by value. */
(() => {
  "use strict";

  const { Grid, Stepper, prose, figure, slider, choice, source, checks } = CF.lessons;
  const STEPS = ["scores", "maximum", "shift", "exponentials", "rescale", "sum", "output"];

  const short = (value) => (value === null ? "−∞" : String(Math.round(value * 1000) / 1000).replace("-", "−"));
  const vector = (values) => `(${values.map(short).join(", ")})`;

  /** Rows of a table, as its part `tag`. */
  const cells = (tag, cell, rows) =>
    CF.h(
      tag,
      {},
      rows.map((row) =>
        CF.h(
          "tr",
          {},
          row.map((text) => CF.h(cell, { scope: cell === "th" ? "col" : null }, text)),
        ),
      ),
    );

  /** A step's effect on one row, in words with its numbers. */
  const told = {
    scores: ({ block, row }) =>
      `s = scale · q·k for keys ${block.keys[0]} to ${block.keys[1] - 1}: ${vector(block.scores[row])}`,
    maximum: ({ block, row, old }) =>
      `m_new = max(${short(old.maximum)}, ${short(block.peak[row])}) = ${short(block.maximum[row])}`,
    shift: ({ block, row }) =>
      block.maximum[row] === null
        ? "no key was visible yet: shift is 0, for −∞ − (−∞) would be NaN"
        : `shift = ${short(block.shift[row])}`,
    exponentials: ({ block, row }) => `p = exp(s − ${short(block.shift[row])}) = ${vector(block.exponentials[row])}`,
    rescale: ({ block, row, old }) =>
      `rescale = exp(${short(old.maximum)} − ${short(block.shift[row])}) = ${short(block.rescale[row])}${block.rescale[row] === 1 ? ": the maximum stays" : ""}`,
    sum: ({ block, row, old }) =>
      `l = ${short(block.rescale[row])} · ${short(old.sum)} + ${short(block.exponentials[row].reduce((a, b) => a + b, 0))} = ${short(block.sum[row])}`,
    output: ({ block, row, old }) =>
      `O = ${short(block.rescale[row])} · ${vector(old.output)} + p V = ${vector(block.output[row])}`,
    divide: ({ trace, row, old }) =>
      `O / l = ${vector(old.output)} / ${short(old.sum)} = ${vector(trace.o[row])}, LSE = ${short(old.maximum)} + log ${short(old.sum)} = ${short(trace.lse[row])}`,
  };

  class SoftmaxFigure {
    constructor(kit) {
      this.data = kit.data.softmax;
      Object.assign(this, { mask: "full", row: 2 });
      this.stepper = new Stepper(
        kit,
        "step",
        () => this.places.length,
        (at) => this.#show(at),
      );
      this.rows = slider("query row", { to: this.data.q.length - 1, value: this.row }, (row) => this.#setRow(row));
      this.source = source(this.data.source);
      this.host = CF.h("div");
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      this.bars = CF.h("div", { class: "softmax-bars", "aria-hidden": "true" });
      this.keys = CF.h("div", { class: "lesson-scroll" });
      this.table = CF.h("div", { class: "lesson-scroll" });
      this.element = figure(
        "One row through all its blocks; every block updates its maximum, as in rows without fixed_max",
        [
          choice(
            "mask",
            Object.keys(this.data.masks).map((mask) => [mask, mask]),
            this.mask,
            (mask) => this.#setMask(mask),
          ),
          this.rows,
          this.stepper.element,
        ],
        this.line,
        this.host,
        CF.h("div", { class: "lesson-pair" }, CF.h("div", {}, this.keys, this.bars, this.table), this.source),
      );
      kit.then(() => this.#setMask(this.mask));
      kit.follow(["theme"], () => this.grid?.paint());
    }

    get trace() {
      return this.data.masks[this.mask];
    }

    /* Every step of every block, then the division. */
    get places() {
      return [
        ...this.trace.blocks.flatMap((_, block) => STEPS.map((step) => ({ block, step }))),
        { block: this.trace.blocks.length, step: "divide" },
      ];
    }

    #setMask(mask) {
      this.mask = mask;
      const keys = this.data.k.length;
      const score = (row, key) => {
        const block = this.trace.blocks.find((candidate) => key >= candidate.keys[0] && key < candidate.keys[1]);
        return block ? block.scores[row][key - block.keys[0]] : undefined;
      };
      this.grid = new Grid("Scores of all queries and keys", {
        rows: this.data.q.length,
        cols: keys,
        corner: "q \\ k",
        text: (row, key) => (score(row, key) === undefined ? "" : short(score(row, key))),
        rgb: (row, key) =>
          score(row, key) === null || score(row, key) === undefined ? null : CF.palette.ramp((score(row, key) + 4) / 8),
        pick: (row) => this.#setRow(row),
      });
      this.grid.mark((row, key) => score(row, key) === null, "hidden-key");
      this.host.replaceChildren(this.grid.element);
      this.stepper.go(0);
    }

    #setRow(row) {
      this.row = row;
      this.rows.to(row);
      this.stepper.go(this.stepper.at);
    }

    /* A row's m, l and O before a block. */
    #before(block) {
      if (block === 0) return { maximum: null, sum: 0, output: this.data.v[0].map(() => 0) };
      const found = this.trace.blocks[block - 1];
      return { maximum: found.maximum[this.row], sum: found.sum[this.row], output: found.output[this.row] };
    }

    #show(at) {
      const { block: number, step } = this.places[at];
      const { trace, row } = this;
      const block = trace.blocks[number] ?? null;
      const [from, to] = block?.keys ?? [0, 0];
      this.grid.mark((r, key) => r === row && key >= from && key < to, "now");
      this.grid.mark((r, key) => r === row && key < from, "past");
      const text = told[step]({ trace, block, row, old: this.#before(number) });
      this.line.replaceChildren(CF.h("b", {}, block ? `block ${number}, ${step}` : "after all blocks"), ` · ${text}`);
      this.source.to(this.data.lines[step]);
      this.keys.replaceChildren(this.#block(Math.min(number, trace.blocks.length - 1), step));
      this.#drawBars(number, step);
      this.table.replaceChildren(this.#state(number, STEPS.indexOf(step)));
    }

    /* The present block's keys, their scores, weights and values. The weights appear with their step. */
    #block(number, step) {
      const { row, data } = this;
      const { keys, scores, exponentials } = this.trace.blocks[number];
      const weighted = !["scores", "maximum", "shift"].includes(step);
      const line = (score, i) => {
        const key = keys[0] + i;
        return [
          key,
          vector(data.k[key]),
          short(score),
          weighted ? short(exponentials[row][i]) : "",
          vector(data.v[key]),
        ];
      };
      return CF.h(
        "table",
        { class: "lesson-state" },
        CF.h("caption", {}, `Block ${number} · q = ${vector(data.q[row])} · scale ${short(data.scale)}`),
        cells("thead", "th", [["key", "k", "s", "p", "v"]]),
        cells("tbody", "td", scores[row].map(line)),
      );
    }

    /* Exponentials of all keys so far relative to the present maximum: rescaling has shrunk the earlier ones. */
    #drawBars(number, step) {
      const { trace, row } = this;
      const done = (name) => STEPS.indexOf(step) < 0 || STEPS.indexOf(step) >= STEPS.indexOf(name);
      const shown = trace.blocks.slice(0, number + (done("exponentials") ? 1 : 0));
      const last = trace.blocks[Math.min(number, trace.blocks.length - 1)];
      const reference = done("rescale") ? last : (trace.blocks[number - 1] ?? last);
      const bars = shown.flatMap((block, at) =>
        block.scores[row].map((score, i) => {
          const shift = at === number ? block.shift[row] : reference.shift[row];
          const height = score === null ? 0 : Math.exp(score - shift);
          return CF.h("i", {
            style: `height:${Math.min(height, 1) * 100}%;background:${CF.palette.css(CF.palette.category(at))}`,
            title: `key ${block.keys[0] + i}: ${short(height)}`,
          });
        }),
      );
      this.bars.replaceChildren(...bars);
    }

    #state(number, step) {
      const before = this.#before(number);
      const block = this.trace.blocks[number];
      const { row } = this;
      const after = (name, from, value) => (block && step >= STEPS.indexOf(name) ? short(value) : short(from));
      const m = after("maximum", before.maximum, block?.maximum[row]);
      const l = after("sum", before.sum, block?.sum[row]);
      const outputs =
        block && step >= STEPS.indexOf("output") ? block.output[row] : step < 0 ? this.trace.o[row] : before.output;
      const names = ["m", "l", ...outputs.map((_, i) => `O[${i}]`)];
      return CF.h(
        "table",
        { class: "lesson-state" },
        CF.h("caption", {}, `Registers of query ${row}`),
        cells("thead", "th", [names]),
        cells("tbody", "td", [[m, l, ...outputs.map(short)]]),
      );
    }
  }

  CF.lessons.add({
    id: "softmax",
    title: "Online softmax, step by step",
    question:
      "A row's softmax needs its maximum and its sum. How can it be multiplied with V before all keys are known?",
    families: ["sm80"],
    build(kit) {
      const { softmax } = kit.data;
      return [
        prose(`Softmax does not change when a constant is subtracted from all scores. So keep, for each row, the
          largest score so far, m; the sum l of exp(s − m); and O, the same weights times V. If a block has a larger
          maximum m', l and the row of O are multiplied with exp(m − m'). At the end O / l is the exact result, as if
          the whole row had been known from the start.

          Below are ${softmax.q.length} queries, ${softmax.k.length} keys and head dim ${softmax.q[0].length}, in
          blocks of ${softmax.tile_n} keys. The numbers are computed by the functions of \`cuteflash.reference\` in
          the loop shown beside them, and the results are those of \`flash_attention_2\`. Pick a row and step. Watch the
          bars, the weights relative to the present maximum: when m grows, the old ones shrink.`),
        new SoftmaxFigure(kit).element,
        prose(`Masks add one difficulty. A hidden key has score −∞ and weight 0. A row that has seen no key has
          m = −∞, and −∞ − (−∞) is NaN; \`finite_or_zero\` subtracts 0 instead, and all weights become 0. Choose the
          window mask and the last row to see it. Under the causal mask, row 0 sees no key of the last block: m stays,
          and nothing changes.

          The kernels do the same arithmetic in base 2: \`softmax_scale · log2(e)\` is folded into one multiply-add
          before each \`ex2\`. They visit the last block first; rows with \`fixed_max\` start with the block of key 0,
          which contains attention sinks, unless a window hides it. The four lanes of a quad find the maximum with two
          shuffles; the sum stays with each thread until the end.

          Must m be the largest score? No: l and O scale alike, so any m gives the same O / l, as long as no number
          overflows or underflows. Rows with \`fixed_max\`, ${softmax.fixed.rows} of ${softmax.fixed.of} in
          the table of ${softmax.fixed.table}, use this. They take the maxima of a tile's first scores, and masked
          blocks still update them. A block that is seen whole uses the present maxima: no search for a larger score,
          no shuffles, no rescaling of O. The exponentials are rounded into P's registers, and S stays in its own.

          Scores far above m would overflow fp16; and the P of a dominant key, which is exactly 1 if m is its score,
          would be rounded. So each thread adds up its part of the block, and compares the sum with 2^${softmax.fixed.repair_log2} =
          ${2 ** softmax.fixed.repair_log2}. The lanes of a warp vote; if one sum is larger, the warp repairs the block:
          it takes the block's maxima from S, exponentiates and rounds again, and rescales O and l to the new maxima.
          Plain inputs seldom need a repair, and results are exact for any input.`),
        kit.seeInKernel(
          "sm80",
          { panel: "acc_S", step: "softmax", thread: 5 },
          "the softmax of a thread's two rows",
          "OnlineSoftmax, cuteflash/core/softmax.py",
        ),
        checks(
          ["m goes from 2 to 5. By which factor do l and O shrink?", "By exp(2 − 5), about 0.05."],
          [
            "Why does the last row's rescale of 0 in the window case do no harm?",
            "There m was −∞: exp(−∞ − shift) = 0, and l and O, which it multiplies, are 0, too.",
          ],
          [
            "Under fixed maxima a block has a score 3 above m, in units of log 2. What happens?",
            `Its exponential is 2^3 = 8, and m stays. A repair comes only if a thread's sum of its part of the block passes ${2 ** softmax.fixed.repair_log2}.`,
          ],
        ),
      ];
    },
  });
})();
