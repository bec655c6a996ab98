/* Colour modes of a tile or fragment: one number a cell, and how a number becomes a colour, a text and a legend. */
(() => {
  "use strict";

  const { category, ramp, mix } = CF.palette;
  const WHITE = [255, 255, 255];
  const BLACK = [0, 0, 0];
  const HUES = CF.palette.categories.length;

  const TITLES = {
    plain: "plain",
    owner: "owner thread",
    value: "value index",
    instruction: "instruction",
    box: "TMA box",
    bank: "bank",
    address: "address order",
    core: "core matrix",
  };

  /* Which thread and value a cell belongs to: a fragment's own layout, of a tile that of a step which moves it. */
  const belonging = (scene, part, step) => (part.owned ? { values: part.owned } : scene.mover(part, step));

  function descriptorOf(scene, part, step) {
    const has = (spec) => ["a", "b"].some((side) => spec?.descriptor?.[side]?.tile === part.id);
    const found = has(scene.step(step)) ? scene.step(step) : scene.steps.find(has);
    if (!found) return null;
    const side = found.descriptor.a?.tile === part.id ? "a" : "b";
    return { step: found, desc: found.descriptor[side] };
  }

  /** Modes that apply to the part: `[[mode, title], ...]`. */
  function modes(scene, part) {
    const found = ["plain"];
    const moved = belonging(scene, part, null);
    const split = scene.mover(part, null, true);
    if (moved?.values.threads > 1) found.push("owner");
    if (moved?.values.values > 1 && moved.step?.kind !== "tma") found.push("value");
    if (split) found.push(split.step.kind === "tma" ? "box" : "instruction");
    if (part.space === "shared") found.push("bank");
    if (part.kind === "tile") found.push("address");
    if (descriptorOf(scene, part, null)) found.push("core");
    return found.map((mode) => [mode, TITLES[mode]]);
  }

  /** The default mode of a part. */
  function standard(scene, part) {
    const found = modes(scene, part).map(([mode]) => mode);
    if (part.space === "shared") return "bank";
    return ["box", "owner", "instruction", "address"].find((mode) => found.includes(mode)) ?? "plain";
  }

  function fill(part, visit) {
    const numbers = new Float64Array(part.size).fill(CF.scene.NONE);
    visit((cell, number) => {
      if (numbers[cell] === CF.scene.NONE) numbers[cell] = number;
    });
    return numbers;
  }

  /* Warps differ in hue; lanes of a warp run from dark to light. */
  function threadColour(thread) {
    const lane = thread % CF.scene.WARP;
    const hue = CF.palette.warp(Math.floor(thread / CF.scene.WARP));
    return lane < 16 ? mix(hue, BLACK, (16 - lane) / 56) : mix(hue, WHITE, (lane - 15) / 28);
  }

  const rampOver = (count) => (number) => ramp(count > 1 ? number / (count - 1) : 0.5);

  function warpNames(numbers) {
    const warps = new Set();
    for (const thread of numbers) if (thread >= 0) warps.add(Math.floor(thread / CF.scene.WARP));
    const sorted = [...warps].sort((a, b) => a - b);
    return [{ text: span("warp", sorted[0], sorted.at(-1)), rgbs: sorted.map(CF.palette.warp) }];
  }

  /* Of an element with several owners the first gives the colour; its warp's name would then hide the others. */
  function ownerNames(copies, numbers) {
    if (copies > 1) return { legend: [{ text: `the first of ${copies} threads`, rgbs: [] }] };
    const group = (thread) => Math.floor(thread / CF.scene.WARP);
    return { group, groupText: (warp) => `warp ${warp}`, legend: warpNames(numbers) };
  }

  const span = (what, first, last) => (first === last ? `${what} ${first}` : `${what} ${first}–${last}`);

  const counted = (numbers, rgb) => {
    const last = numbers.reduce((a, b) => Math.max(a, b), 0);
    const rgbs = Array.from({ length: Math.min(last + 1, HUES) }, (_, i) => rgb(i));
    return [{ text: last ? `0–${last}` : "0", rgbs }];
  };

  /* As in the static pictures, shifted by one every eight: numbers a multiple of eight apart differ in colour. */
  const coreColour = (number) => category(number + Math.floor(number / HUES));

  const makers = {
    plain: (scene, part) => ({
      numbers: new Float64Array(part.size),
      rgb: () => CF.palette.parse(CF.palette.theme("cell")),
      text: (_, cell) => `${cell % part.rows},${Math.floor(cell / part.rows)}`,
      legend: [],
    }),

    owner: (scene, part, { step }) => {
      const { values, step: mover } = belonging(scene, part, step);
      const numbers = fill(part, (put) => values.each(null, null, (cell, thread) => put(cell, thread)));
      return {
        numbers,
        by: mover?.title,
        follows: ["step"],
        rgb: threadColour,
        text: (number) => `t${number}`,
        ...ownerNames(values.classes.members[0].length, numbers),
      };
    },

    value: (scene, part, { step }) => {
      const { values, step: mover } = belonging(scene, part, step);
      const numbers = fill(part, (put) => values.each(null, null, (cell, _, value) => put(cell, value)));
      return {
        numbers,
        by: mover?.title,
        follows: ["step"],
        rgb: rampOver(values.values),
        text: (n) => `v${n}`,
        range: ["v0", `v${values.values - 1}`],
      };
    },

    instruction: (scene, part, { step }) => {
      const { values, step: mover } = scene.mover(part, step, true);
      const what = mover.kind === "tma" ? "box" : "instruction";
      const numbers = fill(part, (put) => {
        for (let i = 0; i < values.instructions; i++) values.each(i, null, (cell) => put(cell, i));
      });
      return {
        numbers,
        by: mover.title,
        follows: ["step"],
        rgb: category,
        text: (n) => `#${n}`,
        group: (n) => n,
        groupText: (n) => `${what} ${n}`,
        legend: counted(numbers, category),
      };
    },

    bank: (scene, part, { stage, swizzled }) => {
      const numbers = addresses(scene, part, stage, swizzled).map((address) => scene.bank(address));
      const range = ["bank 0", "31"];
      return { numbers, follows: ["stage", "swizzle"], rgb: rampOver(CF.scene.BANKS), text: String, range };
    },

    address: (scene, part, { stage, swizzled }) => {
      const numbers = addresses(scene, part, stage, swizzled);
      const low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
      const high = numbers.reduce((a, b) => Math.max(a, b), 0);
      return {
        numbers,
        follows: ["stage", "swizzle"],
        rgb: (address) => ramp((address - low) / Math.max(high - low, 1)),
        text: (address) => address.toString(16),
        range: [CF.hex(low), CF.hex(high)],
      };
    },

    core: (scene, part, { step, instruction }) => {
      const found = descriptorOf(scene, part, step);
      const numbers = coreNumbers(scene, part, found, instruction ?? 0);
      return {
        numbers,
        by: found.step.title,
        follows: ["step", "instruction"],
        rgb: coreColour,
        text: (n) => `c${n}`,
        group: (n) => n,
        groupText: (n) => `${n}`,
        legend: counted(numbers, coreColour),
      };
    },
  };
  makers.box = makers.instruction;

  function addresses(scene, part, stage, swizzled) {
    const numbers = new Float64Array(part.size);
    for (let col = 0, cell = 0; col < part.cols; col++) {
      for (let row = 0; row < part.rows; row++) numbers[cell++] = scene.address(part, row, col, stage, swizzled);
    }
    return numbers;
  }

  /* The scene gives the core matrices of instruction 0; a later one reads the same pattern, moved as its cells are. */
  function coreNumbers(scene, part, { step, desc }, instruction) {
    const touch = step.touches.find((candidate) => candidate.id === part.id && candidate.mode === "read");
    const values = touch && scene.touchValues(touch);
    const moved = values && instruction < values.instructions ? values.cell(0, 0, instruction) - values.cell(0) : 0;
    const cells = CF.algebra.evaluate(desc.core);
    return fill(part, (put) => cells.forEach((cell, at) => put(cell + moved, Math.floor(at / 64))));
  }

  /**
   * The colouring of a part: `{mode, title, numbers: Float64Array by cell (-1 none), rgb(number), text(number, cell)}`
   * and for the legend either `legend: [{text, rgbs}]` or `range: [low, high]`; `group(number)` and `groupText(group)`
   * if neighbouring cells of one group get a label; `by` the step that the numbers are of, `follows` the keys of
   * CF.state that they depend on. A mode that does not apply to the part is replaced by its default.
   */
  function of(scene, part, wanted, options) {
    const known = modes(scene, part).map(([mode]) => mode);
    const alias = wanted === "instruction" && known.includes("box") ? "box" : wanted;
    const mode = known.includes(alias) ? alias : standard(scene, part);
    return { mode, title: TITLES[mode], ...makers[mode](scene, part, options) };
  }

  CF.coloring = { modes, standard, of, TITLES, descriptorOf };
})();
