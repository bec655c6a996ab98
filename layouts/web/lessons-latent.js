/* Lesson 14: decoding latent attention: two warpgroups that trade P and own half of O's columns each. */
(() => {
  "use strict";

  const { prose, figure, checks, Stepper } = CF.lessons;
  const WHATS = { S: "scores", exp: "softmax", own: "product with its own P", other: "product with the other's P" };

  const named = ([warpgroup, what, page]) => `${WHATS[what]} of warpgroup ${warpgroup}, page ${page}`;

  /** The events of one pair of pages: what happens, what it waits for, and its line of the kernel. */
  class EventFigure {
    constructor(kit) {
      const { events, sources } = kit.data.seesaw;
      const host = CF.h("div", {});
      const line = CF.h("p", { class: "lesson-message", role: "status" });
      const shown = Object.fromEntries(
        Object.entries(sources).map(([name, source]) => [name, CF.lessons.source(source)]),
      );
      const stepper = new Stepper(
        kit,
        "event",
        () => events.length,
        (at) => {
          const { warpgroup, what, page, waits, function: name, line: where, words } = events[at];
          const after = waits.length ? `It waits for: ${waits.map(named).join("; ")}.` : "It waits for its page alone.";
          line.textContent = `Warpgroup ${warpgroup}, page ${page}, ${WHATS[what]}: ${words} ${after}`;
          host.replaceChildren(shown[name]);
          shown[name].to(where);
        },
      );
      this.element = figure("A pair of pages, event by event", [stepper.element], line, host);
      stepper.go(0);
    }
  }

  /** The model's schedule. */
  function schedule(kit) {
    const { schedule: found, clocks, pages } = kit.data.seesaw;
    const host = CF.h("div", { class: "lesson-scroll" });
    const beside = { name: "softmax", tasks: { exp: "exp" } };
    kit.follow(["theme"], () =>
      host.replaceChildren(
        CF.lessons.timeline(found, { groups: 2, longest: found.clocks, beside, unit: "page" }),
      ),
    );
    return figure(
      `${pages} pages: a model`,
      null,
      host,
      CF.h(
        "p",
        { class: "lesson-message" },
        `S of a page takes ${CF.number(clocks.S)} clocks, half of P V ${clocks.own}, the exponentials ${clocks.exp}. The tensor cores are busy ${Math.round(found.tensor * 100)} % of the time.`,
      ),
      CF.h(
        "p",
        { class: "hint" },
        "Each colour is a page. The model has the rates of the units and the order of issue, but no latencies, loads, maxima, conversions or rescaling.",
      ),
    );
  }

  CF.lessons.add({
    id: "seesaw",
    title: "Latent attention: the seesaw",
    question:
      "A page of the latent cache is K for all query heads, and its first 512 columns are V. An O of 64 × 512 in fp32 is more than a warpgroup's registers hold. How do two share the work, if each needs all of P?",
    families: ["mla"],
    state: {},
    build(kit) {
      const scene = kit.scene("mla");
      const { traits } = scene.data.kernel;
      const size = (axis) => scene.data.axes[axis].size;
      const registers = (id) => scene.fragment(id).spec.registers;
      const consumer = scene.data.budget.registers.roles.at(-1);
      const { regions, total, limit } = scene.data.budget.smem;
      const pages = regions.find(({ id }) => id === "sK");
      const shape = (id) => scene.step(id).instruction.match(/m\d+n\d+k\d+/)[0];
      return [
        prose(`A tile is ${size("m")} rows, each a query head of a token, for all of which a page of ${size("n")} keys is K: ${size("d")} latent
          columns, which are V as well, and ${size("r")} that only K has. Two warpgroups have half of O's columns each,
          ${registers("acc_O")} of the ${consumer.limit} registers of a thread. Either half needs P of every page, but P is one: if both
          computed all scores, the larger product would be done twice.

          So each computes the scores of every other page, and they trade P. The products with V are \`${shape("wgmma_pv_own")}\`: of
          its own page a warpgroup has P in registers, of the other's it reads it from shared memory.`),
        figure("acc_O: half of the columns each", null, kit.panel("mla", "acc_O", { color: "owner" })),
        prose(`What the one writes the other waits for, up and down. Maxima go along: the first page's are those that the
          second page's begin with, and theirs scale O of the first warpgroup. A row's maximum moves only if a score exceeds
          it by 2^${traits.headroom}, so that O is hardly ever scaled. Sums need no trading: each warpgroup keeps those of its own
          pages, and both are added when the tile ends.`),
        new EventFigure(kit).element,
        schedule(kit),
        prose(`Memory is as tight as registers. Two pages take ${CF.number(pages.bytes)} of ${CF.number(total)} bytes, and a block
          may have ${CF.number(limit)}. V is no copy, it is K seen with columns as rows: \`sV\` and \`sK\` are the same bytes.
          P of the second warpgroup lies over the last slab of Q, which both have taken into registers (\`rQr\`).

          A page arrives in groups of ${traits.groups.join(", ")} slabs, so that the scores begin with the first. Each part of a
          page is let go of as soon as it was read, for the next page but one.`),
        figure("The same bytes as K and as V", null, [
          CF.h(
            "div",
            { class: "lesson-pair" },
            ["sK", "sV"].map((id) => kit.panel("mla", id, { color: "bank", height: 240 })),
          ),
        ]),
        kit.seeInKernel(
          "mla",
          { panel: "sP", step: "wgmma_pv_other", instruction: 0 },
          "the product with the other warpgroup's P",
          "attend_first, attend_second, cuteflash/kernels/sm90/mla_decode_mma.py; publish, take_maxima, cuteflash/kernels/sm90/mla_decode_half.py",
        ),
        checks(
          [
            "Why does warpgroup 1 issue the product with P0 before its own softmax?",
            "The tensor cores then work while it takes exponentials. The maxima of its page also have to go on from those of P0, which are there by then.",
          ],
          [
            "Why must warpgroup 1 wait for that product before it says that P1 is ready?",
            "Its scaling of O by the new maxima must not meet a product that still adds to O, and what it read of P0 may then be overwritten.",
          ],
        ),
      ];
    },
  });
})();
