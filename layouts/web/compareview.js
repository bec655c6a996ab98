/* The Compare view: two rows side by side, differences marked, their panels linked element by element. */
(() => {
  "use strict";

  const { h } = CF;
  const SIDES = ["a", "b"];
  const HEIGHT = 300; // pixels of a panel's grid
  const FIRST_TENSOR = "K"; // its tiles and fragments differ most between the families
  const HOW = "Move over a panel, tap a cell or use the arrow keys in one: its element is marked in both rows.";

  CF.state.define("tensor", { param: "tensor" });
  CF.state.define("differ", { param: "differ", initial: false, parse: (text) => text !== "0", print: () => "1" });

  const dims = ({ head_dim: own, head_dim_v: other }) => (own === other ? String(own) : `${own} × ${other}`);

  class Compare {
    constructor(container, data) {
      this.rows = CF.compare.rowsOf(data);
      this.panels = [];
      this.body = h("div");
      this.element = h("div", { class: "compare" });
      this.element.append(...this.#head(data).filter(Boolean), this.body);
      container.append(this.element);
      const redraw = CF.perFrame(() => this.#tell());
      this.stops = [
        CF.state.on(SIDES, () => this.update()),
        CF.state.on("tensor", () => this.#drawPanels()),
        CF.state.on("differ", () => this.#filter()),
        CF.state.on("swizzle", () => this.#drawSwitch()),
        CF.state.on(["hover", "pin", "source", "panel", "stage", "swizzle", "tensor"], redraw),
      ];
      this.release = (event) => event.key === "Escape" && CF.state.set({ pin: null });
      document.addEventListener("keydown", this.release);
      this.update();
    }

    destroy() {
      for (const stop of this.stops) stop();
      document.removeEventListener("keydown", this.release);
      this.resized.disconnect();
      this.#destroyPanels();
    }

    /** The two scenes; those of the standard comparison if the state does not name scenes of this page. */
    get scenes() {
      const start = CF.compare.standard(this.rows);
      return SIDES.map((side, i) => CF.scene.of(CF.state.get(side)) ?? CF.scene.of(start[i].id));
    }

    /** The tensors of either row, in the first row's order. */
    get known() {
      return [...new Set(this.scenes.flatMap(({ lanes }) => lanes.flat()))];
    }

    /** The tensor whose panels are shown: the state's, else that of the panel that a link names. */
    get tensor() {
      const [wanted, panel] = [CF.state.get("tensor"), CF.state.get("panel")];
      const named = this.scenes.map((scene) => scene.part(panel)?.tensor).find(Boolean);
      return [wanted, named].find((tensor) => this.known.includes(tensor)) ?? FIRST_TENSOR;
    }

    #head({ gallery }) {
      this.missing = h("p", { class: "hint", role: "status" });
      this.selects = SIDES.map((side) => rowSelect(this.rows, side));
      this.links = SIDES.map(() => h("a", {}, "its page"));
      const picks = SIDES.map((side, i) =>
        h("label", {}, badge(side), this.selects[i], gallery ? this.links[i] : null),
      );
      const swap = () => {
        const [a, b] = this.scenes.map((scene) => scene.data.id);
        CF.state.set({ a: b, b: a });
      };
      const button = h("button", { type: "button", onclick: swap, "aria-label": "Swap A and B", title: "Swap" }, "⇄");
      const bar = h("div", { class: "compare-picks" }, picks[0], button, picks[1]);
      const { style } = this.element; // elements that stick below the bar need its height
      this.resized = new ResizeObserver(() => style.setProperty("--picks", `${bar.offsetHeight}px`));
      this.resized.observe(bar);
      return [
        gallery ? CF.gallery.links("compare") : null,
        bar,
        this.missing,
      ];
    }

    update() {
      const { scenes } = this;
      this.#drawHead(scenes);
      const traits = CF.compare.traits(...scenes);
      this.#destroyPanels();
      const budgets = table(CF.compare.budget(...scenes), "Budgets");
      this.body.replaceChildren(
        h("p", { class: "lead" }, CF.compare.summary(traits)),
        this.#differSwitch(),
        box("Rows", table([...CF.compare.row(...scenes), ...traits], "Rows and their traits", explained(scenes))),
        this.#panelBox(),
        box("Tiles and fragments", table(CF.compare.parts(...scenes), "Tiles and fragments")),
        box("Budgets", budgets, smemBars(scenes), registerBars(scenes)),
        box("Bank conflicts", leftOut(), table(CF.compare.accesses(...scenes), "Bank conflicts")),
        box("Instructions", table(CF.compare.steps(...scenes), "Instructions")),
      );
      this.#filter();
      this.#drawPanels();
    }

    #drawHead(scenes) {
      const unknown = SIDES.filter((side) => CF.state.get(side) && !CF.scene.of(CF.state.get(side)));
      const words = unknown.map((side) => `This page does not have a row “${CF.state.get(side)}”.`);
      this.missing.textContent = words.join(" ");
      scenes.forEach(({ data: { id } }, i) => {
        this.selects[i].value = id;
        this.links[i].href = this.rows.find((row) => row.id === id).file ?? "";
        this.links[i].setAttribute("aria-label", `The page of ${SIDES[i].toUpperCase()}`);
      });
    }

    #differSwitch() {
      const toggle = () => CF.state.set({ differ: !CF.state.get("differ") });
      this.differ = toggleButton("Only what differs", toggle);
      return this.differ;
    }

    #filter() {
      const only = CF.state.get("differ");
      this.differ.setAttribute("aria-checked", String(only));
      for (const row of this.body.querySelectorAll("tr.same")) row.hidden = only;
      for (const hint of this.body.querySelectorAll(".all-same")) hint.hidden = !only;
    }

    #panelBox() {
      this.tensors = h("div", { class: "segmented", role: "group", "aria-label": "Tensor" });
      const toggle = () => CF.state.set({ swizzle: !CF.state.get("swizzle") });
      this.swizzle = toggleButton("Swizzle", toggle);
      this.how = h("p", { class: "hint" }, HOW);
      this.told = SIDES.map((side) => h("p", { "aria-live": "polite" }, badge(side), h("span")));
      this.pairs = h("div", { class: "compare-pairs" });
      return box(
        "Positions of the elements",
        h("div", { class: "view-controls" }, this.tensors, this.swizzle),
        h("div", { class: "compare-told" }, this.how, this.told),
        this.pairs,
      );
    }

    #drawPanels() {
      const { tensor, scenes } = this;
      const choose = (name) => CF.state.set({ tensor: name, panel: null });
      const focused = this.tensors.contains(document.activeElement);
      this.tensors.replaceChildren(
        ...this.known.map((name) =>
          h("button", { type: "button", "aria-pressed": String(name === tensor), onclick: () => choose(name) }, name),
        ),
      );
      if (focused) this.tensors.querySelector("[aria-pressed=true]").focus();
      this.#destroyPanels();
      const ids = scenes.map((scene) => scene.parts.filter((part) => part.tensor === tensor).map(({ id }) => id));
      this.pairs.replaceChildren();
      for (const id of CF.compare.merged(...ids)) this.#drawPair(id);
      this.#drawSwitch();
      this.#tell();
    }

    #drawPair(id) {
      this.scenes.forEach((scene, i) => {
        const side = SIDES[i];
        const place = h("div", { class: "compare-cell", role: "group", "aria-label": side.toUpperCase() }, badge(side));
        this.pairs.append(place);
        if (scene.part(id)) this.panels.push(new CF.Panel(place, { scene, id, height: HEIGHT }));
        else place.append(h("p", { class: "hint" }, `has no ${id}`));
      });
    }

    #drawSwitch() {
      this.swizzle.setAttribute("aria-checked", String(CF.state.get("swizzle")));
      this.swizzle.disabled = !this.panels.some(({ part }) => part.spec.swizzle);
    }

    /* The place of the element under the cursor in either row: in the cursor's panel, one of its tensor, or any. */
    #tell() {
      const element = CF.state.get("hover") ?? CF.state.get("pin");
      const at = CF.state.get(CF.state.get("hover") ? "source" : "panel");
      const options = { stage: CF.state.get("stage"), swizzled: CF.state.get("swizzle") };
      this.scenes.forEach((scene, i) => {
        const inTensor = scene.parts.filter((part) => part.tensor === this.tensor);
        const candidates = [scene.part(at), ...inTensor, ...scene.parts];
        const part = candidates.find((other) => other && !other.place(element).includes(null));
        this.told[i].hidden = !element;
        this.told[i].lastChild.textContent = element ? sentence(scene, part, element, options) : "";
      });
      this.how.hidden = Boolean(element);
    }

    #destroyPanels() {
      for (const panel of this.panels) panel.destroy();
      this.panels = [];
    }
  }

  function sentence(scene, part, element, options) {
    if (!part) return `${CF.state.printElement(element)} is outside this row's tiles.`;
    const [row, col] = part.place(element);
    return CF.inspector.sentence(part, CF.inspector.describe(scene, part, row, col, options));
  }

  const badge = (side) => h("b", { class: `side-badge ${side}` }, side.toUpperCase());

  const leftOut = () =>
    h("p", { class: "hint" }, "A dash: the row does not have this access, or it is TMA's, which the model leaves out.");

  const toggleButton = (text, onclick) =>
    h("button", { type: "button", class: "switch", role: "switch", onclick }, text);

  /* All rows by arch. */
  function rowSelect(rows, side) {
    const archs = [...new Set(rows.map(({ arch }) => arch))];
    const facts = (row) => [row.arch, row.family, dims(row), row.mask, row.dtype, row.lengths, row.part];
    const words = (row) => facts(row).filter(Boolean).join(" · ");
    const option = (row) => h("option", { value: row.id }, words(row));
    const group = (arch) => h("optgroup", { label: arch }, rows.filter((row) => row.arch === arch).map(option));
    return h(
      "select",
      {
        "aria-label": `Row ${side.toUpperCase()}`,
        onchange: (event) => CF.state.set({ [side]: event.target.value }),
      },
      archs.map(group),
    );
  }

  const box = (title, ...children) => CF.budget.box(title, ...children);

  /* A trait of either row has an explanation; other names do not. */
  const explained = (scenes) => (name) => {
    const kernels = scenes.map((scene) => scene.data.kernel.name);
    return CF.explain.trait(kernels.find((kernel) => CF.explain.traitWords(kernel, name)), name);
  };

  /* Lines of CF.compare as a table; lines that differ have a sign and another background. */
  function table(lines, label, named = (name) => name) {
    const same = lines.every(({ differs }) => !differs);
    const cell = (found, side) =>
      found
        ? h(
            "td",
            { class: found.bad ? "bad" : null },
            badge(side),
            found.text,
            found.note ? h("small", {}, found.note) : null,
            found.code ? h("small", {}, h("code", {}, found.code)) : null,
          )
        : h("td", {}, badge(side), h("span", { class: "hint" }, "–"));
    const row = ({ name, a, b, differs }) =>
      h(
        "tr",
        { class: differs ? "differs" : "same" },
        h("th", { scope: "row" }, differs ? h("i", { title: "differs" }, "≠") : null, named(name)),
        cell(a, "a"),
        cell(b, "b"),
      );
    const head = (side) => h("th", { scope: "col" }, badge(side));
    return [
      h(
        "table",
        { class: "facts-table compare-table", "aria-label": label },
        h("thead", {}, h("tr", {}, h("td"), SIDES.map(head))),
        h("tbody", {}, lines.map(row)),
      ),
      same ? h("p", { class: "hint all-same" }, "Nothing differs here.") : null,
    ];
  }

  /* Bars of both rows, to one scale. */
  const bars = (title, rows) => [
    h("h3", { class: "after" }, title),
    rows.map(([side, name, bar]) => h("div", { class: "compare-bar" }, h("p", {}, badge(side), name), bar)),
  ];

  function smemBars(scenes) {
    const budgets = scenes.map(({ data }) => data.budget.smem);
    const scale = Math.max(...budgets.map(({ limit }) => limit));
    const say = ({ total, limit }) => `${CF.budget.bytes(total)} of ${CF.budget.bytes(limit)}`;
    return bars(
      "Shared memory of a block",
      budgets.map((smem, i) => [SIDES[i], say(smem), CF.budget.smemBar(smem, scale)]),
    );
  }

  function registerBars(scenes) {
    const sides = scenes.flatMap(({ data }, i) => data.budget.registers.roles.map((role) => [SIDES[i], role]));
    const most = ([, role]) => Math.max(role.limit, CF.budget.roleUse(role).used);
    const scale = Math.max(...sides.map(most));
    const say = ({ name, limit }) => `${name}, ${limit} at most`;
    return bars(
      "Registers of a thread",
      sides.map(([side, role]) => [side, say(role), CF.budget.registerBar(role, scale)]),
    );
  }

  let view = null;
  CF.views.compare = {
    title: "Compare",
    mount(container, { data }) {
      if (CF.compare.rowsOf(data).length) view = new Compare(container, data);
      else container.append(h("p", { class: "hint" }, "This page does not have rows to compare."));
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };
})();
