/* Parallel coordinates: a line for each candidate that was timed, from its speed through its traits. Drag along an
   axis, or press its values, to keep only those candidates; press a line to pick its candidate. */
(() => {
  const { h, words } = R;
  const HEAD = 48; // pixels above the axes, for their names
  const FOOT = 10;
  const SIDE = 46; // on both sides, for labels
  const HEIGHT = 430;
  const SPACING = 82; // at least, between axes
  const REACH = 7; // pixels from a line or axis that still mean it
  const BAND = 0.72; // of a value's part of its axis that its lines fan out over, the fastest on top

  /** The axes beside speed: every trait with several values among those with a speed, the most telling first. */
  function axesOf(space, speed, reference) {
    return R.model.effects(space, speed, reference).map(({ trait, values }) => ({
      trait,
      values: values.map((entry) => entry.value),
      counts: values.map((entry) => entry.count),
    }));
  }

  /** The slowest share that the speed axis shows: nine of ten candidates are above it; the others lie on its end. */
  function slowest(shares) {
    const sorted = [...shares].sort((a, b) => a - b);
    return Math.min(0.95, Math.floor(R.model.quantile(sorted, 0.1) * 20) / 20);
  }

  class Plot {
    constructor(data) {
      this.data = data;
      this.canvas = h("canvas", { class: "lines" });
      this.labels = h("div", { class: "axis-labels" });
      this.brush = h("i", { class: "brush", hidden: true });
      this.tip = h("div", { class: "tip", hidden: true });
      this.sizer = h("div", { class: "parallel-sizer" }, this.canvas, this.labels, this.brush, this.tip);
      this.scroll = h("div", { class: "parallel-scroll" }, this.sizer);
      this.hover = null;
      this.paint = R.perFrame(() => this.draw());
      this.listen();
    }

    listen() {
      R.onWidth(this.scroll, () => this.layout());
      R.state.on(R.WHERE, () => this.layout());
      R.state.on(["filter", "least", "pick"], () => this.refresh());
      R.theme.on(this.paint);
      this.canvas.addEventListener("pointermove", (event) => this.moved(event));
      this.canvas.addEventListener("pointerleave", () => this.point(null));
      this.canvas.addEventListener("pointerdown", (event) => this.pressed(event));
      this.canvas.addEventListener("click", (event) => this.clicked(event));
    }

    /** Places axes and labels for the selection and the width there is. */
    layout() {
      const space = R.state.space();
      const speed = R.state.speed();
      this.who = [...speed.share.keys()].filter((who) => !Number.isNaN(speed.share[who]));
      this.scroll.hidden = !this.who.length;
      if (!this.who.length) return;
      this.axes = axesOf(space, speed, R.state.reference());
      this.low = slowest(this.who.map((who) => speed.share[who]));
      const available = this.scroll.clientWidth;
      this.width = Math.max(available, 2 * SIDE + this.axes.length * SPACING);
      this.step = (this.width - 2 * SIDE) / Math.max(1, this.axes.length);
      this.sizer.style.width = `${this.width}px`;
      this.sizer.style.height = `${HEIGHT}px`;
      this.ranks();
      this.labels.replaceChildren(this.speedLabels(), ...this.axes.map((axis, place) => this.axisLabels(axis, place)));
      this.refresh();
    }

    x(place) {
      return SIDE + place * this.step; // the speed axis is place 0
    }

    speedY(share) {
      const at = (Math.max(share, this.low) - this.low) / (1 - this.low);
      return HEAD + (1 - at) * (HEIGHT - HEAD - FOOT);
    }

    /** The middle of a value's part of its axis, the largest value on top. */
    valueY(axis, index) {
      const part = (HEIGHT - HEAD - FOOT) / axis.values.length;
      return HEIGHT - FOOT - (index + 0.5) * part;
    }

    /** Where each line crosses each axis: lines of one value fan out by speed, so that they do not hide each other. */
    ranks() {
      const { share } = R.state.speed();
      const order = [...this.who].sort((a, b) => share[a] - share[b]);
      this.lines = new Map(order.map((who) => [who, [this.speedY(share[who])]]));
      this.axes.forEach((axis) => {
        const part = ((HEIGHT - HEAD - FOOT) / axis.values.length) * BAND;
        const seen = axis.values.map(() => 0);
        for (const who of order) {
          const index = axis.trait.column[who];
          const at = axis.counts[index] > 1 ? seen[index]++ / (axis.counts[index] - 1) - 0.5 : 0;
          this.lines.get(who).push(this.valueY(axis, index) - at * part);
        }
      });
      this.order = order;
    }

    speedLabels() {
      const ticks = R.ticks(this.low, 1, 8).filter((share) => share > this.low - 1e-9);
      return h(
        "div",
        { class: "axis speed", style: `left: ${this.x(0)}px` },
        h("b", null, R.state.speed().estimated ? "analytic score" : "speed"),
        ticks.map((share) =>
          h(
            "span",
            { style: `top: ${this.speedY(share)}px` },
            `${share - 1e-9 <= this.low ? "≤" : ""}${Math.round(share * 100)} %`,
          ),
        ),
      );
    }

    axisLabels(axis, place) {
      const name = axis.trait.name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);
      const buttons = axis.values.map((value, index) =>
        h(
          "button",
          {
            type: "button",
            style: `top: ${this.valueY(axis, index)}px`,
            "aria-label": `${axis.trait.name} ${words.value(value)}, ${axis.counts[index]} candidates`,
            onclick: () => R.state.toggle(axis.trait.name, value),
          },
          words.value(value),
        ),
      );
      axis.buttons = buttons;
      const head = h("b", { title: axis.trait.doc }, name);
      return h(
        "div",
        { class: "axis", role: "group", "aria-label": axis.trait.name, style: `left: ${this.x(place + 1)}px` },
        head,
        buttons,
      );
    }

    refresh() {
      if (!this.who?.length) return;
      for (const axis of this.axes) {
        const chosen = R.state.now.filter[axis.trait.name];
        axis.buttons.forEach((button, index) => {
          button.setAttribute("aria-pressed", Boolean(chosen?.includes(String(axis.values[index]))));
          button.classList.toggle("off", Boolean(chosen) && !chosen.includes(String(axis.values[index])));
        });
      }
      this.paint();
    }

    draw() {
      if (!this.who?.length) return;
      const ratio = devicePixelRatio || 1;
      Object.assign(this.canvas, { width: this.width * ratio, height: HEIGHT * ratio });
      Object.assign(this.canvas.style, { width: `${this.width}px`, height: `${HEIGHT}px` });
      const pen = this.canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const { share } = R.state.speed();
      const slot = R.state.slot();
      const shown = this.order.filter((who) => R.state.shown(who));
      const through = new Set(shown);
      const crowd = Math.min(1, 0.25 + 40 / (shown.length + 40));
      this.drawAxes(pen);
      pen.lineJoin = "round";
      const faint = R.theme.color("line-faint");
      for (const who of this.order)
        if (!through.has(who)) this.stroke(pen, who, { color: faint, width: 0.8, alpha: 0.5 });
      const [slow, fast] = [R.theme.color("speed-slow"), R.theme.color("speed-fast")];
      for (const who of shown) {
        const at = Math.max(0, (share[who] - this.low) / (1 - this.low));
        this.stroke(pen, who, {
          color: mixed(slow, fast, at ** 1.5),
          width: 0.9 + 0.7 * at,
          alpha: crowd * (0.35 + 0.65 * at),
        });
      }
      const special = [
        [slot?.default, { color: R.theme.color("default"), width: 2.4, dash: [7, 4] }],
        [slot?.winner, { color: R.theme.color("winner"), width: 3 }],
        [this.hover, { color: R.theme.color("ink"), width: 2 }],
        [R.state.picked(), { color: R.theme.color("picked"), width: 2.6, dash: [2, 3] }],
      ];
      for (const [who, style] of special) if (this.lines.has(who)) this.stroke(pen, who, style);
    }

    drawAxes(pen) {
      pen.strokeStyle = R.theme.color("axis");
      pen.lineWidth = 1;
      for (let place = 0; place <= this.axes.length; place++) {
        pen.beginPath();
        pen.moveTo(this.x(place), HEAD);
        pen.lineTo(this.x(place), HEIGHT - FOOT);
        pen.stroke();
      }
    }

    stroke(pen, who, { color, width, alpha = 1, dash = [] }) {
      pen.globalAlpha = alpha;
      pen.strokeStyle = color;
      pen.lineWidth = width;
      pen.setLineDash(dash);
      pen.beginPath();
      const bend = this.step * 0.35;
      this.lines.get(who).forEach((y, place, all) => {
        if (!place) pen.moveTo(this.x(0), y);
        else pen.bezierCurveTo(this.x(place - 1) + bend, all[place - 1], this.x(place) - bend, y, this.x(place), y);
      });
      pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
    }

    /** The candidate whose line passes closest to a point, null where none is near. */
    at(x, y) {
      const place = Math.min(this.axes.length - 1, Math.max(0, Math.floor((x - SIDE) / this.step)));
      const t = Math.min(1, Math.max(0, (x - this.x(place)) / this.step));
      const ease = curve(t);
      let best = null;
      let closest = REACH;
      for (const who of this.order) {
        if (!R.state.shown(who)) continue;
        const [from, to] = this.lines.get(who).slice(place, place + 2);
        const distance = Math.abs(from + (to - from) * ease - y);
        if (distance <= closest) [best, closest] = [who, distance];
      }
      return best;
    }

    moved(event) {
      if (this.dragging || event.pointerType === "touch") return;
      this.canvas.style.cursor = this.axisAt(event.offsetX) === null ? "" : "row-resize";
      this.point(this.at(event.offsetX, event.offsetY), event);
    }

    point(who, event) {
      if (this.hover === who && who === null) return;
      this.hover = who;
      this.tip.hidden = who === null;
      if (who !== null) {
        const space = R.state.space();
        this.tip.replaceChildren(
          h("b", null, words.percent(R.state.speed().share[who])),
          ` ${R.model.title(space, who)}`,
        );
        const left = event.offsetX > this.width / 2;
        const side = left ? `right: ${this.width - event.offsetX}px` : `left: ${event.offsetX}px`;
        this.tip.style.cssText = `top: ${event.offsetY + 14}px; ${side}`;
      }
      this.paint();
    }

    axisAt(x) {
      const place = Math.round((x - SIDE) / this.step);
      return Math.abs(this.x(place) - x) <= 2 * REACH && place <= this.axes.length ? place : null;
    }

    /** Starts a brush on the axis under the pointer; fingers scroll, and press the values instead. */
    pressed(event) {
      const place = this.axisAt(event.offsetX);
      if (place === null || event.button || event.pointerType === "touch") return;
      const from = event.offsetY;
      this.dragging = false;
      this.canvas.setPointerCapture(event.pointerId);
      const move = (now) => {
        this.dragging ||= Math.abs(now.offsetY - from) > 4;
        if (!this.dragging) return;
        this.point(null);
        const [top, bottom] = [Math.min(from, now.offsetY), Math.max(from, now.offsetY)];
        this.brush.hidden = false;
        this.brush.style.cssText = `left: ${this.x(place) - 9}px; top: ${top}px; height: ${bottom - top}px`;
      };
      const end = (now) => {
        this.canvas.removeEventListener("pointermove", move);
        this.brush.hidden = true;
        if (this.dragging) this.brushed(place, Math.min(from, now.offsetY), Math.max(from, now.offsetY));
      };
      this.point(null);
      this.canvas.addEventListener("pointermove", move);
      this.canvas.addEventListener("pointerup", end, { once: true });
      this.canvas.addEventListener("pointercancel", end, { once: true });
    }

    brushed(place, top, bottom) {
      if (!place) {
        const least = this.low + (1 - this.low) * (1 - (bottom - HEAD) / (HEIGHT - HEAD - FOOT));
        R.state.set({ least: least <= this.low ? 0 : Math.round(least * 1000) / 10 });
        return;
      }
      const axis = this.axes[place - 1];
      const half = ((HEIGHT - HEAD - FOOT) / axis.values.length) * 0.25;
      const within = (value, index) =>
        this.valueY(axis, index) + half > top && this.valueY(axis, index) - half < bottom;
      R.state.limit(axis.trait.name, axis.values.filter(within));
    }

    clicked(event) {
      if (this.dragging) this.dragging = false;
      else R.state.pick(this.at(event.offsetX, event.offsetY));
    }
  }

  /** Height of a line's curve between two axes, 0 to 1, at a share of the way; its control points lie 0.35 off. */
  function curve(x) {
    let [low, high] = [0, 1];
    for (let round = 0; round < 12; round++) {
      const t = (low + high) / 2;
      const at = 3 * (1 - t) ** 2 * t * 0.35 + 3 * (1 - t) * t ** 2 * 0.65 + t ** 3;
      if (at < x) low = t;
      else high = t;
    }
    return 3 * low ** 2 - 2 * low ** 3;
  }

  function mixed(a, b, t) {
    const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const [from, to] = [parse(a), parse(b)];
    return `rgb(${from.map((part, i) => Math.round(part + (to[i] - part) * t)).join(" ")})`;
  }

  R.parallel = (data) => {
    const plot = new Plot(data);
    const line = (name) => h("span", null, h("i", { class: `line-key ${name}` }), name);
    const [ours, key] = [["winner", "default"].map(line), ["picked", "fast", "slow"].map(line)];
    const hint = h("p", { class: "hint" });
    const panel = h("div", { class: "picked-panel", "aria-live": "polite" });
    const lines = h("div", { class: "key" }, ours, key);
    const draw = () => {
      const { estimated } = R.state.speed();
      lines.hidden = R.state.reference() === null;
      for (const one of ours) one.hidden = Boolean(estimated);
      hint.textContent = lines.hidden
        ? "No candidate of this selection has a speed."
        : (estimated
            ? "Nothing was timed: speed is an estimate, by the analytic score, as a share of the first's. "
            : "Speed is the share of the fastest's. ") +
          "Drag along an axis, or press its values, to keep only those candidates, in the table below too. Among the " +
          "lines of one value the faster lie above the slower.";
      const who = R.state.picked();
      panel.replaceChildren(
        who === null
          ? h("p", { class: "hint" }, "Press a line, or a candidate below, to see all about it here.")
          : R.detail(data, who),
      );
    };
    R.state.on([...R.WHERE, "pick"], draw);
    draw();
    return [hint, lines, plot.scroll, panel];
  };
  R.parallelParts = { curve, slowest, mixed };
})();
