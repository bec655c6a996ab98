/* Lesson 7: WGMMA operands and descriptors, roles of warpgroups, and ping-pong. */
(() => {
  "use strict";

  const { prose, figure, slider, choice, checks } = CF.lessons;
  const ROW = 26; // pixels of a lane in the schedule
  const LEFT = 104;
  const LABEL_FROM = 34; // width of a task that has room for its name
  const SCALE = 1000; // the drawing's width in its own units

  /** The descriptor of one instruction, beside the core matrices that it describes. */
  class DescriptorFigure {
    constructor(kit) {
      this.scene = kit.scene("sm90");
      const steps = [["wgmma_qk", "K, K-major"], ["wgmma_pv", "V, MN-major"]];
      this.host = CF.h("div", { class: "lesson-scroll" });
      this.slider = slider("instruction", { to: 7 }, (i) => CF.state.set({ instruction: i }));
      const hosts = { wgmma_qk: kit.panel("sm90", "sK", { color: "core" }), wgmma_pv: kit.panel("sm90", "sV", { color: "core" }) };
      this.element = figure(
        "Core matrices and the descriptor of one wgmma",
        [choice("operand", steps, "wgmma_qk", (step) => CF.state.set({ step, instruction: 0 })), this.slider],
        CF.h("div", { class: "lesson-pair" }, CF.h("div", {}, Object.values(hosts)), this.host),
      );
      kit.follow(["step", "instruction"], () => {
        const step = this.scene.step(CF.state.get("step"))?.descriptor ? CF.state.get("step") : "wgmma_qk";
        for (const [name, host] of Object.entries(hosts)) host.hidden = name !== step;
        this.#show(this.scene.step(step).descriptor.b);
      });
    }

    #show(desc) {
      const at = Math.min(CF.state.get("instruction") ?? 0, desc.starts.length - 1);
      this.slider.limit(desc.starts.length - 1);
      this.slider.to(at);
      const start = this.scene.part(desc.tile).spec.base + desc.starts[at];
      const fields = CF.stepper.descriptorFields(desc, start);
      const cell = (text) => CF.h("td", {}, text);
      const row = ([name, bits, plain, value]) => CF.h("tr", {}, CF.h("th", { scope: "row" }, name), cell(bits), cell(plain), cell(CF.hex(value, 1)));
      this.host.replaceChildren(
        CF.h(
          "table",
          { class: "descriptor" },
          CF.h("caption", {}, `Descriptor of ${desc.tile}, instruction ${at}: ${desc.starts[at]} bytes into the tile`),
          CF.h("thead", {}, CF.h("tr", {}, ["field", "bits", "value", "encoded"].map((text) => CF.h("th", { scope: "col" }, text)))),
          CF.h("tbody", {}, fields.map(row)),
        ),
      );
    }
  }

  /** Registers by role: what the block is launched with, and what `setmaxnreg` makes of it. */
  function registers(scene) {
    const { launch, file, roles } = scene.data.budget.registers;
    const { threads } = scene.data.kernel;
    const bar = (label, parts) =>
      CF.h("div", { class: "lesson-bar-row" }, CF.h("span", {}, label), CF.h("div", { class: "lesson-bar" }, parts.map(([text, share, rgb]) => CF.h("i", { style: `width:${share * 100}%;background:${CF.palette.css(rgb)};color:${CF.palette.ink(rgb)}` }, text))));
    const warpgroups = threads / 128;
    const grey = CF.palette.category(7);
    const launched = Array.from({ length: warpgroups }, (_, i) => [`${launch}`, (launch * 128) / file, i ? CF.palette.category(i) : grey]);
    const split = roles.flatMap((role, r) => Array.from({ length: role.threads / 128 }, (_, i) => [`${role.limit}`, (role.limit * 128) / file, r ? CF.palette.category(i + 1) : grey]));
    const used = roles.map((role) => `${role.threads} · ${role.limit}`).join(" + ");
    const total = roles.reduce((sum, role) => sum + role.threads * role.limit, 0);
    return figure(
      "Registers of a multiprocessor, by warpgroup",
      null,
      bar("at launch", launched),
      bar("after setmaxnreg", split),
      CF.h("p", { class: "lesson-message" }, `${used} = ${CF.number(total)} = ${threads} · ${launch}, of ${CF.number(file)} registers. The producer needs few; what it gives up lets each consumer thread hold its accumulators.`),
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
        "Who uses the tensor cores when: a model of four key blocks",
        [
          choice("head dim", Object.keys(this.data).map((dim) => [dim, dim]), this.dim, set("dim")),
          choice("consumers", [["1", "one"], ["many", "as shipped"]], this.groups, set("groups")),
          choice("overlap", [[0, "off"], [1, "on"]], this.overlap, set("overlap")),
          choice("ping-pong", [[0, "off"], [1, "on"]], this.turns, set("turns")),
        ],
        this.host,
        this.line,
        CF.h("p", { class: "hint" }, "A colour is a key block, and exp its exponentials. The model knows the rates of the two units and the order of issue; no latencies, maxima, conversions or rescaling. Without turns it assumes that the warpgroups run in step, the worst case."),
      );
      kit.follow(["theme"], () => this.#show());
    }

    #show() {
      const row = this.data[this.dim];
      const groups = this.groups === "1" ? 1 : row.warpgroups;
      const turns = groups === 1 ? 0 : this.turns;
      const schedule = row.schedules[`${groups} ${this.overlap} ${turns}`];
      this.host.replaceChildren(this.#drawing(schedule, groups));
      const alone = groups === 1 && this.turns ? " One warpgroup has nobody to take turns with." : "";
      this.line.textContent = `${row.tile_n} keys a block: a product takes ${row.product} clocks, its exponentials ${row.softmax}. ${groups} warpgroup${groups > 1 ? "s" : ""}: ${CF.number(schedule.clocks)} clocks, tensor cores busy ${Math.round(schedule.tensor * 100)} %.${alone}`;
    }

    #drawing({ spans, clocks }, groups) {
      const longest = Math.max(...Object.values(this.data[this.dim].schedules).map((schedule) => schedule.clocks));
      const x = (clock) => LEFT + ((SCALE - LEFT) * clock) / longest;
      const lanes = Array.from({ length: groups }, (_, wg) => [`wg ${wg} products`, `wg ${wg} softmax`]).flat();
      const box = ([wg, what, block, start, end]) => {
        const rgb = CF.palette.category(block);
        const y = (2 * wg + (what === "softmax" ? 1 : 0)) * ROW;
        return CF.svg(
          "g",
          {},
          CF.svg("title", {}, `${what} of block ${block}, warpgroup ${wg}: clocks ${start} to ${end}`),
          CF.svg("rect", { x: x(start), y: y + 2, width: Math.max(x(end) - x(start) - 1, 1), height: ROW - 4, rx: 2, fill: CF.palette.css(rgb, what === "softmax" ? 0.55 : 1) }),
          x(end) - x(start) > LABEL_FROM ? CF.svg("text", { x: (x(start) + x(end)) / 2, y: y + ROW / 2 + 4, "text-anchor": "middle", fill: what === "softmax" ? CF.palette.theme("ink") : CF.palette.ink(rgb) }, what === "softmax" ? `exp ${block}` : `${what} ${block}`) : null,
        );
      };
      const height = lanes.length * ROW;
      return CF.svg(
        "svg",
        { viewBox: `0 0 ${SCALE} ${height + 18}`, class: "lesson-turns", role: "img", "aria-label": `Schedule of ${groups} warpgroups over ${clocks} clocks` },
        lanes.map((name, i) => CF.svg("text", { x: 0, y: i * ROW + ROW / 2 + 4, class: "lane" }, name)),
        spans.map(box),
        CF.svg("line", { x1: x(clocks), x2: x(clocks), y1: 0, y2: height, class: "end" }),
        CF.svg("text", { x: x(clocks), y: height + 13, "text-anchor": "end", class: "lane" }, `${CF.number(clocks)} clocks`),
      );
    }
  }

  CF.lessons.add({
    id: "wgmma",
    title: "WGMMA and warp specialisation",
    question: "Hopper multiplies with 128 threads at once and reads operands through a descriptor. What is left for the threads to do, and who does it?",
    families: ["sm90"],
    state: { step: "wgmma_qk", instruction: 0 },
    build(kit) {
      const scene = kit.scene("sm90");
      const roles = scene.data.kernel.roles.map(({ name, does }) => `${name}: ${does}`).join("; ");
      return [
        prose(`\`wgmma\` is issued by a warpgroup, four warps together: here m64n128k16. It runs asynchronously, like a copy:
          fence, issue, commit a group, wait later. A comes from registers or shared memory, B always from shared memory, where
          the unit reads it itself. It needs no per-thread addresses, only a 64-bit descriptor.

          The descriptor describes core matrices, 8 rows × 16 bytes. For K, whose k extent runs along the row, the stride
          field says how far the next eight keys are (1024 bytes); an instruction takes 16 columns, so the start moves by 32 bytes,
          and after four instructions into the next slab. V has its k extent down the rows: start moves by 16 keys, 2048 bytes, and the
          leading field is the distance to the next 64 columns. The swizzle field repeats what TMA wrote.`),
        new DescriptorFigure(kit).element,
        prose(`Roles split the block (${roles}). Loads then no longer stand between a consumer's products, and \`setmaxnreg\`
          moves registers to where they are needed.`),
        registers(scene),
        prose(`Two units bound the loop: tensor cores and the exponentials. While a warpgroup is at its softmax the tensor cores
          must have someone else's work. With \`pingpong\`, named barriers let a warpgroup issue its products only in its turn. With
          \`overlap\`, the scores of the next block are issued before P V of this one, so that a softmax finds products running even
          in its own warpgroup. Measured on an H200: without turns D64 loses 5 %, D128 ±1 %; without overlap D64 14 %, D128 10 to 20 %.`),
        new TurnFigure(kit).element,
        kit.seeInKernel("sm90", { panel: "sK", step: "wgmma_qk", instruction: 0, color: "core" }, "the wgmma of Q K^T with its descriptor", "step_overlapped, cuteflash/kernels/sm90/fwd_mma.py; take_turn, warpgroup.py"),
        checks(
          ["Instruction 4 of Q K^T starts 16384 bytes into sK. Why?", "Four instructions use up the 64 columns of the first slab; the second slab begins after 128 rows of 128 bytes."],
          ["At head dim 64 the products take half as long as the exponentials. What can scheduling still do?", "A block's two products together take as long as its exponentials, so at best both units stay busy. With three consumers the model comes near it; the kernel reaches 62 %."],
          ["Why must the launch ask for 168 registers when consumers need 240?", "All threads start equal. `setmaxnreg` only moves registers inside the block's allocation, 384 · 168; the producers must first give up theirs."],
        ),
      ];
    },
  });
})();
