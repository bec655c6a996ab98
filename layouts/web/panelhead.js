/* The parts around a panel's grid: name, controls, legend, counts of marked cells. */
(() => {
  "use strict";

  const SPACES = { global: "global memory", shared: "shared memory", registers: "registers" };
  const RAMP = [0, 0.25, 0.5, 0.75, 1];

  /** The panel's label for a screen reader. */
  function label({ part, scene }) {
    const name = (axis, extent) => `${extent} ${scene?.data.axes[axis]?.label ?? axis}`;
    const [rows, cols] = [name(part.axes[0], part.rows), name(part.axes[1], part.cols)];
    const place = part.space ? `, ${SPACES[part.space]}` : "";
    const stages = part.stages > 1 ? `, ${part.stages} stages` : "";
    return (
      `${part.id}${place}: ${rows} rows by ${cols} columns${stages}. ` +
      "Arrow keys move the cursor, Enter pins it, plus and minus zoom."
    );
  }

  /** Title and controls: colour mode, stage, zoom. */
  function header(panel) {
    const { part } = panel;
    const { part: name, axis } = CF.explain;
    const words = part.owned ? [`${part.spec.dtype} ${part.spec.operand}`, `${part.spec.registers} registers`] : [];
    if (!part.owned && part.space) words.push(SPACES[part.space]);
    const [down, across] = part.axes.map((letter) => axis(panel.scene, letter));
    const extents = [down, ` ${part.rows} × `, across, ` ${part.cols}`];
    const facts = CF.h("span", {}, extents, words.map((word) => ` · ${word}`));
    return CF.h(
      "header",
      { class: "panel-head" },
      CF.h("div", { class: "panel-title" }, CF.h("h3", {}, name(part)), facts),
      CF.h("div", { class: "panel-tools" }, colours(panel), stages(panel), zooms(panel)),
    );
  }

  function colours(panel) {
    if (panel.ownColouring) return null;
    const pairs = [["", "colour: as all"], ...CF.coloring.modes(panel.scene, panel.part)];
    return CF.select(`Colour of ${panel.part.id}`, pairs, panel.color ?? "", (mode) => panel.setColor(mode || null));
  }

  function stages(panel) {
    if (panel.part.stages < 2) return null;
    const pairs = Array.from({ length: panel.part.stages }, (_, stage) => [stage, `stage ${stage}`]);
    const choose = (stage) => CF.state.set({ stage: Number(stage) });
    panel.stageSelect = CF.select(`Stage of ${panel.part.id}`, pairs, panel.stage, choose);
    return panel.stageSelect;
  }

  function zooms(panel) {
    const button = (text, title, onclick) => {
      const attributes = { type: "button", "aria-label": `${title}: ${panel.part.id}`, title, onclick };
      return CF.h("button", attributes, text);
    };
    return CF.h(
      "span",
      { class: "segmented" },
      button("−", "Smaller cells", () => panel.zoomBy(-1)),
      button("fit", "Whole panel", () => panel.setZoom(null)),
      button("+", "Larger cells", () => panel.zoomBy(1)),
      button("↔", "Full width", () => panel.element.classList.toggle("wide")),
    );
  }

  /** The nodes of a colouring's legend. */
  function legend({ title, by, range, legend: entries = [] }) {
    const { css, ramp } = CF.palette;
    const swatch = (rgb) => CF.h("i", { style: `background:${css(rgb)}` });
    const name = CF.h("b", { title: by && `by the step: ${by}` }, title ?? "");
    if (range) {
      const stops = RAMP.map((t) => css(ramp(t))).join(",");
      const strip = CF.h("i", { class: "ramp", style: `background:linear-gradient(90deg,${stops})` });
      return [name, CF.h("span", {}, range[0], strip, range[1])];
    }
    const strip = (rgbs) => CF.h("span", { class: "strip" }, rgbs.map(swatch));
    return [name, ...entries.map(({ text, rgbs }) => CF.h("span", {}, strip(rgbs), text))];
  }

  /** Badges for the counts `{held, read, write}` of marked cells; none if nothing is marked. */
  function badges(total) {
    const words = { held: "holds", read: "reads", write: "writes" };
    const marked = Object.keys(words).filter((key) => total[key]);
    return marked.map((key) => CF.h("span", { class: `badge ${key}` }, `${words[key]} ${CF.number(total[key])}`));
  }

  CF.panelHead = { label, header, legend, badges };
})();
