/* Lesson 11: attention on 8 bits: the order of keys that makes P an operand, how V is turned, what sums lose. */
(() => {
  "use strict";

  const { prose, figure, checks, Grid } = CF.lessons;
  const LANES = 4; // of a quad, which hold a row of S together
  const GROUP = 8; // neighbouring keys of an accumulator's group, two a lane

  const percent = (share) => `${(100 * share).toFixed(share < 0.01 ? 2 : 1)} %`;

  /** The positions of 16 keys in the operand: a position's key, and the lane that has both. */
  function order(keys) {
    const line = CF.h("p", { class: "lesson-message", role: "status" });
    const width = keys.length / LANES; // bytes of a register
    const lane = (position) => Math.floor(position / width);
    const tell = (_, position) => {
      const key = keys[position];
      line.textContent =
        `Position ${position} is byte ${position % width} of a register of lane ${lane(position)} of the quad. ` +
        `It holds key ${key}, key ${key % GROUP} of group ${Math.floor(key / GROUP)}, which the accumulator of S has in lane ${Math.floor((key % GROUP) / 2)}, too.`;
    };
    const grid = new Grid("Keys by position", {
      rows: 1,
      cols: keys.length,
      text: (_, position) => String(keys[position]),
      rgb: (_, position) => CF.palette.category(lane(position)),
      rowHead: () => "key",
      corner: "position",
      pick: tell,
      follow: true,
    });
    tell(0, 0);
    return figure(`${keys.length} keys in the order of the product`, null, grid.element, line);
  }

  /** What is lost of a sum, by its length and the way to accumulate. */
  function losses({ losses: rows, level }) {
    const head = ["keys", "one level", `two levels, ${level} keys each`];
    return figure(
      "Share of P V that the tensor cores lose, P and V of one sign on average",
      null,
      CF.h(
        "div",
        { class: "lesson-scroll" },
        CF.h(
          "table",
          { class: "lesson-state" },
          CF.h(
            "thead",
            {},
            CF.h(
              "tr",
              {},
              head.map((text) => CF.h("th", { scope: "col" }, text)),
            ),
          ),
          CF.h(
            "tbody",
            {},
            rows.map(({ keys, one, two }) =>
              CF.h(
                "tr",
                {},
                CF.h("th", { scope: "row" }, CF.number(keys)),
                CF.h("td", {}, percent(one)),
                CF.h("td", {}, percent(two)),
              ),
            ),
          ),
        ),
      ),
    );
  }

  const pair = (kit, ...ids) =>
    CF.h(
      "div",
      { class: "lesson-pair" },
      ids.map((id) => kit.panel("fp8", id, { color: id.startsWith("s") ? "bank" : "owner", height: 240 })),
    );

  CF.lessons.add({
    id: "fp8",
    title: "Attention on 8 bits",
    question:
      "Tensor cores multiply 8-bit numbers twice as fast as 16-bit ones. Why do P and V not simply get smaller, and what happens to the result?",
    families: ["fp8"],
    state: {},
    build(kit) {
      const scene = kit.scene("fp8");
      const data = kit.data.fp8;
      const { traits } = scene.data.kernel;
      const registers = (id) => scene.fragment(id).spec.registers;
      const shape = scene.step("wgmma_pv").instruction.match(/m\d+n\d+k\d+/)[0];
      const turning = scene.step("ldmatrix_v");
      const worst = data.losses.at(-1);
      return [
        prose(`The row of this lesson has tiles of ${traits.tile_m} queries and ${traits.tile_n} keys, of which Q, K and V
          take a byte an element. A product is \`${shape}\`: its k extent is twice that of 16 bits in the same time.

          P comes from the accumulator of S, where four lanes hold a row together: lane t has keys 2t and 2t + 1 of each
          group of 8. With 16 bits that is the operand's own layout. A register of an 8-bit operand has four neighbouring
          positions instead, and a lane does not have four neighbouring keys; it would have to exchange values with the
          others. But a sum does not depend on the order of its terms. If P's positions are filled with the pairs that a
          lane has, of two groups, and V's keys stand in the same order, the product is the same: position 4t + 2j + b of
          each 16 holds key 8j + 2t + b.`),
        order(data.keys),
        prose(`The panels show P by key, so that both have the same owners: nothing moves between threads. The
          ${registers("acc_S")} registers of scores become ${registers("rP")}.`),
        figure("acc_S and rP: the same owners", null, pair(kit, "acc_S", "rP")),
        prose(`WGMMA takes 8-bit operands only if the dimension that it sums over is contiguous. For K that is the column,
          as it is stored. For V it is the key, so the product reads Vᵀ. Neither TMA nor a matrix instruction of Hopper
          transposes bytes. Whoever quantises V may write Vᵀ at once; then TMA loads it as it is. Otherwise the producer
          warpgroup turns each tile while the consumers compute: \`ldmatrix.trans\` moves pairs of bytes as if they were
          numbers of 16 bits, which brings a lane two columns of two keys in each register; two byte permutes sort the
          bytes by column; \`stmatrix\` writes four keys of a column a lane. They are the four keys that P has in a
          register. A warp turns 16 keys of 32 columns at a time, ${turning.instructions} times a tile.`),
        figure("rV and rVt: a lane's bytes as they come, and sorted", null, pair(kit, "rV", "rVt")),
        figure("V as it is stored, and Vᵀ drawn by key", null, pair(kit, "sV_stored", "sV")),
        prose(`e4m3 has 4 bits of mantissa, so that rounding P costs 2 to 3 % of O if V's values have no mean, and far less
          if they have one: errors of many keys cancel. P is multiplied by 2^${data.offset_log2} before it is rounded, as small
          numbers lose bits, and must stay below ${data.largest}, as a conversion saturates in silence. A thread whose
          exponentials of a block sum to more has its warp redo the block with new maxima.

          The accumulator is the other loss. It is called fp32, but each instruction aligns the accumulator and its
          ${data.products} products to the largest of them and cuts everything at ${data.fraction_bits} fraction bits.
          A long sum of one sign loses ever more. With two levels each block's product starts from zero, and is added to
          O by fp32 instructions (\`acc_PV\`, ${traits.two_level ? registers("acc_PV") : 0} registers).`),
        losses(data),
        kit.seeInKernel(
          "fp8",
          { panel: "rVt", step: "permute_v", instruction: 0 },
          "V on its way through the producer's registers",
          "round_p, cuteflash/kernels/sm90/warpgroup.py; Turning, cuteflash/kernels/sm90/fp8_load.py; await_pv, cuteflash/kernels/sm90/products.py; accumulate, cuteflash/reference/fp8_accumulator.py",
        ),
        checks(
          [
            "Which keys does lane 1 of a quad have in its first register of P?",
            `Positions 4 to 7: keys ${data.keys.slice(4, 8).join(", ")}. They are the pairs that it has of the first two groups of 8.`,
          ],
          [
            "Why can K stay as it is, but not V?",
            "S = Q Kᵀ sums over columns, and a row's columns are contiguous. P V sums over keys, and neighbouring keys of V lie a whole row apart.",
          ],
          [
            `How much of a sum over ${CF.number(worst.keys)} keys does one level lose, and why do two levels not?`,
            `${percent(worst.one)} here, ${percent(worst.two)} with two levels. What is cut is small beside the largest number of an instruction; a sum of ${data.level} keys never becomes large.`,
          ],
        ),
      ];
    },
  });
})();
