/* The playground's model of a value: positions of cells, their text, colour, facts and groups. */
(() => {
  "use strict";

  const A = CF.algebra;
  const BANKS = 32;
  const MAX_SIDE = 512; // rows and columns that are drawn at most
  const FOLD_FROM = 48; // cells from which a layout of one mode is folded into lines
  const FOLD = 32; // cells of a line then
  const { ramp, category, mix } = CF.palette;

  /* Extent of the first mode of a nested one: a heavier line follows it. */
  const period = (shape) => {
    const extents = A.flatten(shape).filter((extent) => extent > 1);
    return extents.length > 1 ? extents[0] : 0;
  };

  /* Positions of a layout's coordinates: one mode as a strip, two as a table, more as (first, all the others). */
  function arrange(layout) {
    const [first, ...others] = A.modes(layout);
    const size = A.size(layout);
    if (others.length === 0) {
      const cols = size >= FOLD_FROM ? FOLD : size;
      const rows = Math.ceil(size / cols);
      const names = rows > 1 ? "coordinate = label of the line + label of the column" : "across: coordinate";
      const position = (row, col) => row * cols + col;
      const place = (at) => [Math.floor(at / cols), at % cols];
      const rowName = (row) => row * cols;
      return { rows, cols, position, place, rowName, names, rowPeriod: 0, colPeriod: rows > 1 ? 0 : period(first.shape) };
    }
    const rows = A.size(first);
    const names = `down: mode 0, across: ${others.length > 1 ? "all other modes" : "mode 1"}`;
    const colPeriod = period(others.map((other) => other.shape));
    const position = (row, col) => row + rows * col;
    const place = (at) => [at % rows, Math.floor(at / rows)];
    const rowName = (row) => row;
    return { rows, cols: size / rows, position, place, rowName, names, rowPeriod: period(first.shape), colPeriod };
  }

  /* Cuts an arrangement to the drawn part, with a remark. */
  function cut(all) {
    const rows = Math.min(all.rows, MAX_SIDE);
    const cols = Math.min(all.cols, MAX_SIDE);
    const parts = [];
    if (rows < all.rows) parts.push(`${rows} of ${CF.number(all.rows)} rows`);
    if (cols < all.cols) parts.push(`${cols} of ${CF.number(all.cols)} columns`);
    const remark = parts.length ? `Too large to draw whole: these are the first ${parts.join(" and ")}.` : "";
    return { ...all, rows, cols, remark };
  }

  /** Byte address and bank of an element index, for elements of `bytes` bytes. */
  const place = (index, bytes) => ({ address: index * bytes, bank: Math.floor((index * bytes) / 4) % BANKS });

  /*
   * A model: rows, cols, names, remark, title; of the cell at (row, col): `text`, `sub` (second line), `rgb`, `facts`
   * ([label, words] pairs), `group` (cells of the same one light up together; null: none do). Empty cells: rgb null.
   * Of a layout also `at` and `cellOf`: the position of a cell (-1: none) and the cell of a position (null: not drawn).
   */
  function layoutModel(value, { bytes, cells }) {
    const inner = A.plain(value);
    const grid = cut(arrange(inner));
    const indices = A.evaluate(value);
    const before = A.isComposed(value) ? A.evaluate(inner) : indices;
    const last = indices.reduce((a, b) => Math.max(a, b), 0);
    const at = (row, col) => {
      const position = grid.position(row, col);
      return position < indices.length ? position : -1;
    };
    const byBank = cells === "bank";
    const bank = (position) => place(indices[position], bytes).bank;
    return {
      ...grid,
      at,
      cellOf: (position) => {
        const [row, col] = grid.place(position);
        return row < grid.rows && col < grid.cols ? [row, col] : null;
      },
      rgb: (row, col) => {
        const position = at(row, col);
        if (position < 0) return null;
        return byBank ? ramp(bank(position) / (BANKS - 1)) : ramp(last ? indices[position] / last : 0);
      },
      text: (row, col) => (at(row, col) < 0 ? "" : String(indices[at(row, col)])),
      sub: (row, col) => (byBank && at(row, col) >= 0 ? `b${bank(at(row, col))}` : ""),
      chars: Math.max(String(last).length, byBank ? 3 : 2),
      lines: byBank ? 2 : 1,
      group: (row, col) => (byBank && at(row, col) >= 0 ? bank(at(row, col)) : null),
      index: (row, col) => (at(row, col) < 0 ? null : before[at(row, col)] + (value.offset ?? 0)),
      facts: (row, col) => layoutFacts(value, at(row, col), { indices, before, bytes }),
      legend: byBank ? ["bank 0", "31"] : ["index 0", String(last)],
    };
  }

  function layoutFacts(value, position, { indices, before, bytes }) {
    if (position < 0) return [];
    const coordinate = A.toText(A.coordinate(position, A.plain(value).shape));
    const facts = [["coordinate", coordinate], ["index", String(before[position])]];
    if (A.isComposed(value)) {
      if (value.offset) facts.push([`+ ${value.offset}`, String(before[position] + value.offset)]);
      facts.push(["swizzled", String(indices[position])]);
    }
    const { address, bank } = place(indices[position], bytes);
    return [...facts, ["byte", `${address} = ${CF.hex(address)}`], ["bank", String(bank)]];
  }

  /* Distinct for the 32 lanes of a warp: eight hues, each plain, lighter, darker and pale. */
  function threadColour(thread) {
    const shade = Math.floor(thread / 8) % 4;
    const hue = category(thread);
    return [hue, mix(hue, [255, 255, 255], 0.45), mix(hue, [0, 0, 0], 0.35), mix(hue, [255, 255, 255], 0.7)][shade];
  }

  /* Of every element of the tile: how many own it, and the first (thread + threads * value; -1 none). */
  function ownership({ tv, shape }) {
    const first = new Int32Array(shape[0] * shape[1]).fill(-1);
    const count = new Int32Array(first.length);
    const elements = A.evaluate(tv);
    for (let at = elements.length - 1; at >= 0; at--) {
      first[elements[at]] = at;
      count[elements[at]]++;
    }
    return { first, count, elements };
  }

  function tvModel(value, { cells }) {
    const [rows, cols] = value.shape;
    const threads = A.size(A.mode(value.tv, 0));
    const values = A.size(A.mode(value.tv, 1));
    const { first, count, elements } = ownership(value);
    const owner = (row, col) => first[row + rows * col];
    const thread = (row, col) => owner(row, col) % threads;
    const register = (row, col) => Math.floor(owner(row, col) / threads);
    const byValue = cells === "register";
    const colour = (row, col) =>
      byValue ? ramp(values > 1 ? register(row, col) / (values - 1) : 0.5) : threadColour(thread(row, col));
    return {
      ...cut({ rows, cols, rowName: (row) => row, names: "down: row, across: column", rowPeriod: 0, colPeriod: 0 }),
      rgb: (row, col) => (owner(row, col) < 0 ? null : colour(row, col)),
      text: (row, col) => (owner(row, col) < 0 ? "" : `T${thread(row, col)}`),
      sub: (row, col) => {
        const more = count[row + rows * col] - 1;
        return owner(row, col) < 0 ? "" : `V${register(row, col)}${more > 0 ? `+${more}` : ""}`;
      },
      chars: Math.max(String(threads - 1).length, String(values - 1).length) + 1,
      lines: 2,
      group: (row, col) => (owner(row, col) < 0 ? null : byValue ? register(row, col) : thread(row, col)),
      index: () => null,
      facts: (row, col) => tvFacts(row, col, { rows, threads, elements, first, count }),
      legend: byValue ? ["V0", `V${values - 1}`] : null,
    };
  }

  const SHOWN_OWNERS = 8;

  function tvFacts(row, col, { rows, threads, elements, first, count }) {
    const element = row + rows * col;
    const name = (at) => `T${at % threads} V${Math.floor(at / threads)}`;
    const facts = [["element", `(${row},${col}) = ${element}`]];
    if (!count[element]) return [...facts, ["owner", "none"]];
    const owners = [];
    for (let at = first[element]; at < elements.length && owners.length < SHOWN_OWNERS; at++) {
      if (elements[at] === element) owners.push(name(at));
    }
    const more = count[element] - owners.length;
    facts.push([count[element] > 1 ? "owners" : "owner", owners.join(", ") + (more > 0 ? ` and ${more} more` : "")]);
    return facts;
  }

  /** The model of a value of `CF.text.evaluate`; `bytes` of an element, `cells` the colouring (see `choices`). */
  const model = (value, options) => (value.tv ? tvModel(value, options) : layoutModel(value, options));

  /** The colourings of a value: [key, words] pairs, the default first. */
  const choices = (value) =>
    value.tv
      ? [
          ["thread", "thread"],
          ["register", "value index"],
        ]
      : [
          ["index", "index"],
          ["bank", "bank"],
        ];

  CF.playmodel = { model, choices, place };
})();
