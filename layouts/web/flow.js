/* The flow overview: tiles and fragments as nodes, steps on the arrows between them, one lane a tensor. */
(() => {
  "use strict";

  const lane = (scene, tensor) =>
    Math.max(
      0,
      scene.lanes.findIndex((tensors) => tensors.includes(tensor)),
    );

  /**
   * Columns of parts and steps: a step is right of everything it reads, a part right of the step that writes it;
   * afterwards each moves as far right as its readers allow, so that a tensor is next to its readers.
   */
  function columns(scene) {
    const column = new Map(scene.parts.map((part) => [part.id, 0]));
    const links = linksIn(scene);
    for (const { key } of links) column.set(key, 0);
    for (const { key, reads, writes } of links) {
      column.set(key, 1 + Math.max(0, ...reads.map((id) => column.get(id))));
      for (const id of writes) column.set(id, Math.max(column.get(id), column.get(key) + 1));
    }
    const readers = (id) => links.filter(({ reads }) => reads.includes(id)).length;
    for (const { key, reads, writes } of [...links].reverse()) {
      const targets = writes.map((id) => column.get(id) - 1);
      const stays = reads.some((id) => readers(id) > 1); // ways that part at a tile part right behind it
      if (targets.length && !stays) column.set(key, Math.max(column.get(key), Math.min(...targets)));
      for (const id of reads) raise(id, column, links);
    }
    return column;
  }

  function raise(id, column, links) {
    const readers = links.filter(({ reads }) => reads.includes(id));
    if (readers.length)
      column.set(id, Math.max(column.get(id), Math.min(...readers.map(({ key }) => column.get(key))) - 1));
  }

  /*
   * What a step reads and writes, for drawing, so that no arrow goes back. A part that the step updates in place counts
   * as read if the step touches nothing else and an earlier one has `made` the part (the softmax of scores); as written
   * if none has (an accumulator, rescaled before the next product); not at all if the step writes something else.
   */
  function linksOf(step, made) {
    const ids = (mode) => [...new Set(step.touches.filter((touch) => touch.mode === mode).map((touch) => touch.id))];
    const [reads, writes] = [ids("read"), ids("write")];
    const others = reads.filter((id) => !writes.includes(id));
    const key = `step ${step.id}`;
    const fresh = writes.filter((id) => !reads.includes(id));
    if (others.length) return { step, key, reads: others, writes: fresh.length ? fresh : writes };
    return reads.some((id) => made.has(id)) ? { step, key, reads, writes: fresh } : { step, key, reads: [], writes };
  }

  /*
   * The links of all steps in order. A step follows an earlier one, and not the part itself, if that one has updated in
   * place what it reads, for the same key blocks (the rounding of P follows the softmax).
   */
  function linksInOrder(steps) {
    const made = new Set();
    const updated = new Map();
    return steps.map((step) => {
      const link = linksOf(step, made);
      const place = (id) => `${id}, ${step.repeat}`;
      const parts = link.reads;
      const inPlace = !link.writes.length && step.touches.some(({ mode }) => mode === "write");
      link.reads = parts.map((id) => updated.get(place(id)) ?? id);
      for (const id of inPlace ? parts : []) updated.set(place(id), link.key);
      for (const id of link.writes) made.add(id);
      return link;
    });
  }

  /*
   * The links of all steps. A step that writes a part but reads none continues an earlier step of the same tensor that
   * read one without writing any: the values pass through registers that the scene does not draw.
   */
  function linksIn(scene) {
    const links = linksInOrder(scene.steps);
    const tensors = (ids) => ids.map((id) => scene.part(id)?.tensor);
    links.forEach((link, at) => {
      if (link.reads.length) return;
      const before = links
        .slice(0, at)
        .findLast(
          ({ reads, writes }) => !writes.length && tensors(reads).some((t) => tensors(link.writes).includes(t)),
        );
      if (before) link.reads = [before.key];
    });
    return links;
  }

  /* The lane of a step is that of the tensor it writes, else of the one it reads. */
  function stepLane(scene, { reads, writes }) {
    const part = scene.part(writes[0] ?? reads[0]);
    return part ? lane(scene, part.tensor) : 0;
  }

  class Flow {
    constructor(container, scene, { openPanel }) {
      this.scene = scene;
      this.links = linksIn(scene);
      this.nodes = new Map();
      this.openPanel = openPanel;
      this.edges = CF.svg("svg", { class: "flow-edges", "aria-hidden": "true" });
      this.grid = CF.h("div", { class: "flow-grid" }, this.edges);
      this.element = CF.h(
        "section",
        { class: "flow", "aria-label": "Flow of data through the kernel" },
        this.grid,
        key(scene),
      );
      container.append(this.element);
      this.#place();
      this.redraw = CF.perFrame(() => this.#drawEdges());
      this.resized = new ResizeObserver(this.redraw);
      this.resized.observe(this.grid);
      this.stop = CF.state.on(["step", "panel", "theme"], () => this.update());
      this.update();
      requestAnimationFrame(() => this.#bringIntoView());
    }

    destroy() {
      this.stop();
      this.resized.disconnect();
      this.element.remove();
    }

    #place() {
      const column = columns(this.scene);
      const used = [...new Set(column.values())].sort((a, b) => a - b);
      const boxes = new Map();
      const box = (key, row) => {
        const at = used.indexOf(column.get(key)) + 2;
        const where = `${row} ${at}`;
        if (!boxes.has(where))
          boxes.set(where, CF.h("div", { class: "flow-cell", style: `grid-row:${row + 1};grid-column:${at}` }));
        return boxes.get(where);
      };
      for (const part of this.scene.parts) box(part.id, lane(this.scene, part.tensor)).append(this.#partNode(part));
      for (const link of this.links) box(link.key, stepLane(this.scene, link)).append(this.#stepNode(link));
      for (const { key, reads } of this.links) {
        const before = reads[0]?.startsWith("step ") ? this.nodes.get(reads[0]).parentElement : null;
        if (before?.children.length > 1) this.nodes.get(key).parentElement.classList.add("following");
      }
      const names = this.scene.lanes.map((tensors, row) =>
        CF.h("div", { class: "flow-lane", style: `grid-row:${row + 1}` }, tensors.join(", ")),
      );
      this.grid.append(...names, ...boxes.values());
    }

    #partNode(part) {
      const shape = `${part.rows}×${part.cols}${part.stages > 1 ? `×${part.stages}` : ""}`;
      const node = CF.h(
        "button",
        {
          type: "button",
          class: `flow-part ${part.space}`,
          title: part.spec.note ?? "",
          onclick: () => this.openPanel(part.id),
        },
        CF.h("b", {}, part.id),
        CF.h("small", {}, shape),
      );
      this.nodes.set(part.id, node);
      return node;
    }

    #stepNode({ step, key }) {
      const choose = () => CF.state.set({ step: CF.state.get("step") === step.id ? null : step.id, instruction: null });
      const node = CF.h(
        "button",
        { type: "button", class: "flow-step", title: step.title, onclick: choose },
        step.kind,
      );
      node.setAttribute("aria-label", `${step.title} (${step.kind})`);
      this.nodes.set(key, node);
      return node;
    }

    /** Marks the present step and panel. */
    update() {
      const [step, panel] = [CF.state.get("step"), CF.state.get("panel")];
      const touches = this.scene.step(step)?.touches ?? [];
      for (const [key, node] of this.nodes) {
        if (key.startsWith("step ")) node.setAttribute("aria-pressed", String(key === `step ${step}`));
        else node.classList.toggle("current", key === panel && !touches.length);
        for (const mode of ["read", "write"])
          node.classList.toggle(mode, touches.some((touch) => touch.id === key && touch.mode === mode));
      }
      this.#bringIntoView();
      this.redraw();
    }

    /* On a narrow screen the flow scrolls sideways within itself. */
    #bringIntoView() {
      const node = this.nodes.get(`step ${CF.state.get("step")}`);
      if (!node) return;
      const [box, frame] = [node.getBoundingClientRect(), this.element.getBoundingClientRect()];
      if (box.left < frame.left || box.right > frame.right) {
        this.element.scrollLeft += (box.left + box.right - frame.left - frame.right) / 2;
      }
    }

    #drawEdges() {
      const frame = this.grid.getBoundingClientRect();
      const box = (key) => {
        const { left, right, top, bottom } = this.nodes.get(key).getBoundingClientRect();
        return { left: left - frame.left, right: right - frame.left, middle: (top + bottom) / 2 - frame.top };
      };
      const paths = [];
      for (const { step, key, reads, writes } of this.links) {
        const chosen = CF.state.get("step") === step.id;
        for (const id of reads) paths.push(edge(box(id), box(key), chosen ? "read" : ""));
        for (const id of writes) paths.push(edge(box(key), box(id), chosen ? "write head" : "head"));
      }
      this.edges.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
      this.edges.replaceChildren(...paths.flat());
    }
  }

  const key = (scene) =>
    CF.h(
      "p",
      { class: "flow-key" },
      [
        ["global", "global memory"],
        ["shared", "shared memory"],
        ["registers", "registers"],
      ].map(([space, text]) => CF.h("span", {}, CF.h("i", { class: `flow-part ${space}` }), text)),
      CF.h("span", {}, "Choose a tile or fragment to open its panel, or a step to see the cells that it touches."),
      CF.explain.axes(scene),
    );

  function edge(from, to, kind) {
    const [x0, x1] = [from.right, to.left];
    const bend = Math.max(10, Math.abs(x1 - x0) / 2);
    const curve = `M${x0},${from.middle} C${x0 + bend},${from.middle} ${x1 - bend},${to.middle} ${x1},${to.middle}`;
    const line = CF.svg("path", { d: curve, class: kind });
    if (!kind.includes("head")) return [line];
    const tip = `M${x1 - 6},${to.middle - 3.5} L${x1},${to.middle} L${x1 - 6},${to.middle + 3.5}`;
    return [line, CF.svg("path", { d: tip, class: kind })];
  }

  CF.Flow = Flow;
  CF.flow = { columns, links: linksIn };
})();
