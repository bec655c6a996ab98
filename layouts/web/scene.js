/* One row's scene, evaluated: layouts become typed arrays when first asked for, and are kept. No drawing here. */
(() => {
  "use strict";

  const WARP = 32;
  const BANKS = 32;
  const BANK_BYTES = 4;
  const NONE = -1;

  /** Cells (`row + rows * col`) of a thread-value array, the other way round: the positions in `tv` of every cell. */
  function invert(tv, cells) {
    const start = new Int32Array(cells + 1);
    for (const cell of tv) if (cell >= 0 && cell < cells) start[cell + 1]++;
    for (let cell = 0; cell < cells; cell++) start[cell + 1] += start[cell];
    const entries = new Int32Array(start[cells]);
    const next = start.slice(0, cells);
    for (let at = 0; at < tv.length; at++) {
      if (tv[at] >= 0 && tv[at] < cells) entries[next[tv[at]]++] = at;
    }
    return { of: (cell) => entries.subarray(start[cell], start[cell + 1]) };
  }

  /**
   * The threads of a mode, sorted into classes that do the same: modes of stride 0 separate no threads (all threads of
   * a warpgroup share a wgmma operand). `of[thread]` is a thread's class, `members[class]` the threads, `layout` the
   * mode without its copies.
   */
  function classify({ shape, stride }) {
    const [extents, strides] = [shape, stride].map((tree) => CF.algebra.flatten(tree));
    const kept = extents.map((_, i) => i).filter((i) => strides[i] !== 0);
    const threads = extents.reduce((a, b) => a * b, 1);
    const of = new Int32Array(threads);
    for (let thread = 0; thread < threads; thread++) {
      let [rest, next] = [thread, 1];
      extents.forEach((extent, i) => {
        if (strides[i] !== 0) {
          of[thread] += next * (rest % extent);
          next *= extent;
        }
        rest = Math.floor(rest / extent);
      });
    }
    const members = [];
    of.forEach((group, thread) => (members[group] ??= []).push(thread));
    const once = kept.length ? kept : [extents.length];
    return {
      of,
      members,
      layout: { shape: once.map((i) => extents[i] ?? 1), stride: once.map((i) => strides[i] ?? 0) },
    };
  }

  /** A thread-value(-instruction) layout over a grid of `cells` cells; evaluated on first use, copies only once. */
  class ThreadValues {
    #cells = null;
    #inverse = null;
    #classes = null;

    constructor({ tv: layout, first_thread: firstThread, tv_swizzle: swizzle }, cells) {
      const { size, modes } = CF.algebra;
      this.modes = modes(layout);
      [this.threads, this.values = 1, this.instructions = 1] = this.modes.map(size);
      this.first = firstThread ?? 0;
      this.swizzle = swizzle ? CF.algebra.swizzle(swizzle) : null;
      this.cells = cells;
    }

    get classes() {
      this.#classes ??= classify(this.modes[0]);
      return this.#classes;
    }

    /* Cells at `class + classes * (value + values * instruction)`. */
    get tv() {
      const modes = [this.classes.layout, ...this.modes.slice(1)];
      if (!this.#cells) {
        const found = CF.algebra.evaluate({
          shape: modes.map((mode) => mode.shape),
          stride: modes.map((mode) => mode.stride),
        });
        this.#cells = this.swizzle ? found.map(this.swizzle) : found;
      }
      return this.#cells;
    }

    /** The cell of a thread (counted from `first`), value and instruction. */
    cell(thread, value = 0, instruction = 0) {
      const { of, members } = this.classes;
      return this.tv[of[thread] + members.length * (value + this.values * instruction)];
    }

    /** `[{thread, value, instruction}]` of a cell, threads counted from the block's first. */
    of(cell) {
      this.#inverse ??= invert(this.tv, this.cells);
      const { members } = this.classes;
      return Array.from(this.#inverse.of(cell)).flatMap((at) => {
        const rest = Math.floor(at / members.length);
        const [value, instruction] = [rest % this.values, Math.floor(rest / this.values)];
        return members[at % members.length].map((thread) => ({ thread: this.first + thread, value, instruction }));
      });
    }

    /**
     * Calls `visit(cell, thread, value)` for the threads in `range` (null: all) and one instruction (null: all). Of
     * threads that do the same only the first is visited, unless `copies`.
     */
    each(instruction, range, visit, copies = false) {
      const groups = this.#groups(range, copies);
      const [from, to] = this.#instructions(instruction);
      const stride = this.classes.members.length;
      for (let at = from * this.values; at < to * this.values; at++) {
        for (const [group, thread] of groups) {
          const cell = this.tv[group + stride * at];
          if (cell >= 0 && cell < this.cells) visit(cell, thread, at % this.values);
        }
      }
    }

    /* `[class, thread]` of the threads in range, one of each class or all. */
    #groups(range, copies) {
      const found = [];
      const seen = new Set();
      this.classes.of.forEach((group, index) => {
        const thread = this.first + index;
        if ((range && (thread < range.first || thread > range.last)) || (!copies && seen.has(group))) return;
        seen.add(group);
        found.push([group, thread]);
      });
      return found;
    }

    /** How many `{cells, threads}` an instruction (null: all) touches, for the threads in `range` (null: all). */
    count(instruction, range) {
      const seen = new Uint8Array(this.cells);
      let cells = 0;
      this.each(instruction, range, (cell) => {
        cells += 1 - seen[cell];
        seen[cell] = 1;
      });
      return { cells, threads: cells ? this.#groups(range, true).length : 0 };
    }

    /* An operand with one instruction in its layout is the same for each of the step's instructions. */
    #instructions(instruction) {
      if (instruction === null) return [0, this.instructions];
      if (this.instructions === 1) return [0, 1];
      return instruction < this.instructions ? [instruction, instruction + 1] : [0, 0];
    }
  }

  /** A tile or fragment: its data of the scene (`spec`) and its grid of `rows` x `cols` cells. */
  class Part {
    #offsets = null;

    constructor(spec, kind) {
      this.spec = spec;
      this.kind = kind;
      this.id = spec.id;
      this.tensor = spec.tensor;
      this.axes = spec.axes;
      [this.rows, this.cols] = spec.shape;
      this.stages = spec.stages ?? 1;
      this.elementBytes = spec.element_bytes;
      this.space = kind === "fragment" ? "registers" : spec.space;
      this.owned = kind === "fragment" ? new ThreadValues(spec, this.size) : null;
    }

    get size() {
      return this.rows * this.cols;
    }

    /** Element offsets before the swizzle, at `row + rows * (col + cols * stage)`; tiles only. */
    get offsets() {
      this.#offsets ??= CF.algebra.evaluate(this.spec.layout);
      return this.#offsets;
    }

    cell(row, col) {
      return row + this.rows * col;
    }

    /** True if the element exists; the rest of a global tile is read as zeros and never written. */
    exists(row, col) {
      const [rows, cols] = this.spec.valid ?? [this.rows, this.cols];
      return row < rows && col < cols;
    }

    /** `{m: row, d: col}` */
    element(row, col) {
      return { [this.axes[0]]: row, [this.axes[1]]: col };
    }

    /** `[row | null, col | null]` of an element `{m, n, d, e}`, null if it lacks the axis or lies outside. */
    place(element) {
      const index = (axis, extent) => (element && element[axis] < extent ? element[axis] : null);
      return [index(this.axes[0], this.rows), index(this.axes[1], this.cols)];
    }
  }

  class Scene {
    #parts = new Map();
    #steps = new Map();
    #values = new Map();

    constructor(data) {
      this.data = data;
      this.elementBytes = data.kernel.element_bytes;
      for (const spec of data.tiles) this.#parts.set(spec.id, new Part(spec, "tile"));
      for (const spec of data.fragments) this.#parts.set(spec.id, new Part(spec, "fragment"));
      for (const spec of data.steps) this.#steps.set(spec.id, spec);
    }

    /** All tiles, then all fragments. */
    get parts() {
      return [...this.#parts.values()];
    }

    get steps() {
      return this.data.steps;
    }

    /** The tensors that are drawn together: `[["Q"], ["S", "P"], ...]`. */
    get lanes() {
      return this.data.lanes;
    }

    part(id) {
      return this.#parts.get(id) ?? null;
    }

    tile(id) {
      return this.#partOf(id, "tile");
    }

    fragment(id) {
      return this.#partOf(id, "fragment");
    }

    #partOf(id, kind) {
      const part = this.part(id);
      return part && part.kind === kind ? part : null;
    }

    step(id) {
      return this.#steps.get(id) ?? null;
    }

    /** The role that a thread of the block plays, or null. */
    role(thread) {
      return (
        this.data.kernel.roles.find((r) => thread >= r.first_thread && thread < r.first_thread + r.threads) ?? null
      );
    }

    /** Byte address of an element: in the block's shared memory, or from the tile's first byte in global memory. */
    address(tile, row, col, stage = 0, swizzled = true) {
      const part = typeof tile === "string" ? this.tile(tile) : tile;
      const offset = part.offsets[row + part.rows * (col + part.cols * (stage % part.stages))];
      const { swizzle, base } = part.spec;
      const placed = swizzled && swizzle ? CF.algebra.swizzle(swizzle)(offset) : offset;
      return (base ?? 0) + part.elementBytes * placed;
    }

    /** Shared-memory bank of a byte address. */
    bank(address) {
      return Math.floor(address / BANK_BYTES) % BANKS;
    }

    /** `[{thread, value}]` that hold an element of a fragment. */
    owners(fragment, row, col) {
      const part = typeof fragment === "string" ? this.fragment(fragment) : fragment;
      return part.owned.of(part.cell(row, col)).map(({ thread, value }) => ({ thread, value }));
    }

    /** Cells of a fragment that the threads of `range` hold. */
    held(fragment, range) {
      const cells = [];
      fragment.owned.each(null, range, (cell) => cells.push(cell));
      return Int32Array.from(cells);
    }

    /** The evaluated thread-value layout of one of a step's touches. */
    touchValues(touch) {
      if (!this.#values.has(touch)) {
        this.#values.set(touch, new ThreadValues(touch, this.part(touch.id).size));
      }
      return this.#values.get(touch);
    }

    /**
     * What an instruction of a step (null: all of them) touches: `[{id, mode, cells, threads}]`, `threads[i]` touching
     * `cells[i]`. `warp` or `range` ({first, last} thread) keeps to those threads.
     */
    touched(step, instruction = null, { warp = null, range = null } = {}) {
      const spec = typeof step === "string" ? this.step(step) : step;
      const threads = warp === null ? range : CF.scene.rangeOf({ warp });
      return spec.touches.map((touch) => {
        const cells = [];
        const by = [];
        const put = (cell, thread) => {
          cells.push(cell);
          by.push(thread);
        };
        this.touchValues(touch).each(instruction, threads, put, true);
        return { id: touch.id, mode: touch.mode, cells: Int32Array.from(cells), threads: Int32Array.from(by) };
      });
    }

    /** Every step's touches of a cell: `[{step, mode, entries: [{thread, value, instruction}]}]`, in step order. */
    touches(part, row, col) {
      const found = [];
      for (const step of this.steps) {
        for (const touch of step.touches) {
          if (touch.id !== part.id) continue;
          const entries = this.touchValues(touch).of(part.cell(row, col));
          if (entries.length) found.push({ step, mode: touch.mode, entries });
        }
      }
      return found;
    }

    /**
     * The touch that says who moves a part, `{step, touch, values}`: of step `stepId` if it touches the part, else its
     * first writer, else any; of several instructions if `split`. Null if no step touches it.
     */
    mover(part, stepId = null, split = false) {
      const all = this.steps.flatMap((step) => step.touches.map((touch) => ({ step, touch })));
      const mine = all
        .filter(({ touch }) => touch.id === part.id)
        .map((found) => ({ ...found, values: this.touchValues(found.touch) }))
        .filter(({ values }) => !split || values.instructions > 1);
      const writer = mine.find(({ touch }) => touch.mode === "write");
      return mine.find(({ step }) => step.id === stepId) ?? writer ?? mine[0] ?? null;
    }
  }

  const cache = new Map();
  let data = { scenes: {} };

  CF.scene = {
    WARP,
    BANKS,
    NONE,
    Scene,
    /** Takes the page's data; `of` reads its scenes. */
    load: (page) => {
      data = page;
      cache.clear();
    },
    /** The scene `id`, or null if the page does not have it. */
    of: (id) => {
      if (!data.scenes?.[id]) return null;
      if (!cache.has(id)) cache.set(id, new Scene(data.scenes[id]));
      return cache.get(id);
    },
    /** A part of one's own for CF.Panel: a grid `{id, axes: [row axis, column axis], shape: [rows, cols]}`. */
    grid: (spec) => new Part(spec, "grid"),
    /** The threads `{first, last, text}` that a thread, warp or warpgroup names; null if none is chosen. */
    rangeOf: ({ thread = null, warp = null, warpgroup = null }) => {
      if (thread !== null) return { first: thread, last: thread, text: `thread ${thread}` };
      if (warp !== null) return { first: warp * WARP, last: warp * WARP + WARP - 1, text: `warp ${warp}` };
      if (warpgroup === null) return null;
      return { first: warpgroup * 128, last: warpgroup * 128 + 127, text: `warpgroup ${warpgroup}` };
    },
    /** The range that the page's state selects. */
    selected: () => {
      const [thread, warp, warpgroup] = ["thread", "warp", "warpgroup"].map(CF.state.get);
      return CF.scene.rangeOf({ thread, warp, warpgroup });
    },
  };
})();
