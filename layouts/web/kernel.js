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

  class Kernel {
    constructor(container, scene) {
      this.scene = scene;
      this.container = container;
      const openPanel = (id) => {
        CF.state.set({ panel: id });
        this.#reveal(id);
      };
      container.append(facts(scene));
      this.parts = [new CF.Flow(container, scene, { openPanel }), new CF.Toolbar(container, scene)];
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

  /* The side column fills what is to be seen of the view below the bars, wherever the page is scrolled to. */
  function fill(side) {
    const body = side.parentElement.getBoundingClientRect();
    const top = Math.max(body.top, parseFloat(getComputedStyle(side).top) || 0);
    const bottom = Math.min(body.bottom, window.innerHeight - 10);
    side.style.setProperty("--side-height", `${Math.max(bottom - top, 260)}px`);
  }

  function facts(scene) {
    const { kernel } = scene.data;
    const role = ({ name, first_thread: first, threads, does }) =>
      CF.h("span", { title: does }, `${name} ${first}–${first + threads - 1}`);
    const traits = Object.entries(kernel.traits ?? {}).map(([name, value]) =>
      CF.h("span", {}, `${name} `, CF.h("b", {}, String(value))),
    );
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
