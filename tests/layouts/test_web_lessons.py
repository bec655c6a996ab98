"""The Learn view, run in node: every lesson mounts on a stub of the document, and what lessons compute is right.

Bank conflicts are expected from `layouts.rows`, layouts from `layouts.algebra`; the ring follows `TmaRing`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import TABLES
from layouts.lessons import eight_bits, lesson_data, lesson_scenes
from layouts.page import PAGE
from layouts.rows import make_scene, touch_ways
from tests.layouts.web import BASE_JS, ROOT, run_js

NEEDED = ("core.js", "algebra.js", "text.js", "scene.js", "coloring.js", "stepper.js")
FILES = (
    BASE_JS,
    *(name for name in PAGE.scripts if name in NEEDED or name.startswith("lessons")),
)  # in the page's order
IDS = ["layout", "tv", "swizzle", "mma", "cp-async", "tma", "wgmma", "softmax", "loops", "backward", "fp8"]
IDS += ["shares", "cache", "seesaw"]

# As much of a document as the lessons touch; texts, attributes and listeners are kept, nothing is laid out.
BROWSER = """
const location = { hash: "" };
const history = { pushState() {}, replaceState() {} };
const window = { scrollTo() {} };
const requestAnimationFrame = (draw) => draw();
const getComputedStyle = () => ({ getPropertyValue: () => "#808080" });
class Node {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, dataset: {}, style: {}, names: new Set() });
    this.classList = {
      add: (name) => this.names.add(name),
      toggle: (name, on = !this.names.has(name)) => (on ? this.names.add(name) : this.names.delete(name)),
    };
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener(type, call) { (this.listeners[type] ??= []).push(call); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  focus() {}
  get textContent() { return this.children.map((child) => child.textContent ?? String(child)).join(""); }
  set textContent(text) { this.children = [text]; }
  all() { return [this, ...this.children.flatMap((child) => (child instanceof Node ? child.all() : []))]; }
  querySelectorAll(selector) {
    const tag = selector.match(/([a-z]+)(?:\\[[^\\]]*\\])?$/)?.[1];
    return this.all().filter((node) => node !== this && node.tag === tag);
  }
  querySelector(selector) {
    const attribute = selector.match(/^\\[([a-z-]+)\\]$/)?.[1];
    return (attribute ? this.all().filter((node) => attribute in node.attributes) : this.querySelectorAll(selector))[0];
  }
}
const document = { createElement: (tag) => new Node(tag), createElementNS: (_, tag) => new Node(tag) };
"""

MOUNT = """
(() => {
  CF.scene.load(data);
  const panels = [];
  CF.Panel = class {
    constructor(host, options) {
      if (!options.scene.part(options.id)) throw new Error(`no ${options.id}`);
      panels.push(options.id);
    }
    update() {}
    destroy() {}
  };
  const container = new Node("main");
  CF.views.learn.mount(container, { data, scene: null });
  const found = CF.lessons.all().map(({ id }) => {
    panels.length = 0;
    CF.state.set({ lesson: id });
    const article = container.querySelector("article");
    const pressed = article.querySelectorAll("button").filter((button) => button.listeners.click);
    for (const button of pressed) if (!button.disabled) button.listeners.click[0]({ target: button });
    return {
      id,
      text: article.textContent,
      panels: [...panels],
      links: article.querySelectorAll("a").map((link) => link.attributes.href),
      answers: article.querySelectorAll("details").length,
      buttons: pressed.length,
    };
  });
  CF.views.learn.unmount();
  return found;
})()
"""


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    scenes = (make_scene(*row) for row in lesson_scenes().values())
    held = {scene.id: json.loads(json.dumps(scene.as_dict())) for scene in scenes}
    views = ["kernel", "playground", "learn"]
    return {"scenes": held, "scene": None, "views": views, "gallery": None, "lessons": lesson_data()}


@pytest.fixture(scope="module")
def mounted(page: dict[str, Any]) -> dict[str, Any]:
    return {lesson["id"]: lesson for lesson in run_js(FILES, MOUNT, page, BROWSER)}


def test_lessons_are_in_order(mounted: dict[str, Any]) -> None:
    assert list(mounted) == IDS


@pytest.mark.parametrize("lesson", IDS)
def test_every_lesson_mounts_with_what_a_lesson_has(mounted: dict[str, Any], lesson: str) -> None:
    shown = mounted[lesson]
    assert 2 <= shown["answers"] <= 3
    assert any("view=kernel" in link for link in shown["links"])
    assert "undefined" not in shown["text"] and "[object" not in shown["text"]


def test_the_softmax_lesson_tells_of_fixed_maxima_and_their_repair(mounted: dict[str, Any]) -> None:
    rows = TABLES["fwd", "sm_90a", "sm90"]
    fixed = sum(isinstance(row.traits, FwdTraitsSm90) and row.traits.fixed_max for row in rows)
    text = mounted["softmax"]["text"]
    assert f"fixed_max, {fixed} of {len(rows)} in the table of sm_90a/sm90" in text
    assert "2^9 = 512" in text and "repairs the block" in text
    assert "in every step" not in text  # of agreeing on the maximum: not of every block any more


def test_the_lesson_on_8_bits_has_the_numbers_of_the_row_and_of_the_model(mounted: dict[str, Any]) -> None:
    shown = mounted["fp8"]
    assert shown["panels"] == ["acc_S", "rP", "rV", "rVt", "sV_stored", "sV"]
    text = shown["text"]
    assert "m64n128k32" in text and "turns 16 keys of 32 columns at a time, 8 times a tile" in text
    assert f"P is multiplied by 2^{eight_bits.row_traits().p_offset:g} " in text and "stay below 448" in text
    assert "keys 2, 3, 10, 11" in text  # of lane 1


@pytest.mark.parametrize("lesson", ["tv", "swizzle", "mma", "tma", "wgmma"])
def test_lessons_on_layouts_show_panels_of_the_row(mounted: dict[str, Any], lesson: str) -> None:
    assert mounted[lesson]["panels"]


@pytest.mark.parametrize("lesson", IDS)
def test_the_source_that_a_lesson_names_is_there(mounted: dict[str, Any], lesson: str) -> None:
    named = mounted[lesson]["text"].split("Source: ")[1].split(".Check yourself")[0]
    for part in named.split("; "):
        *names, file = part.split(", ")
        text = (ROOT / file).read_text()
        for name in ".".join(names).split("."):
            assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), f"no {name} in {file}"


def test_an_order_of_loads_offers_its_own_depths_and_says_why(page: dict[str, Any]) -> None:
    expression = """(() => {
      CF.scene.load(data);
      CF.state.set({ lesson: "cp-async" });
      const container = new Node("main");
      CF.views.learn.mount(container, { data, scene: null });
      const article = container.querySelector("article");
      const button = (text) => article.querySelectorAll("button").find((one) => one.textContent === text);
      const shown = () => ({
        off: ["1", "2", "3"].filter((depth) => button(depth).disabled),
        pressed: ["1", "2", "3"].filter((depth) => button(depth).attributes["aria-pressed"] === "true"),
        kinds: article.querySelectorAll("abbr").map((one) => one.attributes.title),
        text: article.textContent,
      });
      const found = [shown()];
      for (const title of data.lessons.pipeline.orders.map((order) => order.title).reverse()) {
        button(title).listeners.click[0]();
        found.push(shown());
      }
      return found;
    })()"""
    first, *others = run_js(FILES, expression, page, BROWSER)
    assert (first["off"], first["pressed"]) == ([], ["2"])
    orders = page["lessons"]["pipeline"]["orders"]
    for shown, order in zip(others, reversed(orders), strict=True):
        assert shown["off"] == list(order["refused"])
        assert shown["pressed"] == ["1"]  # what all have: the order changes, the depth stays
        depth = order["stages"]["1"]
        assert shown["kinds"] == [action["kind"] for action in depth["actions"]]
        assert f"the tile waits {depth['waits']} times" in shown["text"]
        assert all(text in shown["text"] for text in ([] if order["off"] is None else [order["does"], "needs eager_"]))


@pytest.mark.parametrize("step", ["wgmma_qk", "wgmma_pv"])
def test_a_link_to_a_step_of_the_wgmma_lesson_presses_its_operand(page: dict[str, Any], step: str) -> None:
    expression = f"""(() => {{
      CF.scene.load(data);
      CF.Panel = class {{ update() {{}} destroy() {{}} }};
      CF.state.set({{ lesson: "wgmma", step: "{step}", instruction: 1 }});
      const container = new Node("main");
      CF.views.learn.mount(container, {{ data, scene: null }});
      const pressed = container.querySelectorAll("button").filter((it) => it.attributes["aria-pressed"] === "true");
      return [pressed[0].textContent, container.querySelectorAll("caption")[0].textContent];
    }})()"""
    pressed, caption = run_js(FILES, expression, page, BROWSER)
    tile = {"wgmma_qk": "K", "wgmma_pv": "V"}[step]
    assert pressed.startswith(tile)
    assert caption.startswith(f"Descriptor of s{tile}, instruction 1:")


def test_a_page_without_the_rows_says_so(page: dict[str, Any]) -> None:
    bare = {**page, "scenes": {}}
    texts = [lesson["text"] for lesson in run_js(FILES, MOUNT, bare, BROWSER)]
    assert all("does not hold the kernel rows" in text for text in texts)


def test_links_lead_to_the_gallery_where_the_page_has_no_kernel_view(page: dict[str, Any]) -> None:
    scene_id = page["lessons"]["scenes"]["sm80"]
    elsewhere = {**page, "views": ["learn"], "gallery": [{"id": scene_id, "file": "row.html"}]}
    links = run_js(FILES, MOUNT, elsewhere, BROWSER)[0]["links"]
    assert any(link.startswith("row.html#view=kernel") and "panel=sK" in link for link in links)
    assert any(link.startswith("playground.html#") for link in links)


@pytest.mark.parametrize("swizzled", [True, False])
def test_ways_are_those_of_the_bank_model(page: dict[str, Any], swizzled: bool) -> None:
    scene = make_scene(*lesson_scenes()["sm80"])
    step = next(step for step in scene.steps if step.id == "ldmatrix_k")
    touch = next(touch for touch in step.touches if touch.id == "sK")
    expected = touch_ways(scene, step, touch, swizzled)[3, 0].tolist()
    found = run_js(
        FILES,
        f"""(() => {{
          CF.scene.load(data);
          const scene = CF.scene.of(data.lessons.scenes.sm80);
          const touch = scene.step("ldmatrix_k").touches.find(({{ id }}) => id === "sK");
          const places = CF.lessons.lanes(scene, touch, 3, 0);
          const phase = (p) => places.slice(8 * p, 8 * p + 8);
          const ways = (p) => CF.lessons.phaseBanks(scene, scene.tile("sK"), phase(p), {str(swizzled).lower()}).ways;
          return [0, 1, 2, 3].map(ways);
        }})()""",
        page,
        BROWSER,
    )
    assert found == expected == [1 if swizzled else 8] * 4


@pytest.mark.parametrize(
    ("layout", "at", "text"),
    [
        ("(4,8):(8,1)", [1, 2], "1·8 + 2·1 = 10"),
        ("((2,2),(2,4)):((1,4),(2,8))", [3, 5], "1·1 + 1·4 + 1·2 + 2·8 = 23"),
        ("(1,8):(5,3)", [0, 2], "2·3 = 6"),
        ("(1,1):(5,3)", [0, 0], "0 = 0"),
    ],
)
def test_workings_add_up(layout: str, at: list[int], text: str) -> None:
    expression = f"CF.lessons.workings(CF.text.evaluate({json.dumps(layout)}).value, {at})"
    assert run_js(FILES, expression, None, BROWSER) == text


def test_ring_lets_the_producer_run_ahead_by_its_stages_only() -> None:
    expression = """(() => {
      const ring = new CF.lessons.Ring(2);
      const can = (actor) => ring.next(actor).why === null;
      const log = [];
      const act = (actor) => {
        log.push([actor, can(actor), ring.next(actor).parity]);
        if (can(actor)) ring.act(actor);
      };
      for (const actor of ["wait", "acquire", "acquire", "acquire", "land", "wait", "acquire", "release", "acquire",
        "land", "wait", "release", "wait", "land", "wait"]) act(actor);
      return { log, holds: [0, 1].map((stage) => ring.holds(stage)) };
    })()"""
    found = run_js(FILES, expression, None, BROWSER)
    assert found["log"] == [
        ["wait", False, 0],
        ["acquire", True, 1],  # a fresh barrier passes the opposite parity
        ["acquire", True, 1],
        ["acquire", False, 0],  # tile 2 wants stage 0 back: phase 0 of its empty barrier
        ["land", True, None],
        ["wait", True, 0],
        ["acquire", False, 0],
        ["release", True, None],
        ["acquire", True, 0],
        ["land", True, None],
        ["wait", True, 0],
        ["release", True, None],
        ["wait", False, 1],  # tile 2 is phase 1 of stage 0
        ["land", True, None],
        ["wait", True, 1],
    ]
    assert found["holds"] == [[2, "reading"], [None, "free"]]
