/* The Kernel view: flow, toolbar, panels by tensor, stepper and inspector of one row. */
(() => {
  "use strict";

  const GROUPS = [
    { title: "Q", tensors: ["Q"] },
    { title: "K", tensors: ["K"] },
    { title: "S and P", tensors: ["S", "P"] },
    { title: "V", tensors: ["V"] },
    { title: "O", tensors: ["O"] },
  ];
  const COLOURS = ["owner", "value", "instruction", "bank", "address", "core", "plain"];
  const KINDS = ["thread", "warp", "warpgroup"];
  const NO_THREADS = { thread: null, warp: null, warpgroup: null };
  const WARPGROUP = 128;

  class Toolbar {
    constructor(container, scene) {
      this.scene = scene;
      this.kind = KINDS.find((kind) => CF.state.get(kind) !== null) ?? "warp";
      this.element = CF.h("div", { class: "toolbar", role: "group", "aria-label": "What the panels show" }, this.#colour(), this.#swizzle(), this.#selection());
      container.append(this.element);
      this.stop = CF.state.on(["color", "swizzle", ...KINDS], () => this.update());
      this.update();
    }

    destroy() {
      this.stop();
      this.element.remove();
    }

    #colour() {
      const pairs = [["", "what says most"], ...COLOURS.map((mode) => [mode, CF.coloring.TITLES[mode]])];
      this.colour = CF.select("Colour of all panels", pairs, CF.state.get("color") ?? "", (mode) => CF.state.set({ color: mode || null }));
      return CF.h("label", {}, CF.h("span", {}, "Colour"), this.colour);
    }

    #swizzle() {
      const has = this.scene.parts.some((part) => part.spec.swizzle);
      this.swizzle = CF.h("button", {
        type: "button", class: "switch", role: "switch", disabled: !has, id: "swizzle",
        onclick: () => CF.state.set({ swizzle: !CF.state.get("swizzle") }),
      }, "Swizzle");
      return this.swizzle;
    }

    #selection() {
      const kinds = CF.select("What to select", KINDS.map((kind) => [kind, kind]), this.kind, (kind) => this.#setKind(kind));
      this.kinds = kinds;
      this.number = CF.h("input", { type: "number", min: 0, step: 1, inputmode: "numeric", placeholder: "all", "aria-label": "Number of the thread, warp or warpgroup", oninput: () => this.#typed() });
      const step = (by, text, label) => CF.h("button", { type: "button", "aria-label": label, onclick: () => this.#choose((this.chosen ?? (by > 0 ? -1 : this.#count())) + by) }, text);
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
            type: "button", class: "chip", "aria-label": `Warp ${warp}${role ? `, ${role.name}` : ""}`, title: role ? `${role.name}: ${role.does}` : "",
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
      this.#choose(range ? Math.floor(range.first / { thread: 1, warp: CF.scene.WARP, warpgroup: WARPGROUP }[kind]) : null);
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

  class Kernel {
    constructor(container, scene) {
      this.scene = scene;
      this.container = container;
      const openPanel = (id) => {
        CF.state.set({ panel: id });
        this.#reveal(id);
      };
      container.append(facts(scene));
      this.parts = [new CF.Flow(container, scene, { openPanel }), new Toolbar(container, scene)];
      const panels = CF.h("div", { class: "panels" });
      const side = CF.h("aside", { class: "side", "aria-label": "Stepper and inspector" });
      container.append(CF.h("div", { class: "kernel-body" }, panels, side));
      this.parts.push(new CF.Stepper(side, scene), new CF.Inspector(side, scene, { openPanel }));
      this.panels = new Map();
      for (const group of GROUPS) this.#group(panels, group);
      this.keys = (event) => this.#key(event);
      document.addEventListener("keydown", this.keys);
      this.fitSide = CF.perFrame(() => fill(side));
      for (const event of ["scroll", "resize"]) window.addEventListener(event, this.fitSide, { passive: true });
      this.fitSide();
      // A link names a panel, now or later; a panel that the reader focused needs no showing.
      this.stop = CF.state.on("panel", () => this.#reveal(CF.state.get("panel")));
      requestAnimationFrame(() => this.#reveal(CF.state.get("panel")));
    }

    #group(container, { title, tensors }) {
      const parts = this.scene.parts.filter((part) => tensors.includes(part.tensor)).sort(this.#inOrder());
      if (!parts.length) return;
      const row = CF.h("div", { class: "panel-row" });
      container.append(CF.h("section", { class: "group", "aria-label": title }, CF.h("h2", {}, title), row));
      for (const part of parts) this.panels.set(part.id, new CF.Panel(row, { scene: this.scene, id: part.id }));
    }

    /* In the order in which the data comes by. */
    #inOrder() {
      const column = CF.flow.columns(this.scene);
      return (a, b) => column.get(a.id) - column.get(b.id);
    }

    /* Scrolls to a panel and focuses it. */
    #reveal(id) {
      const panel = this.panels.get(id);
      if (!panel || panel.element.contains(document.activeElement)) return;
      panel.element.scrollIntoView({ block: "center" });
      panel.view.focus({ preventScroll: true });
    }

    #key(event) {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      const chosen = [["pin"], ["thread", "warp", "warpgroup"], ["step", "instruction"]];
      const first = chosen.find((keys) => keys.some((key) => CF.state.get(key) !== null));
      if (first) CF.state.set(Object.fromEntries(first.map((key) => [key, null])));
    }

    destroy() {
      this.stop();
      document.removeEventListener("keydown", this.keys);
      for (const event of ["scroll", "resize"]) window.removeEventListener(event, this.fitSide);
      for (const part of [...this.parts, ...this.panels.values()]) part.destroy();
    }
  }

  /* The side column reaches from where it stands to the window's lower edge, whether or not the page is scrolled. */
  function fill(side) {
    const top = side.getBoundingClientRect().top;
    side.style.setProperty("--side-height", `${Math.max(window.innerHeight - top - 10, 300)}px`);
  }

  function facts(scene) {
    const { kernel } = scene.data;
    const role = ({ name, first_thread: first, threads, does }) => CF.h("span", { title: does }, `${name} ${first}–${first + threads - 1}`);
    const traits = Object.entries(kernel.traits ?? {}).map(([name, value]) => CF.h("span", {}, `${name} `, CF.h("b", {}, String(value))));
    return CF.h(
      "div",
      { class: "facts" },
      CF.h("span", {}, `${kernel.threads} threads: `),
      kernel.roles.map(role),
      CF.h("span", {}, kernel.source),
      traits.length ? CF.h("details", {}, CF.h("summary", {}, "traits"), CF.h("p", { class: "traits" }, traits)) : null,
    );
  }

  let view = null;
  CF.views.kernel = {
    title: "Kernel",
    mount(container, { scene }) {
      if (scene) view = new Kernel(container, scene);
      else container.append(CF.h("p", { class: "hint" }, "This page holds no kernel under that name."));
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };
})();
