/* What the data says: candidates, how far they came, how fast they are, what each trait is worth. Draws nothing. */
(() => {
  const TIMED = "T";
  const WAITING = "w";
  const UNTOUCHED = "u"; // could run, and was not yet compiled for a problem
  /* How far a candidate came, furthest last; the words of the rejecting stages are the data's. */
  const ORDER = ["p", "l", UNTOUCHED, "c", "g", "t", WAITING, TIMED];
  const STAGE_OF = { p: "prune", l: "limit", c: "compile", g: "gate", t: "time" };
  const ZERO = "0".charCodeAt(0);
  const FINE = 10000; // parts of a time in which the ends of its interval are counted

  /** Lists in place of what the data writes small: traits' columns, and [ms, low, high] of every time. */
  function decode(data) {
    for (const space of data.spaces) {
      for (const trait of space.traits) {
        const letters = trait.column;
        trait.column = space.ids.map((_, who) => (letters ? letters.charCodeAt(who) - ZERO : 0));
      }
      for (const cell of space.cells) {
        const { ms, below, above } = cell.times;
        const end = (one, parts) => (parts === null ? null : one * (1 + parts / FINE));
        cell.times = ms.map((one, place) => [one, end(one, -below[place]), end(one, above[place])]);
      }
    }
    return data;
  }

  /** What a state letter means. */
  function stateWords(data, state) {
    if (state === TIMED) return "timed";
    if (state === UNTOUCHED) return "not compiled yet";
    return state === WAITING ? "not timed yet" : data.stages[STAGE_OF[state]];
  }

  const traitNamed = (space, name) => space.traits.find((trait) => trait.name === name);

  /** A candidate's value of a trait. */
  const valueOf = (trait, who) => trait.values[trait.column[who]];

  /** The traits that a candidate has: others belong to another kind. */
  const traitsOf = (space, who) => space.traits.filter((trait) => valueOf(trait, who) !== null);

  /** Whether a candidate's value of a trait is another one than its kind's default, or there is no default. */
  const isOwn = (space, trait, who) =>
    valueOf(trait, who) !== trait.defaults[valueOf(traitNamed(space, "kind"), who)];

  /** A candidate in few words: its kind if there are several, its tile, and every trait that is not the default. */
  function title(space, who) {
    const kind = traitNamed(space, "kind");
    const words = kind.values.length > 1 ? [valueOf(kind, who)] : [];
    words.push(`${valueOf(traitNamed(space, "tile_m"), who)}x${valueOf(traitNamed(space, "tile_n"), who)}`);
    for (const trait of traitsOf(space, who)) {
      const value = valueOf(trait, who);
      if (valueOf(kind, who) in trait.defaults && isOwn(space, trait, who)) {
        words.push(value === true ? trait.name : `${trait.name}=${value === false ? "False" : value}`);
      }
    }
    return words.join(" ");
  }

  /** How far a candidate came: on one problem or, where that is null, on the one where it came furthest. */
  function stateOf(space, problem, who) {
    if (problem) return problem.states[who];
    if (!space.problems.length) return space.base[who];
    const states = space.problems.map((one) => one.states[who]);
    return states.reduce((a, b) => (ORDER.indexOf(b) > ORDER.indexOf(a) ? b : a));
  }

  /** Why a candidate was rejected, "" where it was not. */
  function reasonOf(data, space, problem, who) {
    const own = problem ? [problem] : space.problems;
    const code = space.reasons[who] || own.map((one) => one.reasons[who]).find(Boolean);
    if (!code) return "";
    let place = 0;
    return data.templates[code[0]].replace(/#/g, () => code[++place]);
  }

  /** [template, candidates] for each kind of reason, the most frequent first. */
  function commonReasons(data, space, problem) {
    const counts = new Map();
    const sources = [space.reasons, ...(problem ? [problem] : space.problems).map((one) => one.reasons)];
    const seen = new Map();
    for (const source of sources)
      for (const [who, code] of Object.entries(source)) if (!seen.has(who)) seen.set(who, code[0]);
    for (const template of seen.values()) counts.set(template, (counts.get(template) || 0) + 1);
    return [...counts].map(([template, count]) => [data.templates[template], count]).sort((a, b) => b[1] - a[1]);
  }

  /** State letter → candidates. */
  function funnel(space, problem) {
    const counts = Object.fromEntries(ORDER.map((state) => [state, 0]));
    space.ids.forEach((_, who) => counts[stateOf(space, problem, who)]++);
    return counts;
  }

  /** The cells of a selection: one mask, dtype and length class, and of these one cell where one is named. */
  function cellsOf(space, { mask, dtype, lengths, cell }) {
    const own = space.cells.filter((one) => one.mask === mask && one.dtype === dtype && one.lengths === lengths);
    const named = own.filter((one) => one.label === cell);
    return named.length ? named : own;
  }

  /** Whether a cell or slot is of few queries, whatever their number of rows. */
  const isDecoding = ({ lengths }) => lengths.split(",")[0] === "decode";

  const mean = (numbers) => numbers.reduce((sum, one) => sum + one, 0) / numbers.length;
  const geometricMean = (numbers) => Math.exp(mean(numbers.map(Math.log)));

  /**
   * Speed of every candidate as a share of the fastest's, by geometric mean over the cells that it was timed on:
   * `share[who]`, NaN where there are none, and `timed[who]`, how many there are of `of`. `change(who, other)` is how
   * much faster one is than another over the cells of both, 0.05 is 5 %; NaN where there are none.
   */
  function shares(space, cells) {
    const times = cells.map((cell) => new Map(cell.who.map((who, place) => [who, cell.times[place][0]])));
    const own = space.ids.map((_, who) => times.flatMap((ms, place) => (ms.has(who) ? [place] : [])));
    const best = cells.map((cell) => cell.times[0][0]);
    const ratio = (who, from, places) => geometricMean(places.map((place) => from(place) / times[place].get(who)));
    return {
      share: own.map((places, who) => ratio(who, (place) => best[place], places)),
      timed: own.map((places) => places.length),
      of: cells.length,
      change: (who, other) => {
        const both = own[who].filter((place) => times[place].has(other));
        return ratio(who, (place) => times[place].get(other), both) - 1;
      },
    };
  }

  /** The same of a space that was never timed, by the analytic score: `estimated`. */
  function estimates(space) {
    const { clocks } = space.costs;
    const best = Math.min(...clocks.filter((one) => one !== null));
    return {
      share: clocks.map((one) => (one === null ? NaN : best / one)),
      timed: clocks.map(() => 0),
      of: 0,
      change: (who, other) => clocks[other] / clocks[who] - 1,
      estimated: true,
    };
  }

  /** The candidate with the largest share, null where none has one. */
  const fastest = ({ share }) =>
    share.reduce((best, one, who) => (one > (best === null ? 0 : share[best]) ? who : best), null);

  /** What a candidate reaches by geometric mean over cells: TFLOP/s, of the matrix product, and TB/s. */
  function rates(cells, who) {
    const times = cells.map((cell) => cell.times[cell.who.indexOf(who)][0]);
    const over = (amount) => geometricMean(cells.map((cell, place) => amount(cell) / times[place]));
    const known = cells.every((cell) => cell.matmul);
    return {
      tflops: over((cell) => cell.work),
      share: known ? over((cell) => cell.work / cell.matmul) : null,
      terabytes: over((cell) => cell.gigabytes),
    };
  }

  /**
   * `[{name, tflops, terabytes, ratio}]` of what a cell has: its slot's winner and default, then the peers. `ratio` is
   * to the best peer's speed, null where no peer was timed.
   */
  function series(space, cell) {
    const slot = space.slots.find((one) => ["mask", "dtype", "lengths"].every((key) => one[key] === cell[key]));
    const time = (who) => cell.times[cell.who.indexOf(who)]?.[0];
    const peers = Object.entries(cell.peers);
    const best = peers.length ? Math.min(...peers.map(([, ms]) => ms)) : null;
    const entries = [
      ["winner", time(slot?.winner)],
      ["default", slot?.default === slot?.winner ? undefined : time(slot?.default)],
      ...peers,
    ];
    return entries
      .filter(([, ms]) => ms)
      .map(([name, ms]) => ({
        name,
        tflops: cell.work / ms,
        terabytes: cell.gigabytes / ms,
        ratio: best === null ? null : best / ms,
      }));
  }

  /** Quantile `q` of sorted numbers, between neighbours in proportion. */
  function quantile(sorted, q) {
    const at = q * (sorted.length - 1);
    const low = Math.floor(at);
    return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
  }

  /**
   * What each trait is worth that has several values among those with a speed: over all pairs that differ in it alone
   * and one of which has the value of `reference`, how much faster the other one is. The most telling first:
   * `{trait, pairs, worth, values: [{value, count, pairs, low, q1, median, q3, high}]}`. `count` is of those with a
   * speed, `worth` how much slower the others of all pairs are in the middle, null without a pair.
   */
  function effects(space, speed, reference) {
    const known = [...space.ids.keys()].filter((who) => !Number.isNaN(speed.share[who]));
    const found = [];
    for (const trait of space.traits) {
      const values = trait.values.map((value) => ({ value, count: 0, changes: [] }));
      for (const who of known) values[trait.column[who]].count++;
      if (values.filter((entry) => entry.count).length < 2) continue;
      const others = space.traits.filter((one) => one !== trait);
      const rest = (who) => others.map((one) => one.column[who]).join();
      const like = (who) => trait.column[who] === trait.column[reference];
      const twins = new Map(known.filter(like).map((who) => [rest(who), who]));
      for (const who of known) {
        const twin = like(who) ? undefined : twins.get(rest(who));
        const change = twin === undefined ? NaN : speed.change(who, twin);
        if (!Number.isNaN(change)) values[trait.column[who]].changes.push(change);
      }
      const all = spread(values.flatMap((entry) => entry.changes));
      const told = values.map(({ value, count, changes }) => ({ value, count, ...spread(changes) }));
      found.push({ trait, pairs: all.pairs, worth: all.pairs ? -all.median : null, values: told });
    }
    return found.sort((a, b) => Math.abs(b.worth) - Math.abs(a.worth) || b.pairs - a.pairs);
  }

  function spread(changes) {
    const sorted = [...changes].sort((a, b) => a - b);
    if (!sorted.length) return { pairs: 0 };
    const [low, q1, median, q3, high] = [0, 0.25, 0.5, 0.75, 1].map((q) => quantile(sorted, q));
    return { pairs: sorted.length, low, q1, median, q3, high };
  }

  /** Whether a candidate has, of every trait in `filter` (name → list of values as texts), one of the values. */
  const passes = (space, filter, who) =>
    Object.entries(filter).every(([name, values]) => {
      const trait = traitNamed(space, name);
      return !trait || values.includes(String(valueOf(trait, who)));
    });

  /** `{name, from, to}` of every trait in which two candidates differ. */
  const differences = (space, from, to) =>
    space.traits
      .filter((trait) => trait.column[from] !== trait.column[to])
      .map((trait) => ({ name: trait.name, from: valueOf(trait, from), to: valueOf(trait, to) }));

  /** The candidate's page for this mask and dtype or else any of its pages, null where it has none. */
  function pageOf(space, who, { mask, dtype }) {
    const own = space.pages.filter((page) => page.who === who);
    const fit = (page) => (page.mask === mask) * 2 + (page.dtype === dtype);
    return own.sort((a, b) => fit(b) - fit(a))[0] || null;
  }

  /** Whether every word is part of the text; `name=value` is a trait's value. */
  function matches(space, who, text, words) {
    return words.every((word) => {
      const [name, wanted] = word.split("=");
      const trait = wanted === undefined ? null : traitNamed(space, name);
      if (!trait) return text.includes(word);
      const value = valueOf(trait, who);
      return [String(value), R.words.value(value)].some((one) => one.toLowerCase() === wanted);
    });
  }

  R.model = {
    TIMED,
    ORDER,
    decode,
    stateWords,
    isDecoding,
    traitNamed,
    valueOf,
    traitsOf,
    isOwn,
    title,
    stateOf,
    reasonOf,
    commonReasons,
    funnel,
    cellsOf,
    shares,
    estimates,
    fastest,
    rates,
    series,
    quantile,
    effects,
    passes,
    differences,
    pageOf,
    matches,
  };
})();
