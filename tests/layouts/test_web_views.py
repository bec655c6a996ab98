"""The Banks, Budget, Compare and Index views: the bank model of the page against Python's, and what the views compute.

The scenes are read from the kernels of a few rows that differ in family, swizzle and the space of their operands.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from cuteflash.cli.app import compile_
from cuteflash.dispatch import choose_fwd
from cuteflash.problem import FwdProblem
from layouts import banks
from layouts.command import scene_json
from layouts.rows import make_scene, touch_ways
from layouts.scene import Scene
from tests.layouts.web import run_js

FILES = ("core.js", "algebra.js", "scene.js", "banks.js")
BROWSER = """
const matchMedia = () => ({ matches: false, addEventListener() {} });
const location = { hash: "" };
const history = {};
"""
# (target, family, head dim): 128-byte and 64-byte swizzles, Q in registers and in shared memory, a partial last box.
ROWS = [
    ("sm_80", "sm80", 128),
    ("sm_80", "sm80", 96),
    ("sm_120", "sm80", 32),
    ("sm_90a", "sm90", 128),
    ("sm_90a", "sm90", 96),
    ("sm_90a", "sm90", 256),
]


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: "-".join(map(str, row)))
def scene(request: pytest.FixtureRequest) -> Scene:
    target, family, head_dim = request.param
    problem = FwdProblem("bf16", head_dim, head_dim)
    return make_scene(problem, target, choose_fwd(problem, target, family))


def ask(scene: Scene, expression: str, files: tuple[str, ...] = FILES) -> Any:
    """A JavaScript expression in which `s` is the scene and `all` its accesses."""
    load = "CF.scene.load({ scenes: { one: data } }); const s = CF.scene.of('one'); const all = CF.banks.accesses(s);"
    return run_js(files, f"(() => {{ {load} return {expression}; }})()", data=scene_json(scene), prelude=BROWSER)


def test_ways_of_every_access_equal_pythons_with_and_without_swizzle(scene: Scene) -> None:
    found = ask(
        scene,
        "all.filter((a) => a.names.group === 'warp')"
        ".map((a) => ({ id: a.id, mode: a.mode, on: a.ways(a.swizzle), off: a.ways(null) }))",
    )
    banked = [(step, touch) for step in scene.steps for touch in step.touches if touch.lane_bytes]
    assert [access["id"] for access in found] == [f"{step.id}.{touch.id}" for step, touch in banked]
    assert banked
    for access, (step, touch) in zip(found, banked, strict=True):
        assert access["mode"] == touch.mode
        assert np.array_equal(access["on"], touch_ways(scene, step, touch, swizzled=True)), access["id"]
        assert np.array_equal(access["off"], touch_ways(scene, step, touch, swizzled=False)), access["id"]


def test_core_matrices_lie_where_the_descriptors_say(scene: Scene) -> None:
    """The unswizzled address of an instruction's first row is the tile's base and the descriptor's start."""
    found = ask(
        scene,
        "all.filter((a) => a.names.group === 'warpgroup').map((a) => ({ id: a.id, first: Array.from("
        "{ length: a.instructions }, (_, i) => a.addresses(0, i, null)[0] - a.part.spec.base) }))",
    )
    descriptors = [
        (f"{step.id}.{operand.tile}", list(operand.starts))
        for step in scene.steps
        if step.descriptor
        for operand in (step.descriptor["a"], step.descriptor["b"])
        if operand
    ]
    assert [(access["id"], access["first"]) for access in found] == descriptors
    assert bool(descriptors) == (scene.kernel["family"] == "sm90")


def test_core_matrices_collide_only_without_swizzle(scene: Scene) -> None:
    """8 rows of 16 bytes, one swizzle atom row apart: one row of banks with the swizzle, as many ways as rows of
    128 bytes that they span without it."""
    found = ask(
        scene,
        "all.filter((a) => a.names.group === 'warpgroup')"
        ".map((a) => [a.swizzle[0], a.summary(a.swizzle).worst, a.summary(null).worst])",
    )
    for bits, with_swizzle, without in found:
        assert with_swizzle == 1
        assert without == 2**bits


def test_a_descriptor_is_used_by_every_consumer_warpgroup(scene: Scene) -> None:
    consumers = [role for role in scene.as_dict()["kernel"]["roles"] if role["name"].startswith("consumer")]
    for groups, first in ask(
        scene, "all.filter((a) => a.names.group === 'warpgroup').map((a) => [a.groups, a.firstGroup])"
    ):
        assert groups == len(consumers)
        assert first == consumers[0]["first_thread"] // 128


def test_a_summary_counts_every_phase_of_the_tile(scene: Scene) -> None:
    found = ask(scene, "all.map((a) => [a.summary(a.swizzle), a.ways(a.swizzle).flat(2)])")
    for summary, ways in found:
        assert summary == {"worst": max(ways), "wavefronts": sum(ways), "phases": len(ways)}


@pytest.mark.parametrize("lane_bytes", [4, 8, 16])
def test_words_by_bank_equal_pythons_for_any_addresses(lane_bytes: int) -> None:
    rng = np.random.default_rng(lane_bytes)
    addresses = rng.integers(0, 4096 // lane_bytes, 64) * lane_bytes
    found = run_js(
        FILES,
        f"CF.banks.wordsByBank(data, {lane_bytes}).map((row) => [...row])",
        data=addresses.tolist(),
        prelude=BROWSER,
    )
    assert np.array_equal(found, banks.words_by_bank(addresses, lane_bytes))


def test_a_phase_of_an_asynchronous_copy_takes_a_pass_for_each_line() -> None:
    rng = np.random.default_rng(0)
    addresses = rng.integers(0, 64, 32) * 16
    found = run_js(FILES, "CF.banks.ways(data, 16, true)", data=addresses.tolist(), prelude=BROWSER)
    assert np.array_equal(found, banks.ways(addresses, 16, asynchronous=True))


def test_alternatives_have_none_to_three_bits_with_the_tiles_base_and_shift() -> None:
    found = run_js(
        FILES, "[[3, 3, 3], [2, 3, 4], null].map((s) => CF.banks.alternatives({ swizzle: s }, 2))", prelude=BROWSER
    )
    assert found[0] == [None, [1, 3, 3], [2, 3, 3], [3, 3, 3]]
    assert found[1] == [None, [1, 3, 4], [2, 3, 4], [3, 3, 4]]
    assert found[2] == found[0]


def budget(expression: str, data: object = None) -> Any:
    return run_js((*FILES, "budget.js"), expression, data=data, prelude=BROWSER)


def test_overlapping_regions_get_lanes_of_their_own() -> None:
    regions = [
        {"id": "sQ", "start": 0, "bytes": 64},
        {"id": "sK", "start": 64, "bytes": 64},
        {"id": "sO", "start": 0, "bytes": 96},
        {"id": "sV", "start": 96, "bytes": 32},
    ]
    lanes = budget("CF.budget.lanes(data).map((lane) => lane.map((region) => region.id))", regions)
    assert lanes == [["sQ", "sK"], ["sO", "sV"]]


def test_registers_left_to_a_role_are_its_limit_less_its_fragments() -> None:
    role = {"limit": 100, "parts": [{"name": "a", "registers": 64}, {"name": "b", "registers": 40}]}
    assert budget("CF.budget.roleUse(data)", role) == {"used": 104, "left": -4, "limit": 100}


def test_a_block_of_warpgroups_keeps_within_its_launch(scene: Scene) -> None:
    values = scene_json(scene)
    asked = {"registers": values["budget"]["registers"], "threads": values["kernel"]["threads"]}
    found = budget("CF.budget.split(data)", asked)
    assert found["total"] <= found["launch"] <= asked["registers"]["file"]
    assert sum(share["threads"] for share in found["shares"]) == asked["threads"]


def test_the_fewest_blocks_bind() -> None:
    occupancy = {"blocks": 1, "limits": {"shared memory": 1, "registers": 1, "threads": 5}}
    assert budget("CF.budget.binding(data)", occupancy) == ["shared memory", "registers"]


def test_the_compile_command_is_one_that_the_cli_takes(scene: Scene) -> None:
    command = budget("CF.budget.compileCommand(data)", scene.kernel)
    assert command.startswith("cuteflash compile --head-dim ")
    options = inspect.signature(compile_).parameters
    for option in command.split()[2::2]:
        assert option.removeprefix("--").replace("-", "_") in options
