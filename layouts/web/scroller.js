/* CF.scroller: a box that scrolls sideways by itself, so that the page never does. */
(() => {
  "use strict";

  const watched = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const scrolls = target.scrollWidth > target.clientWidth;
      if (scrolls) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });

  /** A box around `children` that the keyboard reaches, as `label`, while some of it is out of sight. */
  CF.scroller = (label, ...children) => {
    const box = CF.h("div", { class: "scroll", role: "group", "aria-label": label }, children);
    watched.observe(box);
    return box;
  };
})();
