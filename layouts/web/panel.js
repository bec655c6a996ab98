/* CF.Panel: one tile or fragment on a canvas, with colour mode, stage, zoom, cursor and keyboard. Every view uses it. */
(() => {
  "use strict";

  const { LEFT, TOP } = CF.draw;
  const LADDER = [2, 3, 4, 6, 8, 12, 16, 22, 30, 40, 56]; // cell sizes in pixels
  const LARGEST_FIT = 30;
  const TALLEST = 440;
  const SCROLLBAR = 14;
  const PAGE = 8; // cells that Page Up and Page Down move by: the height of a core matrix
  const COLOURED_BY = ["color", "theme"]; // and what the colouring itself says it follows
  const MARKED_BY = ["thread", "warp", "warpgroup", "step", "instruction", "theme"];
  const STATE = ["hover", "pin", "stage", "swizzle", "color", ...MARKED_BY];

  CF.state.define("source"); // the panel in which the cursor is

  class Panel {
    /**
     * Draws part `id` of `scene` (a CF.scene Scene) into `container` and follows CF.state from then on.
     * `color` sets a colour mode at the start (null: the state's, else the part's default); `colouring` is a custom
     * colouring (see CF.coloring.of) and `part` a custom part instead of `id`; `onHover(row, col)` is called with the
     * cursor's cell (null, null: left); `compact` omits title and controls; `height` limits the grid's height
     * (pixels); with `live: false` it does not follow hover, selection and step.
     */
    constructor(container, options) {
      const {
        scene,
        id,
        part = scene.part(id),
        color = null,
        compact = false,
        height = TALLEST,
        live = true,
      } = options;
      if (!part) throw new Error(`the scene ${scene.data.id} has no tile or fragment "${id}"`);
      Object.assign(this, { scene, part, compact, live, tallest: height, usual: height, color });
      this.onHover = options.onHover ?? null;
      this.ownColouring = options.colouring ?? null;
      this.zoom = null;
      this.at = null;
      this.frame = { part };
      this.stale = { colours: true, marks: true };
      this.seen = false;
      this.redraw = CF.perFrame(() => this.#draw());
      this.#build(container);
      this.#watch();
    }

    #build(container) {
      this.canvas = CF.h("canvas", { "aria-hidden": "true" });
      this.sizer = CF.h("div", { class: "panel-sizer" }, this.canvas);
      this.view = CF.h(
        "div",
        { class: "panel-view", tabindex: 0, role: "application", "aria-label": CF.panelHead.label(this) },
        this.sizer,
      );
      this.legend = CF.h("div", { class: "panel-legend" });
      this.status = CF.h("span", { class: "panel-status" });
      this.element = CF.h(
        "section",
        {
          class: this.compact ? "panel compact" : "panel",
          "aria-label": this.part.id,
          dataset: { panel: this.part.id },
        },
        this.compact ? null : CF.panelHead.header(this),
        this.view,
        this.compact ? null : CF.h("div", { class: "panel-foot" }, this.legend, this.status),
      );
      this.context = this.canvas.getContext("2d");
      this.#listen();
      container.append(this.element);
    }

    #listen() {
      const { view } = this;
      view.addEventListener("scroll", () => this.redraw());
      view.addEventListener("pointermove", (event) => event.pointerType !== "touch" && this.#hover(this.hit(event)));
      view.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.#hover(null));
      view.addEventListener("click", (event) => {
        const at = this.hit(event);
        if (!at) return;
        this.#hover(at);
        this.pin();
        if (event.pointerType === "touch") this.#hover(null);
      });
      view.addEventListener("keydown", (event) => this.#key(event));
      view.addEventListener("focus", () => this.live && !this.compact && CF.state.set({ panel: this.part.id }));
      view.addEventListener("blur", () => CF.state.get("source") === this.part.id && this.#hover(null));
    }

    #watch() {
      this.stop = CF.state.on(STATE, (changed) => {
        const coloured = [...COLOURED_BY, ...(this.frame.colouring?.follows ?? [])];
        if (coloured.some((key) => changed.has(key))) this.stale.colours = true;
        if (changed.has("stage") && this.stageSelect) this.stageSelect.value = String(this.stage);
        if (MARKED_BY.some((key) => changed.has(key))) this.stale.marks = true;
        this.redraw();
      });
      // Unseen panels are measured too: the page must not shift when they come into view.
      this.resized = new ResizeObserver(() => {
        this.#measure();
        this.redraw();
      });
      this.resized.observe(this.element);
      this.visible = new IntersectionObserver(
        ([entry]) => {
          this.seen = entry.isIntersecting;
          if (this.seen) this.redraw();
        },
        { rootMargin: "200px" },
      );
      this.visible.observe(this.element);
      this.#measure();
    }

    /** Redraws, colours and marks included. */
    update() {
      this.stale = { colours: true, marks: true };
      this.redraw();
    }

    /** Removes the panel, its listeners and its element. */
    destroy() {
      this.stop();
      this.resized.disconnect();
      this.visible.disconnect();
      this.element.remove();
    }

    /** Fixes the colour mode; null follows the state's again. */
    setColor(mode) {
      this.color = mode;
      this.update();
    }

    /** Replaces the custom colouring. */
    setColouring(colouring) {
      this.ownColouring = colouring;
      this.update();
    }

    /** Limits the grid's height, in pixels; null: as at first. */
    limit(height) {
      this.tallest = height ?? this.usual;
      this.#measure();
      this.redraw();
    }

    /** The stage that the panel shows. */
    get stage() {
      return CF.state.get("stage") % this.part.stages;
    }

    /** The cell size in pixels at which the whole grid is visible. */
    fit() {
      const width = this.view.clientWidth - LEFT - 2;
      return Math.max(1, Math.min(width / this.part.cols, (this.tallest - TOP) / this.part.rows, LARGEST_FIT));
    }

    get cell() {
      return this.zoom ?? this.fit();
    }

    setZoom(size) {
      const pinned = this.part.place(CF.state.get("pin"));
      const centre = this.at ?? (pinned.includes(null) ? this.#firstMarked() : pinned) ?? [0, 0];
      this.zoom = size;
      this.#measure();
      this.#reveal(centre);
      this.redraw();
    }

    zoomBy(direction) {
      const sizes =
        direction > 0 ? LADDER.filter((s) => s > this.cell + 0.5) : LADDER.filter((s) => s < this.cell - 0.5);
      const next = direction > 0 ? sizes[0] : sizes.at(-1);
      if (next !== undefined) this.setZoom(next <= this.fit() + 0.5 ? null : next);
    }

    /* Sizes the scrolled area and the canvas, which stays in place while the area scrolls. */
    #measure() {
      const cell = this.cell;
      const [width, height] = [LEFT + this.part.cols * cell + 2, TOP + this.part.rows * cell + 2];
      const scrolls = width > this.view.clientWidth + 1;
      this.view.style.height = `${Math.ceil(Math.min(height, this.tallest) + (scrolls ? SCROLLBAR : 0))}px`;
      this.sizer.style.width = scrolls ? `${width}px` : "100%";
      this.sizer.style.height = `${height}px`;
      const ratio = window.devicePixelRatio || 1;
      const size = [this.view.clientWidth, this.view.clientHeight];
      if (this.canvas.width !== Math.round(size[0] * ratio) || this.canvas.height !== Math.round(size[1] * ratio)) {
        [this.canvas.width, this.canvas.height] = size.map((pixels) => Math.round(pixels * ratio));
        [this.canvas.style.width, this.canvas.style.height] = size.map((pixels) => `${pixels}px`);
      }
    }

    /** The `[row, col]` under a pointer event, or null. */
    hit(event) {
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left - LEFT, event.clientY - box.top - TOP];
      if (x < 0 || y < 0) return null;
      const col = Math.floor((x + this.view.scrollLeft) / this.cell);
      const row = Math.floor((y + this.view.scrollTop) / this.cell);
      return row < this.part.rows && col < this.part.cols ? [row, col] : null;
    }

    #hover(at) {
      this.at = at ?? this.at;
      this.onHover?.(at ? at[0] : null, at ? at[1] : null);
      if (!this.live) return;
      if (at) CF.state.set({ hover: this.part.element(...at), source: this.part.id });
      else CF.state.set({ hover: null });
    }

    /** Pins the element under the cursor, or unpins it if it is the pinned one. */
    pin() {
      if (!this.live) return;
      const [pinned, element] = [CF.state.get("pin"), CF.state.get("hover")];
      CF.state.set({ pin: JSON.stringify(pinned) === JSON.stringify(element) ? null : element });
    }

    #key(event) {
      const moves = {
        ArrowUp: [-1, 0],
        ArrowDown: [1, 0],
        ArrowLeft: [0, -1],
        ArrowRight: [0, 1],
        PageUp: [-PAGE, 0],
        PageDown: [PAGE, 0],
        Home: [0, -Infinity],
        End: [0, Infinity],
      };
      const acts = {
        Enter: () => this.pin(),
        " ": () => this.pin(),
        "+": () => this.zoomBy(1),
        "=": () => this.zoomBy(1),
        "-": () => this.zoomBy(-1),
        0: () => this.setZoom(null),
      };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (moves[event.key]) this.#move(moves[event.key]);
      else if (acts[event.key]) acts[event.key]();
      else return;
      event.preventDefault();
    }

    #move([down, right]) {
      const pinned = this.part.place(CF.state.get("hover") ?? CF.state.get("pin")).map((index) => index ?? 0);
      const from = CF.state.get("hover") || !this.at ? pinned : this.at;
      const within = (index, extent) => Math.min(Math.max(index, 0), extent - 1);
      const to = [within(from[0] + down, this.part.rows), within(from[1] + right, this.part.cols)];
      this.#hover(to);
      this.#reveal(to);
    }

    /* The first cell that the step reads or writes, or null. */
    #firstMarked() {
      const [at = null] = this.frame.flags ? this.frame.marked : [];
      return at === null ? null : [at % this.part.rows, Math.floor(at / this.part.rows)];
    }

    /* Scrolls inside the panel so that a cell is in sight. */
    #reveal([row, col]) {
      const { view, cell } = this;
      const into = (scroll, at, room) => (at < scroll ? at : at + cell > scroll + room ? at + cell - room : scroll);
      view.scrollLeft = into(view.scrollLeft, col * cell, view.clientWidth - LEFT - 2);
      view.scrollTop = into(view.scrollTop, row * cell, view.clientHeight - TOP - 2);
    }

    #draw() {
      if (!this.seen || !this.element.isConnected) return;
      this.#measure();
      if (this.stale.colours) this.#recolour();
      if (this.stale.marks) this.#remark();
      const { view, frame } = this;
      const [hover, pin] = this.live ? [CF.state.get("hover"), CF.state.get("pin")] : [null, null];
      const placed = (element) => {
        const place = element && this.part.place(element);
        return place && place.some((index) => index !== null) ? place : null;
      };
      frame.place = placed(hover);
      frame.pin = placed(pin);
      const area = { left: view.scrollLeft, top: view.scrollTop, width: view.clientWidth, height: view.clientHeight };
      CF.draw.draw(this.context, frame, this.cell, area, window.devicePixelRatio || 1);
    }

    #recolour() {
      const [step, instruction, swizzled] = ["step", "instruction", "swizzle"].map(CF.state.get);
      const options = { step, instruction, swizzled, stage: this.stage };
      const wanted = this.color ?? CF.state.get("color");
      const colouring = this.ownColouring ?? CF.coloring.of(this.scene, this.part, wanted, options);
      colouring.boxes ??= CF.draw.groupBoxes(this.part, colouring);
      this.frame.colouring = colouring;
      this.frame.base = CF.draw.baseImage(this.part, colouring);
      this.stale.colours = false;
      this.element.dataset.color = colouring.mode ?? "own";
      this.legend.replaceChildren(...CF.panelHead.legend(colouring));
    }

    #remark() {
      const { frame, part } = this;
      const step = this.live ? this.scene?.step(CF.state.get("step")) : null;
      const selection = {
        step,
        instruction: CF.state.get("instruction"),
        range: this.live ? CF.scene.selected() : null,
      };
      const flags = this.scene && part.id ? CF.marks.flags(this.scene, part, selection) : null;
      frame.flags = flags;
      this.stale.marks = false;
      this.status.replaceChildren();
      this.element.classList.remove("idle");
      if (!flags) return;
      const total = CF.marks.count(flags);
      const line = (flag) => CF.marks.outline(flags, part.rows, part.cols, flag);
      frame.marked = CF.marks.touched(flags);
      frame.dim = CF.draw.dimImage(part, flags);
      frame.islands = CF.draw.framed(part, flags);
      frame.paths = { read: line(CF.marks.READ), write: line(CF.marks.WRITE) };
      if (this.zoom !== null && this.#firstMarked()) this.#reveal(this.#firstMarked());
      const badges = CF.panelHead.badges(total);
      this.status.append(...(badges.length ? badges : ["not touched"]));
      this.element.classList.toggle("idle", !badges.length);
    }
  }

  CF.Panel = Panel;
})();
