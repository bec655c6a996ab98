/* The page's name CF: the base, the state store with its hash, palettes. Independent of the views. */
const CF = { ...Base };

/** Registered views by name: `{title, mount(container, ctx), unmount()}` with `ctx = {data, scene}`. */
CF.views = {};

/** `0x00a0`: an address in hexadecimal with at least `digits` digits. */
CF.hex = (value, digits = 4) => "0x" + value.toString(16).padStart(digits, "0");

/* State: one flat store. Keys that matter for a link have a hash parameter. */
(() => {
  const AXES = ["m", "n", "d", "e"];

  const whole = { parse: (text) => (/^\d+$/.test(text) ? Number(text) : null), print: String };
  const word = { parse: (text) => text || null, print: String };
  const flag = { parse: (text) => text !== "0", print: (value) => (value ? "1" : "0") };
  const element = { parse: parseElement, print: printElement };

  /** `n3,d17` as `{n: 3, d: 17}`; null if it contains no axis. */
  function parseElement(text) {
    const found = {};
    for (const [, axis, index] of text.matchAll(/([mnde])(\d+)/g)) found[axis] = Number(index);
    return Object.keys(found).length ? found : null;
  }

  function printElement(value) {
    return AXES.filter((axis) => axis in value)
      .map((axis) => axis + value[axis])
      .join(",");
  }

  /* key -> {param: name in the hash or null, initial, parse, print} */
  const keys = {
    view: { param: "view", initial: null, ...word },
    scene: { param: "scene", initial: null, ...word },
    panel: { param: "panel", initial: null, ...word },
    hover: { param: null, initial: null },
    pin: { param: "el", initial: null, ...element },
    thread: { param: "thread", initial: null, ...whole },
    warp: { param: "warp", initial: null, ...whole },
    warpgroup: { param: "warpgroup", initial: null, ...whole },
    step: { param: "step", initial: null, ...word },
    instruction: { param: "i", initial: null, ...whole },
    stage: { param: "stage", initial: 0, ...whole },
    swizzle: { param: "swizzle", initial: true, ...flag },
    color: { param: "color", initial: null, ...word },
    theme: { param: null, initial: null },
  };

  const values = Object.fromEntries(Object.entries(keys).map(([key, spec]) => [key, spec.initial]));
  const listeners = new Set();
  let hashTimer = null;

  const same = (a, b) => a === b || JSON.stringify(a) === JSON.stringify(b);

  function set(changes, { fromHash = false } = {}) {
    const changed = new Set();
    for (const [key, value] of Object.entries(changes)) {
      if (!(key in keys)) throw new Error(`no state key "${key}"; CF.state.define makes one`);
      if (same(values[key], value)) continue;
      values[key] = value;
      changed.add(key);
    }
    if (!changed.size) return;
    for (const listener of [...listeners]) {
      if (listener.keys === "*" || listener.keys.some((key) => changed.has(key))) listener.call(changed);
    }
    if (!fromHash) laterWriteHash(changed.has("view") || changed.has("scene"));
  }

  function on(keyOrKeys, call) {
    const listener = { keys: keyOrKeys === "*" ? "*" : [keyOrKeys].flat(), call };
    listeners.add(listener);
    return () => listeners.delete(listener);
  }

  function define(key, { param = null, initial = null, parse = word.parse, print = String } = {}) {
    if (key in keys) return;
    keys[key] = { param, initial, parse, print };
    const text = param && new URLSearchParams(location.hash.slice(1)).get(param);
    values[key] = text ? parse(text) : initial;
  }

  /** Other initial values, for instance the page's own scene: a key that has its initial value is not in the hash. */
  function initial(changes) {
    for (const [key, value] of Object.entries(changes)) keys[key].initial = values[key] = value;
  }

  /** The values that the address may give a key; any other is ignored. */
  function limit(key, allowed) {
    keys[key].allowed = allowed;
  }

  /** The hash for the present state with `changes` applied, for links: `#view=kernel&panel=sK`. */
  function link(changes = {}) {
    const state = { ...values, ...changes };
    const parts = [];
    for (const [key, spec] of Object.entries(keys)) {
      const value = state[key];
      if (!spec.param || value === null || value === undefined || same(value, spec.initial)) continue;
      parts.push(`${spec.param}=${encodeURIComponent(spec.print(value)).replaceAll("%2C", ",")}`);
    }
    return "#" + parts.join("&");
  }

  /* Browsers limit how often the address may change, so the hash follows the state with a short delay. */
  function laterWriteHash(newEntry) {
    laterWriteHash.newEntry ||= newEntry;
    clearTimeout(hashTimer);
    hashTimer = setTimeout(() => {
      const hash = link();
      if (hash !== location.hash) history[laterWriteHash.newEntry ? "pushState" : "replaceState"](null, "", hash);
      laterWriteHash.newEntry = false;
    }, 120);
  }

  /** Sets every linked key from the address; keys that it does not name get their initial value. */
  function readHash() {
    const params = new URLSearchParams(location.hash.slice(1));
    const changes = {};
    for (const [key, spec] of Object.entries(keys)) {
      if (!spec.param) continue;
      const text = params.get(spec.param);
      const value = text === null ? null : spec.parse(text);
      const known = value !== null && (spec.allowed?.includes(value) ?? true);
      changes[key] = known ? value : spec.initial;
    }
    clearTimeout(hashTimer);
    set(changes, { fromHash: true });
  }

  /**
   * `get(key)`; `set({key: value, ...})`; `on(key | [keys] | "*", fn)` calls `fn(changedKeys: Set)` once a `set`
   * and returns the function that ends it; `define(key, {param, initial, parse, print})` adds a view's own key (with
   * `param`, it is part of the hash); `limit(key, allowed)`; `link(changes)` is the hash of the present state with
   * changes.
   */
  CF.state = { get: (key) => values[key], set, on, define, initial, limit, link, readHash, parseElement, printElement };
})();

/* Colours. Categories are Okabe and Ito's, quantities a ramp from dark blue over green to yellow; both hold for
   colour-blind readers and in grey. Everything drawn with them also carries a number, a word or a pattern. */
(() => {
  const categories = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"];
  const stops = ["#440154", "#472f7d", "#39568c", "#28788e", "#1f988b", "#35b779", "#7ad151", "#bddf26", "#fde725"];

  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const categoryRgb = categories.map(parse);
  const stopRgb = stops.map(parse);

  const mix = (a, b, t) => a.map((part, i) => Math.round(part + (b[i] - part) * t));

  function ramp(t) {
    const at = Math.min(Math.max(t, 0), 1) * (stopRgb.length - 1);
    const low = Math.min(Math.floor(at), stopRgb.length - 2);
    return mix(stopRgb[low], stopRgb[low + 1], at - low);
  }

  /* Black or white, whichever reads better on the colour (relative luminance, threshold of equal contrast). */
  function ink([r, g, b]) {
    const linear = (part) => (part / 255) ** 2.2;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) > 0.18 ? "#000" : "#fff";
  }

  /* The second eight warps have the hues of the first, darker. */
  const warp = (index) => mix(categoryRgb[index % 8], [0, 0, 0], index % 16 > 7 ? 0.32 : 0);

  /**
   * `categories` hex strings; `category(i)`, `warp(i)` and `ramp(0..1)` give [r, g, b]; `mix(a, b, t)`; `parse(hex)`;
   * `css(rgb, alpha)`; `ink(rgb)` the text colour that reads on it; `theme(name)` the CSS custom property `--name` of
   * the present theme.
   */
  CF.palette = {
    categories,
    category: (index) => categoryRgb[((index % 8) + 8) % 8],
    warp,
    ramp,
    mix,
    ink,
    parse,
    css: ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`,
    theme: CF.theme.color,
  };
})();

/* A state key, so that everything drawn in colours can follow it. */
CF.theme.on(() => CF.state.set({ theme: CF.theme.present() }));
