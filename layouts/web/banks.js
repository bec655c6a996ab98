/* The bank model: which accesses of shared memory conflict. No drawing here; layouts/banks.py is the same in Python. */
(() => {
  "use strict";

  const { WARP, BANKS } = CF.scene;
  const WORD = 4; // bytes of a bank
  const PHASE_BYTES = BANKS * WORD;
  const WARPGROUP = 128;
  const CORE_ROWS = 8; // a core matrix is 8 rows of 16 bytes
  const CORE_ELEMENTS = 8;
  const CORE_BYTES = 16;
  const MOST_BITS = 3; // 8 chunks of 16 bytes fill a row of banks

  /** Lanes served together when each accesses `laneBytes` (4, 8 or 16). */
  const phaseLanes = (laneBytes) => Math.min(WARP, PHASE_BYTES / laneBytes);

  /** Distinct words in each bank that each phase accesses, from the lanes' byte addresses: `[Uint8Array(32), ...]`. */
  function wordsByBank(addresses, laneBytes) {
    const lanes = phaseLanes(laneBytes);
    const table = [];
    for (let first = 0; first < addresses.length; first += lanes) {
      const words = new Set();
      for (const address of addresses.slice(first, first + lanes)) {
        for (let byte = 0; byte < laneBytes; byte += WORD) words.add(Math.floor((address + byte) / WORD));
      }
      const banks = new Uint8Array(BANKS);
      for (const word of words) banks[word % BANKS]++;
      table.push(banks);
    }
    return table;
  }

  /** Distinct 128-byte lines that each phase touches. */
  function linesOf(addresses, laneBytes) {
    const lanes = phaseLanes(laneBytes);
    return Array.from({ length: addresses.length / lanes }, (_, phase) => {
      const mine = Array.from(addresses.slice(phase * lanes, (phase + 1) * lanes));
      return new Set(mine.map((address) => Math.floor(address / PHASE_BYTES))).size;
    });
  }

  /**
   * Passes that each phase takes, 1 if it is free of conflicts: the largest number of words in one bank; for an
   * asynchronous copy (cp.async), the number of 128-byte lines.
   */
  const ways = (addresses, laneBytes, asynchronous = false) =>
    asynchronous
      ? linesOf(addresses, laneBytes)
      : wordsByBank(addresses, laneBytes).map((banks) => Math.max(...banks));

  /**
   * The accesses of one step to one shared-memory tile: by the lanes of warps, or by warpgroups through a matrix
   * descriptor, whose core matrices then stand for phases of 8 lanes with 16 bytes each.
   */
  class Access {
    #summaries = new Map();

    constructor(scene, step, tile) {
      this.id = `${step.id}.${tile}`;
      this.scene = scene;
      this.step = step;
      this.part = scene.tile(tile);
      this.asynchronous = step.kind === "cp.async";
    }

    /** Lanes of one phase. */
    get phaseLanes() {
      return phaseLanes(this.laneBytes);
    }

    /** Phases of one instruction of one warp or warpgroup. */
    get phases() {
      return this.lanes / this.phaseLanes;
    }

    /** The swizzle `[bits, base, shift]` of the tile, null if it has none. */
    get swizzle() {
      return this.part.spec.swizzle;
    }

    /**
     * Byte address of each lane, in stage 0, which stands for all of them.
     * `group` counts the access's warps or warpgroups from 0; `swizzle` null: none.
     */
    addresses(group, instruction, swizzle) {
      const { offsets, spec, elementBytes } = this.part;
      const place = swizzle ? CF.algebra.swizzle(swizzle) : (offset) => offset;
      return Int32Array.from(
        { length: this.lanes },
        (_, lane) => spec.base + elementBytes * place(offsets[this.cell(group, instruction, lane)]),
      );
    }

    /** `wordsByBank` of one instruction of one group. */
    words(group, instruction, swizzle) {
      return wordsByBank(this.addresses(group, instruction, swizzle), this.laneBytes);
    }

    /** Ways of the phases of one instruction of one group. */
    waysOf(group, instruction, swizzle) {
      return ways(this.addresses(group, instruction, swizzle), this.laneBytes, this.asynchronous);
    }

    /** Ways of every phase of the tile: `[instruction][group][phase]`. */
    ways(swizzle) {
      return Array.from({ length: this.instructions }, (_, instruction) =>
        Array.from({ length: this.groups }, (_, group) => this.waysOf(group, instruction, swizzle)),
      );
    }

    /** Over the whole tile: `{worst, wavefronts, phases}`; each phase takes at least one wavefront. */
    summary(swizzle) {
      const key = String(swizzle);
      if (!this.#summaries.has(key)) {
        const all = this.ways(swizzle).flat(2);
        const wavefronts = all.reduce((sum, n) => sum + n, 0);
        this.#summaries.set(key, { worst: Math.max(...all), wavefronts, phases: all.length });
      }
      return this.#summaries.get(key);
    }
  }

  class WarpAccess extends Access {
    constructor(scene, step, touch) {
      super(scene, step, touch.id);
      this.values = scene.touchValues(touch);
      this.mode = touch.mode;
      this.laneBytes = touch.lane_bytes;
      this.lanes = WARP;
      this.groups = this.values.threads / WARP;
      this.firstGroup = Math.floor(touch.first_thread / WARP);
      this.instructions = this.values.instructions;
      this.names = { group: "warp", phase: "phase", lane: "lane" };
    }

    /** The cell `row + rows * col` of a lane's first element. */
    cell(group, instruction, lane) {
      return this.values.cell(WARP * group + lane, 0, instruction);
    }
  }

  class DescriptorAccess extends Access {
    constructor(scene, step, descriptor) {
      super(scene, step, descriptor.tile);
      const touch = step.touches.find(({ id, mode }) => id === descriptor.tile && mode === "read");
      this.values = scene.touchValues(touch);
      this.cores = CF.algebra.evaluate(descriptor.core);
      this.mode = "read";
      this.laneBytes = CORE_BYTES;
      this.lanes = this.cores.length / CORE_ELEMENTS;
      this.groups = this.values.threads / WARPGROUP;
      this.firstGroup = Math.floor(touch.first_thread / WARPGROUP);
      this.instructions = this.values.instructions;
      this.names = { group: "warpgroup", phase: "core matrix", lane: "row" };
    }

    /* The core matrices are those of the first instruction and warpgroup; others are moved as their cells are. */
    cell(group, instruction, lane) {
      const row = lane % CORE_ROWS;
      const core = Math.floor(lane / CORE_ROWS);
      const moved = this.values.cell(WARPGROUP * group, 0, instruction) - this.values.cell(0);
      return this.cores[row + CORE_ROWS * CORE_ELEMENTS * core] + moved;
    }
  }

  const known = new WeakMap();

  /** Every access of a scene to shared memory that the model covers, in step order. */
  function accesses(scene) {
    if (!known.has(scene)) {
      const found = scene.steps.flatMap((step) => [
        ...step.touches.filter((touch) => touch.lane_bytes).map((touch) => new WarpAccess(scene, step, touch)),
        ...["a", "b"]
          .filter((side) => step.descriptor?.[side])
          .map((side) => new DescriptorAccess(scene, step, step.descriptor[side])),
      ]);
      known.set(scene, found);
    }
    return known.get(scene);
  }

  /** The swizzles of 0 to 3 bits with a tile's own base and shift: `[null, [1, m, s], [2, m, s], [3, m, s]]`. */
  function alternatives({ spec: { swizzle }, elementBytes }) {
    const chunk = Math.log2(CORE_BYTES / elementBytes);
    const [, base, shift] = swizzle ?? [0, chunk, MOST_BITS];
    return Array.from({ length: MOST_BITS + 1 }, (_, bits) => (bits ? [bits, base, shift] : null));
  }

  /** `S<3,3,3>`, or "no swizzle". */
  const swizzleText = (swizzle) => (swizzle ? `S<${swizzle.join(",")}>` : "no swizzle");

  const LINES = "cp.async takes a pass for every 128-byte line that a phase writes to, regardless of banks.";

  CF.banks = { LINES, BANKS, WORD, phaseLanes, wordsByBank, ways, accesses, alternatives, swizzleText };
})();
