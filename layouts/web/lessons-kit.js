/*
 * The lessons' registry and building blocks: prose, figures, panels, steppers, small grids, source lines,
 * questions, links to a kernel. A lesson is `{id, title, question, families, state, build(kit)}`: `families` are the
 * kernel families whose rows it shows, `state` the values of CF.state that the address does not give, and `build`
 * returns the nodes of its body. The files lessons-*.js add them in order; lessons.js shows them.
 */
(() => {
  "use strict";

  const PLAY_MS = 900;
  const lessons = [];
  let named = 0;

  /** Text in which `back quotes` are code. */
  const inline = (text) => text.split("`").map((part, i) => (i % 2 ? CF.h("code", {}, part) : part));

  /** Paragraphs, separated by blank lines. */
  const prose = (text) =>
    text
      .trim()
      .split(/\n\s*\n/)
      .map((paragraph) => CF.h("p", {}, inline(paragraph.replace(/\s+/g, " "))));

  /** A live experiment: a titled box with controls and content. */
  function figure(title, controls, ...content) {
    const id = `lesson-figure-${++named}`;
    return CF.h(
      "section",
      { class: "lesson-figure", "aria-labelledby": id },
      CF.h("h3", { id }, title),
      controls?.length ? CF.h("div", { class: "lesson-controls" }, controls) : null,
      content,
    );
  }

  /** A labelled slider; `change(number)`; `show(number)` is the text beside it. `.to(number)` moves it silently. */
  function slider(label, { from = 0, to, value = from, show = String }, change) {
    const output = CF.h("output", {}, show(value));
    const input = CF.h("input", { type: "range", min: from, max: to, step: 1, value, "aria-valuetext": show(value) });
    const element = CF.h("label", { class: "lesson-slider" }, CF.h("span", {}, label), input, output);
    element.to = (number) => {
      input.value = number;
      output.textContent = show(number);
      input.setAttribute("aria-valuetext", show(number));
    };
    element.limit = (last) => (input.max = last);
    input.addEventListener("input", () => {
      element.to(Number(input.value));
      change(Number(input.value));
    });
    return element;
  }

  /**
   * Buttons of which one is pressed; `pairs` are `[value, text]`. `.to(value)` presses one silently; `.refuse(reasons)`
   * switches those off whose value is a key of `reasons`, and the others on.
   */
  function choice(label, pairs, value, change) {
    const buttons = pairs.map(([key, text]) =>
      CF.h("button", { type: "button", "aria-pressed": String(key === value), onclick: () => press(key) }, text),
    );
    const show = (key) =>
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(pairs[i][0] === key)));
    function press(key) {
      show(key);
      change(key);
    }
    const element = CF.h(
      "div",
      { class: "lesson-choice", role: "group", "aria-label": label },
      CF.h("span", {}, label),
      CF.h("span", { class: "segmented" }, buttons),
    );
    element.to = show;
    element.refuse = (reasons) =>
      buttons.forEach((button, i) => {
        button.title = reasons[pairs[i][0]] ?? "";
        button.disabled = pairs[i][0] in reasons;
      });
    return element;
  }

  /** A switch that follows a flag of CF.state. */
  function stateSwitch(kit, label, key) {
    const button = CF.h(
      "button",
      { type: "button", class: "switch", role: "switch", onclick: () => CF.state.set({ [key]: !CF.state.get(key) }) },
      label,
    );
    kit.follow([key], () => button.setAttribute("aria-checked", String(CF.state.get(key))));
    return button;
  }

  /** Previous, play and next over `count()` places; `draw(at)` shows one. */
  class Stepper {
    constructor(kit, label, count, draw) {
      Object.assign(this, { count, draw, at: 0, timer: null });
      const button = (text, name, act) =>
        CF.h("button", { type: "button", "aria-label": `${name}: ${label}`, title: name, onclick: act }, text);
      this.playButton = button("▶", "Play", () => (this.timer ? this.pause() : this.#play()));
      this.slider = slider(label, { to: 0, show: (at) => `${at + 1} of ${this.count()}` }, (at) => this.go(at));
      const buttons = [
        button("‹", "Previous", () => this.#by(-1)),
        this.playButton,
        button("›", "Next", () => this.#by(1)),
      ];
      this.element = CF.h(
        "div",
        { class: "lesson-stepper" },
        CF.h("span", { class: "segmented" }, buttons),
        this.slider,
      );
      kit.onEnd(() => this.pause());
    }

    /** Shows a place; without one the first. */
    go(at = 0) {
      this.at = Math.min(Math.max(at, 0), this.count() - 1);
      this.slider.limit(this.count() - 1);
      this.slider.to(this.at);
      this.draw(this.at);
    }

    #by(step) {
      this.pause();
      this.go(this.at + step);
    }

    #play() {
      if (this.at === this.count() - 1) this.go(0);
      this.playButton.textContent = "❚❚";
      this.timer = setInterval(() => {
        this.go(this.at + 1);
        if (this.at === this.count() - 1) this.pause();
      }, PLAY_MS);
    }

    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.playButton.textContent = "▶";
    }
  }

  /**
   * A small table of cells, one tab stop, arrow keys inside. `text(row, col)`; `rgb(row, col)` or null; `pick(row, col)`
   * is called with the cell that is clicked or has the focus, with `follow` also with that under the pointer.
   * `.paint()` redraws, `.mark(test, name)` sets class `name` on the cells that fulfil the test.
   */
  class Grid {
    constructor(
      label,
      {
        rows,
        cols,
        text,
        rgb = () => null,
        pick = null,
        follow = false,
        rowHead = String,
        colHead = String,
        corner = "",
      },
    ) {
      Object.assign(this, { rows, cols, text, rgb, pick, follow });
      this.cells = Array.from({ length: rows }, (_, row) =>
        Array.from({ length: cols }, (_, col) => this.#cell(row, col)),
      );
      const head = CF.h(
        "tr",
        {},
        CF.h("th", { class: "corner" }, corner),
        Array.from({ length: cols }, (_, col) => CF.h("th", { scope: "col" }, colHead(col))),
      );
      const body = this.cells.map((cells, row) => CF.h("tr", {}, CF.h("th", { scope: "row" }, rowHead(row)), cells));
      this.table = CF.h(
        "table",
        { class: "lesson-grid", role: pick ? "grid" : null, "aria-label": label },
        CF.h("thead", {}, head),
        CF.h("tbody", {}, body),
      );
      this.element = CF.h("div", { class: "lesson-scroll" }, this.table);
      if (pick) this.#listen();
      this.paint();
    }

    #cell(row, col) {
      return CF.h("td", {
        role: this.pick ? "gridcell" : null,
        tabindex: this.pick ? (row || col ? -1 : 0) : null,
        dataset: { row, col },
      });
    }

    #listen() {
      const told = ({ target }) => {
        const cell = target.closest?.("td");
        if (cell) this.pick(Number(cell.dataset.row), Number(cell.dataset.col));
      };
      if (this.follow) this.table.addEventListener("pointerover", told);
      this.table.addEventListener("click", told);
      this.table.addEventListener("focusin", told);
      this.table.addEventListener("keydown", (event) => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        const cell = event.target.closest("td");
        if (!move || !cell) return;
        event.preventDefault();
        this.focus(Number(cell.dataset.row) + move[0], Number(cell.dataset.col) + move[1]);
      });
    }

    focus(row, col) {
      const cell = this.cells[row]?.[col];
      if (!cell) return;
      this.table.querySelectorAll("td[tabindex='0']").forEach((other) => (other.tabIndex = -1));
      cell.tabIndex = 0;
      cell.focus();
    }

    paint() {
      this.#each((cell, row, col) => {
        const rgb = this.rgb(row, col);
        cell.textContent = this.text(row, col);
        cell.style.background = rgb ? CF.palette.css(rgb) : "";
        cell.style.color = rgb ? CF.palette.ink(rgb) : "";
      });
    }

    mark(test, name = "marked") {
      this.#each((cell, row, col) => cell.classList.toggle(name, Boolean(test(row, col))));
    }

    #each(visit) {
      this.cells.forEach((cells, row) => cells.forEach((cell, col) => visit(cell, row, col)));
    }
  }

  /** Source lines as Python has them; `.to(...indices)` marks these lines and brings them into sight. */
  function source({ name, file, first, lines }) {
    const items = lines.map((line, i) =>
      CF.h("div", { class: "line" }, CF.h("span", { class: "number", "aria-hidden": "true" }, first + i), line || " "),
    );
    const code = CF.h("div", { class: "code", tabindex: 0, role: "group", "aria-label": `Source of ${name}` }, items);
    const element = CF.h(
      "figure",
      { class: "lesson-source" },
      CF.h("figcaption", {}, CF.h("code", {}, name), ` in ${file}`),
      code,
    );
    element.to = (...indices) => {
      items.forEach((item, i) => item.classList.toggle("current", indices.includes(i)));
      const middle = items[Math.round((Math.min(...indices) + Math.max(...indices)) / 2)];
      if (middle) code.scrollTop = Math.max(0, middle.offsetTop - code.clientHeight / 2);
    };
    return element;
  }

  /** Questions with their answers folded away. */
  const checks = (...pairs) =>
    CF.h(
      "section",
      { class: "lesson-checks", "aria-label": "Check questions" },
      CF.h("h3", {}, "Check yourself"),
      CF.h(
        "ol",
        {},
        pairs.map(([asked, answer]) =>
          CF.h("li", {}, CF.h("details", {}, CF.h("summary", {}, inline(asked)), CF.h("p", {}, inline(answer)))),
        ),
      ),
    );

  /** The helpers of one lesson: they have the page's data, and `end` releases what they started. */
  class Kit {
    #later = [];
    #ends = [];

    constructor(data) {
      this.page = data;
      this.data = data.lessons;
    }

    /** The scene of the lessons' row of a kernel family, "sm80" or "sm90". */
    scene(family) {
      return CF.scene.of(this.data?.scenes[family]);
    }

    /** A host element in which a CF.Panel appears; `ready(panel)` is called with it. */
    panel(family, id, options = {}, ready = null) {
      const host = CF.h("div", { class: "panel-row" });
      this.#later.push(() => {
        const panel = new CF.Panel(host, { scene: this.scene(family), id, height: 330, ...options });
        this.onEnd(() => panel.destroy());
        ready?.(panel);
      });
      return host;
    }

    /** Calls `draw` when the lesson is mounted, and whenever one of the keys of CF.state changes. */
    follow(keys, draw) {
      this.#later.push(() => {
        this.onEnd(CF.state.on(keys, draw));
        draw();
      });
    }

    /** Calls `act` when the lesson is mounted. */
    then(act) {
      this.#later.push(act);
    }

    onEnd(act) {
      this.#ends.push(act);
    }

    start() {
      for (const act of this.#later) act();
    }

    end() {
      for (const act of this.#ends) act();
    }

    /** "See it in the kernel": a link to the Kernel view of a row, here or on the row's own page, and the source. */
    seeInKernel(family, where, text, code) {
      const href = this.#address(family, where);
      const words = href ? CF.h("a", { href }, text) : text;
      return CF.h(
        "p",
        { class: "lesson-kernel" },
        "See it in the kernel: ",
        words,
        ". ",
        code ? ["Source: ", CF.h("code", {}, code), "."] : null,
      );
    }

    /** A link that opens a layout text in the playground, here or on its own page; plain text without one. */
    playground(text) {
      const hash = CF.state.link({ ...CF.lessons.NOTHING, view: "playground", scene: this.page.scene, layout: text });
      const here = this.page.views.includes("playground");
      const href = here ? hash : this.page.gallery ? `playground.html${hash}` : null;
      return href ? CF.h("a", { href }, CF.h("code", {}, text)) : CF.h("code", {}, text);
    }

    #address(family, where) {
      const id = this.data.scenes[family];
      const hash = CF.state.link({ ...CF.lessons.NOTHING, view: "kernel", scene: id, ...where });
      if (this.page.views.includes("kernel") && CF.scene.of(id)) return hash;
      const entry = this.page.gallery?.find((row) => row.id === id);
      return entry ? entry.file + hash : null;
    }
  }

  CF.lessons = {
    /** Adds a lesson at the end of the path. */
    add: (lesson) => lessons.push(lesson),
    /** All lessons, in order. */
    all: () => [...lessons],
    /** State of a link that selects nothing. */
    NOTHING: {
      panel: null,
      hover: null,
      pin: null,
      thread: null,
      warp: null,
      warpgroup: null,
      step: null,
      instruction: null,
      stage: 0,
      swizzle: true,
      color: null,
      lesson: null,
    },
    Kit,
    Stepper,
    Grid,
    inline,
    prose,
    figure,
    slider,
    choice,
    stateSwitch,
    source,
    checks,
  };
})();
