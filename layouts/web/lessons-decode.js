/* Lessons 12 and 13: split keys, in lines and lanes; how tiles of an e4m3 cache become tiles of fp16. */
(() => {
  "use strict";

  const { prose, figure, choice, checks, Grid } = CF.lessons;
  const KIB = 1024;

  const listed = (from, to) => (from === to ? `share ${from}` : `shares ${from} to ${to}`);

  /** The key blocks of a launch's lines, coloured by the share that has them; the example can be chosen. */
  class ShareFigure {
    constructor(kit) {
      this.data = kit.data.shares;
      this.host = CF.h("div", { class: "lesson-host" });
      this.line = CF.h("p", { class: "lesson-message", role: "status" });
      const pairs = this.data.examples.map(({ title }, i) => [String(i), title]);
      const examples = choice("launch", pairs, "0", (key) => this.#show(this.data.examples[Number(key)]));
      this.element = figure(
        `Key blocks of all tiles, dealt to the blocks of a launch on ${this.data.multiprocessors} multiprocessors`,
        [examples],
        this.host,
        this.line,
      );
      kit.follow(["theme"], () => this.#show(this.data.examples[0]));
      kit.follow(["theme"], () => examples.to("0"));
    }

    #show(example) {
      const { tiles, shares, lanes, heads, blocks } = example;
      const units = tiles.flatMap(({ width }, tile) => Array.from({ length: width }, (_, unit) => ({ tile, unit })));
      const place = units.map(({ tile }, at) => {
        const number = shares.findIndex((parts) =>
          parts.some((part) => part.tile === tile && part.begin <= at && at < part.begin + part.last - part.first),
        );
        return { number, part: shares[number].find((part) => part.tile === tile) };
      });
      const ofLine = heads / lanes; // tiles of a sequence in one line
      const tell = (lane, at) => {
        const { tile, unit } = units[at];
        const { number, part } = place[at];
        const head = (tile % ofLine) * lanes + lane;
        const alone = part.owner === part.last_owner;
        const end = alone
          ? "The share has the whole tile, so its block writes O."
          : `The tile is cut: ${listed(part.owner, part.last_owner)} of the line have parts of it, which are merged.`;
        this.line.textContent =
          `Key block ${unit} of sequence ${tiles[tile].sequence}, KV head ${head}: share ${number} of line ${lane}, ` +
          `which is block ${number * lanes + lane} of the launch's ${blocks}. ${end}`;
      };
      const grid = new Grid("Key blocks by line", {
        rows: lanes,
        cols: units.length,
        text: (_, at) => String(units[at].unit),
        rgb: (_, at) => CF.palette.category(place[at].number),
        rowHead: (lane) => `line ${lane}`,
        colHead: (at) => (units[at].unit ? "" : `seq ${tiles[units[at].tile].sequence}`),
        corner: "key block",
        pick: tell,
        follow: true,
      });
      this.host.replaceChildren(grid.element);
      tell(0, 0);
    }
  }

  const pair = (kit, family, ...ids) =>
    CF.h(
      "div",
      { class: "lesson-pair" },
      ids.map((id) => kit.panel(family, id, { color: id.startsWith("s") ? "bank" : "owner", height: 240 })),
    );

  CF.lessons.add({
    id: "shares",
    title: "Decoding: shared keys",
    question:
      "A decode step has one query a sequence: one tile for each KV head, and a long cache to read. How do all multiprocessors get the same share of it?",
    families: ["split"],
    state: {},
    build(kit) {
      const scene = kit.scene("split");
      const { traits } = scene.data.kernel;
      const data = kit.data.shares;
      const columns = traits.head_dim + traits.head_dim_v;
      return [
        prose(`The query heads of a KV head are rows of one tile, so that its keys are read once. Products hardly count:
          the time is that of reading K and V. The row of this lesson has ${traits.kv_stage} stages of
          ${traits.tile_n} keys × ${columns} columns in flight, ${data.in_flight / KIB} KiB a multiprocessor, which is what keeps
          memory busy.

          But there are as many tiles as sequences times KV heads, and their lengths differ. So the key blocks of
          all tiles are laid end to end, and the line is cut into equal shares, one for each block of the launch. A tile
          inside one share is computed as ever; one that a border cuts is computed in parts.`),
        new ShareFigure(kit).element,
        prose(`Heads go in step: with several KV heads there are several such lines, their lanes, and neighbouring blocks
          have the same share of neighbouring lines. A token's heads are neighbours in memory, and are read at the same
          time. A line has as many shares as leave few blocks without work, and borders of shares are borders of tiles
          if lengths allow it: less is merged.

          A part is O of the share's keys, divided by its own sums, and the log-sum-exp of each row, in fp32. A block has
          two slots for parts at most, whatever the lengths: for the tile that began before its share, and for the one
          that goes on after it. The last block to come merges a tile with few rows: each part counts by
          exp(its log-sum-exp - that of all). Of many rows the blocks meet, and each merges some.`),
        figure("acc_O and its slot", null, pair(kit, "split", "acc_O", "gO_part")),
        kit.seeInKernel(
          "split",
          { panel: "gO_part", step: "store_o_part", instruction: 0 },
          "a part on its way to its slot",
          "share_size, share_of_tile, cuteflash/core/split.py; come, arrive, all_came, cuteflash/kernels/common/partials.py; merge, cuteflash/kernels/common/part_sums.py; grid_of, cuteflash/split_planning.py",
        ),
        checks(
          [
            "Why can a block have no more than two parts of tiles that are cut?",
            "Its share is one piece of the line. Tiles in its middle lie in it whole; only the first and the last can reach beyond its borders.",
          ],
          [
            "Does a mask that hides keys change the shares?",
            "All tiles of a sequence count as many units as the one that visits the most. A tile that visits fewer leaves its block without work for some; a share that took every mask into account would have to be found tile by tile.",
          ],
        ),
      ];
    },
  });

  CF.lessons.add({
    id: "cache",
    title: "A cache of 8 bits",
    question:
      "An e4m3 cache takes half the time to read. The queries have 16 bits, and a product has operands of one kind: who makes 16 bits of the cache, and where?",
    families: ["cache"],
    state: {},
    build(kit) {
      const scene = kit.scene("cache");
      const { kernel } = scene.data;
      const { traits } = kernel;
      const [read, convert] = ["read_k", "convert_k"].map((id) => scene.step(id));
      const converting = kernel.roles.filter(({ name }) => name.startsWith("converter"));
      const shared = traits.key_warpgroups > 1;
      return [
        prose(`Every number of e4m3 is a number of fp16, so nothing is lost if K and V become fp16 between memory and the
          products. A TMA load brings bytes as they are; \`${traits.stored_stage}\` such tiles of K and of V are in flight.
          ${converting.length === 1 ? "A warpgroup of its own makes" : `${converting.length} warpgroups of their own make`} fp16 tiles of them while the consumers
          compute: ${converting.map(({ name, does }) => `${name} has ${does}`).join(", ")}.

          A lane loads 16 bytes, converts pairs with \`cvt.rn.f16x2.e4m3x2\`, and stores 32. Either tile is swizzled, and
          the rows of one have half as many bytes as those of the other. Eight lanes access shared memory together: they take
          rows and chunks that lie in different banks of both. The panels show a lane's bytes, and the banks of both tiles.`),
        figure("K as TMA brings it, and as the product reads it", null, pair(kit, "cache", "sK_stored", "sK")),
        figure("rK: the bytes of each lane", null, kit.panel("cache", "rK", { color: "owner", height: 240 })),
        prose(`A tile takes ${read.instructions} loads and ${convert.instructions} stores of each lane. The scale of K is left to the scores,
          that of V to the end of the tile: a conversion with a factor would take registers and time.
          ${kernel.dtype === "bf16" ? "Queries of bf16 become fp16, too, whose range is smaller: each row is multiplied by a power of two, and its scores by the inverse." : ""}

          ${shared ? `Tiles of decoding have few rows, so ${traits.key_warpgroups} consumer warpgroups share them and each reads half of the keys of a block: the exponentials of both run beside the other's products. When the tile ends, the second hands its O to the first through shared memory.` : ""}`),
        kit.seeInKernel(
          "cache",
          { panel: "sK", step: "convert_k", instruction: 0 },
          "a store of the converted tile",
          "convert_share, place, cuteflash/kernels/sm90/convert.py; Share, cuteflash/traits/cache_sm90.py; fit_q_registers, cuteflash/kernels/sm90/fit_q.py",
        ),
        checks(
          [
            "Why do lanes 4 to 7 not take the row below that of lanes 0 to 3?",
            "In the converted tile neighbouring rows would put their chunks into banks that the lanes' own rows use. The fourth row after next, with its first bit flipped, leaves each lane banks of its own in both tiles.",
          ],
          [
            "What would be gained if the products took e4m3 themselves?",
            "No conversion, but then P and Q had 8 bits as well, and V would have to be transposed. Decoding waits for memory, so that the conversion costs little as long as it keeps up with the loads.",
          ],
        ),
      ];
    },
  });
})();
