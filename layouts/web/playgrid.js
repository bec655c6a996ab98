/* The playground's drawings: CF.PlayGrid, a model of playmodel.js on a canvas with cursor, keyboard and zoom; bits. */
(() => {
  "use strict";

  const { ink, css, parse, theme } = CF.palette;
  const LEFT = 34;
  const TOP = 20;
  const TALLEST = 512;
  const FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
  const GRID_FROM = 7; // cell size from which cells have borders
  const SMALLEST = 7.5; // and the font size from which they have text
  const DIM = 0.78;

  /* One pixel a cell. */
  function image(rows, cols, rgba) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [cols, rows];
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(cols, rows);
    for (let row = 0, at = 0; row < rows; row++) {
      for (let col = 0; col < cols; col++, at += 4) pixels.data.set(rgba(row, col), at);
    }
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  class PlayGrid {
    /** Draws into `container`; `onCursor(row, col, keyboard)` is told of the cursor, `(null, null)` when it leaves. */
    constructor(container, { label, onCursor = null, tallest = TALLEST }) {
      Object.assign(this, { onCursor, tallest, zoom: 1, at: null, lit: [], model: null, seen: false });
      this.canvas = CF.h("canvas", { "aria-hidden": "true" });
      this.sizer = CF.h("div", { class: "panel-sizer" }, this.canvas);
      const attributes = { class: "panel-view", tabindex: 0, role: "application", "aria-label": label };
      this.view = CF.h("div", attributes, this.sizer);
      this.redraw = CF.perFrame(() => this.#draw());
      this.#listen();
      container.append(this.view);
      this.resized = new ResizeObserver(() => this.redraw());
      this.resized.observe(this.view);
      this.visible = new IntersectionObserver(([entry]) => {
        this.seen = entry.isIntersecting;
        this.redraw();
      }, { rootMargin: "200px" });
      this.visible.observe(this.view);
    }

    /** Frames the cells of these positions of the layout, and brings the first into sight inside the grid. */
    light(positions) {
      if (String(positions) === String(this.lit)) return;
      this.lit = positions;
      this.redraw();
    }

    /** Shows another model; made by `make()` when the grid comes into sight, since evaluating it may take a while. */
    show(make) {
      Object.assign(this, { make, model: null, at: null, lit: [] });
      this.redraw();
    }

    zoomBy(factor) {
      this.zoom = factor === null ? 1 : Math.min(Math.max(this.zoom * factor, 1), 12);
      this.redraw();
    }

    destroy() {
      this.resized.disconnect();
      this.visible.disconnect();
      this.view.remove();
    }

    #listen() {
      const { view } = this;
      view.addEventListener("scroll", () => this.redraw());
      view.addEventListener("pointermove", (event) => event.pointerType !== "touch" && this.#cursor(this.#hit(event)));
      view.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.#cursor(null));
      view.addEventListener("click", (event) => this.#cursor(this.#hit(event)));
      view.addEventListener("blur", () => this.#cursor(null));
      view.addEventListener("keydown", (event) => this.#key(event));
    }

    #key(event) {
      if (!this.model || event.ctrlKey || event.metaKey || event.altKey) return;
      const zooms = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, 0: null };
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const jumps = { Home: [0, -Infinity], End: [0, Infinity], PageUp: [-8, 0], PageDown: [8, 0] };
      const move = moves[event.key] ?? jumps[event.key];
      if (event.key === "Escape") this.#cursor(null);
      else if (event.key in zooms) this.zoomBy(zooms[event.key]);
      else if (move) this.#move(move);
      else return;
      event.preventDefault();
    }

    #move([down, right]) {
      const { rows, cols } = this.model;
      const [row, col] = this.at ?? this.last ?? [-down, -right];
      const within = (index, extent) => Math.min(Math.max(index, 0), extent - 1);
      const to = [within(row + down, rows), within(col + right, cols)];
      this.#cursor(to, true);
      this.#reveal(to);
    }

    #reveal([row, col]) {
      const { view, cell } = this;
      const into = (scroll, at, size, room) => Math.min(Math.max(scroll, at + size - room), at);
      view.scrollLeft = into(view.scrollLeft, col * cell.width, cell.width, view.clientWidth - LEFT - 2);
      view.scrollTop = into(view.scrollTop, row * cell.height, cell.height, view.clientHeight - TOP - 2);
    }

    #cursor(at, keyboard = false) {
      if (!this.model || String(at) === String(this.at)) return;
      this.at = at;
      this.last = at ?? this.last;
      this.marked = null;
      this.onCursor?.(at ? at[0] : null, at ? at[1] : null, keyboard);
      this.redraw();
    }

    #hit(event) {
      if (!this.model) return null;
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left - LEFT, event.clientY - box.top - TOP];
      const col = Math.floor((x + this.view.scrollLeft) / this.cell.width);
      const row = Math.floor((y + this.view.scrollTop) / this.cell.height);
      return x >= 0 && y >= 0 && row < this.model.rows && col < this.model.cols ? [row, col] : null;
    }

    /* Cells as large as their text needs, smaller if the grid would not fit the width; then zoomed. */
    #measure() {
      const { model, view } = this;
      const ratio = window.devicePixelRatio || 1;
      const natural = { width: Math.max(24, model.chars * 7.6 + 8), height: model.lines > 1 ? 30 : 24 };
      const fit = (view.clientWidth - LEFT - 4) / model.cols;
      const width = Math.max(2, Math.min(natural.width, fit));
      const least = Math.min(14, (this.tallest - TOP) / model.rows);
      const height = Math.max(Math.min(natural.height, width * (natural.height / 24)), least, 2);
      const grown = (size, enough) => Math.max(size, Math.min(size * this.zoom, enough));
      this.cell = { width: grown(width, 2 * natural.width), height: grown(height, 1.5 * natural.height) };
      const size = [LEFT + model.cols * this.cell.width + 2, TOP + model.rows * this.cell.height + 2];
      view.style.height = `${Math.ceil(Math.min(size[1], this.tallest)) + (size[0] > view.clientWidth + 1 ? 14 : 0)}px`;
      this.sizer.style.width = this.zoom > 1 || size[0] > view.clientWidth + 1 ? `${size[0]}px` : "100%";
      this.sizer.style.height = `${size[1]}px`;
      const shown = [view.clientWidth, view.clientHeight];
      const pixels = shown.map((length) => Math.round(length * ratio));
      if (this.canvas.width !== pixels[0]) this.canvas.width = pixels[0];
      if (this.canvas.height !== pixels[1]) this.canvas.height = pixels[1];
      [this.canvas.style.width, this.canvas.style.height] = shown.map((length) => `${length}px`);
      return ratio;
    }

    #prepare() {
      if (this.model || !this.make) return;
      this.model = this.make();
      const none = [0, 0, 0, 0];
      const { rows, cols } = this.model;
      this.base = image(rows, cols, (row, col) => {
        const rgb = this.model.rgb(row, col);
        return rgb ? [...rgb, 255] : none;
      });
      this.marked = null;
    }

    /* Covers what does not belong to the cursor's group. */
    #overlay() {
      if (this.marked || !this.at) return;
      const group = this.model.group(...this.at);
      if (group === null) return;
      const [veil, none] = [[...parse(theme("surface")), 255 * DIM], [0, 0, 0, 0]];
      const same = (row, col) => this.model.group(row, col) === group;
      this.marked = image(this.model.rows, this.model.cols, (row, col) => (same(row, col) ? none : veil));
    }

    #draw() {
      if (!this.seen || !this.view.isConnected) return;
      this.#prepare();
      if (!this.model) return;
      const ratio = this.#measure();
      this.#overlay();
      const { view, cell, model } = this;
      const lit = this.lit.map((position) => model.cellOf?.(position)).filter(Boolean);
      if (lit.length && !this.at) this.#reveal(lit[0]);
      const context = this.canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, view.clientWidth, view.clientHeight);
      const g = { x0: LEFT - view.scrollLeft, y0: TOP - view.scrollTop, width: cell.width, height: cell.height };
      const range = (scroll, size, room, count) => {
        return [Math.floor(scroll / size), Math.min(count - 1, Math.floor((scroll + room) / size))];
      };
      g.rows = range(view.scrollTop, cell.height, view.clientHeight - TOP, model.rows);
      g.cols = range(view.scrollLeft, cell.width, view.clientWidth - LEFT, model.cols);
      context.save();
      context.beginPath();
      context.rect(LEFT, TOP, view.clientWidth - LEFT, view.clientHeight - TOP);
      context.clip();
      context.imageSmoothingEnabled = false;
      const area = [g.x0, g.y0, model.cols * g.width, model.rows * g.height];
      context.drawImage(this.base, ...area);
      if (this.at && this.marked) context.drawImage(this.marked, ...area);
      lines(context, g, model);
      texts(context, g, model, this.at ? model.group(...this.at) : null);
      for (const place of lit) frame(context, g, place);
      if (this.at) frame(context, g, this.at);
      context.restore();
      ticks(context, g, model, this.at);
    }
  }

  function lines(context, g, model) {
    const draw = (every, alpha) => {
      context.strokeStyle = css(parse(theme("ink")), alpha);
      context.beginPath();
      const [bottom, right] = [g.y0 + (g.rows[1] + 1) * g.height, g.x0 + (g.cols[1] + 1) * g.width];
      for (let row = g.rows[0]; every[0] && row <= g.rows[1] + 1; row++) {
        if (row % every[0]) continue;
        const y = Math.round(g.y0 + row * g.height) + 0.5;
        context.moveTo(g.x0 + g.cols[0] * g.width, y);
        context.lineTo(right, y);
      }
      for (let col = g.cols[0]; every[1] && col <= g.cols[1] + 1; col++) {
        if (col % every[1]) continue;
        const x = Math.round(g.x0 + col * g.width) + 0.5;
        context.moveTo(x, g.y0 + g.rows[0] * g.height);
        context.lineTo(x, bottom);
      }
      context.stroke();
    };
    context.lineWidth = 1;
    if (Math.min(g.width, g.height) >= GRID_FROM) draw([1, 1], 0.16);
    const room = (every, size) => (every * size >= GRID_FROM ? every : 0);
    context.lineWidth = 1.5;
    draw([room(model.rowPeriod, g.height), room(model.colPeriod, g.width)], 0.75);
  }

  function texts(context, g, model, group) {
    const two = model.lines > 1 && g.height >= 19;
    const size = Math.min(13, (g.width - 3) / (model.chars * 0.61), g.height * (two ? 0.42 : 0.6));
    if (size < SMALLEST) return;
    context.font = `${size}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = g.rows[0]; row <= g.rows[1]; row++) {
      for (let col = g.cols[0]; col <= g.cols[1]; col++) {
        const rgb = model.rgb(row, col);
        if (!rgb) continue;
        const faded = group !== null && model.group(row, col) !== group;
        context.fillStyle = faded ? theme("muted") : ink(rgb);
        const [x, y] = [g.x0 + (col + 0.5) * g.width, g.y0 + (row + 0.5) * g.height + 0.5];
        context.fillText(model.text(row, col), x, two ? y - size * 0.56 : y);
        if (two) context.fillText(model.sub(row, col), x, y + size * 0.56);
      }
    }
  }

  function frame(context, g, [row, col]) {
    context.beginPath();
    context.rect(g.x0 + col * g.width, g.y0 + row * g.height, Math.max(g.width, 4), Math.max(g.height, 4));
    for (const [width, colour] of [[4.5, "surface"], [2, "cursor"]]) {
      context.lineWidth = width;
      context.strokeStyle = theme(colour);
      context.stroke();
    }
  }

  function ticks(context, g, model, at) {
    context.font = `10px ${FONT}`;
    context.textBaseline = "middle";
    const spacing = (size, room) => [1, 2, 4, 8, 16, 32, 64, 128].find((every) => every * size >= room) ?? 256;
    const name = (text, x, y, here) => {
      context.fillStyle = theme(here ? "cursor" : "muted");
      context.fillText(text, x, y);
    };
    /* Indices at regular distances, and the cursor's own with room around it. */
    const shown = (index, every, size, room, here = -Infinity) =>
      index === here || (index % every === 0 && Math.abs(index - here) * size > room);
    context.textAlign = "center";
    const everyCol = spacing(g.width, 24);
    for (let col = g.cols[0]; col <= g.cols[1]; col++) {
      const x = g.x0 + (col + 0.5) * g.width;
      if (x > LEFT - 4 && shown(col, everyCol, g.width, 22, at?.[1])) name(col, x, TOP - 8, col === at?.[1]);
    }
    context.textAlign = "right";
    const everyRow = spacing(g.height, 13);
    for (let row = g.rows[0]; row <= g.rows[1]; row++) {
      const y = g.y0 + (row + 0.5) * g.height;
      const text = model.rowName(row);
      if (y > TOP - 4 && shown(row, everyRow, g.height, 11, at?.[0])) name(text, LEFT - 5, y, row === at?.[0]);
    }
  }

  CF.PlayGrid = PlayGrid;
})();

/* CF.swizzleBits: which bits of an index a swizzle XORs onto which; with an element, its own bits, too. */
(() => {
  "use strict";

  const A = CF.algebra;
  const WIDTH = 26; // of a bit
  const ARC = 46; // height of the arcs
  const ROW = 24;
  const LABEL = 92;
  const WORD = 2; // address bits inside a bank's 4 bytes
  const BANK = 5; // address bits of the bank

  const range = (from, count) => Array.from({ length: count }, (_, i) => from + i);

  /* How many bits the picture needs: those of the swizzle and of the greatest index, and up to the bank's. */
  function width({ swizzle: [bits, base, shift], layout, offset }, shiftOfBytes) {
    const greatest = A.cosize(layout) - 1 + offset;
    const length = greatest > 0 ? Math.floor(Math.log2(greatest)) + 1 : 1;
    return Math.min(31, Math.max(base + Math.abs(shift) + bits, length, WORD + BANK - shiftOfBytes));
  }

  /**
   * An SVG of the composed layout's swizzle for elements of `bytes` bytes: the source bits, arcs to the bits that they
   * are XORed onto, and which bits of the index make the bank. With an `index` also its bits before and after.
   */
  CF.swizzleBits = (value, bytes, index) => {
    const [bits, base, shift] = value.swizzle;
    const scale = Math.log2(bytes);
    const count = width(value, scale);
    const target = range(shift < 0 ? base - shift : base, bits);
    const source = range(shift < 0 ? base : base + shift, bits);
    const x = (bit) => LABEL + (count - 1 - bit) * WIDTH;
    const rows = index === null ? [] : valueRows(value, index, source, target);
    const height = ARC + ROW * (2 + rows.length) + 6;
    const svg = CF.svg("svg", { class: "play-bits-picture", width: LABEL + count * WIDTH + 4, height, role: "img" });
    svg.setAttribute("aria-label", inWords(value, source, target, index));
    const kind = (bit) => (source.includes(bit) ? "source" : target.includes(bit) ? "target" : "");
    svg.append(
      ...source.map((bit, i) => arc(x(bit) + WIDTH / 2, x(target[i]) + WIDTH / 2)),
      label("index bit", ARC),
      ...range(0, count).map((bit) => cell(x(bit), ARC, String(bit), kind(bit))),
      label("bank bit", ARC + ROW),
      ...range(0, count).map((bit) => bankCell(x(bit), ARC + ROW, bit + scale)),
    );
    rows.forEach(({ name, bit }, row) => {
      const y = ARC + ROW * (row + 2) + 6;
      svg.append(label(name, y), ...range(0, count).map((at) => cell(x(at), y, bit(at), bit(at) ? kind(at) : "")));
    });
    const name = `S<${value.swizzle.join(",")}>`;
    const title = CF.h("p", {}, CF.h("b", {}, name), ` ${inWords(value, source, target, null)}`);
    const scroll = { class: "play-bits-scroll", tabindex: 0, role: "group", "aria-label": "Bits of the swizzle" };
    return CF.h("figure", {}, title, CF.h("div", scroll, svg));
  };

  function valueRows({ swizzle }, index, source, target) {
    const result = A.swizzle(swizzle)(index);
    const digit = (number) => (bit) => String((number >> bit) & 1);
    const moved = (bit) => (target.includes(bit) ? digit(index)(source[target.indexOf(bit)]) : "");
    return [
      { name: `${index}`, bit: digit(index) },
      { name: "XOR", bit: moved },
      { name: `= ${result}`, bit: digit(result) },
    ];
  }

  function inWords({ swizzle: [bits] }, source, target, index) {
    if (bits === 0) return "changes nothing.";
    const span = (list) => (list.length > 1 ? `bits ${list[0]} to ${list.at(-1)}` : `bit ${list[0]}`);
    const words = `XORs ${span(source)} of the index onto ${span(target)}.`;
    return index === null ? words : `${words} Index ${index}.`;
  }

  /* From a source bit up and down again onto its target. */
  function arc(from, to) {
    const lift = Math.min(ARC - 8, 14 + Math.abs(to - from) / 5);
    const path = `M${from} ${ARC - 1} C${from} ${ARC - lift} ${to} ${ARC - lift} ${to} ${ARC - 7}`;
    const head = `M${to - 4} ${ARC - 8} L${to} ${ARC - 1} L${to + 4} ${ARC - 8} Z`;
    return CF.svg("g", { class: "arc" }, CF.svg("path", { d: path, class: "stroke" }), CF.svg("path", { d: head }));
  }

  const label = (text, y) => CF.svg("text", { x: LABEL - 8, y: y + ROW / 2, class: "name" }, text);

  function cell(x, y, text, kind) {
    const box = { x: x + 1, y: y + 1, width: WIDTH - 2, height: ROW - 2, rx: 3, class: `box ${kind}` };
    const place = { x: x + WIDTH / 2, y: y + ROW / 2, class: `digit ${kind}` };
    return CF.svg("g", {}, text === "" ? null : CF.svg("rect", box), CF.svg("text", place, text));
  }

  /* `b0` to `b4`: the address bits that choose the bank. */
  function bankCell(x, y, addressBit) {
    const bit = addressBit - WORD;
    const place = { x: x + WIDTH / 2, y: y + ROW / 2, class: "digit bank" };
    return CF.svg("text", place, bit >= 0 && bit < BANK ? `b${bit}` : "·");
  }
})();
