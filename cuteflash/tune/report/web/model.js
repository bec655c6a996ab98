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
  const PEERS = { fa4: "FA4", cudnn: "cuDNN", fa2: "FA2" };

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

  /** A candidate in few words: its tile, and every trait that is not the default. */
  function title(space, who) {
    const words = [`${valueOf(traitNamed(space, "tile_m"), who)}x${valueOf(traitNamed(space, "tile_n"), who)}`];
    for (const trait of space.traits) {
      const value = valueOf(trait, who);
      if ("default" in trait && value !== trait.default) {
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

  /** The cells of a selection: one mask, dtype and shape class, and of these one cell where one is named. */
  function cellsOf(space, { mask, dtype, shape, cell }) {
    const own = space.cells.filter((one) => one.mask === mask && one.dtype === dtype && one.shape === shape);
    const named = own.filter((one) => one.label === cell);
    return named.length ? named : own;
  }

  /**
   * Speed of every candidate as a share of the fastest's, by geometric mean over the cells that it was timed on:
   * `share[who]`, NaN where there are none, and `timed[who]`, how many there are.
   */
  function shares(space, cells) {
    const logs = new Float64Array(space.ids.length);
    const timed = new Uint16Array(space.ids.length);
    for (const cell of cells) {
      const best = cell.times[0][0];
      cell.who.forEach((who, place) => {
        logs[who] += Math.log(best / cell.times[place][0]);
        timed[who]++;
      });
    }
    return { share: logs.map((sum, who) => (timed[who] ? Math.exp(sum / timed[who]) : NaN)), timed, of: cells.length };
  }

  /** Quantile `q` of sorted numbers, between neighbours in proportion. */
  function quantile(sorted, q) {
    const at = q * (sorted.length - 1);
    const low = Math.floor(at);
    return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
  }

  /**
   * What each trait that was timed with more than one value is worth, the most telling first:
   * `{trait, influence, values: [{value, count, rejected, best, who, q1, median, q3, low}]}`. `influence` is how far
   * the best candidate of the worst value lies behind that of the best.
   */
  function effects(space, problem, speed) {
    const found = [];
    for (const trait of space.traits) {
      const values = trait.values.map((value) => ({ value, own: [], rejected: 0, who: null, best: 0 }));
      space.ids.forEach((_, who) => {
        const entry = values[trait.column[who]];
        const share = speed.share[who];
        if (Number.isNaN(share)) {
          entry.rejected += STAGE_OF[stateOf(space, problem, who)] ? 1 : 0;
          return;
        }
        entry.own.push(share);
        if (share > entry.best) Object.assign(entry, { best: share, who });
      });
      const timed = values.filter((entry) => entry.own.length);
      if (timed.length < 2) continue;
      const bests = timed.map((entry) => entry.best);
      found.push({ trait, influence: Math.max(...bests) - Math.min(...bests), values: values.map(spread) });
    }
    return found.sort((a, b) => b.influence - a.influence);
  }

  function spread({ value, own, rejected, who, best }) {
    if (!own.length) return { value, count: 0, rejected };
    own.sort((a, b) => a - b);
    const [low, q1, median, q3] = [0, 0.25, 0.5, 0.75].map((q) => quantile(own, q));
    return { value, count: own.length, rejected, best, who, low, q1, median, q3 };
  }

  /** Whether a candidate has, of every trait in `filter` (name → list of values as texts), one of the values. */
  const passes = (space, filter, who) =>
    Object.entries(filter).every(([name, values]) => {
      const trait = traitNamed(space, name);
      return !trait || values.includes(String(valueOf(trait, who)));
    });

  /** Words by which two candidates differ, the first one's value first. */
  const differences = (space, who, other) =>
    space.traits
      .filter((trait) => trait.column[who] !== trait.column[other])
      .map(
        (trait) => `${trait.name} ${R.words.value(valueOf(trait, who))}, not ${R.words.value(valueOf(trait, other))}`,
      );

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
    PEERS,
    decode,
    stateWords,
    traitNamed,
    valueOf,
    title,
    stateOf,
    reasonOf,
    commonReasons,
    funnel,
    cellsOf,
    shares,
    quantile,
    effects,
    passes,
    differences,
    pageOf,
    matches,
  };
})();
