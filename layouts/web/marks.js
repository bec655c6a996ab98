/* The cells that a panel emphasises: touched by the selected step, held by the selected threads. No drawing here. */
(() => {
  "use strict";

  const READ = 1;
  const WRITE = 2;
  const HELD = 4;

  /**
   * Flags of every cell of a part (READ | WRITE | HELD), or null if nothing is selected. A step marks what its
   * instruction (null: all of them) touches, for the threads in `range` or all. Threads without a step mark what they
   * hold of a fragment and what they touch of a tile in any step.
   */
  function flags(scene, part, { step, instruction, range }) {
    if (!step && !range) return null;
    const found = new Uint8Array(part.size);
    if (range && part.owned) part.owned.each(null, range, (cell) => (found[cell] |= HELD));
    const steps = step ? [step] : part.owned ? [] : scene.steps;
    for (const spec of steps) {
      for (const touch of spec.touches) {
        if (touch.id !== part.id) continue;
        const flag = touch.mode === "write" ? WRITE : READ;
        scene.touchValues(touch).each(step ? instruction : null, range, (cell) => (found[cell] |= flag));
      }
    }
    return found;
  }

  /** How many cells are `{read, write, held}`. */
  function count(found) {
    const total = { read: 0, write: 0, held: 0 };
    for (const flag of found) {
      if (flag & READ) total.read++;
      if (flag & WRITE) total.write++;
      if (flag & HELD) total.held++;
    }
    return total;
  }

  /** The cells that are read or written. */
  function touched(found) {
    const cells = [];
    found.forEach((flag, cell) => flag & (READ | WRITE) && cells.push(cell));
    return cells;
  }

  /** Bounding boxes `{row0, row1, col0, col1, write}` of the marked cells that hang together, side by side. */
  function islands(found, rows, cols) {
    const left = new Set(touched(found));
    const boxes = [];
    for (const first of left) {
      const box = { row0: rows, row1: 0, col0: cols, col1: 0, write: (found[first] & WRITE) !== 0 };
      const reached = [first];
      left.delete(first);
      while (reached.length) {
        const cell = reached.pop();
        const [row, col] = [cell % rows, Math.floor(cell / rows)];
        [box.row0, box.row1] = [Math.min(box.row0, row), Math.max(box.row1, row)];
        [box.col0, box.col1] = [Math.min(box.col0, col), Math.max(box.col1, col)];
        const above = row > 0 ? [cell - 1] : [];
        const below = row < rows - 1 ? [cell + 1] : [];
        for (const next of [...above, ...below, cell - rows, cell + rows]) if (left.delete(next)) reached.push(next);
      }
      boxes.push(box);
    }
    return boxes;
  }

  /** The outline of the cells that have `flag`, in cell units, as a Path2D. */
  function outline(found, rows, cols, flag) {
    const path = new Path2D();
    const has = (row, col) =>
      row >= 0 && row < rows && col >= 0 && col < cols && (found[row + rows * col] & flag) !== 0;
    for (let row = 0; row <= rows; row++)
      runs(
        cols,
        (col) => has(row, col) !== has(row - 1, col),
        (from, to) => {
          path.moveTo(from, row);
          path.lineTo(to, row);
        },
      );
    for (let col = 0; col <= cols; col++)
      runs(
        rows,
        (row) => has(row, col) !== has(row, col - 1),
        (from, to) => {
          path.moveTo(col, from);
          path.lineTo(col, to);
        },
      );
    return path;
  }

  /* Calls `visit(from, to)` for each run of indices that fulfil `test`: long lines are drawn as one. */
  function runs(length, test, visit) {
    let from = -1;
    for (let at = 0; at <= length; at++) {
      const inside = at < length && test(at);
      if (inside && from < 0) from = at;
      if (!inside && from >= 0) {
        visit(from, at);
        from = -1;
      }
    }
  }

  CF.marks = { READ, WRITE, HELD, flags, count, touched, islands, outline };
})();
