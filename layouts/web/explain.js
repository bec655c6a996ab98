/*
 * CF.explain: names of traits, axes, tiles and fragments that show an explanation when they are tapped.
 * One box beside the name has the text; Escape, a tap elsewhere or scrolling closes it.
 */
(() => {
  "use strict";

  const GAP = 6; // pixels between the name and the box, and to the window's edge
  const PLACES = {
    g: "a tile in global memory: the part of the tensor that this thread block reads or writes",
    s: "a tile in the thread block's shared memory",
    r: "a fragment: an operand in the registers of many threads",
    acc: "an accumulator: the result of a product, in fp32 in the registers of many threads",
  };
  const TENSORS = {
    Q: "Q, the queries",
    Qr: "the columns of Q that K has beside V's",
    K: "K, the keys",
    Kr: "the columns of K that V does not have",
    V: "V, the values",
    S: "S, the scores Q Kᵀ",
    P: "P, the exponentials of the scores, rounded to the element type",
    O: "O, the output, the sum of P V over the key blocks",
    dO: "dO, the gradient of the output",
    dP: "dP, the gradient of P, dO Vᵀ",
    dS: "dS, the gradient of the scores, P (dP - delta), rounded to the element type",
    dQ: "dQ, the gradient of the queries, the sum of dS K over the key blocks",
    dK: "dK, the gradient of the keys, the sum of dSᵀ Q over the query blocks",
    dV: "dV, the gradient of the values, the sum of Pᵀ dO over the query blocks",
  };

  let page = {};
  let box = null;
  let opener = null;

  /* Made when it is first needed. */
  function theBox() {
    if (box) return box;
    box = CF.h("div", { id: "explanation", class: "explanation", popover: "auto", role: "note", "aria-live": "polite" });
    box.addEventListener("beforetoggle", ({ newState }) => {
      if (newState === "closed") opener?.setAttribute("aria-expanded", "false");
    });
    document.body.append(box);
    window.addEventListener("scroll", () => box.hidePopover(), { passive: true });
    return box;
  }

  /* Below the name, or above it if there is no room, and inside the window. */
  function place(name) {
    const [at, size] = [name.getBoundingClientRect(), box.getBoundingClientRect()];
    const below = at.bottom + GAP + size.height <= window.innerHeight;
    const top = below ? at.bottom + GAP : Math.max(GAP, at.top - GAP - size.height);
    const left = Math.max(GAP, Math.min(at.left, document.documentElement.clientWidth - size.width - GAP));
    Object.assign(box.style, { top: `${top}px`, left: `${left}px` });
  }

  function open(name, title, words) {
    theBox().hidePopover(); // of another name, which the keyboard may have left open
    opener = name;
    box.replaceChildren(CF.h("b", {}, title), CF.h("p", {}, words));
    box.showPopover();
    name.setAttribute("aria-expanded", "true");
    place(name);
  }

  /**
   * A name with an explanation, or just the name without `words`. `title` heads the explanation, `text` is the name.
   */
  function term(text, words, title = text) {
    if (!words) return CF.h("span", {}, text);
    let wasOpen = false; // a press outside the box, as one on the name is, has closed it before the click comes
    const name = CF.h(
      "button",
      {
        type: "button",
        class: "term",
        "aria-expanded": "false",
        onpointerdown: () => (wasOpen = opener === name && isOpen()),
        onclick: () => {
          if (!wasOpen) open(name, title, words);
          wasOpen = false;
        },
      },
      text,
    );
    return name;
  }

  const isOpen = () => Boolean(box?.matches(":popover-open"));

  /** The description of a trait of a kernel. */
  const traitWords = (kernel, name) => page.traits?.[kernel]?.[name] ?? null;

  /** `kv_stage`, with its description. */
  const trait = (kernel, name, text = name) => term(text, traitWords(kernel, name), name);

  function axisWords(scene, axis) {
    const { label, size } = scene.data.axes[axis];
    const users = scene.parts.filter(({ axes }) => axes.includes(axis)).map(({ tensor }) => tensor);
    return `${label}: an axis of ${[...new Set(users)].join(", ")}, ${size} long in one tile of this row.`;
  }

  /** `m`, with the rows or columns that it counts. */
  const axis = (scene, name) => (scene?.data.axes[name] ? term(name, axisWords(scene, name)) : name);

  /** The axes with the rows or columns that they count. */
  const axes = (scene) =>
    CF.h(
      "span",
      { class: "axes" },
      Object.entries(scene.data.axes).map(([name, { label }]) => CF.h("span", {}, axis(scene, name), ` ${label}`)),
    );

  function partWords({ id, tensor, spec, owned, stages, kind }) {
    const prefix = id?.match(/^(acc|[gsr])_?d?[A-Z][rt]?(_stored|_sorted|_part)?$/)?.[1];
    if (!prefix || kind === "grid") return null;
    const words = [`${TENSORS[tensor]}: ${PLACES[prefix]}.`];
    if (owned) words.push(`${spec.registers} registers of each thread.`);
    if (stages > 1) words.push(`${stages} stages, so that loads run ahead of the products.`);
    return [...words, spec.note].filter(Boolean).join(" ");
  }

  /** `acc_S`, with its content and its place. */
  const part = (found, text = found.id) => term(text, partWords(found), found.id);

  CF.explain = {
    /** Takes the page's data, which contains the descriptions of traits. */
    load: (data) => (page = data),
    term,
    trait,
    traitWords,
    axis,
    axes,
    part,
    partWords,
    axisWords,
    isOpen,
  };
})();
