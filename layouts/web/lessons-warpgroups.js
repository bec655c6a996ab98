/* The ring that warpgroups share, and lesson 7: WGMMA operands and descriptors, roles of warpgroups, and ping-pong. */
(() => {
  "use strict";

  const { prose, figure, slider, choice, checks } = CF.lessons;
  const WGMMA_K = 16; // extent of the sum in one instruction, for 16-bit elements

  /** `TmaRing` with its mbarriers: which actor may proceed, which waits for which parity. Positions count all tiles. */
  class Ring {
    constructor(stages) {
      Object.assign(this, { stages, produced: 0, landed: 0, waited: 0, released: 0 });
      this.full = new Array(stages).fill(0); // completed phases
      this.empty = new Array(stages).fill(0);
    }

    stage(position) {
      return position % this.stages;
    }

    phase(position) {
      return Math.floor(position / this.stages) % 2;
    }

    /** Whether a wait for the phase of this parity passes: the barrier is then in a phase of the other parity. */
    static passes(completed, parity) {
      return completed % 2 !== parity;
    }

    /** `{method, position, parity, why}` of an actor's next act; `why` is null if it may act now. */
    next(actor) {
      const say = (method, position, parity, why) => ({ method, position, parity, why });
      if (actor === "acquire") {
        const parity = this.phase(this.produced) ^ 1;
        const free = Ring.passes(this.empty[this.stage(this.produced)], parity);
        return say(
          "acquire",
          this.produced,
          parity,
          free ? null : `waits: stage ${this.stage(this.produced)} is not empty`,
        );
      }
      if (actor === "land")
        return say("acquire", this.landed, null, this.landed < this.produced ? null : "nothing is in flight");
      if (actor === "wait") {
        if (this.waited > this.released) return say("wait", this.waited, null, "first release the tile that was read");
        const parity = this.phase(this.waited);
        const full = this.landed > this.waited && Ring.passes(this.full[this.stage(this.waited)], parity);
        return say("wait", this.waited, parity, full ? null : `waits: tile ${this.waited} has not landed`);
      }
      return say("release", this.released, null, this.waited > this.released ? null : "nothing is being read");
    }

    act(actor) {
      const { position } = this.next(actor);
      if (actor === "acquire") this.produced++;
      if (actor === "land") {
        this.full[this.stage(position)]++;
        this.landed++;
      }
      if (actor === "wait") this.waited++;
      if (actor === "release") {
        this.empty[this.stage(position)]++;
        this.released++;
      }
    }

    /** The content of a stage: `[tile or null, status]`. */
    holds(stage) {
      for (let position = this.released; position < this.produced; position++) {
        if (this.stage(position) !== stage) continue;
        if (position >= this.landed) return [position, "loading"];
        return [position, position < this.waited ? "reading" : "ready"];
      }
      return [null, "free"];
    }
  }

  /** The descriptor of one instruction, beside the core matrices that it describes. */
  class DescriptorFigure {
    constructor(kit) {
      this.scene = kit.scene("sm90");
      const steps = [
        ["wgmma_qk", "K, K-major"],
        ["wgmma_pv", "V, MN-major"],
      ];
      this.host = CF.h("div", { class: "lesson-scroll" });
      this.slider = slider("instruction", { to: 1 }, (i) => CF.state.set({ instruction: i }));
      this.operand = choice("operand", steps, "wgmma_qk", (step) => CF.state.set({ step, instruction: 0 }));
      const hosts = {
        wgmma_qk: kit.panel("sm90", "sK", { color: "core" }),
        wgmma_pv: kit.panel("sm90", "sV", { color: "core" }),
      };
      this.element = figure(
        "Core matrices and the descriptor of one wgmma",
        [this.operand, this.slider],
        CF.h("div", { class: "lesson-pair" }, CF.h("div", {}, Object.values(hosts)), this.host),
      );
      kit.follow(["step", "instruction", "stage"], () => {
        const step = this.scene.step(CF.state.get("step"))?.descriptor ? CF.state.get("step") : "wgmma_qk";
        for (const [name, host] of Object.entries(hosts)) host.hidden = name !== step;
        this.operand.to(step);
        this.#show(this.scene.step(step).descriptor.b);
      });
    }

    #show(desc) {
      const at = Math.min(CF.state.get("instruction") ?? 0, desc.starts.length - 1);
      this.slider.limit(desc.starts.length - 1);
      this.slider.to(at);
      const stage = CF.state.get("stage");
      const start = this.scene.address(this.scene.tile(desc.tile), 0, 0, stage, true) + desc.starts[at];
      const fields = CF.stepper.descriptorFields(desc, start);
      const cell = (text) => CF.h("td", {}, text);
      const row = ([name, bits, plain, value]) =>
        CF.h("tr", {}, CF.h("th", { scope: "row" }, name), cell(bits), cell(plain), cell(CF.hex(value, 1)));
      this.host.replaceChildren(
        CF.h(
          "table",
          { class: "descriptor" },
          CF.h(
            "caption",
            {},
            `Descriptor of ${desc.tile}, instruction ${at}: ${desc.starts[at]} bytes into stage ${stage}`,
          ),
          CF.h(
            "thead",
            {},
            CF.h(
              "tr",
              {},
              ["field", "bits", "value", "encoded"].map((text) => CF.h("th", { scope: "col" }, text)),
            ),
          ),
          CF.h("tbody", {}, fields.map(row)),
          CF.h("tfoot", {}, row(["all 64 bits", "63–0", "", CF.stepper.descriptorWord(fields)])),
        ),
        CF.h("p", { class: "lesson-message" }, this.#told(desc, at)),
      );
    }

    /* The meaning of this operand's numbers; K-major operands with a swizzle do not use the leading field. */
    #told(desc, at) {
      const tile = this.scene.tile(desc.tile);
      const step =
        desc.major === "K"
          ? `columns ${at * WGMMA_K} to ${(at + 1) * WGMMA_K - 1}`
          : `keys ${at * WGMMA_K} to ${(at + 1) * WGMMA_K - 1}`;
      const leading =
        desc.major === "K"
          ? "The leading field is not used with this swizzle."
          : `The next ${desc.swizzle_bytes / this.scene.elementBytes} columns lie ${CF.number(desc.leading_bytes)} bytes on.`;
      return `Instruction ${at} multiplies ${step} of ${tile.id}. The next eight keys lie ${CF.number(desc.stride_bytes)} bytes on. ${leading}`;
    }
  }

  /** Registers by role: at launch, and after `setmaxnreg`. */
  function registers(scene) {
    const { launch, file, roles } = scene.data.budget.registers;
    const { threads } = scene.data.kernel;
    const bar = (label, parts) =>
      CF.h(
        "div",
        { class: "lesson-bar-row" },
        CF.h("span", {}, label),
        CF.h(
          "div",
          { class: "lesson-bar" },
          parts.map(([text, share, rgb]) =>
            CF.h(
              "i",
              { style: `width:${share * 100}%;background:${CF.palette.css(rgb)};color:${CF.palette.ink(rgb)}` },
              text,
            ),
          ),
        ),
      );
    const warpgroups = threads / 128;
    const grey = CF.palette.category(7);
    const launched = Array.from({ length: warpgroups }, (_, i) => [
      `${launch}`,
      (launch * 128) / file,
      i ? CF.palette.category(i) : grey,
    ]);
    const split = roles.flatMap((role, r) =>
      Array.from({ length: role.threads / 128 }, (_, i) => [
        `${role.limit}`,
        (role.limit * 128) / file,
        r ? CF.palette.category(i + 1) : grey,
      ]),
    );
    const used = roles.map((role) => `${role.threads} · ${role.limit}`).join(" + ");
    const total = roles.reduce((sum, role) => sum + role.threads * role.limit, 0);
    return figure(
      "Registers of a multiprocessor, by warpgroup",
      null,
      bar("at launch", launched),
      bar("after setmaxnreg", split),
      CF.h(
        "p",
        { class: "lesson-message" },
        `${used} = ${CF.number(total)} = ${threads} · ${launch}, of ${CF.number(file)} registers. The producer needs few; those that it gives up let each consumer thread hold its accumulators.`,
      ),
    );
  }

  /** The schedule of the model, as a drawing with one lane for each warpgroup and unit. */
  class TurnFigure {
    constructor(kit) {
      this.data = kit.data.turns.head_dims;
      Object.assign(this, { dim: "128", groups: "many", overlap: 1, turns: 1 });
      this.host = CF.h("div", { class: "lesson-scroll" });
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      const set = (key) => (value) => {
        this[key] = value;
        this.#show();
      };
      this.element = figure(
        "Use of the tensor cores over time: a model of four key blocks",
        [
          choice(
            "head dim",
            Object.keys(this.data).map((dim) => [dim, dim]),
            this.dim,
            set("dim"),
          ),
          choice(
            "consumers",
            [
              ["1", "one"],
              ["many", "as shipped"],
            ],
            this.groups,
            set("groups"),
          ),
          choice(
            "overlap",
            [
              [0, "off"],
              [1, "on"],
            ],
            this.overlap,
            set("overlap"),
          ),
          choice(
            "ping-pong",
            [
              [0, "off"],
              [1, "on"],
            ],
            this.turns,
            set("turns"),
          ),
        ],
        this.host,
        this.line,
        CF.h(
          "p",
          { class: "hint" },
          "Each colour is a key block; exp are its exponentials. The model has the rates of the two units and the order of issue, but no latencies, maxima, conversions or rescaling. Without turns it assumes that the warpgroups run in step, the worst case.",
        ),
      );
      kit.follow(["theme"], () => this.#show());
    }

    #show() {
      const row = this.data[this.dim];
      const groups = this.groups === "1" ? 1 : row.warpgroups;
      const turns = groups === 1 ? 0 : this.turns;
      const schedule = row.schedules[`${groups} ${this.overlap} ${turns}`];
      const longest = Math.max(...Object.values(row.schedules).map(({ clocks }) => clocks));
      this.host.replaceChildren(
        CF.lessons.timeline(schedule, {
          groups,
          longest,
          beside: { name: "softmax", tasks: { softmax: "exp" } },
          unit: "block",
        }),
      );
      const alone = groups === 1 && this.turns ? " A single warpgroup has no other to take turns with." : "";
      this.line.textContent = `${row.tile_n} keys a block: a product takes ${row.product} clocks, its exponentials ${row.softmax}. ${groups} warpgroup${groups > 1 ? "s" : ""}: ${CF.number(schedule.clocks)} clocks, tensor cores busy ${Math.round(schedule.tensor * 100)} %.${alone}`;
    }
  }

  CF.lessons.add({
    id: "wgmma",
    title: "WGMMA and warp specialisation",
    question:
      "Hopper multiplies with 128 threads at once and reads operands through a descriptor. Which work remains for the threads, and how is it divided?",
    families: ["sm90"],
    state: { step: "wgmma_qk", instruction: 0 },
    build(kit) {
      const scene = kit.scene("sm90");
      const roles = scene.data.kernel.roles.map(({ name, does }) => `${name}: ${does}`).join("; ");
      const [k, v] = ["wgmma_qk", "wgmma_pv"].map((id) => scene.step(id).descriptor.b);
      const shape = scene.step("wgmma_qk").instruction.match(/m\d+n\d+k\d+/)[0];
      const columns = k.swizzle_bytes / scene.elementBytes; // of a slab
      const moves = k.starts[1] - k.starts[0];
      const slab = k.swizzle_bytes / moves; // instructions
      const { launch, roles: split } = scene.data.budget.registers;
      const { threads } = scene.data.kernel;
      const narrow = kit.data.turns.head_dims["64"];
      const best = Math.round(narrow.schedules[`${narrow.warpgroups} 1 1`].tensor * 100);
      return [
        prose(`\`wgmma\` is issued by a warpgroup, four warps together: here ${shape}. It runs asynchronously, like a
          copy: fence, issue, commit a group, wait later. A comes from registers or shared memory, B always from
          shared memory, which the unit reads itself. It needs no per-thread addresses, only a 64-bit descriptor.

          The descriptor describes core matrices, 8 rows × 16 bytes. For K, whose k extent runs along the row, the
          stride field is the distance to the next eight keys (${k.stride_bytes} bytes); an instruction takes ${WGMMA_K}
          columns, so the start moves by ${moves} bytes, and after ${slab} instructions into the next slab. V has its
          k extent down the rows: the start moves by ${WGMMA_K} keys, ${v.starts[1] - v.starts[0]} bytes, and the
          leading field is the distance to the next ${columns} columns. The swizzle field names TMA's swizzle.`),
        new DescriptorFigure(kit).element,
        prose(`Warpgroups have roles (${roles}). Consumers then do not issue loads between their products, and
          \`setmaxnreg\` moves registers to the consumers, which need them.`),
        registers(scene),
        prose(`Two units bound the loop: the tensor cores and the special-function unit, which computes exponentials.
          While a warpgroup computes its softmax, the tensor cores need work from another. With \`pingpong\`, named
          barriers let a warpgroup issue its products only in its turn. With \`overlap\`, the scores of the next block
          are issued before P V of this one, so that a softmax overlaps products of its own warpgroup, too. The gains
          of turns and overlap on a GPU, row by row, are in \`docs/performance.md\`.`),
        new TurnFigure(kit).element,
        kit.seeInKernel(
          "sm90",
          { panel: "sK", step: "wgmma_qk", instruction: 0, color: "core" },
          "the wgmma of Q Kᵀ with its descriptor",
          "step_overlapped, cuteflash/kernels/sm90/fwd_mma.py; take_turn, cuteflash/kernels/sm90/warpgroup.py",
        ),
        checks(
          [
            `Instruction ${slab} of Q Kᵀ starts ${k.starts[slab]} bytes into sK. Why?`,
            `${slab} instructions use up the ${columns} columns of the first slab; the second begins after ${scene.tile("sK").rows} rows of ${k.swizzle_bytes} bytes.`,
          ],
          [
            `At head dim 64 a product takes ${narrow.product} clocks, the exponentials of its scores ${narrow.softmax}. What can scheduling still gain?`,
            `A block's two products together take ${2 * narrow.product} clocks, so at best both units stay busy. With ${narrow.warpgroups} consumers the model keeps the tensor cores ${best} % busy; the profiler's counts are in \`docs/performance.md\`.`,
          ],
          [
            `Why must the launch ask for ${launch} registers when consumers need ${split.at(-1).limit}?`,
            `All threads start with the same number. \`setmaxnreg\` only moves registers inside the block's allocation, ${threads} · ${launch}; the producers must first give up theirs.`,
          ],
        ),
      ];
    },
  });

  Object.assign(CF.lessons, { Ring });
})();
