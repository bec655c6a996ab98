/* The Banks view: every access of shared memory with its conflicts, one of them in detail, and its tile's swizzle. */
(() => {
  "use strict";

  const { h } = CF;
  const { swizzleText } = CF.banks;
  const number = {
    parse: (text) => (/^\d+$/.test(text) ? Number(text) : null),
  };

  CF.state.define("access", { param: "access" });
  CF.state.define("phase", { param: "phase", initial: 0, ...number });
  CF.state.define("bits", { param: "bits", ...number }); // of the swizzle that is tried, null: the tile's own

  const THREADS = ["thread", "warp", "warpgroup"];
  const DETAIL = ["access", "phase", "instruction", "bits", ...THREADS];
  const ELEMENT = ["hover", "pin", "stage", ...DETAIL];

  class Banks {
    constructor(container, scene) {
      this.scene = scene;
      this.accesses = CF.banks.accesses(scene);
      this.tableNote = h("p", { class: "hint" });
      this.table = h("div", { class: "scroll" });
      this.detail = h("section", { class: "box", "aria-label": "One instruction" });
      this.swizzle = h("section", { class: "box", "aria-label": "Swizzle of the tile" });
      this.figure = h("div");
      this.tries = h("div");
      this.panelPlace = h("div", { class: "bits-panel" });
      const title = h("h2", {}, "Accesses of shared memory");
      container.append(intro(), h("section", { class: "box" }, title, this.tableNote, this.table));
      container.append(this.detail, this.swizzle);
      this.swizzle.append(
        (this.swizzleTitle = h("h2")),
        h("div", { class: "bits-row" }, h("div", {}, this.figure, this.tries), this.panelPlace),
      );
      this.stops = [
        CF.state.on(DETAIL, (changed) => this.update(changed)),
        CF.state.on(ELEMENT, () => this.drawFigure()),
        CF.state.on(["stage"], () => this.panel.setColouring(this.#colouring())),
      ];
      this.update();
      this.drawFigure();
    }

    destroy() {
      for (const stop of this.stops) stop();
      this.panel?.destroy();
    }

    /** The chosen access; at first one of the state's step, else the one that the swizzle helps most. */
    get access() {
      const [id, step] = [CF.state.get("access"), CF.state.get("step")];
      const gain = (access) => access.summary(null).worst;
      const most = [...this.accesses].sort((a, b) => gain(b) - gain(a))[0];
      return (
        this.accesses.find((access) => access.id === id) ??
        this.accesses.find((access) => access.step.id === step) ??
        most
      );
    }

    /** Index of the chosen warp or warpgroup within the access, 0 if the selection is not part of it. */
    get group() {
      const range = CF.scene.selected();
      const threads = this.access.names.group === "warp" ? 32 : 128;
      const at = range ? Math.floor(range.first / threads) - this.access.firstGroup : 0;
      return at >= 0 && at < this.access.groups ? at : 0;
    }

    get instruction() {
      return Math.min(CF.state.get("instruction") ?? 0, this.access.instructions - 1);
    }

    get phase() {
      return Math.min(CF.state.get("phase"), this.access.phases - 1);
    }

    /** The swizzle that the view shows for the chosen tile: its own, or the one that is tried. */
    get shown() {
      const bits = CF.state.get("bits");
      const { part } = this.access;
      return bits === null ? part.spec.swizzle : this.#alternatives()[Math.min(bits, 3)];
    }

    #alternatives() {
      return CF.banks.alternatives(this.access.part);
    }

    choose(access) {
      const sameTile = access.part === this.access.part;
      CF.state.set({
        access: access.id,
        step: access.step.id,
        instruction: 0,
        phase: 0,
        ...(sameTile ? {} : { bits: null }),
      });
    }

    /** Draws what depends on the `changed` keys; everything if they are not given. */
    update(changed = new Set(["access"])) {
      const focus = keepFocus(this.detail, this.swizzle, this.table);
      if (changed.has("access") || changed.has("bits")) {
        this.#drawTable();
        this.#drawTries();
        this.#drawPanel();
      }
      this.#drawDetail();
      focus();
    }

    #drawTable() {
      const { access, accesses, shown } = this;
      const tried = CF.state.get("bits") !== null;
      const meaning = "Wavefronts are the passes over shared memory of all instructions of all warps for one tile.";
      this.tableNote.textContent = (tried ? `Trying ${swizzleText(shown)} on ${access.part.id}. ` : "") + meaning;
      const choose = (other) => this.choose(other);
      this.table.replaceChildren(CF.bankTables.accessTable({ accesses, chosen: access, shown, choose }));
    }

    #drawDetail() {
      const { access, group, instruction, phase, shown } = this;
      const side = (swizzle, title) => ({
        swizzle,
        title,
        addresses: access.addresses(group, instruction, swizzle),
        words: access.words(group, instruction, swizzle),
        ways: access.waysOf(group, instruction, swizzle),
      });
      const sides = [side(shown, shown ? swizzleText(shown) : "no swizzle"), side(null, "no swizzle")];
      const choose = (index) => CF.state.set({ phase: index });
      const map = ({ swizzle, words, ways }) =>
        CF.bankMap.heatMap({ access, swizzle, table: words, ways, phase, choose });
      const element = (cell) => access.part.element(cell % access.part.rows, Math.floor(cell / access.part.rows));
      this.detail.replaceChildren(
        h("h2", {}, `${access.step.title}: one instruction`),
        h("p", { class: "hint" }, h("code", {}, access.step.instruction), ` on ${access.part.id}. ${this.#note()}`),
        this.#controls(),
        h("div", { class: "bank-maps" }, sides.map(map)),
        CF.bankMap.legend(access),
        CF.bankMap.lanes({
          access,
          group,
          instruction,
          phase,
          sides,
          point: (cell) => CF.state.set({ hover: cell === null ? null : element(cell), source: null }),
          pin: (cell) => CF.state.set({ pin: element(cell) }),
        }),
      );
    }

    #note() {
      const { access } = this;
      if (access.names.phase !== "phase")
        return "How wgmma reads is not documented; in the model each core matrix, 8 rows of 16 bytes, is one phase.";
      return access.lanes === access.phaseLanes
        ? `The 32 lanes access ${access.laneBytes} bytes each in one phase.`
        : `The 32 lanes access ${access.laneBytes} bytes each, ${access.phaseLanes} lanes a phase.`;
    }

    #controls() {
      const { access, group, instruction, phase } = this;
      const none = Object.fromEntries(THREADS.map((key) => [key, null]));
      const setGroup = (at) => CF.state.set({ ...none, [access.names.group]: access.firstGroup + at });
      return h(
        "div",
        { class: "view-controls" },
        stepper(access.names.group, group, access.groups, setGroup, access.firstGroup),
        stepper("instruction", instruction, access.instructions, (at) => CF.state.set({ instruction: at })),
        stepper(access.names.phase, phase, access.phases, (at) => CF.state.set({ phase: at })),
      );
    }

    #drawTries() {
      const { part } = this.access;
      const own = part.spec.swizzle?.[0] ?? 0;
      this.tries.replaceChildren(
        ...CF.bankTables.tries({
          part,
          accesses: this.accesses.filter((access) => access.part === part),
          alternatives: this.#alternatives(),
          chosen: CF.state.get("bits") ?? own,
          choose: (bits) => CF.state.set({ bits: bits === own ? null : bits }),
        }),
      );
    }

    #drawPanel() {
      const { part } = this.access;
      this.swizzleTitle.textContent = `${part.id}: ${swizzleText(this.shown)}`;
      if (this.panel?.part !== part) {
        this.panel?.destroy();
        const options = { scene: this.scene, id: part.id, colouring: this.#colouring(), height: 360 };
        this.panel = new CF.Panel(this.panelPlace, options);
      } else this.panel.setColouring(this.#colouring());
    }

    /* Banks of the tile's elements under the shown swizzle. */
    #colouring() {
      const { part } = this.access;
      const stage = CF.state.get("stage");
      const numbers = Float64Array.from({ length: part.size }, (_, cell) => {
        const { after } = CF.bits.offsets(part, cell, this.shown, stage);
        return this.scene.bank(part.spec.base + after);
      });
      const rgb = (bank) => CF.palette.ramp(bank / (CF.banks.BANKS - 1));
      return { title: "bank", numbers, rgb, text: String, range: ["bank 0", "31"] };
    }

    /** The bits of the element under the cursor, the pinned one, or the last lane's. */
    drawFigure() {
      const { access, group, instruction, phase } = this;
      const { part } = access;
      const found = [CF.state.get("hover"), CF.state.get("pin")].map((element) => element && part.place(element));
      const place = found.find((at) => at && !at.includes(null));
      const last = (phase + 1) * access.phaseLanes - 1; // a phase's last row is the one that the swizzle moves furthest
      const cell = place ? part.cell(...place) : access.cell(group, instruction, last);
      const name = `${part.axes[0]}${cell % part.rows}, ${part.axes[1]}${Math.floor(cell / part.rows)}`;
      const stage = CF.state.get("stage");
      const options = { scene: this.scene, part, cell, swizzle: this.shown, name, stage };
      const old = this.figure.querySelector(".scroll");
      const figure = CF.bits.figure(options);
      const at = old ? old.scrollLeft : Infinity; // the low bits, which matter most, are at the right
      this.figure.replaceChildren(figure);
      figure.querySelector(".scroll").scrollLeft = Math.min(at, figure.scrollWidth);
    }
  }

  const intro = () =>
    h(
      "p",
      { class: "lead" },
      "Shared memory has 32 banks of 4 bytes. A warp's access is served in phases of at most 128 bytes; a phase takes ",
      "as many passes, called wavefronts, as the largest number of different words in one bank. One is conflict-free. ",
      "cp.async differs: it takes a pass for every 128-byte line of a phase. ",
      "Choose an access for its banks, lanes and bits.",
    );

  /* A number with buttons either side, from 0 to `count` - 1, shown from `first` on. */
  function stepper(name, value, count, set, first = 0) {
    const pairs = Array.from({ length: count }, (_, at) => [at, String(first + at)]);
    const button = (by, text, label) =>
      h(
        "button",
        {
          type: "button",
          "aria-label": `${label} ${name}`,
          disabled: value + by < 0 || value + by >= count,
          dataset: { key: `${name}${by}` },
          onclick: () => set(value + by),
        },
        text,
      );
    const select = CF.select(name, pairs, value, (text) => set(Number(text)));
    select.dataset.key = `${name}-select`;
    return h(
      "label",
      {},
      h("span", {}, name),
      h("span", { class: "segmented" }, button(-1, "‹", "Previous"), select, button(1, "›", "Next")),
      h("span", { class: "hint" }, count > 1 ? `of ${count}` : "only one"),
    );
  }

  /* Redrawing must not lose the focus: the returned function focuses the control that had it. */
  function keepFocus(...roots) {
    const key = document.activeElement?.dataset?.key ?? document.activeElement?.textContent;
    const inside = roots.find((root) => root.contains(document.activeElement));
    return () => {
      if (!inside || inside.contains(document.activeElement)) return;
      const controls = [...inside.querySelectorAll("button, select, input")];
      const next = controls.find((control) => (control.dataset.key ?? control.textContent) === key);
      next?.focus({ preventScroll: true });
    };
  }

  let view = null;
  CF.views.banks = {
    title: "Banks",
    mount(container, { scene }) {
      if (scene) view = new Banks(container, scene);
      else container.append(h("p", { class: "hint" }, "This page does not have a kernel of that name."));
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };
})();
