/* A swizzle's effect on the bits of an element's byte offset in its tile, as a picture with a text. */
(() => {
  "use strict";

  const BIT = { width: 30, height: 24 };
  const LEFT = 62;
  const BEFORE = 38; // top edges of the two rows of bits
  const AFTER = 112;
  const HEIGHT = 184;
  const BANK_BITS = [2, 6]; // of a byte address: 32 banks of 4 bytes
  const CHUNK_BITS = [4, 6]; // 8 chunks of 16 bytes in the 128 bytes of all banks

  /** Bit numbers of a byte offset that a swizzle of elements XORs: `[{source, target}, ...]`, lowest first. */
  function pairs(swizzle, elementBytes) {
    if (!swizzle) return [];
    const [bits, base, shift] = swizzle;
    const byteBits = Math.log2(elementBytes);
    return Array.from({ length: bits }, (_, i) => {
      const [low, high] = [base + i + byteBits, base + i + Math.abs(shift) + byteBits];
      return shift < 0 ? { source: low, target: high } : { source: high, target: low };
    });
  }

  /** Byte offsets of an element before and after a swizzle: `{before, after}`. */
  function offsets(part, cell, swizzle, stage = 0) {
    const { elementBytes } = part;
    const offset = part.offsets[cell + part.size * (stage % part.stages)];
    const after = swizzle ? CF.algebra.swizzle(swizzle)(offset) : offset;
    return { before: offset * elementBytes, after: after * elementBytes };
  }

  /** `width` binary digits, a space before each group of four. */
  const binary = (value, width) =>
    value
      .toString(2)
      .padStart(width, "0")
      .replace(/\B(?=(\d{4})+$)/g, " ");

  /** The picture of `before` and `after` in `width` bits, the XORs of `xors` between them. */
  function picture({ before, after, xors, width }) {
    const x = (bit) => LEFT + (width - 1 - bit) * BIT.width;
    const bit = (value, at) => Math.floor(value / 2 ** at) % 2;
    const numbers = Array.from({ length: width }, (_, at) =>
      CF.svg("text", { x: x(at) + BIT.width / 2, y: 26, class: "bit-number" }, String(at)),
    );
    return CF.svg(
      "svg",
      {
        class: "bits",
        width: LEFT + width * BIT.width + 2,
        height: HEIGHT,
        role: "img",
        "aria-label":
          `Before ${binary(before, width)}, after ${binary(after, width)}. ` +
          (xors.map(({ source, target }) => `bit ${source} is XORed onto bit ${target}`).join(", ") || "No swizzle."),
      },
      CF.svg("text", { x: 0, y: 26, class: "bit-label" }, "bit"),
      numbers,
      bitRow("before", BEFORE, before, null),
      xors.map(arc),
      bitRow("after", AFTER, after, before),
      bracket(BANK_BITS, AFTER + BIT.height + 8, "bank"),
      bracket(CHUNK_BITS, AFTER + BIT.height + 31, "16-byte chunk"),
    );

    function bitRow(name, top, value, other) {
      const role = (at) => {
        if (xors.some(({ source }) => source === at)) return "source";
        return xors.some(({ target }) => target === at) ? "target" : "";
      };
      const cells = Array.from({ length: width }, (_, at) => {
        const flipped = other !== null && bit(other, at) !== bit(value, at);
        const box = { x: x(at) + 1, y: top, width: BIT.width - 2, height: BIT.height, rx: 3 };
        const text = { x: x(at) + BIT.width / 2, y: top + 17 };
        return CF.svg(
          "g",
          { class: `bit ${role(at)}${flipped ? " flipped" : ""}` },
          CF.svg("rect", box),
          CF.svg("text", text, String(bit(value, at))),
        );
      });
      return [CF.svg("text", { x: 0, y: top + 17, class: "bit-label" }, name), cells];
    }

    /* From the source bit of the upper row to the ⊕ over the target bit of the lower row. */
    function arc({ source, target }) {
      const [from, to] = [x(source) + BIT.width / 2, x(target) + BIT.width / 2];
      const [top, ring] = [BEFORE + BIT.height, AFTER - 16];
      const active = bit(before, source) ? " active" : "";
      const end = to - 8 * Math.sign(to - from);
      return CF.svg(
        "g",
        { class: `xor${active}` },
        CF.svg("path", { d: `M${from} ${top} C${from} ${ring} ${from + (to - from) * 0.3} ${ring} ${end} ${ring}` }),
        CF.svg("path", { d: `M${to} ${top} V${AFTER}`, class: "carry" }),
        CF.svg("circle", { cx: to, cy: ring, r: 7 }),
        CF.svg("path", { d: `M${to - 4} ${ring} h8 M${to} ${ring - 4} v8` }),
      );
    }

    function bracket([low, high], top, text) {
      const [from, to] = [x(high) + 3, x(low) + BIT.width - 3];
      const label = { x: (from + to) / 2, y: top + 14, class: "bit-number" };
      return CF.svg(
        "g",
        { class: "bit-bracket" },
        CF.svg("path", { d: `M${from} ${top - 4} v4 H${to} v-4` }),
        CF.svg("text", label, `${text}, bits ${low}–${high}`),
      );
    }
  }

  /**
   * Picture and text of one element of a tile under a swizzle. `name` is the element's, as `n3, d17`.
   * The swizzle acts on the offset within the tile; tiles start at multiples of its period, so banks agree.
   */
  function figure({ scene, part, cell, swizzle, name, stage = 0 }) {
    const { before, after } = offsets(part, cell, swizzle, stage);
    const bytes = part.elementBytes * part.offsets.length;
    const width = Math.max(Math.ceil(Math.log2(bytes)), 10);
    const xors = pairs(swizzle, part.elementBytes);
    const { base } = part.spec;
    const say = (offset) =>
      `offset ${CF.hex(offset)}, address ${CF.hex(base + offset)}, bank ${scene.bank(base + offset)}`;
    const rules = xors.map(({ source, target }) => `${source} → ${target}`).join(", ");
    return CF.h(
      "figure",
      { class: "bits-figure" },
      CF.scroller("Bits of the offset", picture({ before, after, xors, width })),
      CF.h(
        "figcaption",
        {},
        CF.h("p", {}, CF.h("b", {}, `${part.id} at ${name}`), ` before: ${say(before)}; `, `after: ${say(after)}.`),
        CF.h(
          "p",
          { class: "hint" },
          xors.length
            ? `${CF.banks.swizzleText(swizzle)} counts elements of ${part.elementBytes} bytes; `
            : "Without a swizzle the offset is the layout's own. ",
          xors.length ? `in bytes it XORs bits ${rules}. ` : null,
          `${part.id} starts at ${CF.hex(base)}, ${aligned(base)}.`,
        ),
      ),
    );
  }

  const aligned = (base) =>
    base === 0
      ? "so offset and address are the same"
      : `a multiple of ${CF.number(base & -base)} bytes, so that both have the same banks`;

  CF.bits = { pairs, offsets, binary, picture, figure };
})();
