"""Pages of the report and of the explorer: one file, the base first, nothing that breaks out of its element."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest

import cuteflash
import layouts
from cuteflash import page as pages
from cuteflash.page import BASE, SCRIPT, STYLE, TEMPLATE, Page, data_of
from cuteflash.tune import report
from cuteflash.tune.report.page import PAGE as REPORT
from layouts.page import PAGE as LAYOUTS
from tests.html_parts import Parts

FOLDERS = {
    module.__name__: pathlib.Path(str(module.__file__)).parent / "web" for module in (cuteflash, report, layouts)
}
NASTY = '</script><script>alert(1)</script><!-- {{style}} & "quotes" \u2028 é'
BOTH = pytest.mark.parametrize("page", [REPORT, LAYOUTS], ids=lambda page: page.package)


@BOTH
def test_base_styles_and_scripts_are_there_once_in_order(page: Page) -> None:
    parts = Parts(page.render("x", {}))
    (style,) = (inside for _, inside in parts.of("style"))
    (script,) = (inside for attributes, inside in parts.of("script") if attributes.get("id") != "data")
    for whole, base, names in ((style, STYLE, page.styles), (script, SCRIPT, page.scripts)):
        texts = [(FOLDERS[BASE] / base).read_text(), *((FOLDERS[page.package] / name).read_text() for name in names)]
        places = [whole.index(text.strip()) for text in texts]
        assert places == sorted(places)
        assert all(whole.count(text.strip()) == 1 for text in texts)


@BOTH
def test_every_web_file_is_part_of_the_page(page: Page) -> None:
    assert sorted(path.name for path in FOLDERS[page.package].iterdir()) == sorted([*page.scripts, *page.styles])
    assert sorted(path.name for path in FOLDERS[BASE].iterdir()) == sorted([SCRIPT, STYLE, TEMPLATE])


@BOTH
def test_the_frame_is_filled(page: Page) -> None:
    text = page.render("Some title", {})
    parts = Parts(text)
    assert re.findall(r"\{\{\w+\}\}", text) == []
    assert [inside.strip() for tag in ("title", "h1") for _, inside in parts.of(tag)] == ["Some title"] * 2
    assert f"Skip to the {page.content}" in text
    assert page.bar in text


@BOTH
def test_nothing_breaks_out_of_the_data(page: Page) -> None:
    text = page.render(NASTY, {"note": NASTY})
    parts = Parts(text)
    (data,) = (inside for attributes, inside in parts.of("script") if attributes.get("id") == "data")
    assert json.loads(data) == data_of(text) == {"note": NASTY}
    assert len(parts.of("script")) == 2
    assert parts.of("title")[0][1].strip() == NASTY
    assert "{{" not in parts.of("style")[0][1]
    assert parts.comments == []


def test_a_text_that_is_no_page_has_no_data() -> None:
    assert data_of("<!doctype html>") is None
    with pytest.raises(ValueError, match="Expecting"):
        data_of('<script type="application/json" id="data">{</script>')


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        LAYOUTS.render("x", {"value": float("nan")})


def test_a_missing_file_is_an_error() -> None:
    forgotten = dataclasses.replace(LAYOUTS, scripts=(*LAYOUTS.scripts, "forgotten.js"))
    with pytest.raises(FileNotFoundError, match=r"forgotten\.js"):
        forgotten.render("x", {})


@pytest.mark.parametrize(
    ("name", "content"),
    [(LAYOUTS.scripts[0], "let a = '</script>';"), (LAYOUTS.scripts[0], "/* <!-- */"), (STYLE, "/* </style> */")],
)
def test_a_file_that_ends_its_element_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> None:
    read = pages.read_web
    monkeypatch.setattr(pages, "read_web", lambda package, file: content if file == name else read(package, file))
    with pytest.raises(ValueError, match=rf"web/{re.escape(name)} of \w+ contains .* end or hide what follows"):
        LAYOUTS.render("x", {})
