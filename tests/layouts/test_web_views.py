"""The Banks, Budget, Compare and Index views: the bank model of the page against Python's, and what the views compute.

The scenes are read from the kernels of a few rows that differ in family, swizzle and the space of their operands.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest

from cuteflash.cli.app import compile_
from cuteflash.dispatch import choose
from cuteflash.problem import FwdProblem
from layouts import banks
from layouts.algebra import ComposedLayout, Layout
from layouts.command import scene_json
from layouts.rows import make_scene, touch_ways
from layouts.scene import Scene
from layouts.site import chosen_rows, make_entry
from layouts.text import evaluate
from tests.layouts.web import BASE_JS, run_js

FILES = (BASE_JS, "core.js", "algebra.js", "scene.js", "banks.js")
BROWSER = """
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
    problem = FwdProblem.dense("bf16", head_dim, head_dim)
    return make_scene(problem, target, choose(problem, target, family))


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
        FILES,
        "[[3, 3, 3], [2, 3, 4], null].map((swizzle) => CF.banks.alternatives({ spec: { swizzle }, elementBytes: 2 }))",
        prelude=BROWSER,
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
    backward = budget("CF.budget.compileCommand(data)", {**scene.kernel, "operation": "bwd"})
    assert backward.startswith("cuteflash layouts --kernel bwd --head-dim ")
    assert "--compile" in backward  # `cuteflash compile` knows the forward alone


COMPARED = (*FILES, "budget.js", "compare.js", "gallery.js", "explain.js")


@pytest.fixture(scope="module")
def pair() -> tuple[Scene, Scene]:
    """One head dim of one arch, in both families."""
    problem = FwdProblem.dense("bf16", 128, 128)
    sm90, sm80 = (choose(problem, "sm_90a", family) for family in ("sm90", "sm80"))
    return make_scene(problem, "sm_90a", sm90), make_scene(problem, "sm_90a", sm80)


def compare(a: Scene, b: Scene, kind: str) -> Any:
    """The lines `kind` of two scenes by their names."""
    return compare_all(a, b, [kind])[kind]


def compare_all(a: Scene, b: Scene, kinds: list[str]) -> dict[str, Any]:
    """The lines of several kinds."""
    load = "CF.scene.load({ scenes: data }); const [a, b] = ['a', 'b'].map(CF.scene.of);"
    expression = f"(() => {{ {load} return {json.dumps(kinds)}.map((kind) => CF.compare[kind](a, b)); }})()"
    found = run_js(COMPARED, expression, data={"a": scene_json(a), "b": scene_json(b)}, prelude=BROWSER)
    assert all(len({line["name"] for line in lines}) == len(lines) for lines in found)
    return {kind: {line["name"]: line for line in lines} for kind, lines in zip(kinds, found, strict=True)}


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("abc", "abc", "abc"),
        ("abc", "axc", "abxc"),
        ("ab", "xaby", "xaby"),
        ("ab", "axy", "abxy"),
        ("abc", "cxa", "xabc"),
        ("", "ab", "ab"),
        ("ab", "", "ab"),
    ],
)
def test_names_of_both_come_once_and_in_the_order_of_the_first(first: str, second: str, both: str) -> None:
    merged = run_js(COMPARED, "CF.compare.merged(data[0], data[1])", [list(first), list(second)], BROWSER)
    assert merged == list(both)


def test_a_row_does_not_differ_from_itself(scene: Scene) -> None:
    found = compare_all(scene, scene, ["row", "traits", "parts", "steps", "accesses", "budget"])
    for kind, lines in found.items():
        assert lines, kind
        assert not any(line["differs"] for line in lines.values()), kind


def test_the_traits_that_differ_are_marked(pair: tuple[Scene, Scene]) -> None:
    mine, others = (scene.kernel["traits"] for scene in pair)
    lines = compare(*pair, "traits")
    assert set(lines) == set(mine) | set(others)
    for name, line in lines.items():
        assert (line["a"] is None, line["b"] is None) == (name not in mine, name not in others)
        assert line["differs"] == (mine.get(name) != others.get(name) or (name in mine) != (name in others))


def test_the_layouts_of_tiles_are_texts_that_place_every_element(pair: tuple[Scene, Scene]) -> None:
    lines = compare(*pair, "parts")
    for scene, side in zip(pair, "ab", strict=True):
        for tile in scene.tiles:
            layout = evaluate(lines[tile.id][side]["code"]).value
            assert isinstance(layout, Layout | ComposedLayout)
            assert np.array_equal(layout.indices().reshape(-1), tile.offsets(swizzled=True).reshape(-1)), tile.id
        shown = {name for name, line in lines.items() if line[side]}
        assert shown == {tile.id for tile in scene.tiles} | {fragment.id for fragment in scene.fragments}


def test_steps_of_one_name_stand_beside_each_other(pair: tuple[Scene, Scene]) -> None:
    line = compare(*pair, "steps")["S = Q K^T"]
    assert line["a"]["code"].startswith("wgmma") and line["b"]["code"].startswith("mma")


def test_the_ways_of_every_access_are_compared(pair: tuple[Scene, Scene]) -> None:
    lines = compare(*pair, "accesses")
    for scene, side in zip(pair, "ab", strict=True):
        for step in scene.steps:
            for touch in step.touches:
                if touch.lane_bytes:
                    worst = touch_ways(scene, step, touch).max()
                    cell = lines[f"{step.title}, {touch.id}"][side]
                    assert cell["text"].startswith(f"{worst}-way")
                    assert cell["bad"] == (worst > 1)


def test_the_summary_names_the_traits_that_both_rows_have() -> None:
    lines = [
        {"name": "head_dim", "a": {}, "b": {}, "differs": False},
        {"name": "tile_m", "a": {}, "b": {}, "differs": False},
        {"name": "tile_n", "a": {}, "b": {}, "differs": True},
        {"name": "kv_stage", "a": {}, "b": {}, "differs": True},
        {"name": "persistent", "a": {}, "b": None, "differs": True},
    ]
    assert run_js(COMPARED, "CF.compare.summary(data)", lines, BROWSER) == (
        "Of 4 traits that both rows have 2 differ: tile_n and kv_stage. A has 1 more, B 0."
    )
    assert run_js(COMPARED, "CF.compare.summary(data)", lines[:2], BROWSER) == (
        "The 2 traits that both rows have are the same."
    )


@pytest.fixture(scope="module")
def gallery() -> list[dict[str, Any]]:
    """What the index knows of some rows that differ in all that it filters by."""
    rows = chosen_rows("fwd", {"sm_90a", "sm_80"}, {"sm90", "sm80"}, {64, 128, 192})
    return [make_entry(row).summary for row in rows]


def of_gallery(gallery: list[dict[str, Any]], expression: str) -> Any:
    return run_js(COMPARED, expression, data=gallery, prelude=BROWSER)


def test_a_comparison_starts_with_both_families_of_an_arch(gallery: list[dict[str, Any]]) -> None:
    a, b = of_gallery(gallery, "CF.compare.standard(data)")
    assert a["head_dim"] == b["head_dim"] == 128
    assert a["arch"] == b["arch"] and a["family"] != b["family"]
    assert of_gallery(gallery[:1], "CF.compare.standard(data)") == [gallery[0], gallery[0]]


def test_rows_without_a_scene_are_not_offered(gallery: list[dict[str, Any]]) -> None:
    found = of_gallery(gallery, "CF.compare.rowsOf({ gallery: data, scenes: { [data[1].id]: {} } })")
    assert found == [gallery[1]]


def test_every_filter_keeps_the_rows_that_serve_its_value(gallery: list[dict[str, Any]]) -> None:
    fields = {"arch": ["arch"], "family": ["family"], "dim": ["head_dim", "head_dim_v"], "mask": ["mask"]}
    fields |= {"dtype": ["dtype"], "lengths": ["lengths"]}
    choices = of_gallery(gallery, "CF.gallery.FILTERS.map((f) => [f.key, CF.gallery.choices(data, f)])")
    assert [key for key, _ in choices] == list(fields)
    assert dict(choices)["dim"] == ["32", "64", "96", "128", "192"]
    for key, values in choices:
        for value in values:
            found = of_gallery(gallery, f"CF.gallery.filtered(data, {json.dumps({key: value})})")
            assert found == [
                row for row in gallery if any(value in str(row[field]).split(", ") for field in fields[key])
            ]
    both = of_gallery(gallery, "CF.gallery.filtered(data, { arch: 'sm_90a', dim: '64' })")
    assert both == [row for row in gallery if row["arch"] == "sm_90a" and row["head_dim"] == 64]
    assert of_gallery(gallery, "CF.gallery.filtered(data, { arch: null })") == gallery


def order(row: dict[str, Any], key: str) -> list[int]:
    if key == "speed":
        return [row["speed"]["tflops"] if row["speed"] else 0]
    return [row[key], row["head_dim_v"]] if key == "head_dim" else [row[key]]


@pytest.mark.parametrize("key", ["head_dim", "smem_bytes", "speed"])
def test_rows_are_sorted_by_number_and_keep_their_order_otherwise(gallery: list[dict[str, Any]], key: str) -> None:
    up = sorted(gallery, key=lambda row: order(row, key))
    assert of_gallery(gallery, f"CF.gallery.sorted(data, {key!r})") == up
    down = sorted(gallery, key=lambda row: [-number for number in order(row, key)])
    assert of_gallery(gallery, f"CF.gallery.sorted(data, '-{key}')") == down


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("d128 fixed", lambda row: 128 in (row["head_dim"], row["head_dim_v"]) and "fixed_max" in row["apart"]),
        ("SM_80, d64", lambda row: row["arch"] == "sm_80" and 64 in (row["head_dim"], row["head_dim_v"])),
        ("q_in_regs off", lambda row: row["apart"].get("q_in_regs") is False),
        ("measured causal", lambda row: "causal" in row["mask"]),  # "not measured" is said of a row, too
        ("nothing like it", lambda row: False),
        ("", lambda row: True),
    ],
)
def test_the_search_finds_rows_by_what_is_said_of_them(gallery: list[dict[str, Any]], text: str, matches: Any) -> None:
    found = [row["id"] for row in of_gallery(gallery, f"CF.gallery.searched(data, {text!r})")]
    assert found == [row["id"] for row in gallery if matches(row)]
    assert found or text == "nothing like it"


def test_rows_that_targets_share_stand_once_with_all_targets() -> None:
    rows = [make_entry(row).summary for row in chosen_rows("fwd", {"sm_80", "sm_86", "sm_120"}, {"sm80"}, {64})]
    groups = [[row["arch"] for row in group] for group in of_gallery(rows, "CF.gallery.kin(data)")]
    assert ["sm_86", "sm_120"] in groups
    assert all(group == ["sm_80"] for group in groups if "sm_80" in group)


def test_a_row_says_how_fast_it_was_and_in_what_it_is_not_like_most(gallery: list[dict[str, Any]]) -> None:
    unlike = next(row for row in gallery if row["family"] == "sm90" and "q_stage" in row["apart"])
    assert unlike["apart"]["q_stage"] == 2
    assert unlike["speed"]["gpu"] == "NVIDIA H200" and unlike["speed"]["tflops"] > 100
    assert any(row["speed"] is None for row in gallery)  # by hand, for a target that was not at hand
    best = of_gallery(gallery, "CF.gallery.fastest(data)")
    assert best["speed"]["tflops"] == max(row["speed"]["tflops"] for row in gallery if row["speed"])


def test_a_columns_head_turns_its_order_and_then_gives_it_up(gallery: list[dict[str, Any]]) -> None:
    turns = "[null, 'arch', '-arch', 'tile'].map((sort) => CF.gallery.nextSort(sort, 'arch'))"
    assert of_gallery(gallery, turns) == ["arch", "-arch", None, "arch"]
    assert of_gallery(gallery, "CF.gallery.sorted(data, 'nothing')") == gallery


@pytest.mark.parametrize(
    ("chosen", "after"),
    [
        ([None, None], ["x", None]),
        (["a", None], ["a", "x"]),
        (["a", "b"], ["b", "x"]),
        (["x", "b"], ["b", None]),
        (["a", "x"], ["a", None]),
    ],
)
def test_the_older_of_two_chosen_rows_gives_way(chosen: list[str | None], after: list[str | None]) -> None:
    assert run_js(COMPARED, "CF.gallery.chosen(data, 'x')", chosen, BROWSER) == after


def test_the_link_to_a_comparison_names_both_rows() -> None:
    assert run_js(COMPARED, "CF.compare.link('a b', 'c')", prelude=BROWSER) == "compare.html#a=a%20b&b=c"
