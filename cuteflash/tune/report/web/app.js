/* Puts the page together: facts, sections, the bar that says what is selected. */
(() => {
  const { h, words } = R;

  const verdict = (data) =>
    h(
      "div",
      { class: "verdict" },
      data.verdict.map((sentence) => h("p", null, sentence)),
    );

  function facts(data) {
    const fact = (name, value) => value && h("div", null, h("dt", null, name), h("dd", null, value));
    const versions = Object.entries(data.versions).map(([name, version]) => `${name} ${version}`);
    const days = [data.first, data.last].filter(Boolean).map(words.moment);
    const considered = data.spaces.reduce((sum, space) => sum + space.ids.length, 0);
    const timed = data.spaces.reduce((sum, space) => sum + R.model.funnel(space, null)[R.model.TIMED], 0);
    const rates = data.runs.map((run) => words.digits(run.tflops));
    return h(
      "dl",
      { class: "facts" },
      fact("GPU", data.gpu),
      fact("compiled for", data.target),
      fact("driver", data.driver),
      fact("versions", versions.join(", ")),
      fact("sources", data.source && h("code", { title: data.source }, data.source.slice(0, 16))),
      fact("recorded, UTC", [...new Set(days)].join(" to ")),
      fact("8192³ bf16 product", rates.length > 0 && `${[...new Set(rates)].join(", ")} TFLOP/s`),
      fact("candidates", `${words.whole(considered)} considered, ${words.whole(timed)} timed`),
    );
  }

  function selectors(data) {
    const holder = h("div", { class: "fields" });
    const draw = () => {
      const { now } = R.state;
      const space = R.state.space();
      const problems = space.slots.length ? space.slots : space.problems;
      const unique = (key, list) => [...new Set(list.map((one) => one[key]))].map((one) => [one, one]);
      const cells = R.model.cellsOf(space, { ...now, cell: "" });
      const choose = (key) => (value) => R.state.set({ [key]: value });
      const focused = document.activeElement?.closest(".field")?.firstChild.textContent;
      const fields = [
        R.field(
          "Space",
          data.spaces.map((one) => [one.title, one.title]),
          now.space,
          choose("space"),
        ),
        now.mask && R.field("Mask", unique("mask", problems), now.mask, choose("mask")),
        now.dtype && R.field("Type", unique("dtype", problems), now.dtype, choose("dtype")),
        now.lengths &&
          R.field(
            "Shape",
            unique(
              "lengths",
              problems.filter((one) => one.mask === now.mask && one.dtype === now.dtype),
            ),
            now.lengths,
            choose("lengths"),
          ),
        cells.length > 1 &&
          R.field("Length", [["", "all"], ...cells.map((cell) => [cell.label, cell.label])], now.cell, choose("cell")),
        R.state.reference() !== null && least(),
      ].filter(Boolean);
      holder.replaceChildren(...fields);
      fields.find((field) => field.firstChild.textContent === focused)?.lastChild.focus();
    };
    R.state.on([...R.WHERE, "least"], draw);
    draw();
    return holder;
  }

  const least = () =>
    h(
      "label",
      { class: "field" },
      h("span", null, "Speed from, %"),
      h("input", {
        type: "number",
        min: 0,
        max: 100,
        step: 1,
        value: R.state.now.least || "",
        placeholder: "any",
        onchange: (event) => R.state.set({ least: Math.min(100, Math.max(0, Number(event.target.value) || 0)) }),
      }),
    );

  function chips() {
    const holder = h("div", { class: "chips" });
    const draw = () => {
      const { filter, least: from } = R.state.now;
      const chip = (text, lift) =>
        h(
          "button",
          { type: "button", "aria-label": `Lift the filter ${text}`, onclick: lift },
          text,
          h("span", { "aria-hidden": "true" }, " ×"),
        );
      const all = Object.entries(filter).map(([name, values]) =>
        chip(`${name} ${values.map(shownValue).join(", ")}`, () => R.state.limit(name, [])),
      );
      if (from) all.push(chip(`speed from ${from} %`, () => R.state.set({ least: 0 })));
      if (all.length > 1)
        all.push(h("button", { type: "button", onclick: () => R.state.set({ filter: {}, least: 0 }) }, "Lift all"));
      holder.replaceChildren(...all);
    };
    R.state.on(["filter", "least", "space"], draw);
    draw();
    return holder;
  }

  const shownValue = (text) => ({ true: "on", false: "off" })[text] || text;

  const SECTIONS = [
    ["winners", "Winners", "Who wins, and by how much", (data) => R.winners(data)],
    ["funnel", "Funnel", "From candidates to times", (data) => R.funnel(data)],
    ["peers", "Peers", "Beside the best peer", (data) => R.peers(data)],
    ["parallel", "Traits", "From traits to speed", (data) => R.parallel(data)],
    ["effects", "Effects", "What each trait is worth", () => R.effects()],
    ["candidates", "Candidates", "All candidates", (data) => R.candidates(data)],
  ];
  const BEFORE_SELECTION = 2; // sections above the bar, which are about everything

  function sections(data) {
    return SECTIONS.map(([id, , title, make]) =>
      h(
        "section",
        { id, "aria-labelledby": `${id}-title` },
        h("h2", { id: `${id}-title`, tabindex: -1 }, title),
        make(data),
      ),
    );
  }

  function contents() {
    return SECTIONS.map(([id, word]) => {
      const go = () => {
        document.getElementById(id).scrollIntoView({ block: "start" });
        document.getElementById(`${id}-title`).focus({ preventScroll: true });
      };
      return h("button", { type: "button", class: "link", onclick: go }, word);
    });
  }

  R.app = () => {
    const data = R.model.decode(R.start());
    R.state.start(data);
    document.getElementById("contents").append(...contents());
    const made = sections(data);
    const bar = h("div", { id: "selection", role: "region", "aria-label": "Selection" }, selectors(data), chips());
    document
      .getElementById("main")
      .append(verdict(data), facts(data), ...made.slice(0, BEFORE_SELECTION), bar, ...made.slice(BEFORE_SELECTION));
    new ResizeObserver(() => {
      const height = getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0;
      document.documentElement.style.setProperty("--toolbar", `${height}px`);
    }).observe(bar);
  };
  R.app();
})();
