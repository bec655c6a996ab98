/* The Budget view: shared memory, registers and resident blocks of a row, against the limits of its arch. */
(() => {
  "use strict";

  const { h } = CF;
  const KIB = 1024;
  const WARP = 32;
  const WARPGROUP = 128;
  const REGISTER_STEP = 8; // the hardware allocates registers in units of 8 a thread
  const NARROW = 0.075; // share of a bar below which a part's label does not fit
  const LATENT_ROWS = 64; // query heads of a tile of latent attention, in the sm90 family
  const FLAGS = { split: "--split", e4m3_cache: "--e4m3-cache" };
  const ROOM = 0.75; // place in a bar up to which a mark has room for its name

  /* A tensor has the same colour in shared memory and in registers. */
  const HUES = { Q: 0, Qr: 0, K: 1, V: 2, O: 3, dO: 3, S: 5, QK: 5, P: 6, dP: 4, dS: 5, dV: 2, dK: 1, dQ: 0 };
  const hue = (name) => HUES[name.replace(/^(acc_|[sr])|t$|_stored$|,.*$/g, "")] ?? 7;

  const bytes = (n) => `${CF.number(n)} B`;
  const percent = (part, whole) => `${Math.round((1000 * part) / whole) / 10} %`;

  /** Regions in lanes, so that none overlaps another of its lane: `[[region, ...], ...]`, larger ones first. */
  function lanes(regions) {
    const found = [];
    const apart = (a, b) => a.start + a.bytes <= b.start || b.start + b.bytes <= a.start;
    for (const region of regions) {
      const lane = found.find((others) => others.every((other) => apart(region, other)));
      if (lane) lane.push(region);
      else found.push([region]);
    }
    return found;
  }

  /** Registers a thread of a role: `{used, left, limit}`; `left` is negative if the parts do not fit at once. */
  function roleUse({ parts, limit }) {
    const used = parts.reduce((sum, part) => sum + part.registers, 0);
    return { used, left: limit - used, limit };
  }

  /** Registers of a block by role, at the roles' limits: `{shares: [{name, threads, each, total}], total, launch}`. */
  function split({ registers, threads }) {
    const shares = registers.roles.map((role) => ({
      name: role.name,
      threads: role.threads,
      each: role.limit,
      total: role.threads * role.limit,
    }));
    const total = shares.reduce((sum, share) => sum + share.total, 0);
    return { shares, total, launch: registers.launch * threads };
  }

  /** Names of the limits that allow the fewest blocks. */
  function binding({ limits }) {
    const least = Math.min(...Object.values(limits));
    return Object.keys(limits).filter((name) => limits[name] === least);
  }

  /** The command that compiles a kernel and reports its registers. */
  function compileCommand(kernel) {
    const { operation, head_dim, head_dim_v, arch, dtype, mask, family, lengths, features, traits } = kernel;
    const drawn = (row) => `cuteflash layouts --kernel ${operation} ${row} --compile -o row.html`;
    if (operation === "mla") {
      const heads = traits.tile_m ?? LATENT_ROWS;
      const cache = features.includes("e4m3_cache") ? ` ${FLAGS.e4m3_cache}` : "";
      return drawn(`--arch ${arch} --dtype ${dtype} --family ${family} --heads ${heads}${cache}`);
    }
    const own = head_dim_v === head_dim ? "" : ` --head-dim-v ${head_dim_v}`;
    const row = `--head-dim ${head_dim}${own} --arch ${arch} --dtype ${dtype} --mask ${mask} --family ${family}`;
    const asked = Object.keys(FLAGS).filter((name) => features.includes(name));
    if (operation === "fwd" && !asked.length) return `cuteflash compile ${row}`;
    const few = kernel.query_rows ? [`--query-rows ${kernel.query_rows}`] : [];
    return drawn([row, `--lengths ${lengths[0]}`, ...asked.map((name) => FLAGS[name]), ...few].join(" "));
  }

  /* One part of a bar, from `start` of `scale` on; its label is inside if there is room. */
  function segment({ label, start, size, scale, color = null, kind = "", slices = 1, title }) {
    const rgb = color === null ? null : CF.palette.category(color);
    const paint = rgb ? `background-color:${CF.palette.css(rgb)};color:${CF.palette.ink(rgb)};` : "";
    const place = `left:${(start / scale) * 100}%;width:${(size / scale) * 100}%;`;
    const cuts = slices > 1 ? `--slices:${slices};` : "";
    const text = size / scale > NARROW ? label : "";
    const name = ["gauge-part", kind, slices > 1 && "sliced"].filter(Boolean).join(" ");
    return h("i", { class: name, style: place + paint + cuts, title }, text);
  }

  /* A line across a bar at `value`, with its name beside it if there is room. */
  function mark(value, scale, name) {
    const text = value / scale < ROOM ? name : "";
    return h("i", { class: "gauge-mark", style: `left:${(value / scale) * 100}%`, title: name }, text);
  }

  /** A bar of one or more lanes of parts, over an axis of `ticks`; `label` says all of it to a screen reader. */
  function bar({ rows, marks = [], ticks, scale, label, tick = String }) {
    return h(
      "div",
      { class: "gauge", role: "img", "aria-label": label },
      h(
        "div",
        { class: "gauge-lanes" },
        rows.map((parts) => h("div", { class: "gauge-lane" }, parts)),
        marks,
      ),
      h(
        "div",
        { class: "gauge-axis", "aria-hidden": "true" },
        ticks.map((value) => h("span", { style: `left:${(value / scale) * 100}%` }, tick(value))),
      ),
    );
  }

  const kib = (value) => `${Math.round(value / KIB)} KiB`;

  const ticksTo = (scale, step) => Array.from({ length: Math.floor(scale / step) + 1 }, (_, i) => i * step);

  const slicesText = ({ stages, bytes: size }) => (stages > 1 ? `${stages} × ${bytes(size / stages)}` : "1");

  /** The shared memory of one block as a bar up to `scale` bytes; overlapping regions lie in lanes of their own. */
  function smemBar(smem, scale = smem.limit) {
    const part = ({ id, start, bytes: size, stages, note }) => {
      const title = `${id}: ${bytes(size)} from ${CF.hex(start)}${note ? `, ${note}` : ""}`;
      return segment({ label: id, start, size, scale, color: hue(id), slices: stages, title });
    };
    const says = smem.regions.map((region) => `${region.id} ${bytes(region.bytes)}`).join(", ");
    return bar({
      rows: lanes(smem.regions).map((lane) => lane.map(part)),
      marks: [mark(smem.total, scale, `total ${bytes(smem.total)}`)],
      ticks: ticksTo(scale, scale > 128 * KIB ? 32 * KIB : 16 * KIB),
      tick: kib,
      scale,
      label: `Shared memory of a block: ${says}; ${bytes(smem.total)} of ${bytes(smem.limit)}`,
    });
  }

  /** The registers of a thread of `role` as a bar up to `scale`; `compiled` (null: unknown) is marked. */
  function registerBar(role, scale = role.limit, compiled = null) {
    const { used, left, limit } = roleUse(role);
    const full = Math.max(scale, used);
    let start = 0;
    const parts = role.parts.map(({ name, registers }) => {
      const label = `${name} ${registers}`;
      const options = { label, start, size: registers, scale: full, color: hue(name), title: label };
      start += registers;
      return segment(options);
    });
    if (left > 0) {
      const label = `${left} left`;
      parts.push(segment({ label, start, size: left, scale: full, kind: "free", title: label }));
    }
    const marks = [mark(limit, full, `limit ${limit}`)];
    if (compiled !== null) marks.push(mark(compiled, full, `compiled: ${compiled}`));
    const says = role.parts.map(({ name, registers }) => `${name} ${registers}`).join(", ");
    const label = `Registers of a thread, ${role.name}: ${says || "no fragments"}; ${used} of ${limit}`;
    return bar({ rows: [parts], marks, ticks: ticksTo(full, 32), scale: full, label });
  }

  /* The register file: every warpgroup's share, of every resident block. */
  function fileBar(registers, shares, blocks) {
    const scale = registers.file;
    let start = 0;
    const parts = [];
    for (let block = 0; block < blocks; block++) {
      shares.forEach(({ name, threads, each, total }, index) => {
        const slices = Math.max(1, Math.round(threads / WARPGROUP));
        const label = `${name}, ${each} each`;
        const title = `${label}: ${CF.number(total)} registers${blocks > 1 ? `, block ${block}` : ""}`;
        parts.push(segment({ label, start, size: total, scale, color: index ? 1 : 4, slices, title }));
        start += total;
      });
    }
    const label = `Register file: ${CF.number(start)} of ${CF.number(scale)} registers`;
    const tick = (value) => (value ? `${value / KIB}K` : "0");
    return bar({ rows: [parts], ticks: ticksTo(scale, 8 * KIB), tick, scale, label });
  }

  /* One multiprocessor's shared memory: the resident blocks, each with the bytes that the system reserves. */
  function perSmBar(smem, blocks) {
    const scale = smem.per_sm;
    const parts = Array.from({ length: blocks }, (_, block) => {
      const start = block * (smem.total + smem.reserved);
      const system = `${bytes(smem.reserved)} of the system`;
      return [
        segment({ label: `block ${block}`, start, size: smem.total, scale, color: 4, title: bytes(smem.total) }),
        segment({ label: "", start: start + smem.total, size: smem.reserved, scale, color: 7, title: system }),
      ];
    });
    const used = blocks * (smem.total + smem.reserved);
    const label = `Shared memory of a multiprocessor: ${bytes(used)} of ${bytes(scale)} by ${blocks} blocks`;
    return bar({ rows: [parts.flat()], ticks: ticksTo(scale, 32 * KIB), tick: kib, scale, label });
  }

  /** A table of facts: `heads` texts, `rows` arrays of texts, the first of each the row's heading. */
  function table(label, heads, rows, numbers = []) {
    const kind = (i) => (numbers.includes(i) ? "num" : null);
    return CF.scroller(
      label,
      h(
        "table",
        { class: "facts-table plain", "aria-label": label },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            heads.map((text, i) => h("th", { scope: "col", class: kind(i) }, text)),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map(([name, ...cells]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name),
              cells.map((cell, i) => h("td", { class: kind(i + 1) }, cell)),
            ),
          ),
        ),
      ),
    );
  }

  const box = (title, ...children) => h("section", { class: "box", "aria-label": title }, h("h2", {}, title), children);

  /* The name of a region or fragment of the budget, with its colour and an explanation of its content. */
  const keyOf = (scene, id) =>
    h("span", { class: "key" }, swatch(hue(id)), scene.part(id) ? CF.explain.part(scene.part(id)) : id);

  function sharedMemory(scene) {
    const { smem, occupancy } = scene.data.budget;
    const rows = smem.regions.map((region) => [
      keyOf(scene, region.id),
      CF.hex(region.start),
      CF.hex(region.start + region.bytes),
      bytes(region.bytes),
      slicesText(region),
      region.note,
    ]);
    const each = smem.total + smem.reserved;
    const one = occupancy.blocks === 1;
    return box(
      "Shared memory",
      h(
        "p",
        {},
        h("b", {}, `${bytes(smem.total)} of ${bytes(smem.limit)}`),
        ` that a block may have, ${percent(smem.total, smem.limit)}; ${bytes(smem.limit - smem.total)} are free.`,
      ),
      smemBar(smem),
      table("Regions of shared memory", ["region", "from", "to", "bytes", "parts", "note"], rows, [1, 2, 3]),
      h(
        "p",
        { class: "after" },
        h("b", {}, `${occupancy.blocks} ${one ? "block" : "blocks"}`),
        ` on a multiprocessor ${one ? "takes" : "take"} ${bytes(occupancy.blocks * each)} of its `,
        `${bytes(smem.per_sm)}: ${one ? "" : "each "}`,
        `${bytes(smem.total)} and ${bytes(smem.reserved)} that the system keeps of each block.`,
      ),
      perSmBar(smem, occupancy.blocks),
    );
  }

  function swatch(index) {
    const colour = CF.palette.css(CF.palette.category(index));
    return h("i", { class: "swatch", style: `background:${colour}` });
  }

  function registersOf(scene, role, scale, compiled) {
    const { used, left, limit } = roleUse(role);
    const rest =
      left >= 0
        ? `${left} are left for addresses, numbers of the rows, and the compiler's temporaries.`
        : `${-left} more than there are: the compiler cannot hold all of them at once.`;
    const own = role.warpgroups ? null : compiled;
    const words = role.parts.length
      ? `${used} of ${limit} registers a thread hold fragments; ${rest}`
      : `${limit} registers a thread, none for fragments: it holds addresses and barriers.`;
    return [
      h("h3", { class: "after" }, `${role.name}: ${limit} registers a thread, ${role.threads} threads`),
      h("p", {}, words),
      registerBar(role, scale, own ? own.registers : null),
      role.parts.length
        ? table(
            `Registers of ${role.name}`,
            ["fragment", "registers a thread", "share of the limit"],
            role.parts.map(({ name, registers }) => [
              keyOf(scene, name),
              CF.number(registers),
              percent(registers, limit),
            ]),
            [1, 2],
          )
        : null,
    ];
  }

  function registerFile({ kernel, budget: { registers, occupancy } }) {
    const { shares, total, launch } = split({ registers, threads: kernel.threads });
    const { blocks } = occupancy;
    const sums = shares.map(({ threads, each }) => `${threads} × ${each}`).join(" + ");
    const moves = registers.roles.some((role) => role.warpgroups > 0);
    const product = `${kernel.threads} × ${registers.launch} = ${CF.number(launch)}`;
    const subject = blocks === 1 ? "One block takes" : `${blocks} blocks take`;
    return [
      h("h3", { class: "after" }, "The register file"),
      h(
        "p",
        {},
        `A block ${moves ? "starts with" : "may have"} ${registers.launch} registers a thread: ${product}. `,
        moves ? `The producer then gives registers up for the consumers: ${sums} = ${CF.number(total)}. ` : null,
        `${subject} ${CF.number(blocks * total)} of ${CF.number(registers.file)}.`,
      ),
      fileBar(registers, shares, blocks),
    ];
  }

  function compiledNumbers(kernel, compiled) {
    if (!compiled)
      return [
        h("h3", { class: "after" }, "As compiled"),
        h("p", {}, "This page was made without the compiler's report. It comes from"),
        h("pre", { class: "command" }, h("code", {}, compileCommand(kernel))),
      ];
    const rows = [
      ["registers a thread", CF.number(compiled.registers)],
      ["stack", bytes(compiled.stack_bytes)],
      ["spilled, stores", bytes(compiled.spill_store_bytes)],
      ["spilled, loads", bytes(compiled.spill_load_bytes)],
      ["warnings", compiled.warnings.length ? compiled.warnings.join("; ") : "none"],
    ];
    return [h("h3", { class: "after" }, "As compiled"), table("As compiled", ["ptxas says", ""], rows, [1])];
  }

  function occupancyBox({ kernel, budget: { smem, registers, occupancy } }) {
    const { limits, blocks, warps, max_warps: most } = occupancy;
    const per = registers.compiled?.registers ?? registers.launch;
    const rounded = Math.ceil(per / REGISTER_STEP) * REGISTER_STEP;
    const each = rounded === per ? per : `${rounded}, for ${per},`;
    const sums = {
      "shared memory": `${bytes(smem.per_sm)} / (${bytes(smem.total)} + ${bytes(smem.reserved)})`,
      registers: `${CF.number(registers.file)} / (${each} × ${kernel.threads} threads)`,
      threads: `${CF.number(most * WARP)} / ${kernel.threads} threads`,
    };
    const binds = binding(occupancy);
    const rows = Object.entries(limits).map(([name, count]) => [
      name,
      sums[name] ?? "",
      CF.number(count),
      binds.includes(name) ? h("b", {}, "◂ binds") : "",
    ]);
    const label = `${warps} of ${most} warps`;
    const part = segment({ label: `${warps} warps`, start: 0, size: warps, scale: most, color: 4, title: label });
    const verb = binds.length > 1 ? "bind" : "binds";
    return box(
      "Occupancy",
      h(
        "p",
        {},
        h("b", {}, `${blocks} ${blocks === 1 ? "block" : "blocks"} a multiprocessor`),
        `, ${label} (${percent(warps, most)}): ${binds.join(" and ")} ${verb}.`,
      ),
      bar({ rows: [[part]], ticks: ticksTo(most, 8), scale: most, label }),
      table("What limits the blocks of a multiprocessor", ["limit", "how many fit", "blocks", ""], rows, [2]),
    );
  }

  CF.budget = { lanes, roleUse, split, binding, compileCommand, smemBar, registerBar, table, box, bytes, percent };

  CF.views.budget = {
    title: "Budget",
    mount(container, { scene }) {
      if (!scene) {
        container.append(h("p", { class: "hint" }, "This page does not have a kernel of that name."));
        return;
      }
      const { kernel, budget } = scene.data;
      const { roles, compiled } = budget.registers;
      container.append(
        h(
          "div",
          { class: "budget" },
          sharedMemory(scene),
          box(
            "Registers",
            roles.map((role) => registersOf(scene, role, Math.max(...roles.map(({ limit }) => limit)), compiled)),
            registerFile({ kernel, budget }),
            compiledNumbers(kernel, compiled),
          ),
          occupancyBox({ kernel, budget }),
        ),
      );
    },
    unmount() {},
  };
})();
