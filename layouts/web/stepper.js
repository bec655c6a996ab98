/* The stepper: the ordered steps of a tile, instruction by instruction, with a description of the selected one. */
(() => {
  "use strict";

  const PHASES = {
    prologue: () => "Prologue, once a tile",
    loop: (scene) => `Loop over ${scene.data.loop}`,
    epilogue: () => "Epilogue, once a tile",
  };
  const PLAY_MS = 450;
  const SWIZZLE_CODES = { 0: 0, 128: 1, 64: 2, 32: 3 };

  /** The fields `[name, bits, plain value, encoded value]` of a wgmma matrix descriptor that starts at byte `start`. */
  function descriptorFields(desc, start) {
    const field = (bytes) => BigInt((bytes & 0x3ffff) >> 4);
    return [
      ["start address", "13–0", CF.hex(start), field(start), 0n],
      ["leading byte offset", "29–16", `${desc.leading_bytes} B`, field(desc.leading_bytes), 16n],
      ["stride byte offset", "45–32", `${desc.stride_bytes} B`, field(desc.stride_bytes), 32n],
      [
        "swizzle",
        "63–62",
        desc.swizzle_bytes ? `${desc.swizzle_bytes} B` : "none",
        BigInt(SWIZZLE_CODES[desc.swizzle_bytes]),
        62n,
      ],
    ];
  }

  /** The 64-bit word of those fields. */
  const descriptorWord = (fields) => fields.reduce((word, [, , , value, shift]) => word | (value << shift), 0n);

  class Stepper {
    constructor(container, scene) {
      this.scene = scene;
      this.steps = Object.keys(PHASES).flatMap((phase) => scene.steps.filter((step) => step.phase === phase));
      this.timer = null;
      this.items = new Map();
      this.list = this.#buildList();
      this.detail = CF.h("div", { class: "step-detail" });
      this.heading = CF.h("h2");
      const leave = () => CF.state.set({ step: null, instruction: null });
      this.all = CF.h("button", { type: "button", onclick: leave }, "All steps");
      this.#buildControls();
      this.element = CF.h(
        "section",
        { class: "stepper", "aria-label": "Steps of a tile" },
        CF.h("div", { class: "step-head" }, this.heading, this.all),
        this.controls,
        this.list,
      );
      container.append(this.element);
      this.stop = CF.state.on(["step", "instruction", "thread", "warp", "warpgroup"], (changed) =>
        this.update(changed),
      );
      this.update(new Set(["step"]));
    }

    destroy() {
      this.pause();
      this.stop();
      this.element.remove();
    }

    #buildList() {
      const groups = Object.entries(PHASES).map(([phase, title]) => {
        const steps = this.steps.filter((step) => step.phase === phase);
        if (!steps.length) return null;
        return [
          CF.h("h3", {}, title(this.scene)),
          CF.h(
            "ol",
            {},
            steps.map((step) => this.#item(step)),
          ),
        ];
      });
      return CF.h("div", { class: "step-list" }, groups);
    }

    #item(step) {
      const choose = () => CF.state.set({ step: CF.state.get("step") === step.id ? null : step.id, instruction: null });
      const button = CF.h(
        "button",
        { type: "button", onclick: choose, dataset: { step: step.id } },
        CF.h("span", {}, step.title),
        CF.h("code", {}, step.kind),
      );
      this.items.set(step.id, button);
      return CF.h("li", { value: this.steps.indexOf(step) + 1 }, button);
    }

    #buildControls() {
      const button = (text, label, act) =>
        CF.h("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
      this.playButton = button("▶", "Play", () => (this.timer ? this.pause() : this.play()));
      this.slider = CF.h("input", {
        type: "range",
        min: 0,
        step: 1,
        "aria-label": "Instruction",
        oninput: () => this.#slide(),
      });
      this.counter = CF.h("output", { class: "step-count" });
      this.controls = CF.h(
        "div",
        { class: "step-controls", role: "group", "aria-label": "Step through the instructions" },
        CF.h(
          "span",
          { class: "segmented" },
          button("«", "Previous step", () => this.moveStep(-1)),
          button("‹", "Previous instruction", () => this.moveInstruction(-1)),
          this.playButton,
          button("›", "Next instruction", () => this.moveInstruction(1)),
          button("»", "Next step", () => this.moveStep(1)),
        ),
        this.slider,
        this.counter,
      );
    }

    get step() {
      return this.scene.step(CF.state.get("step"));
    }

    /** How many instructions the present step's layouts distinguish. */
    count(step = this.step) {
      return step ? Math.max(1, ...step.touches.map((touch) => this.scene.touchValues(touch).instructions)) : 0;
    }

    /** The step `by` places further in the list, all its instructions; nothing moves past the ends. */
    moveStep(by) {
      const at = this.steps.indexOf(this.step);
      const next = this.steps[at < 0 ? (by > 0 ? 0 : this.steps.length - 1) : at + by];
      if (next) CF.state.set({ step: next.id, instruction: null });
      return Boolean(next);
    }

    /** The instruction `by` places further, over into the neighbouring step at the ends; false at the very end. */
    moveInstruction(by) {
      const count = this.count();
      const from = CF.state.get("instruction") ?? (by > 0 ? -1 : count);
      const to = from + by;
      if (this.step && to >= 0 && to < count) {
        CF.state.set({ instruction: to });
        return true;
      }
      if (!this.moveStep(by)) return false;
      CF.state.set({ instruction: by > 0 ? 0 : this.count() - 1 });
      return true;
    }

    play() {
      this.timer = setInterval(() => this.moveInstruction(1) || this.pause(), PLAY_MS);
      this.playButton.textContent = "❚❚";
      this.playButton.setAttribute("aria-label", "Pause");
      if (!this.step || CF.state.get("instruction") === null) this.moveInstruction(1);
    }

    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.playButton.textContent = "▶";
      this.playButton.setAttribute("aria-label", "Play");
    }

    #slide() {
      const value = Number(this.slider.value);
      CF.state.set({ instruction: value ? value - 1 : null });
    }

    /** Shows the present step; `changed` are the state's keys that moved. */
    update(changed) {
      const { step } = this;
      const [count, instruction] = [this.count(), CF.state.get("instruction")];
      const number = this.steps.indexOf(step) + 1;
      this.heading.textContent = step ? `Step ${number} of ${this.steps.length}` : `${this.steps.length} steps`;
      this.all.hidden = !step;
      this.element.classList.toggle("chosen", Boolean(step));
      for (const [id, button] of this.items) {
        button.parentElement.hidden = Boolean(step) && id !== step.id;
        button.setAttribute("aria-expanded", String(id === step?.id));
        if (id === step?.id) button.setAttribute("aria-current", "step");
        else button.removeAttribute("aria-current");
      }
      this.slider.max = count;
      this.slider.disabled = !step;
      this.slider.value = instruction === null ? 0 : instruction + 1;
      const words = instruction === null ? `all ${count}` : `${instruction + 1} of ${count}`;
      this.counter.textContent = step ? words : "no step";
      this.slider.setAttribute("aria-valuetext", step ? `instruction ${words}` : "no step");
      this.detail.remove();
      if (!step) return;
      this.detail.replaceChildren(...this.#details(step, instruction));
      this.items.get(step.id).after(this.detail);
      if (changed.has("step")) this.list.scrollTop = 0;
    }

    #details(step, instruction) {
      const row = (name, ...value) => CF.h("div", {}, CF.h("dt", {}, name), CF.h("dd", {}, value));
      return [
        CF.h("code", { class: "mnemonic" }, step.instruction),
        CF.h(
          "dl",
          {},
          row("issued by", step.role),
          row("how often", `${step.repeat}, ${step.instructions} per issuing thread`),
          step.box ? row("TMA box", `${step.box[0]} × ${step.box[1]} elements`) : null,
          step.touches.map((touch) => row(...this.#touchRow(touch, instruction))),
        ),
        step.note ? CF.h("p", {}, step.note) : null,
        ...["a", "b"]
          .filter((side) => step.descriptor?.[side])
          .map((side) => descriptorTable(this.scene, side, step.descriptor[side], instruction ?? 0)),
      ].filter(Boolean);
    }

    #touchRow(touch, instruction) {
      const range = CF.scene.selected();
      const { cells, threads } = this.scene.touchValues(touch).count(instruction, range);
      const sign = CF.h("span", { class: `badge ${touch.mode}` }, touch.mode === "read" ? "reads" : "writes");
      if (!cells) return [sign, `${touch.id}: nothing by ${range?.text ?? "this instruction"}`];
      return [sign, `${touch.id}: ${CF.number(cells)} elements by ${threads} thread${threads === 1 ? "" : "s"}`];
    }
  }

  function descriptorTable(scene, side, desc, instruction) {
    const index = Math.min(instruction, desc.starts.length - 1);
    const start = (scene.tile(desc.tile)?.spec.base ?? 0) + desc.starts[index];
    const fields = descriptorFields(desc, start);
    const cells = ([name, bits, plain, value]) =>
      CF.h(
        "tr",
        {},
        CF.h("th", { scope: "row" }, name),
        CF.h("td", {}, bits),
        CF.h("td", {}, plain),
        CF.h("td", {}, CF.hex(value, 1)),
      );
    return CF.h(
      "table",
      { class: "descriptor" },
      CF.h("caption", {}, `Descriptor ${side.toUpperCase()}: ${desc.tile}, ${desc.major}-major, instruction ${index}`),
      CF.h(
        "thead",
        {},
        CF.h(
          "tr",
          {},
          ["field", "bits", "value", "encoded"].map((text) => CF.h("th", { scope: "col" }, text)),
        ),
      ),
      CF.h("tbody", {}, fields.map(cells)),
      CF.h(
        "tfoot",
        {},
        CF.h(
          "tr",
          {},
          CF.h("th", { scope: "row" }, "word"),
          CF.h("td", { colspan: 3 }, CF.hex(descriptorWord(fields), 16)),
        ),
      ),
    );
  }

  CF.Stepper = Stepper;
  CF.stepper = { descriptorFields, descriptorWord };
})();
