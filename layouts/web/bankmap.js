/* Two pictures of one instruction's accesses: words by phase and bank, and the banks that each lane accesses. */
(() => {
  "use strict";

  const { BANKS, WORD } = CF.banks;
  const LABEL_EVERY = 4; // banks under one heading: a 16-byte chunk
  const FULL_RAMP = 8; // words of one bank at which the ramp ends

  const colour = (words) => CF.palette.ramp(0.12 + (0.88 * Math.min(words, FULL_RAMP)) / FULL_RAMP);

  const style = (words) => {
    const rgb = colour(words);
    return `background:${CF.palette.css(rgb)};color:${CF.palette.ink(rgb)}`;
  };

  /** Heading of phase `index` of an access: the lanes that it serves, or the core matrix. */
  function phaseName(access, index) {
    if (access.names.phase !== "phase") return `core ${index}`;
    const first = index * access.phaseLanes;
    return `lanes ${first}–${first + access.phaseLanes - 1}`;
  }

  const bankHeadings = () =>
    Array.from({ length: BANKS / LABEL_EVERY }, (_, i) =>
      CF.h("th", { scope: "col", colspan: LABEL_EVERY, title: `banks ${i * 4} to ${i * 4 + 3}` }, String(i * 4)),
    );

  /**
   * The heat map of one instruction as a table: a row for each phase, a column for each bank, in the cells the number
   * of words. `table` is the access's `words`, `ways` its passes, `phase` the chosen row, `choose(phase)` is called
   * with another.
   */
  function heatMap({ access, swizzle, table, ways, phase, choose }) {
    const wavefronts = ways.reduce((sum, n) => sum + n, 0);
    const worst = Math.max(...ways);
    const title = swizzle ? `With ${CF.banks.swizzleText(swizzle)}` : "Without swizzle";
    const passes = `${wavefronts} ${plural("wavefront", wavefronts)}`;
    const phases = `${table.length} ${plural(access.names.phase, table.length)}`;
    const row = (banks, index) =>
      CF.h(
        "tr",
        { class: index === phase ? "chosen" : null },
        CF.h(
          "th",
          { scope: "row" },
          CF.h(
            "button",
            { type: "button", "aria-pressed": String(index === phase), onclick: () => choose(index) },
            phaseName(access, index),
          ),
        ),
        Array.from(banks, (words) => heatCell(words, access.asynchronous ? 1 : ways[index])),
        CF.h("td", { class: ways[index] > 1 ? "ways bad" : "ways" }, ways[index] > 1 ? `${ways[index]} ▲` : "1"),
      );
    return CF.h(
      "div",
      { class: "bank-map" },
      CF.h("p", {}, CF.h("b", {}, title), `: worst ${worst}-way, ${passes} for ${phases}`),
      CF.h(
        "div",
        { class: "bank-scroll" },
        CF.h(
          "table",
          { "aria-label": `Words by phase and bank. ${title}` },
          CF.h(
            "thead",
            {},
            CF.h("tr", {}, CF.h("th", { scope: "col" }, "bank"), bankHeadings(), CF.h("th", { scope: "col" }, "ways")),
          ),
          CF.h("tbody", {}, table.map(row)),
        ),
      ),
    );
  }

  const plural = (word, count) => (count === 1 ? word : word.replace(/matrix$/, "matrice") + "s");

  /* The banks with the most words, which decide how long a phase takes, are outlined. */
  function heatCell(words, ways) {
    if (!words) return CF.h("td", { class: "none" }, "·");
    return CF.h("td", { class: ways > 1 && words === ways ? "worst" : null, style: style(words) }, String(words));
  }

  /** Legend of an access's heat map. */
  function legend({ asynchronous }) {
    const rule = asynchronous ? CF.banks.LINES : "The largest number of a row, outlined, is the number of passes.";
    const keys = [1, 2, 4, 8].map((words) => CF.h("i", { style: style(words) }, String(words)));
    return CF.h("p", { class: "bank-legend" }, "Words in a bank:", keys, CF.h("span", {}, `· none. ${rule}`));
  }

  /** Bank of the first and the last word of an access. */
  function bankRange(address, bytes) {
    const first = Math.floor(address / WORD) % BANKS;
    const last = first + bytes / WORD - 1;
    return { first, last, text: first === last ? `bank ${first}` : `banks ${first}–${last}` };
  }

  /* A lane's access as a bar over the 32 banks; hatched in banks with more than one word to serve. */
  function strip(address, name, laneBytes, banks) {
    const { first, last, text } = bankRange(address, laneBytes);
    const most = banks ? Math.max(...banks.slice(first, last + 1)) : 1;
    const place = `left:${(first / BANKS) * 100}%;width:${((last - first + 1) / BANKS) * 100}%`;
    const label = `${text}${most > 1 ? `, wanted ${most} times` : ""}`;
    return CF.h(
      "td",
      {},
      CF.h(
        "div",
        { class: "bank-strip", role: "img", "aria-label": label, title: label },
        CF.h("i", { class: most > 1 ? "collides" : null, style: place }, last > first ? String(name) : ""),
      ),
    );
  }

  /**
   * The lanes of one phase as a table: which element, address and banks. `sides` are
   * `[{title, addresses, words}, ...]`, all lanes of the instruction; `point(cell)` is told of the row under the cursor
   * (null: left), `pin(cell)` of a chosen one.
   */
  function lanes({ access, group, instruction, phase, sides, point, pin }) {
    const { part, phaseLanes, laneBytes, asynchronous } = access;
    const row = (_, index) => {
      const lane = phase * phaseLanes + index;
      const cell = access.cell(group, instruction, lane);
      const [at, column] = [cell % part.rows, Math.floor(cell / part.rows)];
      const label = access.names.lane === "row" ? index : lane;
      const name = `${access.names.lane} ${label}`;
      return CF.h(
        "tr",
        { onpointerenter: () => point(cell), onpointerleave: () => point(null) },
        CF.h("th", { scope: "row" }, CF.h("button", { type: "button", onclick: () => pin(cell) }, name)),
        CF.h("td", {}, `${part.axes[0]}${at}, ${part.axes[1]}${column}`),
        sides.map(({ addresses, words }) => [
          CF.h("td", { class: "mono" }, CF.hex(addresses[lane])),
          strip(addresses[lane], label, laneBytes, asynchronous ? null : words[phase]),
        ]),
      );
    };
    const heads = sides.map(({ title }) => [
      CF.h("th", { scope: "col" }, "address"),
      CF.h("th", { scope: "col" }, `banks 0–31, ${title}`),
    ]);
    return CF.h(
      "div",
      { class: "bank-lanes" },
      CF.h("p", {}, CF.h("b", {}, phaseName(access, phase)), `: ${phaseLanes} times ${laneBytes} bytes`),
      CF.h(
        "table",
        { "aria-label": `Banks of ${phaseName(access, phase)}` },
        CF.h(
          "thead",
          {},
          CF.h("tr", {}, CF.h("th", { scope: "col" }, access.names.lane), CF.h("th", { scope: "col" }, "from"), heads),
        ),
        CF.h("tbody", {}, Array.from({ length: phaseLanes }, row)),
      ),
    );
  }

  CF.bankMap = { heatMap, legend, lanes, phaseName, bankRange, plural };
})();
