"use strict";
/* The page's base: the namespace R, DOM helpers, numbers in words, theme. Knows nothing of sweeps. */
const R = {};

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function build(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
      if (name.startsWith("aria-")) node.setAttribute(name, String(value));
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "value") node.value = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  /**
   * Makes an element. `on*` attributes are listeners; null, undefined and false ones (but aria's) are left out, as are
   * such children. Children may be nodes, strings, numbers or nested arrays of them.
   */
  R.h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);

  /** The same for an SVG element. */
  R.svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

  /** A labelled `<select>` of `[value, text]` pairs; `change(value)` is called with the chosen text value. */
  R.select = (label, pairs, value, change) =>
    R.h(
      "label",
      { class: "field" },
      R.h("span", null, label),
      R.h(
        "select",
        { onchange: (event) => change(event.target.value) },
        pairs.map(([key, text]) => R.h("option", { value: key, selected: String(key) === String(value) }, text)),
      ),
    );

  /** Calls `draw` at most once a frame, however often the returned function is called. */
  R.perFrame = (draw) => {
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

  /** Calls `draw` now and whenever the width of `node` changes. */
  R.onWidth = (node, draw) => {
    let width = null;
    const watch = new ResizeObserver(() => {
      if (node.clientWidth === width || !node.clientWidth) return;
      width = node.clientWidth;
      draw();
    });
    watch.observe(node);
  };
})();

/* Numbers in words. */
(() => {
  const THIN = "\u2009";

  /** A whole number with thin spaces between thousands. */
  const whole = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, THIN);

  /** A positive number with `digits` significant digits, never in powers of ten. */
  function digits(value, count = 3) {
    const places = Math.max(0, count - 1 - Math.floor(Math.log10(value)));
    return value === 0 ? "0" : value.toFixed(Math.min(places, 6));
  }

  /** 0.0512 as "5.1 %"; null is unknown. */
  const percent = (share, places = 1) =>
    share === null ? "unknown" : `${minus((100 * share).toFixed(places))}${THIN}%`;

  /** The same with a sign. */
  const signed = (share, places = 1) => (share === null ? "unknown" : (share > 0 ? "+" : "") + percent(share, places));

  const minus = (text) => text.replace("-", "−");

  /** Any value of a trait. */
  const value = (one) => (one === true ? "on" : one === false ? "off" : String(one));

  /** "2026-03-02 09:30" of a moment in ISO form. */
  const moment = (text) => text.slice(0, 16).replace("T", " ");

  R.words = { whole, digits, percent, signed, value, moment };
})();

/* Theme: the system's, unless the reader chose one. */
(() => {
  const STORED = "cuteflash-theme";
  const listeners = [];

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
    listeners.forEach((call) => call());
  }

  R.theme = {
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
    /** Calls after every change of theme: canvases have to be drawn again. */
    on: (call) => listeners.push(call),
    /** The CSS custom property `--name` of the present theme. */
    color: (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),
  };
})();
