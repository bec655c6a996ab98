/* Lessons 5 and 6: cp.async commit groups on Ampere, TMA and its mbarrier ring on Hopper. */
(() => {
  "use strict";

  const { Grid, Stepper, prose, figure, slider, choice, source, checks } = CF.lessons;
  const STATUS = { free: "·", loading: "↓", stored: "↧", ready: "✓", reading: "●", read: "○" };
  const WORDS = {
    free: "free",
    loading: "in flight",
    stored: "stored by this thread, other threads may not have finished",
    ready: "ready",
    reading: "being read",
    read: "read by this warp, other warps may still read it",
  };
  const KINDS = { load: "L", commit: "C", wait: "W", ldmatrix: "M", product: "P", softmax: "S" };

  const pale = (rgb) => CF.palette.mix(rgb, CF.palette.parse(CF.palette.theme("surface")), 0.62);

  /** The colour of a buffer that holds a block: full while it is read, pale before, none when it is free. */
  function shade(block, status) {
    if (block === null || status === "free") return null;
    return status === "reading" ? CF.palette.category(block) : pale(CF.palette.category(block));
  }

  /** Every action of a tile's loads in a chosen order: the buffers over time, the groups, the line of the kernel. */
  class PipelineFigure {
    constructor(kit) {
      this.data = kit.data.pipeline;
      this.scene = kit.scene("sm80");
      this.order = this.data.orders[0];
      this.stages = String(this.scene.data.kernel.traits.kv_stage);
      this.stepper = new Stepper(
        kit,
        "action",
        () => this.actions.length,
        (at) => this.#show(at),
      );
      this.host = CF.h("div");
      this.groups = CF.h("p", { class: "lesson-groups" });
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      this.sources = Object.fromEntries(Object.entries(this.data.sources).map(([name, data]) => [name, source(data)]));
      this.cost = CF.h("p");
      this.rows = CF.h("p", { class: "hint" });
      const titles = this.data.orders.map(({ title }) => [title, title]);
      const depths = Object.keys(this.order.stages).map((stages) => [stages, stages]);
      this.depth = choice("kv_stage", depths, this.stages, (stages) => this.#choose(stages));
      const key = Object.keys(STATUS)
        .slice(1)
        .map((status) => CF.h("span", {}, `${STATUS[status]} ${WORDS[status]}`));
      this.element = figure(
        "Stages over time: a column is one call of the kernel",
        [choice("loads", titles, this.order.title, (title) => this.#reorder(title)), this.depth, this.stepper.element],
        this.line,
        this.host,
        CF.h("p", { class: "lesson-key" }, key, CF.h("span", {}, "the number is the key block")),
        CF.h(
          "p",
          { class: "lesson-key" },
          Object.entries(KINDS).map(([kind, letter]) => CF.h("span", {}, `${letter} ${kind}`)),
        ),
        this.cost,
        this.groups,
        Object.values(this.sources),
        this.rows,
      );
      kit.then(() => this.#choose(this.stages));
      kit.follow(["theme"], () => this.grid?.paint());
    }

    get actions() {
      return this.order.stages[this.stages].actions;
    }

    /* Another order of loads, with as many stages as before or, if it does not allow that, the fewest. */
    #reorder(title) {
      this.order = this.data.orders.find((order) => order.title === title);
      this.depth.refuse(this.order.refused);
      const stages = this.stages in this.order.stages ? this.stages : Object.keys(this.order.stages)[0];
      this.depth.to(stages);
      this.#choose(stages);
    }

    #choose(stages) {
      this.stages = stages;
      const buffers = Object.keys(this.actions[0].buffers);
      const at = (row, col) => this.actions[col].buffers[buffers[row]];
      this.grid = new Grid("Buffers over time", {
        rows: buffers.length,
        cols: this.actions.length,
        text: (row, col) => (at(row, col)[1] === "free" ? STATUS.free : `${at(row, col)[0]}${STATUS[at(row, col)[1]]}`),
        rgb: (row, col) => shade(...at(row, col)),
        rowHead: (row) => buffers[row],
        colHead: (col) => CF.h("abbr", { title: this.actions[col].kind }, KINDS[this.actions[col].kind]),
        pick: (_, col) => this.stepper.go(col),
      });
      this.grid.table.classList.add("timeline");
      this.host.replaceChildren(this.grid.element);
      const { waits, work, covered } = this.order.stages[stages];
      this.cost.textContent = `Over ${this.data.blocks} key blocks the tile waits ${waits} times. A copy is in flight during ${covered} of its ${work} products and softmaxes.`;
      this.rows.textContent = this.#remark(stages);
      this.stepper.go(0);
    }

    /* The shipped rows of this kind; if there are none, the cost of this choice. */
    #remark(stages) {
      const { rows } = this.order.stages[stages];
      const { off, does, refused } = this.order;
      if (rows.length) return `Shipped rows with kv_stage ${stages}: ${rows.join("; ")}.`;
      if (!off) return `No shipped row has kv_stage ${stages}. ${this.#price(Number(stages))}`;
      const [why] = Object.values(refused);
      return `No shipped row has ${off} off. ${off}: ${does}${why ? ` ${why}.` : ""}`;
    }

    /* The shared memory that the lesson's row would need for this number of stages. */
    #price(stages) {
      const { regions, total, per_sm: perSm, reserved } = this.scene.data.budget.smem;
      const staged = regions.filter(({ id }) => id === "sK" || id === "sV");
      const stage = staged.reduce((sum, region) => sum + region.bytes / region.stages, 0);
      const bytes = total + (stages - this.scene.data.kernel.traits.kv_stage) * stage;
      const blocks = (size) => Math.floor(perSm / (size + reserved));
      return `In this row it would take ${CF.number(bytes)} bytes instead of ${CF.number(total)}: a multiprocessor has room for ${blocks(bytes)} of its blocks instead of ${blocks(total)}.`;
    }

    #show(at) {
      const action = this.actions[at];
      this.grid.mark((_, col) => col === at, "now");
      this.grid.element.scrollLeft = Math.max(
        0,
        (this.grid.cells[0][at]?.offsetLeft ?? 0) - this.grid.element.clientWidth / 2,
      );
      this.line.replaceChildren(CF.h("b", {}, action.kind), ` · ${action.text}`);
      const group = (names) => (names.length ? names.join(" ") : "empty");
      const listed = action.groups.map((names) => CF.h("span", {}, group(names)));
      const open = action.open.length ? CF.h("span", { class: "open" }, `not closed: ${group(action.open)}`) : null;
      this.groups.replaceChildren(
        "groups in flight, oldest first: ",
        ...(listed.length ? listed : ["none "]),
        open ?? "",
      );
      for (const [name, element] of Object.entries(this.sources)) {
        element.hidden = name !== action.function;
        if (!element.hidden) element.to(action.line);
      }
    }
  }

  CF.lessons.add({
    id: "cp-async",
    title: "cp.async pipelines",
    question:
      "A load from global memory takes hundreds of clocks. How does a kernel multiply one key block while the next is loading?",
    families: ["sm80"],
    build(kit) {
      const stages = kit.scene("sm80").data.kernel.traits.kv_stage;
      return [
        prose(`\`cp.async\` copies 16 bytes from global to shared memory without passing through registers, and
          without making the thread wait. A thread puts the copies that it has issued since its last group into a new
          one (\`cp_async_commit_group\`), and later waits until all but its last n groups have landed
          (\`cp_async_wait_group(n)\`). Groups are counted, not named. A wait covers a thread's own copies only, so a
          block-wide barrier follows it; the kernel calls the pair \`wait_loads\`.

          This row has \`kv_stage\` ${stages}, that is ${stages} buffers for K and ${stages} for V. At the top of a step
          \`wait_loads(${stages - 2})\` does two jobs. It makes this step's block readable, and after its barrier every
          warp has read the buffer of the step before. So the next load may overwrite that buffer at once, and is in
          flight while both products and the softmax run.

          With one stage there is no second buffer. V then loads during Q Kᵀ, and the next K during the softmax and
          P V; this takes a second barrier in each step.

          After the last block \`load_block\` still commits a group, an empty one: otherwise the count of the wait would
          be off by one. Blocks run from the last to the first, so that only the first step has to mask the ragged
          end.

          Two traits switch parts of this off. Without \`eager_loads\` a step loads its own K and V and waits for both.
          Without \`async_copy\` the calls keep their order, but a load returns only when the thread's data has gone
          through its registers into shared memory; the groups are empty, and only the barrier of \`wait_loads\` has an
          effect. In both cases nothing is in flight while a product runs. The cost is measured in
          \`docs/ladder.md\`.`),
        new PipelineFigure(kit).element,
        kit.seeInKernel(
          "sm80",
          { panel: "sK", step: "load_k", instruction: 0 },
          "the copies of K",
          "prologue, load_block, attend_block, cuteflash/kernels/sm80/fwd_mma.py",
        ),
        checks(
          [
            "With two stages, how many groups may still be in flight when a product starts to read its K?",
            "One: that of the next block, issued between the wait and the product. The wait itself left 0 pending.",
          ],
          [
            "With three stages the wait is `wait_loads(1)`. Why not 0?",
            "Two blocks are ahead; only the older one is needed now. Waiting for 0 would stall on the younger one and waste the third stage.",
          ],
          [
            "Why is Q in the same group as the first K?",
            "Both are needed for the first product and not before, so one wait serves both. `load_q` issues the copies; `prologue` commits.",
          ],
        ),
      ];
    },
  });

  const ACTORS = [
    ["acquire", "producer: acquire, issue TMA"],
    ["land", "TMA: the bytes land"],
    ["wait", "consumers: wait, read"],
    ["release", "consumers: release"],
  ];

  class RingFigure {
    constructor(kit) {
      const { kernel } = kit.scene("sm90").data;
      this.warps = consumerThreads(kit.scene("sm90")) / 32;
      this.sources = Object.fromEntries(
        Object.entries(kit.data.ring.sources).map(([name, data]) => [name, source(data)]),
      );
      this.stageBoxes = CF.h("div", { class: "ring-stages" });
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      this.buttons = ACTORS.map(([actor, text]) => {
        const why = CF.h("small");
        const button = CF.h(
          "button",
          { type: "button", "aria-disabled": "false", onclick: () => this.#act(actor) },
          CF.h("span", {}, text),
          why,
        );
        return { actor, button, why };
      });
      const stages = kernel.traits.kv_stage;
      this.element = figure(
        "The ring of K tiles: act as producer, TMA and consumers",
        [
          choice(
            "stages",
            [2, 3, 4].map((count) => [count, String(count)]),
            stages,
            (count) => this.#reset(count),
          ),
          CF.h("button", { type: "button", onclick: () => this.#reset(this.ring.stages) }, "start again"),
        ],
        CF.h(
          "div",
          { class: "ring-actors", role: "group", "aria-label": "Choose who acts next" },
          this.buttons.map(({ button }) => button),
        ),
        this.stageBoxes,
        this.line,
        Object.values(this.sources),
      );
      kit.follow(["theme"], () => (this.ring ? this.#show() : this.#reset(stages)));
    }

    #reset(stages) {
      this.ring = new CF.lessons.Ring(stages);
      this.line.textContent = "All stages are free. The producer may run ahead until the ring is full.";
      this.#show("acquire");
    }

    #act(actor) {
      const { position, parity, why, method } = this.ring.next(actor);
      const stage = this.ring.stage(position);
      if (why) {
        this.line.textContent =
          parity === null
            ? `Not now: ${why}.`
            : `Blocked: ${why}. wait_phase asks for parity ${parity}, which that mbarrier has not completed.`;
        return this.#show(method);
      }
      this.ring.act(actor);
      const told = {
        acquire: `Tile ${position} goes to stage ${stage}. empty[${stage}] was waited on with parity ${parity}; the bytes were announced to full[${stage}] and the copy issued.`,
        land: `The last byte of tile ${position} landed: full[${stage}] completes a phase, without any thread.`,
        wait: `full[${stage}] had completed the phase of parity ${parity}: tile ${position} may be read.`,
        release: `All ${this.warps} consumer warps arrived at empty[${stage}]: its phase completes, stage ${stage} is free.`,
      };
      this.line.textContent = told[actor];
      this.#show(method);
      return undefined;
    }

    #show(method = this.method) {
      this.method = method;
      const { ring } = this;
      this.stageBoxes.replaceChildren(
        ...ring.full.map((_, stage) => {
          const [tile, status] = ring.holds(stage);
          const rgb = tile === null ? null : shade(tile, status);
          const style = rgb ? `background:${CF.palette.css(rgb)};color:${CF.palette.ink(rgb)}` : null;
          const barrier = (name, completed) =>
            CF.h("div", {}, CF.h("code", {}, `${name}[${stage}]`), ` phase ${completed}, parity ${completed % 2}`);
          return CF.h(
            "div",
            { class: "ring-stage" },
            CF.h(
              "div",
              { class: "ring-tile", style },
              `stage ${stage}: ${tile === null ? "free" : `tile ${tile}, ${WORDS[status]}`}`,
            ),
            barrier("full", ring.full[stage]),
            barrier("empty", ring.empty[stage]),
          );
        }),
      );
      for (const { actor, button, why } of this.buttons) {
        const next = ring.next(actor);
        button.setAttribute("aria-disabled", String(Boolean(next.why)));
        why.textContent = next.why ?? `tile ${next.position}, stage ${ring.stage(next.position)}`;
      }
      for (const [name, element] of Object.entries(this.sources)) element.hidden = name !== method && name !== "phase";
    }
  }

  const consumerThreads = (scene) =>
    scene.data.kernel.roles.filter(({ name }) => name !== "producer").reduce((sum, { threads }) => sum + threads, 0);

  /** The boxes of a tile, one at a time: the part of the tensor that it reads, and the bytes that it fills. */
  function boxes(kit, scene, step) {
    const tile = scene.tile("sK");
    const line = CF.h("p", { class: "lesson-message", role: "status" });
    const chosen = slider("box", { to: step.instructions - 1 }, (i) => CF.state.set({ instruction: i }));
    const [rows, cols] = step.box;
    kit.follow(["instruction", "stage"], () => {
      const [box, stage] = [CF.state.get("instruction") ?? 0, CF.state.get("stage")];
      const first = scene.address(tile, 0, box * cols, stage, true);
      const last = first + rows * cols * scene.elementBytes - 1;
      chosen.to(box);
      line.textContent = `Box ${box}: keys 0 to ${rows - 1} of the block, columns ${box * cols} to ${(box + 1) * cols - 1}, fill bytes ${CF.hex(first)} to ${CF.hex(last)} of shared memory, stage ${stage}.`;
    });
    const panel = (id) => kit.panel("sm90", id, { color: "box", height: 240 });
    const pair = CF.h("div", { class: "lesson-pair" }, panel("gK"), panel("sK"));
    return figure("K: the boxes of one tile, in global and shared memory", [chosen], pair, line);
  }

  CF.lessons.add({
    id: "tma",
    title: "TMA and the mbarrier ring",
    question:
      "One thread can load a whole swizzled tile. How do the others know that it has landed, and how does it know that they have read it?",
    families: ["sm90"],
    state: { step: "load_k", instruction: 0 },
    build(kit) {
      const scene = kit.scene("sm90");
      const step = scene.step("load_k");
      const [rows, cols] = step.box;
      const bytes = rows * cols * scene.elementBytes;
      const count = step.instructions;
      const consumers = consumerThreads(scene);
      return [
        prose(`The Tensor Memory Accelerator copies boxes. The host describes a tensor once (\`make_tma\`): extents,
          strides, box, swizzle. In the kernel one thread then gives the coordinates of a box, and the unit computes
          every address, applies the swizzle and fills elements outside the tensor with zeros. No thread needs
          registers for addresses.

          A box row may not be longer than the swizzle: ${cols * scene.elementBytes} bytes, ${cols} elements. So a K
          tile of ${scene.data.axes.n.size} keys × ${scene.data.axes.d.size} columns is ${count} boxes of ${rows} ×
          ${cols}, ${CF.number(bytes)} bytes each. The unit's swizzle is the permutation of lesson 3. If the last
          block of a sequence is ragged, the box still has its full size: the rows beyond the end become zeros, and
          their bytes count.`),
        boxes(kit, scene, step),
        prose(`Completion is a barrier in shared memory, an mbarrier. Each stage has two. \`full\` completes a phase
          after its one arrival and the announced ${CF.number(bytes * count)} bytes; TMA itself counts the bytes.
          \`empty\` completes a phase when all consumer warps have arrived. Phases alternate in parity, and a wait names
          the parity of the phase that it waits for. So tile p lives in stage p mod stages and completes phase p /
          stages of both barriers. No barrier has to be reset.

          The producer waits on \`empty\` with the opposite parity: on a fresh barrier this wait passes at once, so
          every stage is free in the first round without a special case.`),
        new RingFigure(kit).element,
        kit.seeInKernel(
          "sm90",
          { panel: "sK", step: "load_k", instruction: 0, color: "instruction" },
          "the TMA boxes of K",
          "TmaRing, cuteflash/atoms/barriers.py; load_tile, cuteflash/kernels/sm90/load.py",
        ),
        checks(
          [
            "With two stages, which stage and which parity has tile 5?",
            "Stage 5 mod 2 = 1; 5 / 2 = 2, so parity 0. Consumers wait on full[1] for parity 0; the producer waits on empty[1] for parity 1.",
          ],
          [
            "What would happen if one consumer warp forgot to release?",
            "`empty` would never complete its phase, and the producer would wait forever for that stage.",
          ],
          [
            "Why is the release per warp and not per thread?",
            `One elected lane arrives for its warp, so \`empty\` counts ${consumers / 32} arrivals instead of ${consumers}. A product that a warp has waited for is finished for all its lanes.`,
          ],
        ),
      ];
    },
  });
})();
