/* The Banks view's tables: all accesses with their conflicts, and the same under other swizzles of a tile. */
(() => {
  "use strict";

  const { h } = CF;
  const { swizzleText } = CF.banks;
  const HEADS = [
    ["instruction", 1],
    ["tile", 1],
    ["phases of one", 1],
    ["worst ways", 2],
    ["wavefronts of the tile", 2],
    ["ratio", 1],
  ];
  const SECOND_HEADS = ["with swizzle", "without", "with swizzle", "without"];

  const ratio = (a, b) => String(Math.round((a / b) * 100) / 100);

  /**
   * Every access with its ways and wavefronts, with and without swizzle. `shown` is the swizzle of the tile
   * of the `chosen` access, its own or one that is tried; `choose(access)` is called with another.
   */
  function accessTable({ accesses, chosen, shown, choose }) {
    const head = ([text, columns]) =>
      columns > 1
        ? h("th", { scope: "colgroup", colspan: columns }, text)
        : h("th", { scope: "col", rowspan: 2 }, text);
    const row = (access) =>
      accessRow(access, {
        chosen: access === chosen,
        swizzle: access.part === chosen.part ? shown : access.swizzle,
        choose,
      });
    return h(
      "table",
      { class: "facts-table access-table", "aria-label": "Accesses of shared memory" },
      h(
        "thead",
        {},
        h("tr", {}, HEADS.map(head)),
        h(
          "tr",
          {},
          SECOND_HEADS.map((text) => h("th", { scope: "col" }, text)),
        ),
      ),
      h("tbody", {}, accesses.map(row)),
    );
  }

  function accessRow(access, { chosen, swizzle, choose }) {
    const [on, off] = [access.summary(swizzle), access.summary(null)];
    const kind = access.step.kind === "wgmma" ? "wgmma, through its descriptor" : access.step.kind;
    const phases = CF.bankMap.plural(access.names.phase, access.phases);
    const ways = (n) => h("td", { class: n > 1 ? "num bad" : "num" }, n > 1 ? `${n} ▲` : "1");
    const count = (n) => h("td", { class: "num" }, CF.number(n));
    const button = h(
      "button",
      {
        type: "button",
        class: "row-button",
        "aria-pressed": String(chosen),
        dataset: { key: `access-${access.id}` },
        onclick: () => choose(access),
      },
      h("span", {}, access.step.title),
      h("small", {}, kind),
    );
    return h(
      "tr",
      { class: chosen ? "chosen" : null },
      h("th", { scope: "row" }, button),
      h("td", { class: "inline" }, `${access.part.id} `, h("small", {}, swizzleText(swizzle))),
      h("td", { class: "inline" }, `${access.phases} `, h("small", {}, phases)),
      ways(on.worst),
      ways(off.worst),
      count(on.wavefronts),
      count(off.wavefronts),
      h("td", { class: "num" }, `${ratio(off.wavefronts, on.wavefronts)}×`),
    );
  }

  /**
   * The accesses of a tile under the swizzles of 0 to 3 bits, with a radio button for each: nodes. `chosen` is the
   * number of bits shown, `choose(bits)` is called with another.
   */
  function tries({ part, accesses, alternatives, chosen, choose }) {
    const question = `What if ${part.id} had another swizzle and the same layout?`;
    const own = part.spec.swizzle?.[0] ?? 0;
    const radio = (bits) => ({
      type: "radio",
      name: "bits",
      checked: bits === chosen,
      dataset: { key: `bits-${bits}` },
      onchange: () => choose(bits),
    });
    const head = (swizzle, bits) =>
      h(
        "th",
        { scope: "col" },
        h(
          "label",
          {},
          h("input", radio(bits)),
          swizzle ? swizzleText(swizzle) : "none",
          bits === own ? h("small", {}, "this kernel's") : null,
        ),
      );
    const cell = (access) => (swizzle, bits) => {
      const { worst, wavefronts } = access.summary(swizzle);
      const kind = [worst > 1 && "bad", bits === chosen && "chosen"].filter(Boolean).join(" ");
      const words = `${worst}-way${worst > 1 ? " ▲" : ""}`;
      return h("td", { class: kind || null }, words, h("small", {}, `${CF.number(wavefronts)} wavefronts`));
    };
    const row = (access) =>
      h("tr", {}, h("th", { scope: "row" }, access.step.title), alternatives.map(cell(access)));
    const table = h(
      "table",
      { class: "facts-table tries", "aria-label": question },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "access"), alternatives.map(head))),
      h("tbody", {}, accesses.map(row)),
    );
    return [
      h("p", {}, h("b", {}, question)),
      h("div", { class: "scroll" }, table),
      h("p", { class: "hint" }, why(part, alternatives, accesses)),
    ];
  }

  /** Why a tile has its swizzle, from the numbers of its alternatives. */
  function why(part, alternatives, accesses) {
    const own = part.spec.swizzle?.[0] ?? 0;
    const worst = alternatives.map((swizzle) => Math.max(...accesses.map((access) => access.summary(swizzle).worst)));
    const least = worst.indexOf(Math.min(...worst));
    if (own === least && worst[own] === 1)
      return `${own} bits are the fewest without a conflict in any access of ${part.id}.`;
    if (worst[own] === worst[least])
      return `${least} bits would be as good for ${part.id}: its worst access takes ${worst[least]} passes either way.`;
    return `With ${least} bits the worst access would take ${worst[least]} passes instead of ${worst[own]}.`;
  }

  CF.bankTables = { accessTable, tries, why, ratio };
})();
