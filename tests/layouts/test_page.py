"""The assembled page: one file, nothing loaded from anywhere, its data as it was given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cuteflash.dispatch import choose
from cuteflash.page import data_of
from cuteflash.problem import FwdProblem
from layouts.command import page_text, read_scene, scene_json
from layouts.lessons import lesson_data
from layouts.page import ROW_VIEWS
from tests.html_parts import Parts

LIMIT = 3_000_000  # bytes of a page


@pytest.fixture(scope="module")
def scene() -> dict[str, Any]:
    problem = FwdProblem.dense("bf16", 128, 128, mask="causal")
    return scene_json(read_scene(problem, "sm_90a", choose(problem, "sm_90a", "sm90")))


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


def test_a_page_explains_the_traits_of_its_kernels(text: str, scene: dict[str, Any]) -> None:
    described = data_of(text)["traits"][scene["kernel"]["name"]].keys()
    assert described == scene["kernel"]["traits"].keys() | {
        "two_level",
        "masked_by_fixed_max",
        "turns_v",
        "stored_v_stage",
        "stages_o",
        "stored_stage",
        "converting_warpgroups",
        "key_warpgroups",
    }  # those of 8-bit operands, then of 8-bit caches


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


def test_a_page_is_the_same_every_time(text: str, scene: dict[str, Any]) -> None:
    assert page_text(json.loads(json.dumps(scene))) == text
