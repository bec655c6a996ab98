/* The inspector: the element under the cursor in every panel, and a line for screen readers. */
(() => {
  "use strict";

  const SPEAK_AFTER_MS = 250;
  const MANY = 4; // owners listed before the rest are only counted

  /** `t130 (warp 4, lane 2) v5` */
  const ownerText = ({ thread, value }) =>
    `t${thread} (warp ${Math.floor(thread / 32)}, lane ${thread % 32}) v${value}`;

  function listed(texts) {
    return texts.length > MANY
      ? `${texts.slice(0, MANY).join(", ")} and ${texts.length - MANY} more`
      : texts.join(", ");
  }

  /* Threads in increasing order with runs written as 0–31. */
  function runs(numbers) {
    const sorted = [...new Set(numbers)].sort((a, b) => a - b);
    const found = [];
    for (const number of sorted) {
      const last = found.at(-1);
      if (last && last[1] === number - 1) last[1] = number;
      else found.push([number, number]);
    }
    return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`));
  }

  /**
   * Facts on a cell of a part: `{coordinates, exists, owners, address, bank, stage, touches}`; address, bank and stage
   * only for tiles, owners only for fragments.
   */
  function describe(scene, part, row, col, { stage, swizzled }) {
    const found = { coordinates: `${part.axes[0]} ${row}, ${part.axes[1]} ${col}`, exists: part.exists(row, col) };
    found.touches = scene.touches(part, row, col);
    if (part.owned) return { ...found, owners: scene.owners(part, row, col) };
    const address = scene.address(part, row, col, stage, swizzled);
    const place = { address, bank: part.space === "shared" ? scene.bank(address) : null };
    return { ...found, ...place, stage: part.stages > 1 ? stage % part.stages : null };
  }

  /** The line that a screen reader reads. */
  function sentence(part, info) {
    const words = [`${part.id} ${info.coordinates}`];
    if (!info.exists) words.push("outside the tensor, zero");
    if (info.owners) words.push(listed(info.owners.map(({ thread, value }) => `thread ${thread} value ${value}`)));
    if (info.address !== undefined) words.push(`address ${CF.hex(info.address)}`);
    if (info.bank !== null && info.bank !== undefined) words.push(`bank ${info.bank}`);
    if (info.stage !== null && info.stage !== undefined) words.push(`stage ${info.stage}`);
    return `${words[0]}: ${words.slice(1).join(", ")}`;
  }

  class Inspector {
    constructor(container, scene, { openPanel }) {
      this.scene = scene;
      this.openPanel = openPanel;
      this.line = CF.h("p", { class: "inspector-line" });
      this.spoken = CF.h("p", { class: "visually-hidden", "aria-live": "polite" });
      this.body = CF.h("div", { class: "inspector-body", id: "inspector-body" });
      this.handle = CF.h(
        "button",
        {
          type: "button",
          class: "inspector-handle",
          "aria-expanded": "false",
          "aria-controls": "inspector-body",
          onclick: () => this.open(!this.isOpen),
        },
        "Element",
      );
      this.element = CF.h(
        "section",
        { class: "inspector", "aria-label": "Inspector" },
        this.handle,
        this.line,
        this.spoken,
        this.body,
      );
      container.append(this.element);
      this.redraw = CF.perFrame(() => this.update());
      this.stop = CF.state.on(["hover", "pin", "panel", "stage", "swizzle", "source", "step"], this.redraw);
      this.update();
    }

    destroy() {
      clearTimeout(this.speaking);
      this.stop();
      this.element.remove();
    }

    /** The end of the window above the inspector, which is a bottom sheet on a narrow screen. */
    get top() {
      const isSheet = getComputedStyle(this.element).position === "fixed";
      return isSheet ? this.element.getBoundingClientRect().top : window.innerHeight;
    }

    get isOpen() {
      return this.element.classList.contains("open");
    }

    /** Opens or closes the bottom sheet; on wide screens the inspector is always open. */
    open(wanted) {
      this.element.classList.toggle("open", wanted);
      this.handle.setAttribute("aria-expanded", String(wanted));
    }

    update() {
      const [hover, pin] = [CF.state.get("hover"), CF.state.get("pin")];
      const element = hover ?? pin;
      if (!element) return this.#empty();
      this.element.classList.remove("empty");
      const options = { stage: CF.state.get("stage"), swizzled: CF.state.get("swizzle") };
      const whole = [];
      const partly = [];
      for (const part of this.#shown()) {
        const [row, col] = part.place(element);
        if (row !== null && col !== null) whole.push({ part, info: describe(this.scene, part, row, col, options) });
        else if (row !== null) partly.push(`${part.id} row ${part.axes[0]} ${row}`);
        else if (col !== null) partly.push(`${part.id} column ${part.axes[1]} ${col}`);
      }
      const at = CF.state.get(hover ? "source" : "panel");
      const source = whole.find(({ part }) => part.id === at) ?? whole[0];
      this.#say(source ? sentence(source.part, source.info) : CF.state.printElement(element), Boolean(!hover && pin));
      this.body.replaceChildren(
        ...whole.map((item) => this.#card(item, item === source)),
        partly.length ? CF.h("p", { class: "hint" }, `Shares an axis with ${partly.join("; ")}.`) : "",
        CF.h("p", { class: "hint" }, pin ? "Pinned. Esc releases." : "Click, tap or Enter pins the element."),
      );
    }

    /* While a step is chosen, what it touches. */
    #shown() {
      const step = this.scene.step(CF.state.get("step"));
      return step
        ? this.scene.parts.filter(({ id }) => step.touches.some((touch) => touch.id === id))
        : this.scene.parts;
    }

    #empty() {
      this.element.classList.add("empty");
      this.#say("No element under the cursor", false);
      this.body.replaceChildren(
        CF.h(
          "p",
          { class: "hint" },
          "Point at a cell, tap it, or use the arrow keys: its element lights up in every panel that contains it.",
        ),
      );
    }

    #say(text, pinned) {
      this.line.textContent = text;
      this.line.classList.toggle("pinned", pinned);
      clearTimeout(this.speaking);
      this.speaking = setTimeout(() => (this.spoken.textContent = text), SPEAK_AFTER_MS);
    }

    #card({ part, info }, isSource) {
      const row = (name, ...value) => [CF.h("dt", {}, name), CF.h("dd", {}, value)];
      const digits = (info.address ?? 0) > 0xffff ? 6 : 4;
      return CF.h(
        "article",
        { class: isSource ? "card source" : "card" },
        CF.h(
          "h4",
          {},
          CF.h("button", { type: "button", onclick: () => this.openPanel(part.id) }, part.id),
          CF.h("span", {}, info.coordinates),
        ),
        CF.h(
          "dl",
          {},
          info.exists ? null : row("value", "zero: outside the tensor"),
          info.owners ? row(info.owners.length > 1 ? "threads" : "thread", listed(info.owners.map(ownerText))) : null,
          info.address === undefined
            ? null
            : row(
                part.space === "shared" ? "address" : "offset",
                CF.h("code", {}, CF.hex(info.address, digits)),
                ` ${info.address}`,
              ),
          info.bank === undefined || info.bank === null ? null : row("bank", info.bank),
          info.stage === undefined || info.stage === null ? null : row("stage", info.stage),
          info.touches.map((touch) => row(...touchRow(touch))),
        ),
      );
    }
  }

  function touchRow({ step, mode, entries }) {
    const threads = runs(entries.map(({ thread }) => thread));
    const instructions = runs(entries.map(({ instruction }) => instruction));
    const some = (texts) => (texts.length > 3 ? `${texts.slice(0, 3).join(", ")}, …` : texts.join(", "));
    return [
      CF.h("span", { class: `badge ${mode}` }, mode),
      `${step.title}: `,
      CF.h("span", { class: "numbers" }, `t${some(threads)} #${some(instructions)}`),
    ];
  }

  CF.Inspector = Inspector;
  CF.inspector = { describe, sentence, runs };
})();
