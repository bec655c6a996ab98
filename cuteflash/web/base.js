"use strict";
/* Helpers of every page: elements, numbers, drawing once a frame, the theme, the page's frame. */
const Base = {};

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function build(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
      if (name.startsWith("aria-")) node.setAttribute(name, String(value));
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "dataset") Object.assign(node.dataset, value);
      else if (name === "value") node.value = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  /**
   * Makes an element. `on*` attributes are listeners, `dataset` an object; null, undefined and false ones (but aria's)
   * are left out, as are such children. Children may be nodes, strings, numbers or nested arrays of them.
   */
  Base.h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);

  /** The same for an SVG element. */
  Base.svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

  /** A `<select>` from `[value, text]` pairs; `change(value)` is called with the chosen value, as text. */
  Base.select = (label, pairs, value, change) =>
    Base.h(
      "select",
      { "aria-label": label, onchange: (event) => change(event.target.value) },
      pairs.map(([key, text]) => Base.h("option", { value: key, selected: String(key) === String(value) }, text)),
    );

  /** A whole number with narrow no-break spaces between thousands. */
  Base.number = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, "\u202f");

  /** Calls `draw` at most once a frame, however often the returned function is called. */
  Base.perFrame = (draw) => {
    let asked = false;
    return () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => {
        asked = false;
        draw();
      });
    };
  };
})();

/* Theme: the system's, unless the reader chose one. */
(() => {
  const STORED = "cuteflash-theme";
  const listeners = [];
  const colors = new Map(); // of the present theme, by name

  /* Storage can be refused (private windows, files opened from disk): the choice then lasts as long as the page. */
  function stored(value) {
    try {
      return value === undefined ? localStorage.getItem(STORED) : localStorage.setItem(STORED, value);
    } catch {
      return null;
    }
  }

  let chosen = null;
  let system = null;
  const present = () => chosen || (system.matches ? "dark" : "light");

  function apply() {
    document.documentElement.dataset.theme = present();
    colors.clear();
    listeners.forEach((call) => call());
  }

  function color(name) {
    if (!colors.has(name))
      colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    return colors.get(name);
  }

  Base.theme = {
    start() {
      system = matchMedia("(prefers-color-scheme: dark)");
      chosen = stored() || null;
      system.addEventListener("change", apply);
      apply();
    },
    toggle() {
      chosen = present() === "dark" ? "light" : "dark";
      stored(chosen);
      apply();
    },
    /** "light" or "dark". */
    present,
    /** Calls after every change of theme: canvases have to be drawn again. */
    on: (call) => listeners.push(call),
    /** The CSS custom property `--name` of the present theme. */
    color,
  };
})();

/** Sets `--top`, the height of the top bar, for everything that sticks or scrolls below it. */
Base.measureTop = () => {
  document.documentElement.style.setProperty("--top", `${document.getElementById("top").offsetHeight}px`);
};

/** Starts the page's frame: theme, skip button, updates of `--top`. Returns the page's data. */
Base.start = () => {
  const [top, main, skip, theme] = ["top", "main", "skip", "theme"].map((id) => document.getElementById(id));
  Base.theme.start();
  theme.addEventListener("click", Base.theme.toggle);
  skip.addEventListener("click", () => main.focus());
  new ResizeObserver(Base.measureTop).observe(top);
  return JSON.parse(document.getElementById("data").textContent);
};
