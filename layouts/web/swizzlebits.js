/* CF.swizzleBits: which bits of an index a swizzle XORs onto which, with an element's own bits where there is one. */
(() => {
  "use strict";

  const A = CF.algebra;
  const WIDTH = 26; // of a bit
  const ARC = 46; // height of the arcs
  const ROW = 24;
  const LABEL = 108;
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
    const svg = CF.svg("svg", { class: "bits", width: LABEL + count * WIDTH + 4, height, role: "img" });
    svg.setAttribute("aria-label", inWords(value, source, target, index));
    const kind = (bit) => (source.includes(bit) ? "source" : target.includes(bit) ? "target" : "");
    svg.append(
      ...source.map((bit, i) => arc(x(bit) + WIDTH / 2, x(target[i]) + WIDTH / 2)),
      label("bit of the index", ARC),
      ...range(0, count).map((bit) => cell(x(bit), ARC, String(bit), kind(bit))),
      label("makes the bank", ARC + ROW),
      ...range(0, count).map((bit) => bankCell(x(bit), ARC + ROW, bit + scale)),
    );
    rows.forEach(({ name, bit }, row) => {
      const y = ARC + ROW * (row + 2) + 6;
      svg.append(label(name, y), ...range(0, count).map((at) => cell(x(at), y, bit(at), bit(at) ? kind(at) : "")));
    });
    const name = `S<${value.swizzle.join(",")}>`;
    const title = CF.h("p", {}, CF.h("b", {}, name), ` ${inWords(value, source, target, null)}`);
    return CF.h("figure", {}, title, CF.h("div", { class: "bits-scroll", tabindex: 0, "aria-label": "Bits" }, svg));
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
    return CF.svg("g", { class: "bits-arc" }, CF.svg("path", { d: path, class: "line" }), CF.svg("path", { d: head }));
  }

  const label = (text, y) => CF.svg("text", { x: LABEL - 8, y: y + ROW / 2, class: "bits-label" }, text);

  function cell(x, y, text, kind) {
    const box = { x: x + 1, y: y + 1, width: WIDTH - 2, height: ROW - 2, rx: 3, class: `bits-box ${kind}` };
    const place = { x: x + WIDTH / 2, y: y + ROW / 2, class: `bits-text ${kind}` };
    return CF.svg("g", {}, text === "" ? null : CF.svg("rect", box), CF.svg("text", place, text));
  }

  /* `b0` to `b4`: the address bits that choose the bank. */
  function bankCell(x, y, addressBit) {
    const bit = addressBit - WORD;
    const place = { x: x + WIDTH / 2, y: y + ROW / 2, class: "bits-text bank" };
    return CF.svg("text", place, bit >= 0 && bit < BANK ? `b${bit}` : "·");
  }
})();
