"""The assembled page: one file, nothing loaded from anywhere, its data as it was given."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from cuteflash.dispatch import choose_fwd
from cuteflash.problem import FwdProblem
from layouts import page
from layouts.command import page_text, read_scene, scene_json
from layouts.lessons import lesson_data
from layouts.page import ROW_VIEWS, SCRIPTS, STYLES, TEMPLATE, make_page, page_data
from tests.html_parts import Parts

WEB = pathlib.Path(page.__file__).parent / "web"
LIMIT = 3_000_000  # bytes of a page
NASTY = '</script><script>alert(1)</script><!-- {{style}} & "quotes" \u2028 é'


def data_of(text: str) -> Any:
    (data,) = (inside for attributes, inside in Parts(text).of("script") if attributes.get("id") == "data")
    return json.loads(data)


@pytest.fixture(scope="module")
def scene() -> dict[str, Any]:
    problem = FwdProblem("bf16", 128, 128, mask="causal")
    return scene_json(read_scene(problem, "sm_90a", choose_fwd(problem, "sm_90a", "sm90")))


@pytest.fixture(scope="module")
def text(scene: dict[str, Any]) -> str:
    return page_text(scene)


def test_a_page_carries_its_scene_and_opens_on_the_kernel(text: str, scene: dict[str, Any]) -> None:
    data = data_of(text)
    assert data["schema"] == 1
    assert data["view"] == "kernel"
    assert data["views"] == list(ROW_VIEWS)
    assert data["scene"] == scene["id"]
    assert data["scenes"][scene["id"]] == scene
    assert data["gallery"] is None
    assert len(text.encode()) < LIMIT


def test_a_page_carries_the_study_path_and_its_scenes(text: str) -> None:
    data = data_of(text)
    assert data["lessons"] == json.loads(json.dumps(lesson_data()))
    assert set(data["lessons"]["scenes"].values()) <= set(data["scenes"])


def test_a_page_refers_to_nothing_outside(text: str) -> None:
    parts = Parts(text)
    for tag, attributes, _ in parts.elements:
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), (tag, attributes)
    assert len(parts.of("link")) == 1  # the empty icon, or browsers ask for one
    for address in re.findall(r"https?://[^\s\"'`<)]*", text):
        assert address.startswith("http://www.w3.org/"), address  # names of XML vocabularies
    for _, style in parts.of("style"):
        assert "@import" not in style
        assert re.findall(r"url\((?!['\"]?data:)", style) == []
    for attributes, script in parts.of("script"):
        if attributes.get("id") != "data":
            assert (
                re.findall(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|importScripts|sendBeacon)\b", script) == []
            )
            assert re.findall(r"^\s*import\b|\bimport\(", script, re.MULTILINE) == []


def test_scripts_and_styles_are_there_once_in_order(text: str) -> None:
    (style,) = (inside for _, inside in Parts(text).of("style"))
    scripts = [inside for attributes, inside in Parts(text).of("script") if attributes.get("id") != "data"]
    assert len(scripts) == 1
    for whole, names in ((scripts[0], SCRIPTS), (style, STYLES)):
        places = [whole.index((WEB / name).read_text().strip()) for name in names]
        assert places == sorted(places)


def test_every_web_file_is_part_of_the_page() -> None:
    files = sorted(path.name for path in WEB.iterdir() if path.is_file())
    assert files == sorted([*SCRIPTS, *STYLES, TEMPLATE])


def test_the_template_names_the_order_of_the_scripts() -> None:
    comment = Parts((WEB / TEMPLATE).read_text()).comments[0]
    assert re.findall(r"[\w-]+\.js", comment) == list(SCRIPTS)


def test_nothing_breaks_out_of_the_data() -> None:
    page_with = make_page(NASTY, page_data("kernel", ["kernel"], None, {"x": {"note": NASTY}}))
    parts = Parts(page_with)
    assert data_of(page_with)["scenes"]["x"]["note"] == NASTY
    assert len(parts.of("script")) == 2
    assert parts.of("title")[0][1].strip() == NASTY
    assert "{{" not in parts.of("style")[0][1]
    assert not any("slots" in comment or "{{" in comment for comment in parts.comments)


def test_a_page_is_the_same_every_time(text: str, scene: dict[str, Any]) -> None:
    assert page_text(json.loads(json.dumps(scene))) == text


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        make_page("x", page_data("kernel", ["kernel"], None, {"x": {"value": float("nan")}}))


def test_a_missing_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SCRIPTS", (*SCRIPTS, "forgotten.js"))
    with pytest.raises(FileNotFoundError, match=r"forgotten\.js"):
        make_page("x", page_data("kernel", ["kernel"]))


@pytest.mark.parametrize("content", ["let text = '</script>';", "/* <!-- */"])
def test_a_script_that_ends_its_element_is_an_error(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    read = page._read
    monkeypatch.setattr(page, "_read", lambda name: content if name == SCRIPTS[0] else read(name))
    with pytest.raises(ValueError, match=re.escape(f"layouts/web/{SCRIPTS[0]} contains")):
        make_page("x", page_data("kernel", ["kernel"]))
