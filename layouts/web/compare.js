/* Differences of two rows: traits, tiles, fragments, instructions, bank conflicts, budgets. No drawing here. */
(() => {
  "use strict";

  const { bytes, percent, roleUse, binding } = CF.budget;

  /** Both lists merged, each name once: the first's in order, the second's others before the names that follow them. */
  function merged(first, second) {
    const found = [...first];
    let next = found.length;
    for (const name of [...second].reverse()) {
      if (found.includes(name)) next = found.indexOf(name);
      else found.splice(next, 0, name);
    }
    return found;
  }

  /**
   * Two scenes line by line: `[{name, a, b, differs}]`. `cellsOf(scene)` gives `[key, name, cell]` of each line, and
   * lines belong together that have the same key, or else the same name (`mma_qk` and `wgmma_qk` are both S = Q K^T).
   * A cell is `{text, note?, code?, bad?}`, or null if the scene does not have the line.
   */
  function lines(a, b, cellsOf) {
    const left = cellsOf(a);
    const mine = new Map(left.map((line) => [line[0], line]));
    const keyOf = ([key, name]) => (mine.has(key) ? key : (left.find((line) => line[1] === name)?.[0] ?? key));
    const others = new Map(cellsOf(b).map((line) => [keyOf(line), line]));
    return merged([...mine.keys()], [...others.keys()]).map((key) => {
      const [, name] = mine.get(key) ?? others.get(key);
      const [one, other] = [mine, others].map((side) => side.get(key)?.[2] ?? null);
      return { name, a: one, b: other, differs: JSON.stringify(one) !== JSON.stringify(other) };
    });
  }

  const plain = (name, value) => [name, name, { text: String(value) }];

  function rowCells({ data: { kernel } }) {
    const { head_dim: own, head_dim_v: other } = kernel;
    const role = ({ name, first_thread: first, threads }) => `${name} ${first}–${first + threads - 1}`;
    return [
      plain("kernel", [kernel.name, kernel.part].filter(Boolean).join(", ")),
      plain("arch", kernel.arch),
      plain("family", kernel.family),
      plain("dtype", kernel.dtype),
      plain("head dim", own === other ? own : `${own}, of V ${other}`),
      plain("mask", kernel.mask),
      plain("lengths", kernel.lengths.join(", ")),
      plain("threads", kernel.threads),
      plain("roles", kernel.roles.map(role).join(", ")),
    ];
  }

  const traitCells = ({ data }) => Object.entries(data.kernel.traits).map(([name, value]) => plain(name, value));

  function partCells(scene) {
    return scene.parts.map(({ id, rows, cols, axes, stages, spec, owned }) => {
      const shape = `${axes[0]} ${rows} × ${axes[1]} ${cols}`;
      const kind = owned ? [`${spec.dtype} ${spec.operand}`, `${spec.registers} registers`] : [];
      if (stages > 1) kind.push(`${stages} stages`);
      const layout = owned ? spec.tv : spec.layout;
      const swizzle = owned ? spec.tv_swizzle : spec.swizzle;
      const placed = swizzle ? { swizzle, offset: 0, layout } : layout;
      return [id, id, { text: [shape, ...kind].join(" · "), code: CF.algebra.toText(placed) }];
    });
  }

  function stepCells({ steps }) {
    return steps.map(({ id, title, instruction, instructions, repeat }) => {
      return [id, title, { text: `${instructions} × ${repeat}`, code: instruction }];
    });
  }

  function accessCells(scene) {
    return CF.banks.accesses(scene).map((access) => {
      const [on, off] = [access.summary(access.swizzle), access.summary(null)];
      const without = access.swizzle ? `; without swizzle ${off.worst}-way` : "";
      const text = `${on.worst}-way${on.worst > 1 ? " ▲" : ""}`;
      const note = `${CF.number(on.wavefronts)} wavefronts${without}`;
      return [access.id, `${access.step.title}, ${access.part.id}`, { text, note, bad: on.worst > 1 }];
    });
  }

  function budgetCells({ data: { budget } }) {
    const { smem, registers, occupancy } = budget;
    const share = percent(smem.total, smem.limit);
    const cells = [
      ["smem", "smem of a block", { text: bytes(smem.total), note: `${share} of ${bytes(smem.limit)}` }],
      ...smem.regions.map((region) => [`smem ${region.id}`, `smem: ${region.id}`, regionCell(region)]),
      plain("registers at launch", registers.launch),
      ...registers.roles.map(roleLine),
    ];
    if (registers.compiled) cells.push(compiledLine(registers.compiled));
    const binds = `${binding(occupancy).join(" and ")} ${binding(occupancy).length > 1 ? "bind" : "binds"}`;
    cells.push(["blocks", "blocks a multiprocessor", { text: String(occupancy.blocks), note: binds }]);
    cells.push(["warps", "warps a multiprocessor", { text: `${occupancy.warps} of ${occupancy.max_warps}` }]);
    return cells;
  }

  const regionCell = ({ bytes: size, stages, note }) => ({
    text: stages > 1 ? `${bytes(size)} in ${stages}` : bytes(size),
    note,
  });

  function roleLine(role) {
    const { used, left, limit } = roleUse(role);
    const note = left < 0 ? `all fragments would take ${used}` : used ? `fragments take ${used}` : "no fragments";
    return [`role ${role.name}`, `registers: ${role.name}`, { text: String(limit), note }];
  }

  function compiledLine({ registers, spill_store_bytes: stored, spill_load_bytes: loaded }) {
    const spilled = stored + loaded;
    const note = spilled ? `${bytes(spilled)} spilled` : "no spills";
    return ["compiled", "registers as compiled", { text: String(registers), note, bad: spilled > 0 }];
  }

  const listed = (names) => [names.slice(0, -1).join(", "), names.at(-1)].filter(Boolean).join(" and ");

  /** Differences of two rows' traits, in words: those that both have by name, the others by number. */
  function summary(traits) {
    const both = traits.filter(({ a, b }) => a && b);
    const names = both.filter(({ differs }) => differs).map(({ name }) => name);
    const verb = names.length === 1 ? "differs" : "differ";
    const shared = names.length
      ? `Of ${both.length} traits that both rows have ${names.length} ${verb}: ${listed(names)}.`
      : `The ${both.length} traits that both rows have are the same.`;
    const alone = ["a", "b"].map((side) => traits.filter((line) => line[side]).length - both.length);
    return alone[0] + alone[1] ? `${shared} A has ${alone[0]} more, B ${alone[1]}.` : shared;
  }

  /** The rows `[a, b]` that a comparison starts with: head dim 128, in both families if an arch has them. */
  function standard(rows) {
    const first = rows.find((row) => row.head_dim === 128) ?? rows[0];
    const others = rows.filter((row) => row !== first);
    const alike = others.filter((row) => row.arch === first?.arch && row.head_dim === first.head_dim);
    const second = alike.find((row) => row.family !== first.family) ?? alike[0] ?? others[0] ?? first;
    return [first, second];
  }

  /** The page's rows, in the tables' order: the gallery's entries with a scene, else the scenes. */
  function rowsOf({ gallery, scenes }) {
    if (gallery) return gallery.filter((row) => row.id in scenes);
    return Object.values(scenes).map(({ id, title, kernel }) => ({ ...kernel, id, title }));
  }

  CF.state.define("a", { param: "a" });
  CF.state.define("b", { param: "b" });

  CF.compare = {
    merged,
    lines,
    summary,
    standard,
    rowsOf,
    row: (a, b) => lines(a, b, rowCells),
    traits: (a, b) => lines(a, b, traitCells),
    parts: (a, b) => lines(a, b, partCells),
    steps: (a, b) => lines(a, b, stepCells),
    accesses: (a, b) => lines(a, b, accessCells),
    budget: (a, b) => lines(a, b, budgetCells),
    /** Address of the comparison of two rows, from a page of the site. */
    link: (a, b) => `compare.html#a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`,
  };
})();
