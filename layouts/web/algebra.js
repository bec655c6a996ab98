/*
 * CuTe layouts in the browser: a layout is `{shape, stride}` with congruent nested arrays or numbers, the first mode
 * runs fastest. A composed layout is `{swizzle: [bits, base, shift], offset, layout}`. The twin of layouts/algebra.py.
 */
(() => {
  "use strict";

  const isTuple = Array.isArray;
  const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
  const product = (numbers) => numbers.reduce((total, x) => total * x, 1);

  /** Flat list of the numbers of a nested array. */
  const flatten = (tree) => (isTuple(tree) ? tree.flatMap(flatten) : [tree]);

  /** Strides that count the elements of `shape` from the left, leftmost mode fastest. */
  function compactStride(shape) {
    let next = 1;
    const walk = (node) => {
      if (isTuple(node)) return node.map(walk);
      const stride = next;
      next *= node;
      return stride;
    };
    return walk(shape);
  }

  /** True where both trees nest the same way. */
  function congruent(a, b) {
    if (!isTuple(a) || !isTuple(b)) return !isTuple(a) && !isTuple(b);
    return a.length === b.length && a.every((mode, i) => congruent(mode, b[i]));
  }

  /** A layout; without `stride` the compact column-major one. Throws a RangeError where the two are not congruent. */
  function layout(shape, stride = compactStride(shape)) {
    if (!congruent(shape, stride)) {
      throw new RangeError(`shape ${treeText(shape)} and stride ${treeText(stride)} are not congruent`);
    }
    return { shape, stride };
  }

  const isComposed = (value) => value.swizzle !== undefined;
  const plain = (value) => (isComposed(value) ? value.layout : value);

  /** Number of coordinates of the layout's domain. */
  const size = (value) => product(flatten(plain(value).shape));

  /** One more than the greatest index of a plain layout. */
  function cosize({ shape, stride }) {
    const strides = flatten(stride);
    return 1 + sum(flatten(shape).map((extent, i) => (extent - 1) * Math.abs(strides[i])));
  }

  /** Number of modes at the top level; an integer shape has one. */
  const rank = (value) => (isTuple(plain(value).shape) ? plain(value).shape.length : 1);

  /** Mode `i` of a layout. */
  const mode = ({ shape, stride }, i) => (isTuple(shape) ? { shape: shape[i], stride: stride[i] } : { shape, stride });

  /** The modes of a layout, one layout each. */
  const modes = (value) => Array.from({ length: rank(value) }, (_, i) => mode(value, i));

  /** One layout with the given layouts as modes. */
  const join = (parts) => ({ shape: parts.map((p) => p.shape), stride: parts.map((p) => p.stride) });

  /** The swizzle's function on integers from 0 up to 2**31 - 1. */
  function swizzle32([bits, base, shift]) {
    const mask = ((1 << bits) - 1) << (base + Math.max(0, shift));
    const distance = Math.abs(shift);
    return shift < 0 ? (x) => x ^ ((x & mask) << distance) : (x) => x ^ ((x & mask) >> distance);
  }

  /**
   * The function of a swizzle `[bits, base, shift]`: the `bits` bits that start at `base + shift` are XORed onto those
   * that start at `base` (a negative shift the other way round). Integers below 2**53 whose swizzled bits lie below 31.
   */
  function swizzle(parameters) {
    const low = swizzle32(parameters);
    return (x) => {
      if (x >= 0 && x <= 0x7fffffff) return low(x);
      const word = x - Math.floor(x / 0x80000000) * 0x80000000;
      return x - word + low(word);
    };
  }

  /** Index of a coordinate, nested as the shape or with an integer in place of any sub-tuple. */
  function plainIndex(coord, shape, stride) {
    if (!isTuple(shape)) return coord * stride;
    if (isTuple(coord)) return sum(coord.map((c, i) => plainIndex(c, shape[i], stride[i])));
    let rest = coord;
    let total = 0;
    shape.forEach((extent, i) => {
      const count = product(flatten(extent));
      const last = i === shape.length - 1;
      total += plainIndex(last ? rest : rest % count, extent, stride[i]);
      rest = Math.floor(rest / count);
    });
    return total;
  }

  /** Index of `coord` in a layout or composed layout. */
  function index(value, coord) {
    if (!isComposed(value)) return plainIndex(coord, value.shape, value.stride);
    return swizzle(value.swizzle)(value.offset + plainIndex(coord, value.layout.shape, value.layout.stride));
  }

  /** The coordinate, nested as `shape`, of position `position` in colexicographic order. */
  function coordinate(position, shape) {
    if (!isTuple(shape)) return position;
    let rest = position;
    return shape.map((extent) => {
      const count = product(flatten(extent));
      const here = coordinate(rest % count, extent);
      rest = Math.floor(rest / count);
      return here;
    });
  }

  /** All indices in colexicographic order: an Int32Array, or a Float64Array where an index leaves 32 bits. */
  function evaluate(value) {
    const { shape, stride } = plain(value);
    const offset = isComposed(value) ? value.offset : 0;
    const wide = cosize(plain(value)) + Math.abs(offset) > 0x7fffffff;
    const out = new (wide ? Float64Array : Int32Array)(size(value));
    const strides = flatten(stride);
    if (out.length > 0) out[0] = offset;
    let filled = 1;
    flatten(shape).forEach((extent, i) => {
      for (let k = 1, at = filled; k < extent; k++) {
        const step = k * strides[i];
        for (let j = 0; j < filled; j++, at++) out[at] = out[j] + step;
      }
      filled *= extent;
    });
    if (isComposed(value)) {
      const apply = wide ? swizzle(value.swizzle) : swizzle32(value.swizzle);
      for (let i = 0; i < out.length; i++) out[i] = apply(out[i]);
    }
    return out;
  }

  /** A shape, stride or coordinate as CuTe prints it: `((2,4),8)`. */
  const treeText = (tree) => (isTuple(tree) ? `(${tree.map(treeText).join(",")})` : String(tree));

  /** CuTe's text of a layout or composed layout: `S<3,4,3> o 0 o (8,64):(64,1)`. */
  function toText(value) {
    if (isComposed(value)) return `S<${value.swizzle.join(",")}> o ${value.offset} o ${toText(value.layout)}`;
    return `${treeText(value.shape)}:${treeText(value.stride)}`;
  }

  CF.algebra = {
    layout, size, cosize, rank, mode, modes, join, flatten, congruent, compactStride, isComposed, plain,
    evaluate, swizzle, index, coordinate, treeText, toText,
  };
})();
