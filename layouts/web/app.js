/* Start of the page: reads the data, shows the tabs that the data lists, mounts the view that the address names. */
(() => {
  "use strict";

  let data = null;
  let mounted = null;

  const names = () => data.views.filter((name) => CF.views[name]);

  function start() {
    data = CF.start();
    CF.scene.load(data);
    CF.explain.load(data);
    CF.state.initial({ scene: data.scene ?? null });
    CF.state.limit("view", names());
    document.getElementById("main").setAttribute("role", "tabpanel");
    buildTabs();
    CF.state.on(["view", "scene"], show);
    window.addEventListener("hashchange", follow);
    window.addEventListener("popstate", follow);
    follow();
    show();
    CF.measureTop(); // the bar is complete; scrolling in the first frame depends on its height
  }

  /* An address without a view that this page has means the page's own. */
  function follow() {
    CF.state.readHash();
    if (CF.state.get("view")) return;
    const view = names().includes(data.view) ? data.view : (names()[0] ?? null);
    CF.state.set({ view }, { fromHash: true });
  }

  function buildTabs() {
    const tabs = document.getElementById("tabs");
    tabs.append(
      ...names().map((name) =>
        CF.h(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "aria-controls": "main",
            onclick: () => CF.state.set({ view: name }),
          },
          CF.views[name].title,
        ),
      ),
    );
    tabs.hidden = names().length < 2;
    if (data.gallery && data.view !== "index") {
      const text = data.scene ? "All rows" : "Start page";
      tabs.after(CF.h("a", { class: "to-index", href: "index.html" }, text));
    }
    tabs.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const at = names().indexOf(CF.state.get("view"));
      const to = event.key === "Home" ? 0 : event.key === "End" ? names().length - 1 : at + (move ?? NaN);
      if (Number.isNaN(to)) return;
      event.preventDefault();
      CF.state.set({ view: names()[(to + names().length) % names().length] });
      document.getElementById(`tab-${CF.state.get("view")}`).focus();
    });
  }

  function show() {
    const name = CF.state.get("view");
    const scene = CF.scene.of(CF.state.get("scene"));
    for (const tab of document.querySelectorAll("#tabs [role=tab]")) {
      const chosen = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
    if (mounted && mounted.name === name && mounted.scene === scene) return;
    const main = document.getElementById("main");
    mounted?.view.unmount?.();
    main.replaceChildren();
    main.className = `view-${name}`;
    main.setAttribute("aria-labelledby", `tab-${name}`);
    document.getElementById("title").textContent = scene ? scene.data.title : document.title;
    mounted = name ? { name, scene, view: CF.views[name] } : null;
    mounted?.view.mount(main, { data, scene });
  }

  start();
})();
