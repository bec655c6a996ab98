/* The Kernel view: flow, toolbar, panels by tensor, stepper and inspector of one row. */
(() => {
  "use strict";

  const LEAST_ROOM = 240; // pixels of grids in sight, below which the page scrolls to them
  const LEAST_GRID = 150;
  const TALLEST_GRID = 440;
  const AROUND_GRID = 120; // a panel's head, foot and frame

  class Kernel {
    constructor(container, scene) {
      this.scene = scene;
      this.container = container;
      const openPanel = (id) => {
        const touched = this.step?.touches.some((touch) => touch.id === id) ?? true;
        CF.state.set({ panel: id, ...(touched ? {} : { step: null, instruction: null }) });
        this.#reveal(id);
      };
      container.append(facts(scene));
      this.parts = [new CF.Flow(container, scene, { openPanel }), new CF.Toolbar(container, scene)];
      const panels = CF.h("div", { class: "panels" });
      const side = CF.h("aside", { class: "side", "aria-label": "Stepper and inspector" });
      this.body = CF.h("div", { class: "kernel-body" }, panels, side);
      this.panelsBox = panels;
      container.append(this.body);
      this.parts.push(new CF.Stepper(side, scene));
      this.inspector = new CF.Inspector(side, scene, { openPanel });
      this.parts.push(this.inspector);
      this.panels = new Map();
      for (const tensors of scene.lanes) this.#group(panels, tensors);
      this.keys = (event) => this.#key(event);
      document.addEventListener("keydown", this.keys);
      this.fitSide = CF.perFrame(() => fill(side));
      for (const event of ["scroll", "resize"]) window.addEventListener(event, this.fitSide, { passive: true });
      this.fitSide();
      this.fitPanels = CF.perFrame(() => this.#fit());
      window.addEventListener("resize", this.fitPanels, { passive: true });
      // A link names a panel, now or later; a panel that the reader focused needs no showing.
      this.stops = [
        CF.state.on("panel", () => this.#reveal(CF.state.get("panel"))),
        CF.state.on("step", () => {
          this.#mark();
          this.fitPanels();
        }),
      ];
      this.#mark();
      requestAnimationFrame(() => {
        this.#reveal(CF.state.get("panel"));
        if (this.step) this.fitPanels(); // a frame later: the bars have been measured by then
      });
    }

    get step() {
      return this.scene.step(CF.state.get("step"));
    }

    /* While a step is chosen, only the panels that it reads and, beside them, those that it writes are shown. */
    #mark() {
      const touches = this.step?.touches ?? [];
      const ids = (mode) => touches.filter((touch) => touch.mode === mode).map(({ id }) => id);
      const [reads, writes] = [ids("read"), ids("write")];
      this.body.classList.toggle("stepping", touches.length > 0);
      const shown = new Set([...reads, ...writes]);
      this.panelsBox.style.setProperty("--shown", shown.size);
      for (const [id, { element }] of this.panels) {
        const words = [reads.includes(id) && "reads", writes.includes(id) && "writes"].filter(Boolean);
        element.hidden = touches.length > 0 && !words.length;
        if (words.length) element.dataset.step = words.join(" and ");
        else delete element.dataset.step;
      }
    }

    /* The step's panels fill the window below the bars; if that is too small, the page scrolls to them. */
    #fit() {
      if (!this.body.classList.contains("stepping")) {
        for (const panel of this.panels.values()) panel.limit(null);
        return;
      }
      if (this.#room() < LEAST_ROOM) this.body.scrollIntoView({ block: "start" });
      const height = Math.min(Math.max(this.#room(), LEAST_GRID), TALLEST_GRID);
      for (const panel of this.panels.values()) panel.limit(height);
    }

    /* Pixels that each of the step's grids may take between the bars and the window's end. */
    #room() {
      const columns = getComputedStyle(this.panelsBox).gridTemplateColumns.split(" ").length;
      const shown = [...this.panels.values()].filter(({ element }) => !element.hidden).length;
      const room = this.inspector.top - Math.max(this.panelsBox.getBoundingClientRect().top, 0);
      return room / Math.ceil(shown / columns) - AROUND_GRID;
    }

    #group(container, tensors) {
      const title = tensors.join(" and ");
      const parts = this.scene.parts.filter((part) => tensors.includes(part.tensor)).sort(this.#inOrder());
      if (!parts.length) return;
      const row = CF.h("div", { class: "panel-row" });
      container.append(CF.h("section", { class: "group", "aria-label": title }, CF.h("h2", {}, title), row));
      for (const part of parts) this.panels.set(part.id, new CF.Panel(row, { scene: this.scene, id: part.id }));
    }

    /* In the order in which the data passes them. */
    #inOrder() {
      const column = CF.flow.columns(this.scene);
      return (a, b) => column.get(a.id) - column.get(b.id);
    }

    /* Scrolls to a panel and focuses it. */
    #reveal(id) {
      const panel = this.panels.get(id);
      if (!panel || panel.element.hidden || panel.element.contains(document.activeElement)) return;
      if (this.step) return panel.view.focus({ preventScroll: true });
      panel.element.scrollIntoView({ block: "center" });
      panel.view.focus({ preventScroll: true });
    }

    #key(event) {
      if (event.key !== "Escape" || event.defaultPrevented || CF.explain.isOpen()) return;
      const chosen = [["pin"], ["thread", "warp", "warpgroup"], ["step", "instruction"]];
      const first = chosen.find((keys) => keys.some((key) => CF.state.get(key) !== null));
      if (first) CF.state.set(Object.fromEntries(first.map((key) => [key, null])));
    }

    destroy() {
      for (const stop of this.stops) stop();
      window.removeEventListener("resize", this.fitPanels);
      document.removeEventListener("keydown", this.keys);
      for (const event of ["scroll", "resize"]) window.removeEventListener(event, this.fitSide);
      for (const part of [...this.parts, ...this.panels.values()]) part.destroy();
    }
  }

  /* The side column fills the visible part of the view below the bars at every scroll position. */
  function fill(side) {
    const body = side.parentElement.getBoundingClientRect();
    const top = Math.max(body.top, parseFloat(getComputedStyle(side).top) || 0);
    const bottom = Math.min(body.bottom, window.innerHeight - 10);
    side.style.setProperty("--side-height", `${Math.max(bottom - top, 260)}px`);
  }

  function facts(scene) {
    const { kernel } = scene.data;
    const role = ({ name, first_thread: first, threads, does }) =>
      CF.h("span", {}, CF.explain.term(name, does), ` ${first}–${first + threads - 1}`);
    const traits = Object.entries(kernel.traits ?? {}).map(([name, value]) =>
      CF.h("span", {}, CF.explain.trait(kernel.name, name), " ", CF.h("b", {}, String(value))),
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
      else container.append(CF.h("p", { class: "hint" }, "This page does not have a kernel of that name."));
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };
})();
