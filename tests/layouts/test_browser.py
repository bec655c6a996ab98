"""The pages in a real browser: headless Chromium driven by Playwright. Skipped where there is no chromium."""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cuteflash.cli.app import app
from cuteflash.dispatch import choose
from cuteflash.page import data_of
from cuteflash.problem import FwdProblem
from layouts.rows import make_scene
from layouts.scene import Scene
from tests import browser as browser_tests
from tests.browser import DESKTOP, PHONE

MEGABYTE = 1 << 20
JUST_NOTICEABLE = 2.3  # distance of two colours in CIE L*a*b*
# Linear RGB as seen without one kind of cone: Viénot, Brettel, Mollon, "Digital video colourmaps", 1999.
COLOUR_BLIND = {
    "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deuteranopia": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A gallery of a few rows, and one row's own page as page.html."""
    folder = tmp_path_factory.mktemp("site")
    for arguments in (
        ["--all", "--arch", "sm_90a", "--family", "sm90", "--head-dim", "64,128", "-o", str(folder)],
        ["--arch", "sm_90a", "--head-dim", "128", "--causal", "-o", str(folder / "page.html")],
        ["--arch", "sm_80", "--head-dim", "128", "-o", str(folder / "ampere.html")],
        ["--kernel", "bwd", "--arch", "sm_90a", "--head-dim", "64", "-o", str(folder / "backward.html")],
    ):
        done = CliRunner().invoke(app, ["layouts", *arguments])
        assert done.exit_code == 0, done.output
    return folder


@functools.cache
def scene() -> Scene:
    """The scene of page.html."""
    problem = FwdProblem.dense(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
    return make_scene(problem, "sm_90a", choose(problem, "sm_90a"))


class Visit(browser_tests.Visit):
    """A visit of the explorer."""

    def settle(self) -> None:
        """Wait until a view is mounted."""
        self.page.wait_for_selector("[role=tab][aria-selected=true]", state="attached")

    def state(self, key: str) -> Any:
        return self.page.evaluate("key => CF.state.get(key)", key)

    def panel(self, id: str) -> Any:
        """The focusable box of a panel, scrolled into sight and drawn."""
        box = self.page.locator(f"[role=application][aria-label^='{id}']").first
        box.scroll_into_view_if_needed()
        self.drawn()
        return box

    def inspector(self) -> str:
        self.drawn()
        return str(self.page.locator("[aria-label=Inspector]").inner_text())

    def fits(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def address_of(tile: str, row: int, col: int, swizzled: bool = True) -> int:
    """Byte address of an element by the Python side."""
    found = scene().tile(tile)
    return found.base + 2 * int(found.offsets(swizzled).reshape(-1, *found.shape[::-1])[0, col, row])


def element(panel: str, row: int, col: int) -> str:
    axes = {"Q": "md", "K": "nd", "S": "mn", "P": "mn", "V": "ne", "O": "me"}[panel[-1]]
    return f"{axes[0]}{row},{axes[1]}{col}"


@pytest.mark.parametrize(
    "name", ["page.html", "ampere.html", "index.html", "compare.html", "playground.html", "learn.html"]
)
def test_pages_are_small_and_ask_nobody(site: pathlib.Path, browser: Any, name: str) -> None:
    assert (site / name).stat().st_size < 3 * MEGABYTE
    with Visit(browser, site / name) as visit:
        visit.page.wait_for_load_state("networkidle")
        assert visit.requests == [(site / name).as_uri()]
        assert visit.fits()


def test_an_element_lights_up_in_every_panel(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html", f"#view=kernel&panel=sK&el={element('sK', 21, 37)}") as visit:
        text = visit.inspector()
        assert f"{address_of('sK', 21, 37):#x}"[2:] in text.lower()
        for panel in ("gK", "sK"):
            assert panel in text
        assert visit.state("pin") == {"n": 21, "d": 37}
    with Visit(browser, site / "page.html", f"#view=kernel&panel=acc_S&el={element('acc_S', 70, 9)}") as visit:
        tv = scene().fragment("acc_S").tv
        threads = tv.mode(0).size()
        at = int(np.flatnonzero(tv.indices() == 70 + 128 * 9)[0])
        assert f"t{128 + at % threads} " in visit.inspector()
        assert f"v{at // threads}" in visit.inspector()


def test_the_mouse_hovers_and_pins(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html") as visit:
        box = visit.panel("sQ").bounding_box()
        # Whole pixels: a click has no fractions, so that between two cells it may miss what a move has met.
        visit.page.mouse.move(round(box["x"] + box["width"] * 0.6), round(box["y"] + box["height"] * 0.6))
        visit.drawn()
        over = visit.state("hover")
        assert set(over) == {"m", "d"}
        assert "sQ" in visit.inspector()
        visit.page.mouse.down()
        visit.page.mouse.up()
        assert visit.state("pin") == over
        visit.page.mouse.move(2, 2)
        assert visit.state("pin") == over
        visit.page.keyboard.press("Escape")
        assert visit.state("pin") is None


def test_the_keyboard_moves_the_cursor(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html") as visit:
        visit.panel("sK").focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            visit.page.keyboard.press(key)
        visit.drawn()
        before = visit.state("hover")
        visit.page.keyboard.press("ArrowDown")
        after = visit.state("hover")
        assert after["n"] == before["n"] + 1 and after["d"] == before["d"]
        spoken = "text => document.querySelector('.inspector [aria-live]').innerText.includes(text)"
        visit.page.wait_for_function(spoken, arg=str(after["n"]))


def test_every_tab_is_reached_by_keyboard(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html") as visit:
        tabs = visit.page.locator("[role=tab]")
        visit.page.locator("[role=tab][aria-selected=true]").focus()
        seen = []
        for _ in range(tabs.count()):
            seen.append(visit.state("view"))
            visit.page.keyboard.press("ArrowRight")
            visit.drawn()
        assert seen == ["kernel", "banks", "budget", "playground", "learn"]


def test_a_warp_shows_all_it_owns(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html") as visit:
        visit.page.get_by_role("button", name="Warp 6, consumer 0").click()
        assert visit.state("warp") == 6
        owned = visit.page.evaluate(
            """() => { const s = CF.scene.of(CF.state.get("scene"));
                       return s.held(s.fragment("acc_S"), CF.scene.selected()).length; }"""
        )
        assert owned == 16 * 128  # a warp's rows of the warpgroup's 64


def test_the_swizzle_can_be_switched_off(site: pathlib.Path, browser: Any) -> None:
    swizzled, plain = (address_of("sK", 21, 37, on) for on in (True, False))
    assert swizzled != plain
    with Visit(browser, site / "page.html", f"#view=kernel&panel=sK&el={element('sK', 21, 37)}") as visit:
        assert f"{swizzled:x}" in visit.inspector().lower()
        visit.page.get_by_role("switch").click()
        assert f"{plain:x}" in visit.inspector().lower()
        visit.page.wait_for_function("location.hash.includes('swizzle=0')")


def test_steps_are_walked_instruction_by_instruction(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html", "#view=kernel&step=wgmma_qk&i=3") as visit:
        text = visit.page.locator(".stepper").inner_text()
        assert "wgmma.mma_async" in text
        assert "1024" in text  # the stride byte offset of its descriptor
        visit.page.get_by_role("button", name="Next instruction").click()
        assert visit.state("instruction") == 4


def test_a_backward_row_loops_over_query_blocks(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "backward.html", "#view=kernel&panel=sdQ") as visit:
        headings = visit.page.locator(".stepper h3").all_inner_texts()
        assert headings == ["Prologue, once a tile", "Loop over query blocks", "Epilogue, once a tile"]
        assert visit.panel("sdQ").is_visible()
        assert visit.fits()


def test_a_deep_link_opens_its_panel(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "page.html", "#view=kernel&panel=acc_O&swizzle=0") as visit:
        visit.drawn()
        assert visit.state("panel") == "acc_O" and visit.state("swizzle") is False
        box = visit.page.locator("[role=application][aria-label^='acc_O']").first.bounding_box()
        assert 0 <= box["y"] < DESKTOP["height"]
    with Visit(browser, site / "page.html", "#view=banks") as visit:
        assert visit.page.locator("[role=tab][aria-selected=true]").inner_text() == "Banks"


def test_a_layout_is_typed_and_its_errors_point(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "playground.html") as visit:
        field = visit.page.locator("main input[type=text], main textarea").first
        field.fill("compose((8,4):(4,1), (4,2):(1,16))")
        visit.drawn()
        assert visit.page.locator("#play-error").inner_text().strip() == ""
        assert "(4,2):(4,2)" in visit.page.locator("main").inner_text()
        field.fill("(8,4):(4,1")
        visit.drawn()
        assert "expected" in visit.page.locator("#play-error").inner_text().lower()


def test_the_orders_of_loads_are_compared_by_keyboard(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "ampere.html", "#view=learn&lesson=cp-async") as visit:
        loads = visit.page.get_by_role("group", name="loads", exact=True)
        depths = visit.page.get_by_role("group", name="kv_stage").get_by_role("button")
        assert loads.get_by_role("button", name="as shipped").get_attribute("aria-pressed") == "true"
        assert [depths.nth(i).is_enabled() for i in range(3)] == [True] * 3
        loads.get_by_role("button", name="without cp.async").focus()
        visit.page.keyboard.press("Enter")
        assert [depths.nth(i).is_enabled() for i in range(3)] == [True, False, False]
        assert "during 0 of its 15 products" in visit.page.locator(".lesson-figure").inner_text()
        assert visit.fits()


@pytest.mark.parametrize("view", ["kernel", "banks", "budget", "playground", "learn"])
def test_every_view_fits_a_phone(site: pathlib.Path, browser: Any, view: str) -> None:
    with Visit(browser, site / "page.html", f"#view={view}", viewport=PHONE, has_touch=True, is_mobile=True) as visit:
        visit.drawn()
        assert visit.fits()
        if view == "kernel":
            visit.panel("sQ").tap()
            assert visit.state("pin") is not None


@pytest.mark.parametrize("name", ["index.html", "compare.html"])
def test_gallery_pages_fit_a_phone(site: pathlib.Path, browser: Any, name: str) -> None:
    with Visit(browser, site / name, viewport=PHONE) as visit:
        visit.drawn()
        assert visit.fits()


def test_the_index_leads_to_rows_and_two_rows_stand_side_by_side(site: pathlib.Path, browser: Any) -> None:
    with Visit(browser, site / "index.html") as visit:
        links = visit.page.locator("main a[href$='.html']")
        targets = {links.nth(i).get_attribute("href") for i in range(links.count())}
        assert targets and all((site / target).exists() for target in targets)
    ids = [row["id"] for row in data_of((site / "index.html").read_text())["gallery"]][:2]
    with Visit(browser, site / "compare.html", f"#view=compare&a={ids[0]}&b={ids[1]}") as visit:
        visit.drawn()
        text = visit.page.locator("main").inner_text()
        assert "tile_n" in text and "smem" in text.lower()


def test_dark_mode_by_preference_and_by_hand(site: pathlib.Path, browser: Any) -> None:
    def brightness(visit: Visit) -> float:
        colour = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return float(np.mean([int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]))

    with Visit(browser, site / "page.html") as light, Visit(browser, site / "page.html", color_scheme="dark") as dark:
        assert brightness(light) > 200 and brightness(dark) < 60
        dark.page.evaluate("CF.theme.toggle()")
        assert brightness(dark) > 200


@pytest.mark.parametrize("kind", COLOUR_BLIND)
def test_categories_differ_for_colour_blind_readers(site: pathlib.Path, browser: Any, kind: str) -> None:
    with Visit(browser, site / "page.html") as visit:
        colours = np.array([visit.page.evaluate("n => CF.palette.category(n)", n) for n in range(8)]) / 255
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(COLOUR_BLIND[kind]).T, 0, 1)
    labs = [lab(rgb) for rgb in seen]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(labs, 2)) > 3 * JUST_NOTICEABLE


def lab(linear_rgb: Any) -> Any:
    """CIE L*a*b* (D65) of linear sRGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear_rgb
    scaled = xyz / np.array([0.9505, 1.0, 1.089])
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
