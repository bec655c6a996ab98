/*
 * CuTe layouts in the browser, the counterpart of layouts/algebra.py and its modules: same results, same errors.
 * A layout is `{shape, stride}` with congruent nested arrays or numbers, the first mode runs fastest. A composed layout
 * is `{swizzle: [bits, base, shift], offset, layout}`. A tiler is a layout, an integer or an array of tilers.
 */
(() => {
  "use strict";

  const MESSAGES = {
    congruent: "stride {stride} is not nested like shape {shape}",
    shape: "every extent of a shape must be at least 1, given {given}",
    stride: "every stride must be at least 0, given {given}",
    swizzle: "a swizzle needs bits >= 0, base >= 0, |shift| >= bits and base + bits + |shift| <= 31, given {swizzle}",
    compose_stride: "cannot compose {left} with {mode}: stride {stride} and extent {extent} do not divide",
    compose_shape: "cannot compose {left} with {mode}: shape {shape} is not a multiple of {step}",
    compose_carry: "cannot compose {left} with {right}: the modes of {right} together overflow extent {extent}",
    tiler_rank: "a tiler of {tiler} modes needs a layout of at least as many, given {layout}",
    overlap: "the complement of {layout} does not exist: its modes overlap",
    cotarget: "the complement needs a size of at least 1, given {given}",
    left_inverse: "{layout} has no left inverse: strides {first} and {second} do not nest",
    repeats: "{layout} has no left inverse: its modes overlap",
  };

  /** An operation that does not exist for these operands; `argument` counts the operand at fault from 0. */
  class AlgebraError extends RangeError {
    constructor(key, argument, values) {
      super(fill(MESSAGES[key], values));
      this.argument = argument;
    }
  }

  /** `template` with every `{name}` replaced by that value, layouts as CuTe text. */
  const fill = (template, values) => template.replace(/\{(\w+)\}/g, (_, name) => toText(values[name]));

  const isTuple = Array.isArray;
  const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

  /** Flat list of the numbers of a nested array. */
  const flatten = (tree) => (isTuple(tree) ? tree.flatMap(flatten) : [tree]);

  /** Column-major strides without gaps, the leftmost mode fastest; extents of 1 get stride 0, as in CuTe. */
  function compactStride(shape) {
    let next = 1;
    const walk = (node) => {
      if (isTuple(node)) return node.map(walk);
      const stride = node === 1 ? 0 : next;
      next *= node;
      return stride;
    };
    return walk(shape);
  }

  /** True if both trees nest the same way. */
  function congruent(a, b) {
    if (!isTuple(a) || !isTuple(b)) return !isTuple(a) && !isTuple(b);
    return a.length === b.length && a.every((mode, i) => congruent(mode, b[i]));
  }

  /** A layout; without `stride` the compact column-major one. Throws AlgebraError if they are not a layout. */
  function layout(shape, stride = compactStride(shape)) {
    if (flatten(shape).some((extent) => !(extent >= 1))) throw new AlgebraError("shape", 0, { given: shape });
    if (flatten(stride).some((step) => !(step >= 0))) throw new AlgebraError("stride", 0, { given: stride });
    if (!congruent(shape, stride)) throw new AlgebraError("congruent", 0, { stride, shape });
    return { shape, stride };
  }

  const isComposed = (value) => Boolean(value.swizzle);
  const plain = (value) => (isComposed(value) ? value.layout : value);

  const product = (shape) => flatten(shape).reduce((total, x) => total * x, 1);

  /** Number of coordinates. */
  const size = (value) => product(plain(value).shape);

  /** One more than the greatest index of a plain layout. */
  const cosize = (a) => 1 + sum(pairs(a).map(([extent, stride]) => (extent - 1) * stride));

  /* Flat modes as [extent, stride] pairs, on which the algebra works. */
  const pairs = ({ shape, stride }) => {
    const strides = flatten(stride);
    return flatten(shape).map((extent, i) => [extent, strides[i]]);
  };

  /** Number of modes at the top level; an integer shape has one. */
  const rank = (value) => (isTuple(plain(value).shape) ? plain(value).shape.length : 1);

  /** Mode `i` of a layout, and all of them. */
  const mode = ({ shape, stride }, i) => (isTuple(shape) ? { shape: shape[i], stride: stride[i] } : { shape, stride });
  const modes = (value) => Array.from({ length: rank(value) }, (_, i) => mode(value, i));

  /** One layout with the given layouts as modes. */
  const join = (parts) => ({ shape: parts.map((p) => p.shape), stride: parts.map((p) => p.stride) });

  /**
   * The function of a swizzle `[bits, base, shift]` on integers from 0 up to 2**31 - 1: the `bits` bits that start at
   * `base + shift` are XORed onto those that start at `base` (a negative shift the other way round).
   */
  function swizzle([bits, base, shift]) {
    const mask = ((1 << bits) - 1) << (base + Math.max(0, shift));
    const distance = Math.abs(shift);
    return shift < 0 ? (x) => x ^ ((x & mask) << distance) : (x) => x ^ ((x & mask) >> distance);
  }

  /* An integer in place of a tuple counts its coordinates; beyond the size it goes on in the last mode. */
  function plainIndex(coord, { shape, stride }) {
    if (isTuple(coord)) return sum(coord.map((part, i) => plainIndex(part, mode({ shape, stride }, i))));
    const list = pairs({ shape, stride });
    const [, last] = list.pop();
    const inner = list.map(([extent, step]) => {
      const digit = coord % extent;
      coord = Math.floor(coord / extent);
      return digit * step;
    });
    return sum(inner) + coord * last;
  }

  /** Index of `coord`, an integer or nested like the shape, in a layout or composed layout. */
  function index(value, coord) {
    if (!isComposed(value)) return plainIndex(coord, value);
    return swizzle(value.swizzle)(value.offset + plainIndex(coord, value.layout));
  }

  /** The coordinate, nested as `shape`, of position `position` in colexicographic order. */
  function coordinate(position, shape) {
    if (!isTuple(shape)) return position;
    let rest = position;
    return shape.map((extent) => {
      const count = product(extent);
      const here = coordinate(rest % count, extent);
      rest = Math.floor(rest / count);
      return here;
    });
  }

  /** All indices, each below 2**31, as an Int32Array in colexicographic order. */
  function evaluate(value) {
    const out = new Int32Array(size(value));
    out[0] = isComposed(value) ? value.offset : 0;
    let filled = 1;
    for (const [extent, stride] of pairs(plain(value))) {
      for (let k = 1, at = filled; k < extent; k++) {
        const step = k * stride;
        for (let j = 0; j < filled; j++, at++) out[at] = out[j] + step;
      }
      filled *= extent;
    }
    if (!isComposed(value)) return out;
    const apply = swizzle(value.swizzle);
    for (let i = 0; i < out.length; i++) out[i] = apply(out[i]);
    return out;
  }

  /** CuTe's text of a layout, swizzle, tiler, shape or integer: `S<3,4,3> o 0 o (8,64):(64,1)`, `((2,4),8:2)`. */
  function toText(value) {
    if (isTuple(value)) return `(${value.map(toText).join(",")})`;
    if (typeof value !== "object") return String(value);
    if (value.tv) return `TV ${toText(value.tv)} on ${toText(value.shape)}`;
    if (!value.swizzle) return `${toText(value.shape)}:${toText(value.stride)}`;
    const text = `S<${value.swizzle.join(",")}>`;
    return value.layout ? `${text} o ${value.offset} o ${toText(value.layout)}` : text;
  }

  /** `{swizzle}`; throws AlgebraError if the function is not a permutation of 31-bit integers. */
  function makeSwizzle(bits, base, shift) {
    const made = { swizzle: [bits, base, shift] };
    const fits = bits >= 0 && base >= 0 && Math.abs(shift) >= bits && base + bits + Math.abs(shift) <= 31;
    if (!fits) throw new AlgebraError("swizzle", 0, { swizzle: made });
    return made;
  }

  /* The layout of the pairs: an integer one for a single pair, 1:0 for none. */
  function fromPairs(list) {
    const [first = [1, 0], second] = list;
    if (!second) return { shape: first[0], stride: first[1] };
    return { shape: list.map(([extent]) => extent), stride: list.map(([, stride]) => stride) };
  }

  /* The fewest pairs that are the same function of an integer, also beyond the size: the last may have extent 1. */
  function merged(layout) {
    const list = pairs(layout);
    const out = [];
    list.forEach(([extent, stride], i) => {
      const last = out.at(-1);
      if (extent === 1 && i < list.length - 1) return;
      if (last && last[0] * last[1] === stride) last[0] *= extent;
      else out.push([extent, stride]);
    });
    return out;
  }

  /* `operation` on the layout under a swizzle, which is kept. */
  const under = (value, operation) =>
    isComposed(value) ? { ...value, layout: operation(value.layout) } : operation(value);

  /** The same function of an integer with as few modes as possible. */
  const coalesce = (value) => under(value, (a) => fromPairs(merged(a).filter(([extent]) => extent > 1)));

  /** The same function with all modes at the top level. */
  const flat = (value) =>
    under(value, (a) => (isTuple(a.shape) ? { shape: flatten(a.shape), stride: flatten(a.stride) } : a));

  /** The coalesced layout without modes of stride 0 or extent 1: the same set of indices. */
  const filter = (a) => coalesce(fromPairs(pairs(a).filter(([, stride]) => stride !== 0)));

  const asLayout = (tiler) => (typeof tiler === "number" ? { shape: tiler, stride: 1 } : tiler);

  /* `operation` on each mode and its tiler; the modes beyond the tiler follow. */
  function byMode(a, tiler, operation) {
    if (tiler.length > rank(a)) throw new AlgebraError("tiler_rank", 1, { tiler: tiler.length, layout: a });
    const parts = modes(a);
    return [...tiler.map((part, i) => operation(parts[i], part)), ...parts.slice(tiler.length)];
  }

  /*
   * The pairs of a (merged: `digits`) after one pair extent:stride, which walks through a's index space read as digits
   * with a's extents as bases. Adds the largest index in each digit to `reach`.
   */
  function composePair(a, digits, [extent, stride], reach) {
    if (extent === 1 || stride === 0) return [[extent, 0]];
    const out = [];
    const mode = `${extent}:${stride}`;
    for (const [digit, [base, step]] of digits.entries()) {
      if (digit === digits.length - 1 || (extent - 1) * stride < base) {
        reach[digit] += (extent - 1) * stride;
        out.push([extent, stride * step]);
        break;
      }
      if (stride % base === 0) {
        stride /= base;
        continue;
      }
      if (base % stride) throw new AlgebraError("compose_stride", 1, { left: a, mode, stride, extent: base });
      const count = base / stride;
      if (extent % count) {
        throw new AlgebraError("compose_shape", 1, { left: a, mode, shape: extent, step: count });
      }
      reach[digit] += (count - 1) * stride;
      out.push([count, stride * step]);
      [extent, stride] = [extent / count, 1];
    }
    return out;
  }

  /** The layout i -> a(b(i)) with b's shape, whose modes may split; a tuple composes mode by mode. */
  function composition(a, b) {
    if (isComposed(a)) return under(a, (inner) => composition(inner, b));
    if (isTuple(b)) return join(byMode(a, b, composition).slice(0, b.length));
    const right = asLayout(b);
    const digits = merged(a);
    const reach = digits.map(() => 0);
    const walk = (shape, stride) =>
      isTuple(shape)
        ? join(shape.map((part, i) => walk(part, stride[i])))
        : fromPairs(composePair(a, digits, [shape, stride], reach));
    const result = walk(right.shape, right.stride);
    const overflow = digits.slice(0, -1).find(([extent], i) => reach[i] >= extent);
    if (overflow) throw new AlgebraError("compose_carry", 1, { left: a, right, extent: overflow[0] });
    return result;
  }

  /** The layout of the smallest indices that, added to those of `a`, fill up `target`; a is `argument` in errors. */
  function complement(a, target = cosize(a), argument = 0) {
    if (target < 1) throw new AlgebraError("cotarget", 1, { given: target });
    const moving = pairs(a).filter(([extent, stride]) => stride && extent > 1);
    const out = [];
    let covered = 1;
    for (const [extent, stride] of moving.sort(([x, p], [y, q]) => p - q || x - y)) {
      if (stride < covered) throw new AlgebraError("overlap", argument, { layout: a });
      out.push([Math.floor(stride / covered), covered]);
      covered = stride * extent;
    }
    out.push([Math.ceil(target / covered), covered]);
    return coalesce(fromPairs(out));
  }

  /* {stride, extent, unit} of the coalesced modes that move, by stride; `unit` is the stride in the coordinate. */
  function byStride(a) {
    let unit = 1;
    const out = [];
    for (const [extent, stride] of pairs(coalesce(a))) {
      if (stride) out.push({ stride, extent, unit });
      unit *= extent;
    }
    return out.sort((x, y) => x.stride - y.stride);
  }

  /** The largest layout r with a(r(i)) = i, over the indices that `a` reaches without a gap from 0. */
  function rightInverse(a) {
    const out = [];
    let reached = 1;
    for (const { stride, extent, unit } of byStride(a)) {
      if (stride !== reached) continue;
      out.push([extent, unit]);
      reached *= extent;
    }
    return coalesce(fromPairs(out));
  }

  /** A layout l with l(a(i)) = i; a mode of stride 0 loses its coordinate, which comes back as 0. */
  function leftInverse(a) {
    const list = byStride(a);
    if (!list.length) return { shape: 1, stride: 0 };
    const out = [[list[0].stride, 0]];
    for (const [i, { stride: first, extent, unit }] of list.slice(0, -1).entries()) {
      const second = list[i + 1].stride;
      if (second < first * extent) throw new AlgebraError("repeats", 0, { layout: a });
      if (second % first) throw new AlgebraError("left_inverse", 0, { layout: a, first, second });
      out.push([second / first, unit]);
    }
    out.push([list.at(-1).extent, list.at(-1).unit]);
    return coalesce(fromPairs(out));
  }

  /* Tilings. `trace(operation, operands, result)` sees each intermediate result; the default sees nothing. */
  const noTrace = () => {};
  function traced(trace, operation, operands, result) {
    trace(operation, operands, result);
    return result;
  }

  const concatenate = (trace, ...parts) => traced(trace, "concatenate", parts, join(parts));
  function inside(composed, operation, trace) {
    const result = under(composed, operation);
    return traced(trace, "swizzle", [{ swizzle: result.swizzle }, result.offset, result.layout], result);
  }

  /** (tile, rest): the elements that `tiler` picks, then how the tile repeats over `a`. */
  function logicalDivide(a, tiler, trace = noTrace) {
    if (isComposed(a)) return inside(a, (inner) => logicalDivide(inner, tiler, trace), trace);
    if (isTuple(tiler)) return concatenate(trace, ...byMode(a, tiler, (part, by) => logicalDivide(part, by, trace)));
    const tile = asLayout(tiler);
    const rest = traced(trace, "complement", [tile, size(a)], complement(tile, size(a), 1));
    const both = concatenate(trace, tile, rest);
    return traced(trace, "compose", [a, both], composition(coalesce(a), both));
  }

  /** (block, repeats): `block` repeated over the free indices in the order of `tiler`; a tuple works mode by mode. */
  function logicalProduct(block, tiler, trace = noTrace) {
    const repeat = (part, by) => logicalProduct(part, by, trace);
    if (isTuple(tiler)) return concatenate(trace, ...byMode(block, tiler, repeat));
    const order = asLayout(tiler);
    const room = size(block) * cosize(order);
    const free = traced(trace, "complement", [block, room], complement(block, room));
    const repeats = traced(trace, "compose", [free, order], composition(free, order));
    return concatenate(trace, block, repeats);
  }

  /* [tile, rest] of a logical divide or product; a mode that the tiler does not reach belongs to the rest. */
  function tileAndRest(a, tiler) {
    if (!isTuple(tiler)) return [mode(a, 0), mode(a, 1)];
    const parts = modes(a);
    const halves = tiler.map((part, i) => tileAndRest(parts[i], part));
    const rests = [...halves.map(([, rest]) => rest), ...parts.slice(tiler.length)];
    return [join(halves.map(([tile]) => tile)), join(rests)];
  }

  /* `operation` (a logical divide or product) with its modes put in the order of `arrange(tile, rest)`. */
  const arranged = (operation, arrange) => {
    const run = (a, tiler, trace = noTrace) => {
      if (isComposed(a)) return inside(a, (inner) => run(inner, tiler, trace), trace);
      const plain = operation(a, tiler, trace);
      const result = join(arrange(...tileAndRest(plain, tiler)));
      return toText(result) === toText(plain) ? result : traced(trace, "regroup", [plain], result);
    };
    return run;
  };

  /* Logical product of block and tiler, both filled up with modes 1:0 to the same rank: [blocks, repeats]. */
  function paddedProduct(block, tiler, trace) {
    const count = Math.max(rank(block), rank(tiler));
    const pad = (a) => join([...modes(a), ...Array(count - rank(a)).fill({ shape: 1, stride: 0 })]);
    return modes(logicalProduct(pad(block), pad(tiler), trace));
  }

  /** Mode i is (block's mode i, tiler's mode i): blocks side by side, as in a matrix of blocks. */
  function blockedProduct(block, tiler, trace = noTrace) {
    const [blocks, repeats] = paddedProduct(block, tiler, trace);
    const result = join(modes(blocks).map((part, i) => join([part, mode(repeats, i)])));
    return traced(trace, "regroup", [blocks, repeats], result);
  }

  /** Mode i is (tiler's mode i, block's mode i), coalesced: the elements of the blocks interleaved. */
  function rakedProduct(block, tiler, trace = noTrace) {
    const [blocks, repeats] = paddedProduct(block, tiler, trace);
    const result = join(modes(repeats).map((part, i) => coalesce(join([part, mode(blocks, i)]))));
    return traced(trace, "regroup", [repeats, blocks], result);
  }

  CF.algebra = {
    AlgebraError, fill, layout, makeSwizzle, isComposed, plain, size, cosize, rank, mode, modes, flatten, congruent,
    toText, evaluate, index, coordinate, swizzle, coalesce, flat, filter, composition, complement, rightInverse,
    leftInverse, logicalDivide, logicalProduct, blockedProduct, rakedProduct,
    zippedDivide: arranged(logicalDivide, (tile, rest) => [tile, rest]),
    tiledDivide: arranged(logicalDivide, (tile, rest) => [tile, ...modes(rest)]),
    flatDivide: arranged(logicalDivide, (tile, rest) => [...modes(tile), ...modes(rest)]),
    zippedProduct: arranged(logicalProduct, (tile, rest) => [tile, rest]),
    tiledProduct: arranged(logicalProduct, (tile, rest) => [tile, ...modes(rest)]),
    flatProduct: arranged(logicalProduct, (tile, rest) => [...modes(tile), ...modes(rest)]),
  };
})();
