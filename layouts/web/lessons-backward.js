/* Lesson 10: the backward: its five products, where their operands are, and where dQ goes. */
(() => {
  "use strict";

  const { prose, figure, choice, checks, Grid } = CF.lessons;
  const PRODUCTS = ["wgmma_s", "wgmma_dp", "wgmma_dv", "wgmma_dk", "wgmma_dq"];

  const place = (scene, id) => {
    const part = scene.part(id);
    return part.space === "registers" ? `${id}, registers` : `${id}, shared memory`;
  };

  /** The products of a scene with their operands, as a table. */
  function operands(scene) {
    const row = (id) => {
      const step = scene.step(id);
      const [a, b, acc] = step.touches.map((touch) => touch.id);
      const shape = step.instruction.match(/m\d+n\d+k\d+/)[0];
      return [step.title, place(scene, a), place(scene, b), acc, shape];
    };
    const heads = ["product", "A", "B", "accumulator", "instruction"];
    return CF.h(
      "div",
      { class: "lesson-scroll" },
      CF.h(
        "table",
        { class: "lesson-state" },
        CF.h("caption", {}, "The products of one query block"),
        CF.h(
          "thead",
          {},
          CF.h(
            "tr",
            {},
            heads.map((text) => CF.h("th", { scope: "col" }, text)),
          ),
        ),
        CF.h(
          "tbody",
          {},
          PRODUCTS.map(row).map(([title, ...cells]) =>
            CF.h(
              "tr",
              {},
              CF.h("th", { scope: "row" }, title),
              cells.map((text) => CF.h("td", {}, text)),
            ),
          ),
        ),
      ),
    );
  }

  /** P, dP and dS of a small attention; a chosen query's two sums are told. */
  function sums({ p, dp, ds, sum, delta }) {
    const line = CF.h("p", { class: "lesson-message", role: "status" });
    const shown = { P: p, dP: dp, dS: ds };
    const tell = (row) => {
      const products = p[row].map((value, key) => `${value} · ${dp[row][key]}`).join(" + ");
      line.textContent = `Query ${row}: the sum of P dP over its keys is ${products} = ${sum[row][0]}; delta, from dO and O alone, is ${delta[row][0]}.`;
    };
    const grids = Object.entries(shown).map(
      ([name, values]) =>
        new Grid(name, {
          rows: values.length,
          cols: values[0].length,
          text: (row, col) => values[row][col].toFixed(3),
          corner: name,
          pick: tell,
          follow: true,
        }).element,
    );
    tell(0);
    return figure("dS = P (dP - delta), for 2 queries and 4 keys", null, grids, line);
  }

  /** The model's schedule of three steps, by head dim and order of issue. */
  class StepFigure {
    constructor(kit) {
      this.data = kit.data.gradients;
      const dims = Object.keys(this.data.head_dims);
      Object.assign(this, { dim: dims[0], order: null });
      this.host = CF.h("div", { class: "lesson-scroll" });
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      const orders = [
        ["0 0", "as it comes"],
        ["0 1", "ping-pong"],
        ["1 0", "dQ apart"],
        ["1 1", "both"],
      ];
      this.order = this.shipped;
      this.orders = choice("order", orders, this.order, (key) => {
        this.order = key;
        this.#show();
      });
      const dimChoice = choice(
        "head dim",
        dims.map((dim) => [dim, dim]),
        this.dim,
        (dim) => {
          this.dim = dim;
          this.order = this.shipped;
          this.orders.to(this.order);
          this.#show();
        },
      );
      this.element = figure(
        `${this.data.steps} steps of a block: a model`,
        [dimChoice, this.orders],
        this.host,
        this.line,
        CF.h(
          "p",
          { class: "hint" },
          "Each colour is a query block. The model has the rates of the units and the order of issue, but no latencies, masks, conversions, copies to shared memory or additions in memory. As it comes, it assumes that the warpgroups run in step, the worst case.",
        ),
      );
      kit.follow(["theme"], () => this.#show());
    }

    /** The order of the shipped row. */
    get shipped() {
      const { apart, traits } = this.data.head_dims[this.dim];
      return `${Number(apart)} ${Number(traits.pingpong)}`;
    }

    #show() {
      const { schedules, clocks, traits, warpgroups } = this.data.head_dims[this.dim];
      const schedule = schedules[this.order];
      const longest = Math.max(...Object.values(schedules).map((one) => one.clocks));
      const beside = { name: "pointwise", tasks: { exp: "exp", dS: "dS" } };
      this.host.replaceChildren(
        CF.lessons.timeline(schedule, { groups: warpgroups + (this.order[0] === "1"), longest, beside, unit: "query block" }),
      );
      const shipped = this.order === this.shipped ? " It is the order of the shipped row." : "";
      this.line.textContent = `${traits.tile_m} queries a block: a product takes ${clocks.S} clocks, the exponentials ${clocks.exp}. ${CF.number(schedule.clocks)} clocks, tensor cores busy ${Math.round(schedule.tensor * 100)} %.${shipped}`;
    }
  }

  const SHARES = {
    rows: "each warpgroup computes half of the rows of every dQ tile",
    columns: "each warpgroup computes half of the columns of every dQ tile",
    transposed: "each warpgroup computes half of the columns of every dQ tile, as rows of dQᵀ = Kᵀ dSᵀ",
    turns: "the warpgroups compute whole dQ tiles, one in even steps and one in odd ones",
    apart: "a third warpgroup computes every dQ tile",
  };

  CF.lessons.add({
    id: "backward",
    title: "The backward: five products",
    question:
      "The forward has two products and keeps O and one number a row. How do five products compute the three gradients from that, and where does each operand come from?",
    families: ["backward"],
    state: { step: "wgmma_dv", instruction: 0 },
    build(kit) {
      const scene = kit.scene("backward");
      const { traits } = scene.data.kernel;
      const { launch } = scene.data.budget.registers;
      const consumer = scene.data.budget.registers.roles.at(-1);
      const used = consumer.parts.reduce((sum, { registers }) => sum + registers, 0);
      const bytes = 4 * traits.tile_m * traits.head_dim;
      const flops = 10 * traits.tile_m * traits.tile_n * traits.head_dim;
      return [
        prose(`O = P V gives two gradients: dV = Pᵀ dO and dP = dO Vᵀ. The softmax turns dP into dS, and S = Q Kᵀ gives
          two more: dQ = dS K and dK = dSᵀ Q. P is not stored, since it is as large as the scores, so S is computed a
          second time. These are five products; a backward therefore counts as 2.5 times the operations of its forward.

          Recomputing P needs neither a maximum nor a sum: the forward has stored the log-sum-exp of each row, and
          P = exp(S - LSE) is final at once. There is nothing to rescale.

          The softmax's derivative is dS = P (dP - the sum of P dP over all keys of the row). That sum spans every key
          block, but P dP summed over keys is dO · (P V) = dO · O, which needs one row alone. A kernel before this one
          computes it, delta = rowsum(dO O); a gradient that flows into the log-sum-exp is subtracted from it.`),
        sums(kit.data.gradients.example),
        prose(`A block owns ${traits.tile_n} keys and loops over the query blocks that see them, so that dK and dV stay
          in registers and are written once. Each consumer warpgroup has 64 of the keys. Registers decide the rest:
          ${used} of ${consumer.limit} in each consumer thread hold accumulators and operands (${launch} at launch).`),
        operands(scene),
        prose(`Scores are held transposed, keys as rows. The accumulator of Sᵀ then has the layout that operand A of
          dV += Pᵀ dO needs: P is rounded in place and goes from the registers of one product to the next without a
          copy. So does dS for dK. Only dQ = dS K sums over keys, which are in both warpgroups: dS goes to shared memory,
          transposed on the way, and a barrier lets a warpgroup read what others wrote.`),
        figure("acc_S: keys are rows of the product", null, kit.panel("backward", "acc_S", { color: "owner" })),
        prose(`dQ is a sum over key blocks, and those are different thread blocks. One way is to add up in memory:
          ${SHARES[traits.dq]}; each tile waits in shared memory for a producer warp, which adds it to an fp32 sum by one
          bulk instruction. The sum is in the order of the threads' registers, so that neither side computes
          addresses; a kernel after this one rounds it. A step adds ${CF.number(bytes)} bytes for
          ${CF.number(flops)} operations; more keys in a tile, and nothing else, make that fewer bytes an operation.

          Additions in any order make the last bits differ from run to run. A deterministic backward makes key blocks
          take turns at each tile. The other way is two passes: one by key blocks for dK and dV, one by query blocks
          for dQ. S and dP are computed in both, which makes seven products instead of five, but nothing is added in memory and
          every run gives the same bits. Wide heads take two passes: their key tiles are so small that the additions
          would take longer than the products.`),
        figure("sdQ: the order in which the threads hold it", null, kit.panel("backward", "sdQ", { color: "owner" })),
        prose(`The pointwise part, exponentials and dS, has to run beside products. A warpgroup that computes dQ, too,
          issues that of a step in the next one, so that the wait for the other's dS costs nothing. With \`pingpong\` a warpgroup issues
          the first products of a step only in its turn: its exponentials fall into the other's products. If a third
          warpgroup computes dQ, the two that have the keys never wait for each other, and leave the copies of dQ to it; but
          its registers are taken from theirs.`),
        new StepFigure(kit).element,
        kit.seeInKernel(
          "backward",
          { panel: "rP", step: "wgmma_dv", instruction: 0 },
          "dV += Pᵀ dO with P in registers",
          "step, cuteflash/kernels/sm90/bwd_mma.py; compute_dq, cuteflash/kernels/sm90/bwd_dq_product.py; take_dq, cuteflash/kernels/sm90/bwd_dq_store.py",
        ),
        checks(
          [
            "Why does P need no running maximum here?",
            "The log-sum-exp of the whole row is known from the forward. exp(S - LSE) is at most 1 for every key, and it is the final value.",
          ],
          [
            "Why is dQ not summed up in registers, as dK and dV are?",
            "A block visits all queries of its keys, so it has whole sums over queries. A sum over keys needs all key blocks, which other thread blocks have.",
          ],
          [
            `A step adds ${CF.number(bytes)} bytes to memory. What makes that cheaper for each operation?`,
            `More keys in a tile: the bytes depend on the ${traits.tile_m} queries and ${traits.head_dim} columns, the operations also on the ${traits.tile_n} keys.`,
          ],
        ),
      ];
    },
  });
})();
