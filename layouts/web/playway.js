/* The origin of an element: the cells of earlier steps' operands that it comes from. No drawing. */
(() => {
  "use strict";

  const A = CF.algebra;
  const SEARCHED = 2 ** 16; // elements up to which a regrouped layout is searched for an index

  /* The integer `position` counted through modes of these sizes: one integer a mode. */
  function split(position, sizes) {
    let rest = position;
    return sizes.map((size, i) => {
      const last = i === sizes.length - 1;
      const here = last ? rest : rest % size;
      rest = Math.floor(rest / size);
      return here;
    });
  }

  const join = (coordinates, sizes) =>
    coordinates.reduceRight((position, here, i) => position * sizes[i] + here, 0);

  const sizeOf = (tiler) => {
    if (typeof tiler === "number") return tiler;
    return Array.isArray(tiler) ? tiler.reduce((size, part) => size * sizeOf(part), 1) : A.size(tiler);
  };

  /* The position in `layout` that `tiler` gives at `position`, and the cells of its own layouts that determine it. */
  function through(layout, tiler, position) {
    if (typeof tiler === "number") return { to: position, cells: [] };
    if (!Array.isArray(tiler)) return { to: A.index(tiler, position), cells: [[tiler, position]] };
    const modes = A.modes(A.plain(layout));
    const parts = split(position, tiler.map(sizeOf)).map((here, i) => through(modes[i], tiler[i], here));
    const to = join([...parts.map((part) => part.to)], modes.map(A.size));
    return { to, cells: parts.flatMap(({ cells }) => cells) };
  }

  /* `[operand, position]` of the elements that the one at `position` of a step's result is made from. */
  const SOURCES = {
    compose: ({ operands: [layout, tiler] }, position) => {
      const { to, cells } = through(layout, tiler, position);
      return [...cells, [layout, to]];
    },
    swizzle: ({ operands: [, , layout] }, position) => [[layout, position]],
    concatenate: ({ operands }, position) =>
      split(position, operands.map(A.size)).map((here, i) => [operands[i], here]),
    coalesce: ({ operands: [layout] }, position) => [[layout, position]],
    flatten: ({ operands: [layout] }, position) => [[layout, position]],
    regroup: ({ operands, result }, position) => {
      if (operands.length > 1 || A.size(result) > SEARCHED) return [];
      return [[operands[0], A.evaluate(operands[0]).indexOf(A.index(result, position))]];
    },
  };

  /**
   * The positions, by the number of the step in `steps`, that the element at `position` of step `at` comes from, its own
   * included: `Map {at => [position], ...}`.
   */
  function trace(steps, at, position) {
    const found = new Map();
    const follow = (number, here) => {
      if (!found.has(number)) found.set(number, []);
      if (found.get(number).includes(here)) return;
      found.get(number).push(here);
      for (const [operand, there] of SOURCES[steps[number].operation]?.(steps[number], here) ?? []) {
        const from = steps.slice(0, number).findLastIndex(({ result }) => result === operand);
        if (from >= 0 && there >= 0 && there < A.size(operand)) follow(from, there);
      }
    };
    follow(at, position);
    return found;
  }

  /** A composition's element in words: `5 → 17 → 6`, from its position over the second operand's index to the first's. */
  function words({ operation, operands, result }, position) {
    if (operation !== "compose") return null;
    const { to } = through(operands[0], operands[1], position);
    return `${position} → ${to} → ${A.index(result, position)}`;
  }

  CF.playway = { trace, words };
})();
