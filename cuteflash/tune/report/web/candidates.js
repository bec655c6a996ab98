/* The table of all candidates: how far each came and why not further, filtered by words, outcome and traits. */
(() => {
  const { h, words } = R;
  const PAGE = 50;

  const COLUMNS = [
    { key: "title", text: "Candidate" },
    { key: "state", text: "Outcome" },
    { key: "share", text: "Speed", number: true },
    { key: "smem_bytes", text: "Shared memory, KiB", number: true },
    { key: "registers", text: "Registers", number: true },
    { key: "blocks", text: "Blocks an SM", number: true },
    { key: "reason", text: "Why not further" },
  ];

  /** Everything the table says of each candidate of the selection. */
  function entries(data) {
    const space = R.state.space();
    const problem = R.state.problem();
    const { share } = R.state.speed();
    return space.ids.map((id, who) => {
      const title = R.model.title(space, who);
      const reason = R.model.reasonOf(data, space, problem, who);
      const costs = Object.fromEntries(
        ["smem_bytes", "registers", "blocks"].map((name) => [name, space.costs[name][who]]),
      );
      const state = R.model.stateOf(space, problem, who);
      return { who, title, state, reason, share: share[who], ...costs, text: `${title} ${id} ${reason}`.toLowerCase() };
    });
  }

  /** Orders two entries by a column; what has no value comes last, whichever way. */
  function compare(key, down) {
    const value = (entry) => (key === "state" ? -R.model.ORDER.indexOf(entry.state) : entry[key]);
    const missing = (one) => one === null || one === "" || Number.isNaN(one);
    return (a, b) => {
      const [left, right] = [value(a), value(b)];
      if (missing(left) || missing(right)) return missing(left) - missing(right) || furthest(a, b);
      const order = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
      return (down ? -order : order) || furthest(a, b);
    };
  }

  const furthest = (a, b) =>
    R.model.ORDER.indexOf(b.state) - R.model.ORDER.indexOf(a.state) ||
    a.title.localeCompare(b.title, "en", { numeric: true });

  class Table {
    constructor(data) {
      this.data = data;
      this.sort = { key: "share", down: true };
      this.page = 0;
      this.state = "";
      this.query = "";
      this.body = h("tbody");
      this.count = h("span", { class: "hint", role: "status" });
      this.back = h("button", { type: "button", onclick: () => this.turn(-1) }, "Back");
      this.on = h("button", { type: "button", onclick: () => this.turn(1) }, "On");
      this.heads = COLUMNS.map((column) => this.head(column));
      this.states = h("select", {
        "aria-label": "Outcome",
        onchange: (event) => this.change({ state: event.target.value }),
      });
      R.state.on(R.WHERE, () => this.load());
      R.state.on(["filter", "least"], () => this.change({}));
      R.state.on(["pick"], () => this.draw());
      this.load();
    }

    head({ key, text, number }) {
      const turn = () => {
        const same = this.sort.key === key;
        this.change({ sort: { key, down: same ? !this.sort.down : Boolean(number) } });
      };
      return h(
        "th",
        { scope: "col", class: number ? "number" : "" },
        h("button", { type: "button", class: "link", onclick: turn }, text),
      );
    }

    load() {
      this.entries = entries(this.data);
      const counts = R.model.funnel(R.state.space(), R.state.problem());
      const present = [...R.model.ORDER].reverse().filter((state) => counts[state]);
      const pairs = [
        ["", `any outcome (${words.whole(this.entries.length)})`],
        ...present.map((state) => [state, `${R.model.stateWords(this.data, state)} (${words.whole(counts[state])})`]),
      ];
      if (!present.includes(this.state)) this.state = "";
      this.states.replaceChildren(
        ...pairs.map(([value, text]) => h("option", { value, selected: value === this.state }, text)),
      );
      this.change({});
    }

    change(changes) {
      Object.assign(this, changes, { page: 0 });
      const space = R.state.space();
      const asked = this.query.toLowerCase().split(/\s+/).filter(Boolean);
      this.found = this.entries
        .filter((entry) => !this.state || entry.state === this.state)
        .filter((entry) => R.state.shown(entry.who) && R.model.matches(space, entry.who, entry.text, asked))
        .sort(compare(this.sort.key, this.sort.down));
      this.draw();
    }

    turn(step) {
      this.page += step;
      this.draw();
    }

    draw() {
      const pages = Math.max(1, Math.ceil(this.found.length / PAGE));
      const first = this.page * PAGE;
      const shown = this.found.slice(first, first + PAGE);
      this.body.replaceChildren(...shown.flatMap((entry) => this.rows(entry)));
      if (!shown.length)
        this.body.append(h("tr", null, h("td", { colspan: COLUMNS.length }, "No candidate is left by the filters.")));
      this.count.textContent = shown.length
        ? `${words.whole(first + 1)} to ${words.whole(first + shown.length)} of ${words.whole(this.found.length)}`
        : "";
      this.back.disabled = this.page === 0;
      this.on.disabled = this.page + 1 >= pages;
      COLUMNS.forEach(({ key }, place) =>
        this.heads[place].setAttribute(
          "aria-sort",
          key !== this.sort.key ? "none" : this.sort.down ? "descending" : "ascending",
        ),
      );
    }

    rows(entry) {
      const space = R.state.space();
      const picked = R.state.picked() === entry.who;
      const slot = R.state.slot();
      const { timed, of, estimated } = R.state.speed();
      const page = R.model.pageOf(space, entry.who, R.state.now);
      const cell = (label, value, kind = "") => R.cell(label, `${kind}${value === null ? " empty" : ""}`, value ?? "–");
      const pick = h(
        "button",
        {
          type: "button",
          class: "link",
          "aria-pressed": picked,
          "aria-expanded": picked,
          onclick: () => this.pick(entry.who),
        },
        h("code", null, entry.title),
      );
      const partly = timed[entry.who] && timed[entry.who] < of && `${timed[entry.who]} of ${of} lengths`;
      const part = (partly || estimated) && h("small", null, partly || "estimated");
      const row = h(
        "tr",
        { class: picked ? "current" : "" },
        h(
          "th",
          { scope: "row" },
          pick,
          R.roles(space, slot, entry.who),
          page ? h("a", { class: "page", href: page.href, title: page.title }, "layouts") : null,
        ),
        cell("Outcome", [h("i", { class: `swatch state-${entry.state}` }), R.model.stateWords(this.data, entry.state)]),
        cell("Speed", Number.isNaN(entry.share) ? null : [words.percent(entry.share), part], "number"),
        cell("Shared memory, KiB", entry.smem_bytes === null ? null : words.digits(entry.smem_bytes / 1024, 4), "number"),
        cell("Registers", entry.registers, "number"),
        cell("Blocks an SM", entry.blocks, "number"),
        cell("Why not further", entry.reason || null),
      );
      return picked
        ? [row, h("tr", { class: "expanded" }, h("td", { colspan: COLUMNS.length }, R.detail(this.data, entry.who)))]
        : [row];
    }

    /** Drawing makes new buttons: the focus goes to the one that was pressed. */
    pick(who) {
      R.state.pick(who);
      const title = R.model.title(R.state.space(), who);
      [...this.body.querySelectorAll("th button")].find((button) => button.textContent === title)?.focus();
    }
  }

  R.candidates = (data) => {
    const table = new Table(data);
    const search = h("input", {
      type: "search",
      placeholder: "words, or tile_m=128",
      "aria-label": "Words that candidates contain, or trait=value",
      oninput: (event) => table.change({ query: event.target.value }),
    });
    return [
      h(
        "div",
        { class: "table-tools" },
        search,
        table.states,
        h("span", { class: "pager" }, table.back, table.on, table.count),
      ),
      R.table("candidates", table.heads, table.body),
    ];
  };
  R.candidatesParts = { compare, entries };
})();
