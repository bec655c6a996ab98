/* CF.lessons.timeline: when the units of a multiprocessor are busy, a lane for each warpgroup and kind of work. */
(() => {
  "use strict";

  const ROW = 26; // height of a lane
  const LEFT = 104;
  const LABEL_FROM = 36; // width of a task that has room for its name
  const SCALE = 1000; // the drawing's width in its own units

  /**
   * A drawing of `{spans: [[warpgroup, what, block, start, end], ...], clocks}`. `beside` names the lane below the
   * products and, by task, the labels of what is in it; `unit` is what the blocks are called. `longest` are the clocks
   * that fill the width.
   */
  function timeline({ spans, clocks }, { groups, longest, beside, unit }) {
    const x = (clock) => LEFT + ((SCALE - LEFT) * clock) / longest;
    const lanes = Array.from({ length: groups }, (_, wg) => [`wg ${wg} products`, `wg ${wg} ${beside.name}`]).flat();
    const box = ([wg, what, block, start, end]) => {
      const label = beside.tasks[what];
      const rgb = CF.palette.category(block);
      const y = (2 * wg + (label ? 1 : 0)) * ROW;
      const width = x(end) - x(start);
      return CF.svg(
        "g",
        {},
        CF.svg("title", {}, `${what} of ${unit} ${block}, warpgroup ${wg}: clocks ${start} to ${end}`),
        CF.svg("rect", {
          x: x(start),
          y: y + 2,
          width: Math.max(width - 1, 1),
          height: ROW - 4,
          rx: 2,
          fill: CF.palette.css(rgb, label ? 0.55 : 1),
        }),
        width > LABEL_FROM
          ? CF.svg(
              "text",
              {
                x: (x(start) + x(end)) / 2,
                y: y + ROW / 2 + 4,
                "text-anchor": "middle",
                fill: label ? CF.palette.theme("ink") : CF.palette.ink(rgb),
              },
              `${label ?? what} ${block}`,
            )
          : null,
      );
    };
    const height = lanes.length * ROW;
    return CF.svg(
      "svg",
      {
        viewBox: `0 0 ${SCALE} ${height + 18}`,
        class: "lesson-turns",
        role: "img",
        "aria-label": `Schedule of ${groups} warpgroups over ${clocks} clocks`,
      },
      lanes.map((name, i) => CF.svg("text", { x: 0, y: i * ROW + ROW / 2 + 4, class: "lane" }, name)),
      spans.map(box),
      CF.svg("line", { x1: x(clocks), x2: x(clocks), y1: 0, y2: height, class: "end" }),
      CF.svg(
        "text",
        { x: x(clocks), y: height + 13, "text-anchor": "end", class: "lane" },
        `${CF.number(clocks)} clocks`,
      ),
    );
  }

  CF.lessons.timeline = timeline;
})();
