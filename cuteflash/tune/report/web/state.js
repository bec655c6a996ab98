/* The reader's selection: which space, problem and cell, which trait values, which candidate. Part of the address. */
(() => {
  const listeners = [];
  let data = null;
  let hashTimer = null;
  /* At first: no mask, bf16 and long sequences, which are measured most. */
  const FIRST = { space: null, mask: "full", dtype: "bf16", lengths: "long", cell: "", pick: null, filter: {}, least: 0 };
  const now = { ...FIRST, space: undefined };

  /** `{tile_m: ["128", "192"]}` as `tile_m:128+192;...` and back. */
  const printFilter = (filter) =>
    Object.entries(filter)
      .map(([name, values]) => `${name}:${values.join("+")}`)
      .join(";");
  const parseFilter = (text) =>
    Object.fromEntries(
      text
        .split(";")
        .map((part) => part.split(":"))
        .filter(([name, values]) => name && values)
        .map(([name, values]) => [name, values.split("+")]),
    );

  const spaceNow = () => data.spaces.find((space) => space.title === now.space);

  /** Choices that exist, in place of those that do not: what was asked for comes first where it is there. */
  function repaired(wanted) {
    const space = data.spaces.find((one) => one.title === wanted.space) || data.spaces[0];
    const timed = space.slots.length ? space.slots : space.problems;
    const fit = (one) =>
      4 * (one.mask === wanted.mask) + 2 * (one.dtype === wanted.dtype) + (one.lengths === wanted.lengths);
    const found = [...timed].sort((a, b) => fit(b) - fit(a))[0] || {};
    const next = {
      ...wanted,
      space: space.title,
      mask: found.mask ?? null,
      dtype: found.dtype ?? null,
      lengths: found.lengths ?? null,
    };
    const cells = R.model.cellsOf(space, { ...next, cell: "" });
    if (!cells.some((cell) => cell.label === next.cell)) next.cell = "";
    next.filter = Object.fromEntries(
      Object.entries(next.filter)
        .map(([name, values]) => {
          const known = R.model.traitNamed(space, name)?.values.map(String) || [];
          return [name, values.filter((value) => known.includes(value))];
        })
        .filter(([, values]) => values.length),
    );
    if (!space.ids.includes(next.pick)) next.pick = null;
    return next;
  }

  function set(changes, { fromHash = false } = {}) {
    const next = repaired({ ...now, ...changes });
    const changed = new Set(Object.keys(FIRST).filter((key) => JSON.stringify(now[key]) !== JSON.stringify(next[key])));
    Object.assign(now, next);
    if (!changed.size) return;
    for (const { keys, call } of listeners) if (keys.some((key) => changed.has(key))) call(changed);
    if (!fromHash) laterWriteHash();
  }

  /* Browsers limit how often the address may change, so the hash follows with a short delay. */
  function laterWriteHash() {
    clearTimeout(hashTimer);
    hashTimer = setTimeout(() => {
      const texts = { ...now, filter: printFilter(now.filter), least: now.least || "" };
      const parts = Object.keys(FIRST)
        .filter((key) => texts[key])
        .map((key) => `${key}=${encodeURIComponent(texts[key])}`);
      history.replaceState(null, "", "#" + parts.join("&"));
    }, 150);
  }

  function readHash() {
    const params = new URLSearchParams(location.hash.slice(1));
    const texts = Object.fromEntries(Object.keys(FIRST).map((key) => [key, params.get(key) ?? FIRST[key]]));
    const least = Number(texts.least);
    set(
      { ...texts, filter: parseFilter(params.get("filter") ?? ""), least: least > 0 && least <= 100 ? least : 0 },
      { fromHash: true },
    );
  }

  /** Turns one value of a trait's filter on or off; a filter of all or no values is none. */
  function toggle(name, value) {
    const own = now.filter[name] || [];
    const text = String(value);
    limit(name, own.includes(text) ? own.filter((one) => one !== text) : [...own, text]);
  }

  /** Lets only these values of a trait through; all or none lifts the filter. */
  function limit(name, values) {
    const all = R.model.traitNamed(spaceNow(), name).values.length;
    const { [name]: _, ...others } = now.filter;
    const texts = values.map(String);
    set({ filter: texts.length && texts.length < all ? { ...others, [name]: texts } : others });
  }

  const space = spaceNow;
  const problem = () => space().problems.find((one) => one.mask === now.mask && one.dtype === now.dtype) || null;
  const slot = () =>
    space().slots.find((one) => one.mask === now.mask && one.dtype === now.dtype && one.lengths === now.lengths) || null;

  /* Speeds are asked for by several views and do not change as filters do. */
  let known = { key: null };
  function speed() {
    const key = [now.space, now.mask, now.dtype, now.lengths, now.cell].join("|");
    const timed = space().cells.length > 0;
    if (known.key !== key)
      known = { key, value: timed ? R.model.shares(space(), R.model.cellsOf(space(), now)) : R.model.estimates(space()) };
    return known.value;
  }

  /** Whom others are told against: the slot's winner or else the first by speed; null where nobody has one. */
  const reference = () => slot()?.winner ?? R.model.fastest(speed());

  /** Whether a candidate passes the filters on traits and on speed. */
  function shown(who) {
    if (now.least && !(speed().share[who] >= now.least / 100)) return false;
    return R.model.passes(space(), now.filter, who);
  }

  const picked = () => (now.pick === null ? null : space().ids.indexOf(now.pick));

  R.state = {
    now,
    /** Takes the page's data and what the address says. */
    start(given) {
      data = given;
      readHash();
      addEventListener("hashchange", readHash);
    },
    set,
    /** Calls after every change of one of the keys. */
    on: (keys, call) => listeners.push({ keys, call }),
    toggle,
    limit,
    space,
    problem,
    slot,
    speed,
    reference,
    shown,
    picked,
    /** Picks a candidate; picking it again lets it go. */
    pick: (who) => set({ pick: who === null || space().ids[who] === now.pick ? null : space().ids[who] }),
    printFilter,
    parseFilter,
  };
  R.WHERE = ["space", "mask", "dtype", "lengths", "cell"];
})();
