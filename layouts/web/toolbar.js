/* The Kernel view's toolbar: colour mode, swizzle, and which thread, warp or warpgroup is selected. */
(() => {
  "use strict";

  const COLOURS = ["owner", "value", "instruction", "bank", "address", "core", "plain"];
  const KINDS = ["thread", "warp", "warpgroup"];
  const NO_THREADS = { thread: null, warp: null, warpgroup: null };
  const WARPGROUP = 128;

  class Toolbar {
    constructor(container, scene) {
      this.scene = scene;
      this.kind = KINDS.find((kind) => CF.state.get(kind) !== null) ?? "warp";
      this.element = CF.h(
        "div",
        { class: "toolbar", role: "group", "aria-label": "What the panels show" },
        this.#colour(),
        this.#swizzle(),
        this.#selection(),
      );
      container.append(this.element);
      this.stop = CF.state.on(["color", "swizzle", ...KINDS], () => this.update());
      const { style } = document.documentElement; // elements that stick below the toolbar need its height
      this.resized = new ResizeObserver(() => style.setProperty("--toolbar", `${this.element.offsetHeight}px`));
      this.resized.observe(this.element);
      this.update();
    }

    destroy() {
      this.stop();
      this.resized.disconnect();
      this.element.remove();
    }

    #colour() {
      const pairs = [["", "default of each panel"], ...COLOURS.map((mode) => [mode, CF.coloring.TITLES[mode]])];
      this.colour = CF.select("Colour of all panels", pairs, CF.state.get("color") ?? "", (mode) =>
        CF.state.set({ color: mode || null }),
      );
      return CF.h("label", {}, CF.h("span", {}, "Colour"), this.colour);
    }

    #swizzle() {
      const has = this.scene.parts.some((part) => part.spec.swizzle);
      this.swizzle = CF.h(
        "button",
        {
          type: "button",
          class: "switch",
          role: "switch",
          disabled: !has,
          id: "swizzle",
          onclick: () => CF.state.set({ swizzle: !CF.state.get("swizzle") }),
        },
        "Swizzle",
      );
      return this.swizzle;
    }

    #selection() {
      const kinds = CF.select(
        "What to select",
        KINDS.map((kind) => [kind, kind]),
        this.kind,
        (kind) => this.#setKind(kind),
      );
      this.kinds = kinds;
      this.number = CF.h("input", {
        type: "number",
        min: 0,
        step: 1,
        inputmode: "numeric",
        placeholder: "all",
        "aria-label": "Number of the thread, warp or warpgroup",
        oninput: () => this.#typed(),
      });
      const step = (by, text, label) =>
        CF.h(
          "button",
          {
            type: "button",
            "aria-label": label,
            onclick: () => this.#choose((this.chosen ?? (by > 0 ? -1 : this.#count())) + by),
          },
          text,
        );
      this.clear = CF.h("button", { type: "button", onclick: () => this.#choose(null) }, "all");
      this.chips = CF.h("span", { class: "chips" }, this.#warpChips());
      this.role = CF.h("span", { class: "hint role" });
      return CF.h(
        "div",
        { class: "selection", role: "group", "aria-label": "Selected threads" },
        kinds,
        CF.h("span", { class: "segmented" }, step(-1, "‹", "Previous"), this.number, step(1, "›", "Next"), this.clear),
        this.chips,
        this.role,
      );
    }

    #warpChips() {
      const warps = Math.ceil(this.scene.data.kernel.threads / CF.scene.WARP);
      return Array.from({ length: warps }, (_, warp) => {
        const rgb = CF.palette.warp(warp);
        const role = this.scene.role(warp * CF.scene.WARP);
        return CF.h(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-label": `Warp ${warp}${role ? `, ${role.name}` : ""}`,
            title: role ? `${role.name}: ${role.does}` : "",
            style: `--chip:${CF.palette.css(rgb)};--chip-ink:${CF.palette.ink(rgb)}`,
            onclick: () => CF.state.set({ ...NO_THREADS, warp: CF.state.get("warp") === warp ? null : warp }),
            dataset: { warp },
          },
          `w${warp}`,
        );
      });
    }

    get chosen() {
      return CF.state.get(this.kind);
    }

    #count(kind = this.kind) {
      const { threads } = this.scene.data.kernel;
      return Math.ceil(threads / { thread: 1, warp: CF.scene.WARP, warpgroup: WARPGROUP }[kind]);
    }

    /* Changing the kind keeps the place: the warp of the thread, the first thread of the warp. */
    #setKind(kind) {
      const range = CF.scene.selected();
      this.kind = kind;
      this.#choose(
        range ? Math.floor(range.first / { thread: 1, warp: CF.scene.WARP, warpgroup: WARPGROUP }[kind]) : null,
      );
      this.update();
    }

    #choose(number) {
      const valid = number === null || (number >= 0 && number < this.#count());
      if (valid) CF.state.set({ ...NO_THREADS, [this.kind]: number });
    }

    #typed() {
      const { value } = this.number;
      const valid = value === "" || (/^\d+$/.test(value) && Number(value) < this.#count());
      this.number.setAttribute("aria-invalid", String(!valid));
      this.role.textContent = valid ? "" : `${this.kind} is a number from 0 to ${this.#count() - 1}`;
      if (valid) this.#choose(value === "" ? null : Number(value));
    }

    update() {
      this.kind = KINDS.find((kind) => CF.state.get(kind) !== null) ?? this.kind;
      const range = CF.scene.selected();
      this.kinds.value = this.kind;
      this.colour.value = CF.state.get("color") ?? "";
      this.swizzle.setAttribute("aria-checked", String(CF.state.get("swizzle")));
      this.number.max = this.#count() - 1;
      this.number.setAttribute("aria-invalid", "false");
      if (document.activeElement !== this.number || this.chosen !== null) this.number.value = this.chosen ?? "";
      this.clear.disabled = !range;
      const role = range && this.scene.role(range.first);
      this.role.textContent = role ? `${range.text}: ${role.name}` : "";
      for (const chip of this.chips.children) {
        const first = Number(chip.dataset.warp) * CF.scene.WARP;
        const inside = range && range.first < first + CF.scene.WARP && range.last >= first;
        chip.setAttribute("aria-pressed", String(Boolean(inside)));
      }
    }
  }

  CF.Toolbar = Toolbar;
})();
