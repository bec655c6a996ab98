/* The Playground view: a layout text, its value, and every step of its evaluation, drawn. */
(() => {
  "use strict";

  const A = CF.algebra;
  const DEFAULT = "S<3,3,3> o 0 o (8,64):(64,1)"; // 128-byte rows of 2-byte elements, as most shared tiles have
  const MAX_STEPS = 24; // drawn at most
  const COUNTED = 2 ** 16; // indices up to which repeats and gaps are counted
  const HISTOGRAM = 2 ** 24; // and the reach up to which
  const ELEMENTS = [1, 2, 4]; // bytes of an element
  const USUAL_BYTES = 2;
  /* Example texts; with the element's bytes if they are not the default. */
  const EXAMPLES = [
    ["Layouts", ["(4,8)", "(8,64):(64,1)", "((2,4),8):((1,16),2)", "(4,8):(0,1)", "(8,8,2):(8,1,64)"]],
    [
      "Swizzles",
      [DEFAULT, "S<2,3,3> o (16,32):(32,1)", ["S<3,4,3> o (8,128):(128,1)", 1], "(8,64):(72,1)"],
    ],
    [
      "TV layouts",
      [
        "TV ((4,8),(2,2)):((32,1),(16,8)) on (16,8)",
        "TV ((4,8),(2,2,2)):((32,1),(16,8,128)) on (16,16)",
        "TV ((4,8),2):((16,1),8) on (8,8)",
        "TV (32,8):(8,1) on (64,4)",
      ],
    ],
    [
      "Algebra",
      [
        "coalesce((2,(1,6)):(1,(6,2)))",
        "compose((6,2):(8,2), (4,3):(3,1))",
        "complement((2,2):(1,6), 24)",
        "divide((4,2,3):(2,1,8), 4:2)",
        "zipped_divide((8,64):(64,1), (4,16))",
        "tiled_divide(S<3,3,3> o (16,64):(64,1), (8,8))",
        "product((2,2):(4,1), 6)",
        "blocked_product((2,5):(5,1), (3,4))",
        "raked_product((2,5):(5,1), (3,4))",
        "right_inverse((4,8):(8,1))",
        "left_inverse((4,8):(1,8))",
        "compose(right_inverse((8,8):(8,1)), (8,8))",
      ],
    ],
  ];

  CF.state.define("layout", { param: "layout" });
  CF.state.define("bytes", {
    param: "bytes",
    initial: USUAL_BYTES,
    parse: (text) => (ELEMENTS.includes(+text) ? +text : null),
  });
  CF.state.define("cells", { param: "cells" });

  /** Properties of a whole value, in a few words each. */
  function facts(value) {
    if (value.tv) {
      const [threads, values] = A.modes(value.tv).map(A.size);
      const tile = `tile ${value.shape.join(" × ")}`;
      return [`${threads} threads`, `${values} values each`, tile, owned(value, threads * values)];
    }
    const size = A.size(value);
    const words = [`${CF.number(size)} elements`, `rank ${A.rank(value)}`];
    if (!A.isComposed(value)) words.push(`cosize ${CF.number(A.cosize(value))}`);
    return size <= COUNTED ? [...words, spread(A.evaluate(value))] : words;
  }

  function owned({ tv, shape }, owners) {
    const tile = shape[0] * shape[1];
    const covered = new Set(A.evaluate(tv)).size;
    if (covered < tile) return `${CF.number(covered)} of ${CF.number(tile)} elements owned`;
    return owners === tile ? "each element owned once" : "every element owned, some by several";
  }

  /* Whether indices repeat, and whether they leave gaps. */
  function spread(indices) {
    const last = indices.reduce((a, b) => Math.max(a, b), 0);
    const different = last < HISTOGRAM ? distinct(indices, last) : new Set(indices).size;
    const once = different === indices.length ? "each index once" : `${CF.number(different)} different indices`;
    return different === last + 1 ? `${once}, no gaps` : `${once}, gaps below ${CF.number(last)}`;
  }

  function distinct(indices, last) {
    const seen = new Uint8Array(last + 1);
    for (const index of indices) seen[index] = 1;
    return seen.reduce((total, flag) => total + flag, 0);
  }

  /** `compose(24:3, (4,2))`: an operation with its operands. */
  function formula({ operation, operands, result }) {
    if (operation === "layout" || operation === "swizzle" || operation === "tv") return A.toText(result);
    return `${operation}(${operands.map(A.toText).join(", ")})`;
  }

  const sized = (bytes) => `${bytes} ${bytes > 1 ? "bytes" : "byte"}`;

  const WORDS = {
    layout: "as written",
    swizzle: "with its swizzle",
    tv: "on the tile",
    concatenate: "side by side as modes",
    regroup: "modes put in order",
    compose: "the second feeds the first",
    complement: "the layout that fills the gaps",
    coalesce: "as few modes as possible",
  };

  let good = DEFAULT; // the last valid text: after an error its picture remains

  const term = ([name, words]) => CF.h("div", {}, CF.h("dt", {}, name), CF.h("dd", {}, words));

  class Playground {
    constructor(container) {
      this.cards = [];
      this.value = null;
      this.#build(container);
      this.stop = CF.state.on(["layout", "bytes", "cells", "theme"], () => this.#refresh());
      this.#refresh();
    }

    unmount() {
      this.stop();
      this.result.destroy();
      this.#clearSteps();
    }

    /* A link may hold line ends, which the field would drop and so move the error's place. */
    get text() {
      return (CF.state.get("layout") ?? DEFAULT).replace(/[\r\n\t]/g, " ");
    }

    #build(container) {
      this.input = CF.h("input", {
        type: "text",
        id: "play-text",
        class: "play-text",
        spellcheck: "false",
        autocapitalize: "off",
        autocomplete: "off",
        maxlength: CF.text.MAX_TEXT,
        "aria-describedby": "play-error",
        oninput: () => CF.state.set({ layout: this.input.value }),
        onscroll: () => this.#followCaret(),
      });
      this.caret = CF.h("div", { class: "play-caret", "aria-hidden": "true" }, CF.h("span"));
      this.error = CF.h("p", { id: "play-error", class: "play-error", "aria-live": "polite" });
      const field = CF.h("div", { class: "play-field" }, this.input, this.caret);
      this.announcer = CF.h("p", { class: "visually-hidden", "aria-live": "polite" });
      const label = CF.h("label", { for: "play-text" }, "Layout text");
      const examples = EXAMPLES.map((group) => this.#examples(group));
      this.stepSection = CF.h("section", { class: "play-steps", "aria-label": "Steps" });
      container.append(
        CF.h("section", { class: "play-entry" }, label, field, this.error),
        CF.h("section", { class: "play-examples", "aria-label": "Examples" }, examples),
        this.#resultSection(),
        this.stepSection,
        this.announcer,
      );
    }

    #examples([title, texts]) {
      const use = (text, bytes) => {
        CF.state.set({ layout: text, bytes });
        this.input.focus();
      };
      const button = (example) => {
        const [text, bytes = USUAL_BYTES] = [example].flat();
        const title = `Elements of ${sized(bytes)}`;
        return CF.h("button", { type: "button", title, dataset: { text }, onclick: () => use(text, bytes) }, text);
      };
      return CF.h("div", { class: "play-group" }, CF.h("h3", {}, title), CF.h("div", {}, texts.map(button)));
    }

    #resultSection() {
      this.heading = CF.h("h2", { class: "play-value" });
      this.facts = CF.h("div", { class: "facts" });
      this.tools = CF.h("div", { class: "play-tools" });
      this.legend = CF.h("span", { class: "play-legend" });
      this.remark = CF.h("p", { class: "hint" });
      this.inspector = CF.h("dl", { class: "play-inspector" });
      this.bits = CF.h("div", { class: "play-bits" });
      const stage = CF.h("div", { class: "play-grid" });
      this.body = CF.h("section", { class: "play-result", "aria-label": "Result" });
      this.body.append(this.heading, this.facts, this.tools, this.remark, stage, this.inspector, this.bits);
      this.result = new CF.PlayGrid(stage, {
        label: "The result, one cell an element. Arrow keys move, plus and minus zoom, Escape leaves.",
        onCursor: (row, col, keyboard) => this.#point(row, col, keyboard),
      });
      return this.body;
    }

    #refresh() {
      const { text } = this;
      if (this.input.value !== text) this.input.value = text;
      let wrong = null;
      try {
        CF.text.evaluate(text);
        good = text;
      } catch (error) {
        if (!(error instanceof CF.text.LayoutTextError)) throw error;
        wrong = error;
      }
      this.#complain(wrong);
      const key = JSON.stringify([good, ...["bytes", "cells", "theme"].map(CF.state.get)]);
      if (this.shown !== key) this.#show(CF.text.evaluate(good));
      this.shown = key;
    }

    /* The error and a caret below the character; the last good drawing remains, and a remark says so. */
    #complain(error) {
      this.input.setAttribute("aria-invalid", String(Boolean(error)));
      const place = error && (error.length ? `Character ${error.position + 1}: ` : "At the end: ");
      const rest = CF.h("span", { class: "hint" }, " The picture below is that of the last valid text.");
      this.error.replaceChildren(...(error ? [CF.h("b", {}, place), error.message, ".", rest] : []));
      const span = this.caret.firstChild;
      const shown = error ? Math.max(1, Math.min(error.length, error.text.length - error.position)) : 0;
      span.textContent = error ? "\u00a0".repeat(error.position) + "^".repeat(shown) : "";
      if (error && document.activeElement !== this.input) this.#revealCaret(span);
      this.#followCaret();
    }

    /* Scrolls a field without the focus so that the character at fault is visible. */
    #revealCaret(span) {
      this.input.scrollLeft = Math.max(0, span.offsetWidth - this.input.clientWidth * 0.8);
    }

    #followCaret() {
      this.caret.firstChild.style.transform = `translateX(${-this.input.scrollLeft}px)`;
    }

    #show({ value, steps }) {
      Object.assign(this, { value, steps });
      const options = this.#options(value);
      const [text, result] = [good.trim(), A.toText(value)];
      const code = (words) => CF.h("code", {}, words);
      this.heading.replaceChildren(...(text === result ? [code(result)] : [code(text), " = ", code(result)]));
      this.facts.replaceChildren(...facts(value).map((fact) => CF.h("span", {}, fact)));
      this.#showTools(value, options);
      this.remark.textContent = "";
      this.result.show(() => {
        this.model = CF.playmodel.model(value, options);
        this.#showLegend();
        return this.model;
      });
      this.#showSteps(steps);
      this.#point(null, null);
    }

    #options(value) {
      const known = CF.playmodel.choices(value).map(([key]) => key);
      const wanted = CF.state.get("cells");
      return { bytes: CF.state.get("bytes"), cells: known.includes(wanted) ? wanted : known[0] };
    }

    #showTools(value, { bytes, cells }) {
      const choose = (label, ...choice) => CF.h("label", {}, label, CF.select(label, ...choice));
      const zoom = (text, title, factor) => {
        const onclick = () => this.result.zoomBy(factor);
        return CF.h("button", { type: "button", title, "aria-label": title, onclick }, text);
      };
      const sizes = ELEMENTS.map((count) => [count, sized(count)]);
      const zooms = [zoom("−", "Smaller cells", 1 / 1.5), zoom("fit", "Fit", null), zoom("+", "Larger cells", 1.5)];
      // Built anew only when the choices change: a control that is in use must not lose the focus.
      const built = `${Boolean(value.tv)} ${cells} ${bytes}`;
      if (this.tools.dataset.built === built) return;
      const focused = this.tools.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
      this.tools.dataset.built = built;
      const bytesChoice = choose("Element", sizes, bytes, (count) => CF.state.set({ bytes: Number(count) }));
      this.tools.replaceChildren(
        choose("Colour", CF.playmodel.choices(value), cells, (key) => CF.state.set({ cells: key })),
        ...(value.tv ? [] : [bytesChoice]),
        CF.h("span", { class: "segmented" }, ...zooms),
        this.legend,
      );
      if (focused) this.tools.querySelector(`[aria-label="${focused}"]`)?.focus();
    }

    #showLegend() {
      const { legend, names, remark } = this.model;
      const stops = [0, 0.25, 0.5, 0.75, 1].map((t) => CF.palette.css(CF.palette.ramp(t))).join(",");
      const colours = CF.h("i", { style: `background:linear-gradient(90deg,${stops})` });
      this.legend.replaceChildren(
        ...(legend ? [CF.h("span", {}, legend[0], colours, legend[1])] : []),
        CF.h("span", {}, names),
      );
      this.remark.textContent = remark;
    }

    /* The cell under the cursor, in words and in the bit picture. */
    #point(row, col, keyboard = false) {
      const here = row !== null && this.model;
      const found = here ? this.model.facts(row, col) : [];
      const way = here && this.#light(this.steps.length - 1, this.model, row, col);
      if (way) found.push(["through the operands", way]);
      if (!here) this.#light(null);
      const hint = CF.h("div", { class: "hint" }, "Move over the cells, tap one, or use the arrow keys there.");
      this.inspector.replaceChildren(...(found.length ? found.map(term) : [hint]));
      if (keyboard) this.announcer.textContent = found.map((fact) => fact.join(" ")).join(", ");
      const composed = A.isComposed(this.value);
      this.bits.hidden = !composed;
      if (!composed) return;
      const index = here ? this.model.index(row, col) : null;
      this.bits.replaceChildren(CF.swizzleBits(this.value, CF.state.get("bytes"), index));
    }

    /*
     * Highlights the cells of earlier steps that a cell of step `at` comes from; null: none. Describes a composition's
     * mapping of the element in words.
     */
    #light(at, model = null, row = null, col = null) {
      const position = row === null ? -1 : (model.at?.(row, col) ?? -1);
      const way = position < 0 ? new Map() : CF.playway.trace(this.steps, at, position);
      for (const { grid, step } of this.cards) grid.light(step === at ? [] : (way.get(step) ?? []));
      return position < 0 ? null : CF.playway.words(this.steps[at], position);
    }

    #clearSteps() {
      for (const { grid } of this.cards) grid.destroy();
      this.cards = [];
      this.stepSection.replaceChildren();
    }

    #showSteps(steps) {
      const key = JSON.stringify([steps, CF.state.get("bytes"), CF.state.get("cells"), CF.state.get("theme")]);
      if (this.stepKey === key) return;
      this.stepKey = key;
      this.#clearSteps();
      if (steps.length < 2) return;
      const more = steps.length - MAX_STEPS;
      this.stepSection.append(
        CF.h("h2", {}, "Steps of the evaluation"),
        CF.h("ol", {}, steps.slice(0, MAX_STEPS).map((step, at) => this.#card(step, at, step === steps.at(-1)))),
      );
      if (more > 0) this.stepSection.append(CF.h("p", { class: "hint" }, `${more} more steps are not drawn.`));
    }

    /* The last step's result is the drawing above. */
    #card(step, at, last) {
      const [words, result] = [formula(step), A.toText(step.result)];
      const card = CF.h(
        "li",
        { class: "play-step" },
        CF.h("p", {}, CF.h("b", {}, step.operation), " ", CF.h("span", { class: "hint" }, WORDS[step.operation] ?? "")),
        CF.h("p", {}, CF.h("code", {}, words === result ? words : `${words} = ${result}`)),
      );
      const above = CF.h("p", { class: "play-line" }, "The result, drawn above.");
      card.append(...(last ? [above] : this.#stepGrid(step, at)));
      return card;
    }

    #stepGrid({ result }, at) {
      const line = CF.h("p", { class: "play-line" });
      const stage = CF.h("div", { class: "play-grid" });
      let model = null;
      const grid = new CF.PlayGrid(stage, {
        label: `Step ${at + 1}: ${A.toText(result)}. Arrow keys move.`,
        tallest: 190,
        onCursor: (row, col, keyboard) => {
          const words = row === null ? "" : model.facts(row, col).map((fact) => fact.join(" ")).join(" · ");
          this.#light(at, model, row, col);
          line.textContent = words || model.remark;
          if (keyboard) this.announcer.textContent = words;
        },
      });
      grid.show(() => {
        model = CF.playmodel.model(result, this.#options(result));
        line.textContent = model.remark;
        return model;
      });
      this.cards.push({ grid, step: at });
      return [stage, line];
    }
  }

  let view = null;
  CF.views.playground = {
    title: "Playground",
    mount(container) {
      view = new Playground(container);
    },
    unmount() {
      view?.unmount();
      view = null;
    },
  };
})();
