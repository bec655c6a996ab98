/* Draws one panel onto its canvas: cells, emphasis, cursor, numbers, axes. Sizes in CSS pixels; no state of its own. */
(() => {
  "use strict";

  const LEFT = 34;
  const TOP = 20;
  const GRID_FROM = 8; // cell size from which every cell has a border
  const TEXT_FROM = 20; // and from which it has room for its number
  const FEW = 512; // marked cells, up to which small groups of them get a frame
  const SEEN = 7; // pixels that the frame around marked cells takes at least
  const FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

  const { theme, css, parse, ink } = CF.palette;

  const pack = ([r, g, b], alpha = 255) => ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;

  /* A canvas of one pixel a cell; `colour(cell)` is packed as the little-endian bytes of an image are. */
  function offscreen(part, colour) {
    const canvas = document.createElement("canvas");
    canvas.width = part.cols;
    canvas.height = part.rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(part.cols, part.rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let row = 0, at = 0; row < part.rows; row++) {
      for (let col = 0; col < part.cols; col++) pixels[at++] = colour(row + part.rows * col);
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }

  /** The colours of a colouring. */
  function baseImage(part, colouring) {
    const known = new Map([[CF.scene.NONE, pack(parse(theme("none")))]]);
    return offscreen(part, (cell) => {
      const number = colouring.numbers[cell];
      if (!known.has(number)) known.set(number, pack(colouring.rgb(number)));
      return known.get(number);
    });
  }

  /** Hides cells that are not marked. */
  function dimImage(part, flags) {
    const dim = pack(parse(theme("dim")), 205);
    return offscreen(part, (cell) => (flags[cell] ? 0 : dim));
  }

  /** The visible part of the grid: cell size, the pixel of cell (0, 0), and the first and last row and column. */
  function geometry(part, cell, view) {
    const first = (scroll) => Math.floor(scroll / cell);
    const last = (scroll, size, count) => Math.min(count - 1, Math.ceil((scroll + size) / cell));
    return {
      cell,
      x0: LEFT - view.left,
      y0: TOP - view.top,
      rows: [first(view.top), last(view.top, view.height - TOP, part.rows)],
      cols: [first(view.left), last(view.left, view.width - LEFT, part.cols)],
      width: Math.min(part.cols * cell - view.left, view.width - LEFT),
      height: Math.min(part.rows * cell - view.top, view.height - TOP),
    };
  }

  function lines(context, g, every, alpha) {
    context.strokeStyle = css(parse(theme("ink")), alpha);
    context.lineWidth = 1;
    context.beginPath();
    for (let row = Math.ceil(g.rows[0] / every) * every; row <= g.rows[1] + 1; row += every) {
      const y = Math.round(g.y0 + row * g.cell) + 0.5;
      context.moveTo(g.x0 + g.cols[0] * g.cell, y);
      context.lineTo(g.x0 + (g.cols[1] + 1) * g.cell, y);
    }
    for (let col = Math.ceil(g.cols[0] / every) * every; col <= g.cols[1] + 1; col += every) {
      const x = Math.round(g.x0 + col * g.cell) + 0.5;
      context.moveTo(x, g.y0 + g.rows[0] * g.cell);
      context.lineTo(x, g.y0 + (g.rows[1] + 1) * g.cell);
    }
    context.stroke();
  }

  function numbers(context, g, part, colouring, flags) {
    const size = Math.min(13, Math.max(8, g.cell * 0.36));
    context.font = `${size}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = g.rows[0]; row <= g.rows[1]; row++) {
      for (let col = g.cols[0]; col <= g.cols[1]; col++) {
        const cell = row + part.rows * col;
        const number = colouring.numbers[cell];
        if (number < 0) continue;
        const faded = flags && flags[cell] === 0;
        context.fillStyle = faded ? theme("faint") : ink(colouring.rgb(number));
        const [x, y] = [g.x0 + (col + 0.5) * g.cell, g.y0 + (row + 0.5) * g.cell];
        context.fillText(colouring.text(number, cell), x, y + 0.5, g.cell - 2);
      }
    }
  }

  /* A name on every group whose cells fill a large enough rectangle, so that colour is not the only sign. */
  function groupLabels(context, g, part, colouring) {
    context.font = `600 11px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    for (const box of colouring.boxes) {
      const text = colouring.groupText(box.group);
      const [width, height] = [(box.col1 - box.col0 + 1) * g.cell, (box.row1 - box.row0 + 1) * g.cell];
      if (height < 13 || context.measureText(text).width + 6 > width) continue;
      const x = g.x0 + box.col0 * g.cell + width / 2;
      const y = g.y0 + box.row0 * g.cell + height / 2;
      context.strokeStyle = theme("surface");
      context.lineWidth = 3;
      context.strokeText(text, x, y);
      context.fillStyle = theme("ink");
      context.fillText(text, x, y);
    }
  }

  /** `[{group, row0, row1, col0, col1}]` of the groups whose cells fill a rectangle. */
  function groupBoxes(part, colouring) {
    if (!colouring.group) return [];
    const boxes = new Map();
    for (let cell = 0; cell < part.size; cell++) {
      if (colouring.numbers[cell] < 0) continue;
      const group = colouring.group(colouring.numbers[cell]);
      const [row, col] = [cell % part.rows, Math.floor(cell / part.rows)];
      if (!boxes.has(group)) boxes.set(group, { group, row0: row, row1: row, col0: col, col1: col, cells: 0 });
      const box = boxes.get(group);
      box.row0 = Math.min(box.row0, row);
      box.row1 = Math.max(box.row1, row);
      box.col1 = Math.max(box.col1, col);
      box.cells++;
    }
    return [...boxes.values()].filter((b) => b.cells === (b.row1 - b.row0 + 1) * (b.col1 - b.col0 + 1));
  }

  /** The groups of marked cells that `draw` may have to frame; none if there are too many to distinguish. */
  function framed(part, flags) {
    return CF.marks.touched(flags).length > FEW ? [] : CF.marks.islands(flags, part.rows, part.cols);
  }

  const sizeOf = (g, { row0, row1, col0, col1 }) => [(col1 - col0 + 1) * g.cell, (row1 - row0 + 1) * g.cell];

  const areSmall = (g, islands) => islands.length > 0 && islands.every((box) => Math.min(...sizeOf(g, box)) < SEEN);

  /* In a large tile whose cells are a pixel or two a thread's few cells are hard to find: they get a wider frame. */
  function frames(context, g, islands) {
    context.lineWidth = 1.5;
    for (const box of islands) {
      const { row0, col0, write } = box;
      const [width, height] = sizeOf(g, box);
      const [wide, high] = [width, height].map((size) => Math.max(size + 2, SEEN));
      context.strokeStyle = theme(write ? "write-line" : "read-line");
      context.strokeRect(g.x0 + col0 * g.cell + (width - wide) / 2, g.y0 + row0 * g.cell + (height - high) / 2, wide, high);
    }
  }

  function outlines(context, g, paths) {
    for (const [name, path] of Object.entries(paths)) {
      context.save();
      context.translate(g.x0, g.y0);
      context.scale(g.cell, g.cell);
      context.lineWidth = (g.cell >= GRID_FROM ? 2.5 : g.cell >= 3 ? 1.5 : 1) / g.cell;
      context.strokeStyle = theme(`${name}-line`);
      if (name === "write" && g.cell >= GRID_FROM) context.setLineDash([4 / g.cell, 2.5 / g.cell]);
      context.stroke(path);
      context.restore();
    }
  }

  /* The row and the column of an element lightly shaded, its cell in a frame; a ring if it is pinned. */
  function cursor(context, g, part, [row, col], pinned) {
    const [width, height] = [part.cols * g.cell, part.rows * g.cell];
    const thick = Math.max(g.cell, 1.5);
    context.fillStyle = css(parse(theme("cursor")), pinned ? 0.22 : 0.3);
    if (row !== null) context.fillRect(g.x0, g.y0 + row * g.cell, width, thick);
    if (col !== null) context.fillRect(g.x0 + col * g.cell, g.y0, thick, height);
    if (row === null || col === null) return;
    const half = Math.max(g.cell, 7) / 2;
    const [x, y] = [g.x0 + (col + 0.5) * g.cell, g.y0 + (row + 0.5) * g.cell];
    context.beginPath();
    if (pinned) context.arc(x, y, half * 1.3, 0, 2 * Math.PI);
    else context.rect(x - half, y - half, 2 * half, 2 * half);
    for (const [width, colour] of [
      [4.5, "surface"],
      [2, "cursor"],
    ]) {
      context.lineWidth = width;
      context.strokeStyle = theme(colour);
      context.stroke();
    }
  }

  function hatch(context, g, part) {
    const [rows, cols] = part.spec?.valid ?? [part.rows, part.cols];
    if (rows >= part.rows && cols >= part.cols) return;
    context.save();
    context.beginPath();
    context.rect(g.x0 + cols * g.cell, g.y0, (part.cols - cols) * g.cell, part.rows * g.cell);
    context.rect(g.x0, g.y0 + rows * g.cell, cols * g.cell, (part.rows - rows) * g.cell);
    context.clip();
    context.fillStyle = theme("none");
    context.fillRect(g.x0, g.y0, part.cols * g.cell, part.rows * g.cell);
    context.strokeStyle = theme("faint");
    context.beginPath();
    const [width, height] = [part.cols * g.cell, part.rows * g.cell];
    for (let at = -height; at < width; at += 6) {
      context.moveTo(g.x0 + at, g.y0 + height);
      context.lineTo(g.x0 + at + height, g.y0);
    }
    context.stroke();
    context.restore();
  }

  /* Row and column indices along the edges; they stay in sight while the cells scroll. */
  function axes(context, g, part, place, width) {
    context.font = `10px ${FONT}`;
    context.textBaseline = "middle";
    const spacing = (room) => [1, 2, 4, 8, 16, 32, 64, 128].find((every) => every * g.cell >= room) ?? 128;
    context.textAlign = "center";
    const everyCol = spacing(26);
    for (let col = Math.ceil(g.cols[0] / everyCol) * everyCol; col <= g.cols[1]; col += everyCol) {
      tick(context, col, g.x0 + (col + 0.5) * g.cell, TOP - 8);
    }
    context.textAlign = "right";
    const everyRow = spacing(16);
    for (let row = Math.ceil(g.rows[0] / everyRow) * everyRow; row <= g.rows[1]; row += everyRow) {
      tick(context, row, LEFT - 5, g.y0 + (row + 0.5) * g.cell);
    }
    if (!place) return;
    const [row, col] = place;
    if (col !== null) chip(context, col, Math.min(g.x0 + (col + 0.5) * g.cell, width - 13), TOP - 9, LEFT);
    if (row !== null) chip(context, row, LEFT - 14, g.y0 + (row + 0.5) * g.cell, 0);
  }

  function tick(context, index, x, y) {
    if (x < LEFT - 6 || y < TOP - 9) return;
    context.fillStyle = theme("muted");
    context.fillText(index, x, y);
  }

  function chip(context, index, x, y, least) {
    if (x < least || y < TOP - 9) return;
    context.textAlign = "center";
    context.fillStyle = theme("cursor");
    context.fillRect(x - 13, y - 7, 26, 14);
    context.fillStyle = theme("surface");
    context.fillText(index, x, y + 0.5);
  }

  /**
   * Draws a panel. `frame` holds part, colouring and base; with flags also dim, paths (outlines) and islands (marked
   * cells that hang together); and place and pin (`[row | null, col | null]`) or null; `view` the scroll position and
   * size in CSS pixels, `ratio` device pixels per CSS pixel. Marked cells keep their colours: only their outline is
   * drawn, and other cells fade.
   */
  function draw(context, frame, cell, view, ratio) {
    const { part, colouring, flags, place, pin } = frame;
    const g = geometry(part, cell, view);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, view.width, view.height);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, g.width + 1, g.height + 1);
    context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(frame.base, g.x0, g.y0, part.cols * cell, part.rows * cell);
    hatch(context, g, part);
    if (flags) context.drawImage(frame.dim, g.x0, g.y0, part.cols * cell, part.rows * cell);
    if (cell >= GRID_FROM) lines(context, g, 1, 0.14);
    if (cell >= 2) lines(context, g, 8, cell >= GRID_FROM ? 0.4 : 0.16);
    if (cell >= TEXT_FROM) numbers(context, g, part, colouring, flags);
    else if (!flags) groupLabels(context, g, part, colouring);
    if (flags && areSmall(g, frame.islands)) frames(context, g, frame.islands);
    else if (flags) outlines(context, g, frame.paths);
    if (pin) cursor(context, g, part, pin, true);
    if (place) cursor(context, g, part, place, false);
    context.restore();
    axes(context, g, part, place ?? pin, view.width);
  }

  CF.draw = { LEFT, TOP, TEXT_FROM, baseImage, dimImage, framed, groupBoxes, draw };
})();
