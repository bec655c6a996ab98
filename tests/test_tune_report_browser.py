"""The report in headless Chromium, driven by Playwright: it draws, follows its reader, fits. Skipped without."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from cuteflash.page import data_of
from cuteflash.tune.report import make_report
from cuteflash.tune.store import Store
from tests import browser as browser_tests
from tests.browser import PHONE
from tests.sweep_synthetic import Filler, Sweep

DESKTOP = {"width": 1440, "height": 900}
READABLE = 4.5  # contrast of text with its ground, WCAG AA
SWEEPS = {
    "timed": Sweep(head_dims=(64, 128), limit=60),
    "compiled": Sweep(limit=40, until="compile"),
    "dry": Sweep(until="prune"),
}
SHOWN = "R.state.space().ids.map((_, who) => who).filter((who) => R.state.speed().share[who] && R.state.shown(who))"
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color, under) => {  // a colour over an opaque one, as [r, g, b]
    canvas.fillStyle = `rgb(${under})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const ground = (node) => {
    const under = node.parentElement ? ground(node.parentElement) : [255, 255, 255];
    return parse(getComputedStyle(node).backgroundColor, under);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [found, skipped] = [[], ["SCRIPT", "STYLE", "OPTION"]];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.disabled || skipped.includes(node.tagName)) continue;
    const under = ground(node);
    const style = getComputedStyle(node);
    const ink = parse(node instanceof SVGElement ? style.fill : style.color, under);
    const [low, high] = [light(under), light(ink)].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), node.className || node.tagName, node.textContent.slice(0, 30)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A page for each of `SWEEPS`."""
    made = tmp_path_factory.mktemp("reports")
    for name, what in SWEEPS.items():
        with Store(made / f"{name}.sqlite") as store:
            Filler(store, what).fill()
            (made / f"{name}.html").write_text(make_report(store))
    return made


class Visit(browser_tests.Visit):
    """A visit of the report, which says nothing and asks for nothing."""

    viewport = DESKTOP

    def check(self) -> None:
        """Nothing was logged, not even a warning, and nothing but the page itself was loaded."""
        assert self.said == []
        own = self.requests[0].split("#")[0]
        assert {url.split("#")[0] for url in self.requests if not url.startswith("data:")} == {own}

    def settle(self) -> None:
        """Lets what was asked for in this frame be drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def now(self, key: str) -> Any:
        return self.page.evaluate(f"R.state.now[{key!r}]")

    def shown(self) -> list[int]:
        """Timed candidates that the filters leave."""
        return self.page.evaluate(SHOWN)

    def winners_start(self) -> tuple[float, float]:
        """Where the winner's line begins on the screen: at the top of the speed axis."""
        canvas = self.page.locator("canvas.lines")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        return box["x"] + 46, box["y"] + 48


@pytest.mark.parametrize(("viewport", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", SWEEPS)
def test_every_page_fits_and_says_nothing(
    browser: Any, folder: pathlib.Path, name: str, viewport: Any, scheme: Any
) -> None:
    with Visit(browser, folder / f"{name}.html", viewport=viewport, color_scheme=scheme) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        assert visit.page.locator("main > section").count() == 6
        assert visit.page.locator("canvas.lines").is_visible()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_opens_with_its_verdict(browser: Any, folder: pathlib.Path, viewport: Any) -> None:
    with Visit(browser, folder / "timed.html", viewport=viewport) as visit:
        first = visit.page.locator("main > :first-child")
        assert first.inner_text() == visit.page.evaluate("JSON.parse(data.textContent).verdict[0]")
        assert re.search(r"of 10 problems get a faster row, by up to \d+\.\d %; behind", first.inner_text())
        box = first.bounding_box()
        assert box["y"] + box["height"] < viewport["height"] / 2
        behind = visit.page.locator(".winners td.behind").all_inner_texts()
        assert behind and all("▾" in text for text in behind)  # not told by colour alone, on a phone either


def test_the_winner_stands_beside_the_default_as_what_changes(browser: Any, folder: pathlib.Path) -> None:
    def chips(space: dict[str, Any], slot: dict[str, Any]) -> list[str]:
        found = []
        for trait in space["traits"]:
            indices = [
                ord(trait["column"][slot[who]]) - ord("0") if trait["column"] else 0 for who in ("default", "winner")
            ]
            values = [{True: "on", False: "off"}[one] if isinstance(one, bool) else str(one) for one in trait["values"]]
            if indices[0] != indices[1]:
                found.append(f"{trait['name']} {values[indices[0]]} → {values[indices[1]]}")
        return found

    page = folder / "timed.html"
    expected = [chips(space, slot) for space in data_of(page.read_text())["spaces"] for slot in space["slots"]]
    with Visit(browser, page) as visit:
        rows = visit.page.locator(".winners tbody tr")
        assert [row.locator(".changes li").all_inner_texts() for row in rows.all()] == expected
        assert any("tile_n 128 → " in chip for some in expected for chip in some)


def test_what_a_trait_is_worth_says_from_how_many_pairs(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        found = visit.page.evaluate(
            "R.model.effects(R.state.space(), R.state.speed(), R.state.slot().winner)"
            ".filter((one) => one.pairs).map((one) => [one.trait.name, one.pairs])"
        )
        heads = visit.page.locator(".effect-card h3").all_inner_texts()
        assert len(heads) == len(found) > 2
        for head, (name, pairs) in zip(heads, found, strict=True):
            assert head.startswith(name) and re.search(rf"worth \S+\s%\sin {pairs} pairs?$", head)


def test_a_dry_run_shows_its_analytic_scores(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "dry.html") as visit:
        assert visit.page.locator(".verdict").inner_text().startswith("Nothing has been timed yet")
        first = visit.page.evaluate("R.model.title(R.state.space(), R.state.reference())")
        assert f"by the analytic score {first} comes first" in visit.page.locator(".untimed").inner_text()
        assert (
            visit.page.locator(".untimed .changes li").count() > 0
            or "a shipped row" in visit.page.locator(".untimed").inner_text()
        )
        speeds = visit.page.locator(".candidates td[data-label='Speed']").all_inner_texts()
        assert speeds[0].split() == ["100.0", "%", "estimated"]
        shares = [float(text.split()[0]) for text in speeds]
        assert len(shares) == 50 and shares == sorted(shares, reverse=True) and shares[-1] < 100
        assert visit.page.locator(".role.shipped").count() > 0
        visit.page.locator(".candidates tbody button").nth(1).click()
        assert "clocks for 1000 scores" in visit.page.locator(".picked-panel").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_readable(browser: Any, folder: pathlib.Path, scheme: Any) -> None:
    with Visit(browser, folder / "timed.html", color_scheme=scheme) as visit:
        visit.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        visit.page.locator(".candidates tbody button").first.click()
        visit.page.get_by_role("button", name="kv_stage 2,").click()
        pale = [one for one in visit.page.evaluate(CONTRASTS) if one[0] < READABLE]
        assert pale == []


def test_the_canvas_is_drawn_in_both_themes(browser: Any, folder: pathlib.Path) -> None:
    count = """() => {
      const drawn = document.querySelector("canvas.lines");
      const copy = new OffscreenCanvas(drawn.width, drawn.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(drawn, 0, 0);
      const { data } = copy.getImageData(0, 0, drawn.width, drawn.height);
      const rgb = R.theme.color("winner").match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
      const like = (at) => rgb.every((part, i) => Math.abs(data[at + i] - part) < 4);
      return Array.from({ length: data.length / 4 }, (_, place) => 4 * place).some(like);
    }"""
    with Visit(browser, folder / "timed.html", color_scheme="light") as visit:
        assert visit.page.evaluate(count)
        visit.page.get_by_label("Switch between light and dark").click()
        visit.settle()
        assert visit.page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert visit.page.evaluate(count)


def test_a_winners_row_selects_its_problem_everywhere(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        visit.page.get_by_role("button", name="causal · bf16 · short").last.click()
        assert [visit.now(key) for key in ("space", "mask", "lengths")] == ["sm90 128x128", "causal", "short"]
        assert visit.page.get_by_label("Mask").input_value() == "causal"
        pressed = visit.page.locator(".winners tr.current button[aria-pressed='true']")
        assert pressed.all_inner_texts() == ["causal · bf16 · short"]
        winner = visit.page.evaluate("R.model.title(R.state.space(), R.state.slot().winner)")
        assert visit.page.locator(".candidates tbody th code").first.inner_text() == winner


def test_values_filter_by_keyboard(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        everybody = visit.shown()
        button = visit.page.locator(".axis button", has_text="128").and_(visit.page.get_by_label("tile_n 128,"))
        button.focus()
        visit.page.keyboard.press("Space")
        kept = visit.shown()
        assert 0 < len(kept) < len(everybody)
        assert button.get_attribute("aria-pressed") == "true"
        assert "x128" in visit.page.locator(".candidates tbody th code").first.inner_text()
        visit.page.get_by_label("Lift the filter tile_n 128").focus()
        visit.page.keyboard.press("Enter")
        assert visit.shown() == everybody


def test_an_effects_value_keeps_the_focus_when_it_filters(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        visit.page.locator(".effect button").first.focus()
        label = visit.page.evaluate("document.activeElement.getAttribute('aria-label')")
        visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("document.activeElement.getAttribute('aria-label')") == label
        assert visit.page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"


def test_dragging_along_the_speed_axis_keeps_the_fast(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        everybody = visit.shown()
        x, y = visit.winners_start()
        visit.page.mouse.move(x, y - 4)
        visit.page.mouse.down()
        visit.page.mouse.move(x, y + 90, steps=5)
        assert visit.page.locator(".brush").is_visible()
        visit.page.mouse.up()
        kept = visit.shown()
        assert 0 < len(kept) < len(everybody)
        least = visit.now("least") / 100
        assert kept == [who for who in everybody if visit.page.evaluate(f"R.state.speed().share[{who}]") >= least]
        assert visit.now("pick") is None


def test_pressing_a_line_picks_its_candidate(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        x, y = visit.winners_start()
        visit.page.mouse.click(x + 1, y + 1)
        assert visit.page.evaluate("R.state.picked() === R.state.slot().winner")
        assert visit.page.locator(".picked-panel .role.winner").is_visible()
        assert "100.0" in visit.page.locator(".picked-panel").inner_text()


def test_the_address_says_what_is_selected(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        visit.page.get_by_label("Space").select_option("sm90 128x128")
        visit.page.get_by_label("Mask").select_option("causal")
        visit.page.get_by_role("combobox", name="Length").select_option("4096")
        visit.page.locator(".axis button").first.click()
        assert visit.now("filter")
        visit.page.locator(".candidates tbody button").first.click()
        state = visit.page.evaluate("R.state.now")
        visit.page.wait_for_function("location.hash.includes('pick=')")
        address = visit.page.evaluate("location.hash")
    with Visit(browser, folder / "timed.html", address) as visit:
        assert visit.page.evaluate("R.state.now") == state
        assert visit.page.locator(".candidates tr.expanded").count() == 1


@pytest.mark.parametrize(
    "address", ["#space=none&mask=up&least=many&filter=a:b;tile_m:7&pick=x&cell=1", "#least=-4", "#filter=;;:&cell=9"]
)
def test_an_address_of_what_is_not_there_is_repaired(browser: Any, folder: pathlib.Path, address: str) -> None:
    with Visit(browser, folder / "timed.html", address) as visit:
        assert visit.page.evaluate("[R.state.now.space, R.state.now.filter, R.state.now.least, R.state.now.pick]") == [
            "sm90 64x64", {}, 0, None,
        ]  # fmt: skip
        assert visit.page.locator("canvas.lines").is_visible()


def test_the_table_finds_candidates_by_words_and_outcome(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        visit.page.get_by_label("Words that candidates contain").fill("the limit tile_m=128")
        rows = visit.page.locator(".candidates tbody tr")
        assert rows.count() == 50
        assert all(
            text.startswith("128x") for text in visit.page.locator(".candidates tbody th code").all_inner_texts()
        )
        visit.page.get_by_role("button", name="On", exact=True).click()
        assert visit.page.locator(".pager .hint").inner_text().startswith("51 to ")
        visit.page.get_by_label("Outcome").select_option("T")
        assert "No candidate is left" in rows.first.inner_text()
        visit.page.get_by_label("Words that candidates contain").fill("")
        visit.page.get_by_role("button", name="Shared memory, KiB").click()
        sizes = [float(text) for text in visit.page.locator(".candidates td:nth-child(4)").all_inner_texts()]
        assert sizes == sorted(sizes, reverse=True)


def test_the_first_tab_stop_skips_to_the_report(browser: Any, folder: pathlib.Path) -> None:
    with Visit(browser, folder / "timed.html") as visit:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.id") == "skip"
        visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "main"
