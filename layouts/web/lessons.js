/* The Learn view: a list of the lessons that the files lessons-*.js have added, and the chosen one. */
(() => {
  "use strict";

  const lessons = CF.lessons.all();

  CF.state.define("lesson", { param: "lesson" });

  const indexOf = (id) =>
    Math.max(
      0,
      lessons.findIndex((lesson) => lesson.id === id),
    );

  /** The address of a lesson: its own state, without that of other views. */
  const address = (lesson) =>
    CF.state.link({ ...CF.lessons.NOTHING, ...lesson.state, view: "learn", lesson: lesson.id });

  class Learn {
    constructor(container, data) {
      this.data = data;
      this.list = CF.h(
        "ol",
        { class: "lesson-list" },
        lessons.map((lesson) => this.#entry(lesson)),
      );
      this.article = CF.h("article", { class: "lesson", tabindex: -1 });
      container.append(
        CF.h(
          "div",
          { class: "learn" },
          CF.h("nav", { class: "lesson-nav", "aria-label": "Lessons" }, this.list),
          this.article,
        ),
      );
      this.stop = CF.state.on("lesson", () => this.#open(true));
      this.#open(false);
    }

    destroy() {
      this.stop();
      this.kit?.end();
    }

    #entry(lesson) {
      return CF.h("li", {}, CF.h("a", { href: address(lesson), dataset: { lesson: lesson.id } }, lesson.title));
    }

    /* State that the address does not give is set to the lesson's own. */
    #open(byReader) {
      const at = indexOf(CF.state.get("lesson"));
      const lesson = lessons[at];
      const missing = Object.entries(lesson.state ?? {}).filter(([key]) => CF.state.get(key) === null);
      CF.state.set(Object.fromEntries(missing), { fromHash: true });
      for (const link of this.list.querySelectorAll("a")) {
        if (link.dataset.lesson === lesson.id) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
      }
      this.#reveal(this.list.querySelector("[aria-current]"));
      this.kit?.end();
      this.kit = new CF.lessons.Kit(this.data);
      const title = CF.h("h2", { id: "lesson-title" }, `${at + 1}. ${lesson.title}`);
      this.article.setAttribute("aria-labelledby", "lesson-title");
      this.article.replaceChildren(
        title,
        CF.h("p", { class: "lesson-question" }, lesson.question),
        ...this.#body(lesson),
        this.#ends(at),
      );
      this.kit.start();
      if (byReader) {
        window.scrollTo(0, 0);
        this.article.focus({ preventScroll: true });
      }
    }

    /* On narrow screens the list is one line that scrolls. */
    #reveal(link) {
      this.list.scrollLeft = link.offsetLeft - (this.list.clientWidth - link.offsetWidth) / 2;
    }

    #body(lesson) {
      const absent = (lesson.families ?? []).filter((family) => !this.kit.scene(family));
      if (!this.data.lessons || absent.length)
        return [CF.h("p", { class: "hint" }, "This page does not hold the kernel rows that this lesson is about.")];
      return lesson.build(this.kit).flat(Infinity);
    }

    #ends(at) {
      const [before, after] = [lessons[at - 1], lessons[at + 1]];
      const link = (lesson, words, rel) => lesson && CF.h("a", { href: address(lesson), rel }, words);
      return CF.h(
        "nav",
        { class: "lesson-ends", "aria-label": "Neighbouring lessons" },
        link(before, `← ${before?.title}`, "prev") ?? CF.h("span"),
        link(after, `${after?.title} →`, "next"),
      );
    }
  }

  let view = null;
  CF.views.learn = {
    title: "Learn",
    mount(container, { data }) {
      view = new Learn(container, data);
    },
    unmount() {
      view?.destroy();
      view = null;
    },
  };
})();
