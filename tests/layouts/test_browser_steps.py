"""A chosen step, explanations, marks, the playground's errors and the ways in, in a real browser."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cuteflash.cli.app import app
from cuteflash.dispatch import choose
from cuteflash.page import data_of
from cuteflash.problem import FwdProblem
from layouts.banks import words_by_bank
from layouts.command import page_text, read_scene, scene_json
from layouts.layout import ComposedLayout
from layouts.text import evaluate
from tests import browser as browser_tests

LAPTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
EIGHT_ROWS = 8
TOUCH = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
# What the canvas of a panel shows at a cell, and the colour of the cell's bank.
CELL = """([id, row, col]) => {
  const scene = CF.scene.of(CF.state.get("scene"));
  const canvas = document.querySelector(`[data-panel=${id}] canvas`);
  const { LEFT, TOP } = CF.draw;
  const cell = (parseFloat(canvas.parentElement.style.height) - TOP - 2) / scene.part(id).rows;
  const ratio = canvas.width / canvas.clientWidth;
  const at = [LEFT + (col + 0.5) * cell, TOP + (row + 0.5) * cell].map((pixel) => Math.floor(pixel * ratio));
  const shown = [...canvas.getContext("2d").getImageData(...at, 1, 1).data].slice(0, 3);
  return { shown, meant: CF.palette.ramp(scene.bank(scene.address(id, row, col)) / 31) };
}"""


@pytest.fixture(scope="module")
def scene() -> dict[str, Any]:
    """A causal row with fixed maxima."""
    problem = FwdProblem.dense("bf16", 128, 128, mask="causal")
    choice = choose(problem, "sm_90a", "sm90")
    assert choice.traits.fixed_max
    return scene_json(read_scene(problem, "sm_90a", choice))


@pytest.fixture(scope="module")
def page(scene: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_text(scene))
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A gallery of one head dim."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--all", "--arch", "sm_90a,sm_86,sm_89", "--head-dim", "128", "-o", str(folder)]
    done = CliRunner().invoke(app, ["layouts", *options])
    assert done.exit_code == 0, done.output
    return folder


class Visit(browser_tests.Visit):
    """A visit of the explorer on a laptop."""

    viewport = LAPTOP

    def settle(self) -> None:
        self.page.wait_for_selector("[role=tabpanel] > *", state="attached")
        self.drawn()

    def panels(self) -> dict[str, dict[str, float]]:
        """The boxes of the panels that are shown, by id."""
        return dict(
            self.page.evaluate(
                """() => [...document.querySelectorAll(".panels .panel")].filter((panel) => panel.checkVisibility())
                    .map((panel) => [panel.dataset.panel, panel.getBoundingClientRect().toJSON()])"""
            )
        )

    def set(self, **state: Any) -> None:
        self.page.evaluate("(state) => CF.state.set(state)", state)
        self.drawn()

    def colours(self, selector: str) -> int:
        """How many different colours a canvas has."""
        return int(
            self.page.evaluate(
                """(selector) => {
                  const canvas = document.querySelector(selector);
                  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                  return new Set(new Uint32Array(data.buffer)).size;
                }""",
                selector,
            )
        )


@pytest.mark.parametrize("name", ["page", "index"])
def test_an_unknown_view_opens_the_pages_own(page: pathlib.Path, site: pathlib.Path, browser: Any, name: str) -> None:
    path = page if name == "page" else site / f"{name}.html"
    own = data_of(path.read_text())["view"]
    with Visit(browser, path, "#view=nope&scene=nope&step=nope&panel=nope&lesson=nope") as visit:
        assert visit.page.evaluate("CF.state.get('view')") == own
        assert visit.page.evaluate("document.getElementById('main').childElementCount") > 0
        visit.page.evaluate("location.hash = 'view=nope'")
        visit.drawn()
        assert visit.page.evaluate("CF.state.get('view')") == own


def test_a_chosen_step_shows_its_panels_alone_sources_first_and_all_in_sight(
    page: pathlib.Path, scene: dict[str, Any], browser: Any
) -> None:
    with Visit(browser, page) as visit:
        for step in scene["steps"]:
            visit.set(step=step["id"], instruction=None)
            boxes = visit.panels()
            modes: dict[str, set[str]] = {}
            for touch in step["touches"]:
                modes.setdefault(touch["id"], set()).add(touch["mode"])
            assert set(boxes) == set(modes), step["id"]
            assert all(box["top"] >= 0 and box["bottom"] <= LAPTOP["height"] for box in boxes.values()), step["id"]
            read = [boxes[id]["right"] for id, mode in modes.items() if "read" in mode]
            written = [boxes[id]["left"] for id, mode in modes.items() if mode == {"write"}]
            assert all(a < b for a in read for b in written), step["id"]
        visit.set(step=None)
        assert len(visit.panels()) == len(scene["tiles"]) + len(scene["fragments"])


def test_a_steps_panels_stick_below_the_bars(page: pathlib.Path, browser: Any) -> None:
    with Visit(browser, page, "#view=kernel&step=wgmma_qk") as visit:
        visit.page.add_style_tag(content="main { padding-bottom: 1200px } .kernel-body { min-height: 1600px }")
        visit.page.mouse.wheel(0, 700)
        visit.drawn()
        bars = visit.page.evaluate("document.querySelector('.toolbar').getBoundingClientRect().bottom")
        assert all(bars <= box["top"] <= bars + 20 for box in visit.panels().values())


def test_the_list_makes_room_for_the_chosen_step_and_comes_back(page: pathlib.Path, browser: Any) -> None:
    with Visit(browser, page) as visit:
        items = visit.page.locator(".step-list li")
        total = items.count()
        items.nth(3).get_by_role("button").click()
        shown = [at for at in range(total) if items.nth(at).is_visible()]
        assert shown == [3]
        detail = visit.page.locator(".step-list").evaluate("(list) => [list.scrollHeight, list.clientHeight]")
        assert detail[0] <= 2 * detail[1]  # one step's words, not all steps'
        visit.page.get_by_role("button", name="All steps").click()
        assert all(items.nth(at).is_visible() for at in range(total))


def test_the_inspector_of_a_chosen_step_keeps_to_its_panels(page: pathlib.Path, browser: Any) -> None:
    with Visit(browser, page, "#view=kernel&step=wgmma_pv&el=m3,e17") as visit:
        cards = visit.page.locator(".inspector .card h4 button")
        assert cards.all_inner_texts() == ["acc_O"]
        visit.set(step=None)
        assert cards.all_inner_texts() == ["gO", "sO", "acc_O"]


def test_a_step_chosen_on_a_phone_brings_its_source_into_sight(page: pathlib.Path, browser: Any) -> None:
    with Visit(browser, page, **TOUCH) as visit:
        visit.page.locator(".flow-step", has_text="fixed softmax").tap()
        visit.drawn()
        boxes, sheet = visit.panels(), visit.page.locator(".inspector").bounding_box()
        assert set(boxes) == {"acc_S", "rP"}
        assert 0 < boxes["acc_S"]["top"] < boxes["acc_S"]["bottom"] <= sheet["y"]
        assert boxes["rP"]["top"] < sheet["y"]


def test_names_explain_themselves_at_a_tap_and_escape_closes_only_that(page: pathlib.Path, browser: Any) -> None:
    with Visit(browser, page, "#view=kernel&step=softmax") as visit:
        box = visit.page.locator("#explanation")
        head = visit.page.locator("[data-panel=acc_S] .panel-head")
        for name, words in (("acc_S", "the scores Q Kᵀ: an accumulator"), ("m", "query"), ("n", "key")):
            head.get_by_role("button", name=name, exact=True).click()
            assert words in box.inner_text()
        visit.page.keyboard.press("Escape")
        assert not box.is_visible()
        assert visit.page.evaluate("CF.state.get('step')") == "softmax"
        visit.page.locator(".facts summary").click()
        name = visit.page.locator(".traits").get_by_role("button", name="kv_stage", exact=True)
        name.click()
        assert "in flight" in box.inner_text() and name.get_attribute("aria-expanded") == "true"
        visit.page.locator(".traits").get_by_role("button", name="fixed_max", exact=True).press("Enter")
        assert "maxima" in box.inner_text() and name.get_attribute("aria-expanded") == "false"
        name.click()
        name.click()  # a second tap closes it
        assert not box.is_visible() and name.get_attribute("aria-expanded") == "false"


def test_every_trait_of_the_row_has_words_that_a_phone_has_room_for(page: pathlib.Path, browser: Any) -> None:
    with Visit(browser, page, **TOUCH) as visit:
        visit.page.locator(".facts summary").tap()
        traits = visit.page.locator(".traits > span")
        names = visit.page.locator(".traits .term")
        assert names.count() == traits.count()
        names.last.tap()
        box = visit.page.locator("#explanation").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]


@pytest.mark.parametrize("device", [{}, TOUCH], ids=["laptop", "phone"])
def test_marked_cells_keep_the_colours_that_they_explain(page: pathlib.Path, browser: Any, device: Any) -> None:
    lesson = data_of(page.read_text())["lessons"]["scenes"]["sm80"]
    with Visit(browser, page, f"#view=learn&lesson=swizzle&scene={lesson}", **device) as visit:
        visit.page.locator("[data-panel=sK]").scroll_into_view_if_needed()
        visit.drawn()
        for row, col in ((3, 4), (11, 5), (4, 12)):  # inside the 16 x 16 cells of the instruction
            found = visit.page.evaluate(CELL, ["sK", row, col])
            assert np.allclose(found["shown"], found["meant"], atol=2), (row, col, found)


def test_an_error_in_the_playground_leaves_the_picture(page: pathlib.Path, browser: Any) -> None:
    canvas = ".play-result canvas"
    with Visit(browser, page, "#view=playground&layout=(8") as visit:  # as a link brings it: nothing was drawn before
        assert "expected" in visit.page.locator("#play-error").inner_text()
        assert visit.colours(canvas) > 20
        field = visit.page.locator("#play-text")
        field.fill("(4,8):(8,1)")
        visit.drawn()
        before = visit.colours(canvas)
        field.fill("(4,8):(8,")
        visit.drawn()
        assert visit.colours(canvas) == before
        assert visit.page.locator(".play-value").inner_text() == "(4,8):(8,1)"
        assert visit.page.locator(".play-result").evaluate("(body) => getComputedStyle(body).opacity") == "1"
        visit.set(view="learn")
        visit.set(view="playground")  # and is still there when the reader comes back
        visit.drawn()
        assert visit.page.locator(".play-value").inner_text() == "(4,8):(8,1)"
        assert visit.colours(canvas) == before


def test_the_playgrounds_swizzles_fit_the_elements_they_are_shown_on(page: pathlib.Path, browser: Any) -> None:
    """The first 16 bytes of eight rows, which one phase of an access asks for, lie in all banks."""
    with Visit(browser, page, "#view=playground") as visit:
        assert visit.page.locator("#play-text").input_value().startswith("S<3,3,3>")
        texts = visit.page.locator(".play-group button", has_text="S<")
        for at in range(texts.count()):
            texts.nth(at).click()
            size = visit.page.evaluate("CF.state.get('bytes')")
            value = evaluate(visit.page.locator("#play-text").input_value()).value
            assert isinstance(value, ComposedLayout)
            column = value.indices().reshape(-1)[:EIGHT_ROWS]
            assert words_by_bank(column * size, 16).max() == 1


def test_a_composition_lights_the_cells_that_its_element_comes_from(page: pathlib.Path, browser: Any) -> None:
    count = """(canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const [r, g, b] = CF.palette.parse(CF.palette.theme("cursor"));
      let found = 0;
      for (let at = 0; at < data.length; at += 4) found += data[at] === r && data[at + 1] === g && data[at + 2] === b;
      return found;
    }"""
    with Visit(browser, page, "#view=playground&layout=compose((8,8):(8,1), (4,4):(1,8))") as visit:
        lit = functools.partial(visit.page.locator(".play-step canvas").evaluate_all, f"(all) => all.map({count})")
        assert lit() == [0, 0]
        visit.page.locator(".play-result .panel-view").hover(position={"x": 34 + 12, "y": 20 + 12})
        visit.drawn()
        assert min(lit()) > 10
        assert "0 → 0 → 0" in visit.page.locator(".play-inspector").inner_text()
        visit.page.mouse.move(2, 2)
        visit.drawn()
        assert lit() == [0, 0]


def test_the_index_opens_on_three_ways_in_and_every_page_leads_back(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "index.html") as visit:
        doors = visit.page.locator(".door h2 a")
        assert doors.all_inner_texts() == ["Learn", "Explore", "Play"]
        assert all(box["y"] < 300 for box in (doors.nth(at).bounding_box() for at in range(3)))
        targets = [doors.nth(at).get_attribute("href") for at in range(3)]
        assert targets[0] == "learn.html" and targets[2] == "playground.html"
    for name in targets:
        with Visit(browser, site / name) as visit:
            back = visit.page.locator("header a[href='index.html']")
            assert back.is_visible()


def test_the_index_is_searched_and_says_speed_and_what_sets_a_row_apart(site: pathlib.Path, browser: Any) -> None:
    gallery = data_of((site / "index.html").read_text())["gallery"]
    with Visit(browser, site / "index.html") as visit:
        rows = visit.page.locator("tr[data-id]")
        shared = {row["kin"] for row in gallery}
        assert rows.count() == len(shared) < len(gallery)
        visit.page.get_by_role("searchbox").fill("repair_apart sm_90a")
        visit.drawn()
        (found,) = (row for row in gallery if row["apart"].get("repair_apart"))
        assert [rows.nth(at).get_attribute("data-id") for at in range(rows.count())] == [found["id"]]
        assert str(found["speed"]["tflops"]) in rows.inner_text()
        rows.get_by_role("button", name="repair_apart").click()
        assert "outside of the main loop" in visit.page.locator("#explanation").inner_text()
        visit.page.wait_for_function("location.hash.includes('q=repair_apart')")
        visit.page.get_by_role("button", name="Show all").click()
        assert rows.count() == len(shared)
