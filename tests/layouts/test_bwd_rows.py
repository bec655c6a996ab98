"""Every shipped backward row's drawing against the DSL and the compiler, as `test_rows.py` does for the forward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from cutlass import cute

from cuteflash.atoms.sm80 import ldmatrix
from cuteflash.dispatch import Choice
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.row import Row
from layouts.dsl import context
from layouts.hopper import WARPGROUPS
from layouts.rows import ShippedRow, make_scene, shipped_rows, touch_ways, worst_ways
from layouts.scene import Scene
from tests.cubins import row_kernels
from tests.kernel_store import KernelStore
from tests.layouts.drawings import WARPGROUP, by_issuer, descriptors_in, descriptors_of, elements
from tests.layouts.dsl_oracle import copied_by, owned_by, smem_offsets
from tests.slow import slow_but

# sm_89 and sm_120 share sm_86's table: what follows from the traits alone is the same.
ROWS = {
    f"{row.target}-{row.family}-{row.choice.row.title}": row
    for row in shipped_rows("bwd")
    if row.target not in ("sm_89", "sm_120")
}
ONE_PASS = [name for name, row in ROWS.items() if isinstance(row.choice.traits, BwdTraitsSm90)]
FIRST = {row.choice.traits.dq: name for name, row in ROWS.items() if name in ONE_PASS}  # type: ignore[union-attr]
AMPERE = [name for name, row in ROWS.items() if isinstance(row.choice.traits, BwdTraitsSm80)]
ampere_rows = pytest.mark.parametrize("name", slow_but(AMPERE, AMPERE[0]))
drawn_rows = pytest.mark.parametrize("name", slow_but([*ONE_PASS, *AMPERE], *FIRST.values(), AMPERE[0]))
one_pass_rows = pytest.mark.parametrize("name", slow_but(ONE_PASS, *FIRST.values()))

# The product, operand and orientation of each fragment of the one-pass kernel.
ONE_PASS_FRAGMENTS = {
    "acc_S": ("tiled_mma_s", "C", True),
    "acc_dP": ("tiled_mma_s", "C", True),
    "rP": ("tiled_mma_dv", "A", True),
    "rdS": ("tiled_mma_dk", "A", True),
    "acc_dV": ("tiled_mma_dv", "C", False),
    "acc_dK": ("tiled_mma_dk", "C", False),
}
ONE_EACH = ("tma", "cp.async", "stmatrix", "st.shared", "ld.shared", "st.global", "red")
POINTWISE = ("exponentials", "differentiate", "convert")


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def kernel_of(row: ShippedRow) -> Any:
    return row.choice.kernel_cls(row.choice.traits, row.problem)


def shape_of(scene: Scene, id: str) -> tuple[int, int]:
    return next(part.shape for part in (*scene.tiles, *scene.fragments) if part.id == id)


@one_pass_rows
@pytest.mark.parametrize("tensor", ["q", "k", "v", "do", "ds"])
def test_shared_addresses_are_the_dsls(name: str, tensor: str) -> None:
    row = ROWS[name]
    tile = next(tile for tile in scene_of(name).tiles if tile.id.lower() == f"s{tensor}")
    expected = smem_offsets(kernel_of(row), row.target, tensor)
    assert np.array_equal(tile.offsets().reshape(-1) * 2, expected)


@one_pass_rows
def test_tiles_fill_the_plan_and_gradients_take_the_place_of_k_and_v(name: str) -> None:
    scene = scene_of(name)
    regions = {region["id"]: (region["start"], region["bytes"]) for region in scene.budget["smem"]["regions"]}
    place = {"sdK": "sK", "sdV": "sV"}
    drawn = {tile.id: tile for tile in scene.tiles if tile.space == "shared"}
    traits = ROWS[name].choice.traits
    words = {word for word, is_there in (("handout", traits.persistent), ("sums", traits.last_rounds)) if is_there}
    assert set(regions) == {"barriers", "sLSE", "sDelta", *drawn} - set(place) | words
    for tile in drawn.values():
        nbytes = tile.layout.size() * tile.element_bytes
        assert (tile.base, nbytes) == regions[place.get(tile.id, tile.id)] or tile.id == "sdQ"
        assert tile.base % 1024 == 0
        assert tile.offsets().max() + 1 == tile.layout.size()
    assert drawn["sdQ"].layout.size() * 4 == regions["sdQ"][1]


@drawn_rows
def test_the_sum_of_dq_lies_as_the_kernel_that_rounds_it_reads_it(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    with context(row.target):
        parts = kernel_of(row).dq_parts()
        rows, cols = parts.shape
        for part, (top, left) in enumerate(parts.origins):
            for thread in (0, 77):
                own = owned_by(parts.mma, thread, "C", (cols, rows) if parts.is_transposed else (rows, cols))
                at = own[:, ::-1] if parts.is_transposed else own
                element = np.arange(len(own))
                expected = part * rows * cols + element // 4 * 4 * parts.threads + thread * 4 + element % 4
                for tile in (tile for tile in scene.tiles if tile.tensor == "dQ"):
                    offsets = tile.offsets().reshape(-1, *tile.shape[::-1])[0]
                    assert np.array_equal(offsets[left + at[:, 1], top + at[:, 0]], expected)


@one_pass_rows
def test_fragments_are_the_dsls_partitions(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    with context(row.target):
        kernel = kernel_of(row)
        for id, (product, operand, transposed) in ONE_PASS_FRAGMENTS.items():
            fragment = scene.fragment(id)
            rows, cols = fragment.shape
            part = (64, rows) if transposed else (64, cols)
            threads, values = (mode.size() for mode in fragment.tv.modes())
            owned = fragment.tv.indices().reshape(values, threads)
            assert np.array_equal(np.sort(owned.reshape(-1)), np.arange(rows * cols))
            for group, thread in ((0, 5), (1, 126)):
                at = owned_by(getattr(kernel, product)(), thread, operand, part)
                key, other = at[:, 0] + 64 * group, at[:, 1]
                expected = other + rows * key if transposed else key + rows * other
                assert np.array_equal(owned[:, thread + WARPGROUP * group], expected), id


@one_pass_rows
def test_copies_are_the_dsls_partitions(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    with context(row.target):
        kernel = kernel_of(row)
        for tensor, transposed in (("dS", True), ("dV", False), ("dK", False)):
            copy, step = getattr(kernel, f"copy_{tensor.lower()}")(), scene.step(f"stmatrix_{tensor.lower()}")
            for side, touch in zip("SD", step.touches, strict=True):
                rows, cols = shape_of(scene, touch.id)
                named = elements(touch)
                at = copied_by(copy, 9, side, (64, rows if transposed else cols))
                expected = at[:, 1] + rows * at[:, 0] if transposed else at[:, 0] + rows * at[:, 1]
                assert np.array_equal(named[:, :, 9].reshape(-1), expected), (step.id, side)


@drawn_rows
def test_steps_move_every_element_and_nothing_else(name: str) -> None:
    scene = scene_of(name)
    in_turns = scene.kernel["traits"].get("dq") == "turns"  # either warpgroup may hold a tile of dQ
    for step in scene.steps:
        copies = 2 if in_turns and step.id == "store_dq" else 1
        for touch in step.touches:
            rows, cols = shape_of(scene, touch.id)
            counts = np.bincount(by_issuer(touch).reshape(-1), minlength=rows * cols)
            assert len(counts) == rows * cols and counts.min() >= 1, (step.id, touch.id)
            if step.kind in (*ONE_EACH, *POINTWISE):
                assert counts.max() == copies, (step.id, touch.id)


@drawn_rows
def test_no_shipped_row_has_a_conflict_and_every_one_would_without_its_swizzle(name: str) -> None:
    scene = scene_of(name)
    assert worst_ways(scene) == 1
    unswizzled = [
        int(touch_ways(scene, step, touch, swizzled=False).max())
        for step in scene.steps
        for touch in step.touches
        if touch.lane_bytes
    ]
    assert max(unswizzled) >= 4


@one_pass_rows
def test_the_drawn_registers_are_those_that_the_traits_count(name: str) -> None:
    producer, *of_dq, consumers = scene_of(name).budget["registers"]["roles"]
    traits = ROWS[name].choice.traits
    assert sum(part["registers"] for part in consumers["parts"]) == traits.accumulator_regs  # type: ignore[union-attr]
    assert (producer["limit"], consumers["limit"]) == (traits.producer_regs, traits.mma_regs)  # type: ignore[union-attr]
    assert [role["limit"] for role in of_dq] == [traits.dq_regs] * traits.is_dq_apart  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST.values())
def test_descriptors_are_the_compilers(name: str, kernels: KernelStore) -> None:
    row = ROWS[name]
    # The problem with which `tests/test_tables.py` compiles it, too.
    kernel = row.target, row.choice.traits
    problem = next(case.problem for case in row_kernels() if (case.target, case.traits) == kernel)
    scene = make_scene(problem, row.target, row.choice)
    compiled = kernels(row.choice.kernel_cls, row.choice.traits, problem, row.target)
    assert descriptors_in(compiled) >= descriptors_of(scene)
    assert scene.budget["smem"]["total"] == row.choice.traits.smem_bytes


def scene_of_own(changes: dict[str, Any], **problem: Any) -> Scene:
    """The scene of a row of head dim 64."""
    traits = dataclasses.replace(BwdTraitsSm90(64, 128, 64, 64), **changes)
    choice = Choice("sm90", traits, Row(traits, without=("softcap",)), "a table of one's own")
    return make_scene(BwdProblem.dense("bf16", 64, 64, **problem), "sm_90a", choice)


def test_a_warpgroup_for_dq_has_its_accumulator_and_its_steps() -> None:
    scene = scene_of_own({"tile_m": 64, "dq": "apart", "pingpong": False})
    assert [(role.name, role.first_thread) for role in scene.roles][-1] == ("dQ", 384)
    assert scene.fragment("acc_dQ").first_thread == scene.step("wgmma_dq").touches[-1].first_thread == 384
    assert (scene.step("wgmma_dq").role, scene.step("wgmma_dk").role) == ("the dQ warpgroup", WARPGROUPS)
    assert scene.tile("sdQ").stages == 2
    roles = {role["name"]: role for role in scene.budget["registers"]["roles"]}
    traits = BwdTraitsSm90(64, 128, 64, 64, dq="apart", pingpong=False)
    assert roles["dQ warpgroup"]["parts"] == [{"name": "acc_dQ", "registers": traits.dq_accumulator_regs}]
    consumers = roles["consumer warpgroup"]
    assert sum(part["registers"] for part in consumers["parts"]) == traits.accumulator_regs
    assert sum(role["limit"] * role["threads"] for role in roles.values()) <= scene.budget["registers"]["file"]
    assert worst_ways(scene) == 1


def test_k_and_v_may_stay_in_registers() -> None:
    scene = scene_of_own({"tile_m": 64, "dq": "turns", "k_in_regs": True, "v_in_regs": True})
    for tensor, step, fetch in (("K", "wgmma_s", "ldmatrix_k"), ("V", "wgmma_dp", "ldmatrix_v")):
        assert scene.step(step).touches[0].id == f"r{tensor}"
        assert scene.step(step).descriptor["a"] is None  # type: ignore[index]
        assert [touch.id for touch in scene.step(fetch).touches] == [f"s{tensor}", f"r{tensor}"]
    (consumers,) = (role for role in scene.budget["registers"]["roles"] if role["parts"])
    traits = BwdTraitsSm90(64, 128, 64, 64, dq="turns", k_in_regs=True, v_in_regs=True)
    assert sum(part["registers"] for part in consumers["parts"]) == traits.accumulator_regs
    assert worst_ways(scene) == 1


def test_a_deterministic_row_adds_in_turns() -> None:
    assert "take turns" not in scene_of_own({"dq": "turns"}).step("add_dq").note
    assert "take turns" in scene_of_own({"dq": "turns"}, deterministic=True).step("add_dq").note


@pytest.mark.parametrize(("pingpong", "words"), [(True, "in the warpgroup's turn"), (False, "at the start of a step")])
def test_the_first_product_waits_for_its_turn(pingpong: bool, words: str) -> None:
    scene = scene_of_own({"dq": "turns", "pingpong": pingpong})
    assert words in scene.step("wgmma_s").note


# The product, operand and orientation of each fragment of the sm80 kernel, and whether ldmatrix transposes.
AMPERE_FRAGMENTS = {
    "rK": ("tiled_mma_s", "A", False, False),
    "rQ": ("tiled_mma_s", "B", False, False),
    "rV": ("tiled_mma_s", "A", False, False),
    "rdO": ("tiled_mma_s", "B", False, False),
    "rP": ("tiled_mma_dkv", "A", True, False),
    "rdS": ("tiled_mma_dkv", "A", True, False),
    "rdOt": ("tiled_mma_dkv", "B", True, True),
    "rQt": ("tiled_mma_dkv", "B", True, True),
    "rdSt": ("tiled_mma_dq", "A", False, True),
    "rKt": ("tiled_mma_dq", "B", True, True),
    "acc_S": ("tiled_mma_s", "C", True, False),
    "acc_dP": ("tiled_mma_s", "C", True, False),
    "acc_dV": ("tiled_mma_dkv", "C", False, False),
    "acc_dK": ("tiled_mma_dkv", "C", False, False),
    "acc_dQ": ("tiled_mma_dq", "C", False, False),
}


@functools.cache
def ampere_of_own() -> tuple[Any, Scene]:
    """The kernel and the scene of a row whose P stays in registers."""
    traits = BwdTraitsSm80(64, 128, 64, 64, 8, s_warps=8, dkv_warps=8)
    problem, choice = BwdProblem.dense("fp16", 64, 64), Choice("sm80", traits, Row(traits), "a table of one's own")
    return choice.kernel_cls(traits, problem), make_scene(problem, "sm_80", choice)


@pytest.mark.parametrize("own", [False, True], ids=["shipped", "P in registers"])
def test_sm80_fragments_and_fetches_are_the_dsls_partitions(own: bool) -> None:
    kernel, scene = ampere_of_own() if own else (kernel_of(ROWS[AMPERE[0]]), scene_of(AMPERE[0]))
    assert {fragment.id for fragment in scene.fragments} == set(AMPERE_FRAGMENTS)
    steps = {step.id: step for step in scene.steps}
    with context("sm_80"):
        for id, (product, operand, turned, trans) in AMPERE_FRAGMENTS.items():
            fragment, mma = scene.fragment(id), getattr(kernel, product)()
            rows, cols = fragment.shape
            part = (cols, rows) if turned else (rows, cols)
            threads, values = (mode.size() for mode in fragment.tv.modes())
            owned = fragment.tv.indices().reshape(values, threads)
            fetch = steps.get(f"ldmatrix_{id[1:].lower()}")
            assert (fetch is None) == (operand == "C" or (own and id in ("rP", "rdS")))

            def expected(at: np.ndarray[Any, Any], rows: int = rows, turned: bool = turned) -> np.ndarray[Any, Any]:
                return at[:, 1] + rows * at[:, 0] if turned else at[:, 0] + rows * at[:, 1]

            for thread in (5, threads - 2):
                mine = expected(owned_by(mma, thread, operand, part))
                assert set(owned[:, thread]) == set(mine), id
                if operand == "C":  # whose registers are in the partition's order
                    assert np.array_equal(owned[:, thread], mine), id
                if fetch is not None:
                    copy = fetch_copy(kernel, mma, operand, trans)
                    for side, touch in zip("SD", fetch.touches, strict=True):
                        moved = expected(copied_by(copy, thread, side, part))
                        assert np.array_equal(elements(touch)[:, :, thread].reshape(-1), moved), (id, side)


def fetch_copy(kernel: Any, mma: Any, operand: str, trans: bool) -> Any:
    make = {"A": cute.make_tiled_copy_A, "B": cute.make_tiled_copy_B}[operand]
    return make(ldmatrix(kernel.dtype, trans), mma)


@ampere_rows
def test_sm80_registers_are_those_that_the_traits_count(name: str) -> None:
    scene, traits = scene_of(name), ROWS[name].choice.traits
    sums = [scene.fragment(f"acc_{tensor}").registers for tensor in ("S", "dP", "dV", "dK")]
    assert sum(sums) == traits.accumulator_regs  # type: ignore[union-attr]
    warps, *_ = scene.budget["registers"]["roles"]
    assert len(warps["parts"]) < len(scene.fragments)  # operands of one product take the place of another's


def test_an_sm80_row_with_p_in_registers_has_no_tile_for_it() -> None:
    _, scene = ampere_of_own()
    assert "sP" not in {tile.id for tile in scene.tiles}
    assert {"convert_p", "convert_ds"} <= {step.id for step in scene.steps}
    assert {"stage_p", "ldmatrix_p"} <= {step.id for step in scene_of(AMPERE[0]).steps}
    assert worst_ways(scene) == 1


def test_a_warpgroup_for_turns_is_drawn_in_deterministic_calls_only() -> None:
    traits = BwdTraitsSm80(64, 128, 64, 64, dq_warps=4, vector_add=True, turn_warpgroup=True)
    choice = Choice("sm80", traits, Row(traits), "a table of one's own")
    plain, deterministic = (
        make_scene(BwdProblem.dense("bf16", 64, 64, deterministic=asked), "sm_90a", choice) for asked in (False, True)
    )
    assert [(role.name, role.threads) for role in plain.roles] == [("warps", 256)]
    assert [(role.first_thread, role.threads) for role in deterministic.roles] == [(0, 256), (256, 128)]
    registers = deterministic.budget["registers"]
    assert (registers["launch"], [role["limit"] for role in registers["roles"]]) == (168, [240, 24])
    assert sum(role["limit"] * role["threads"] for role in registers["roles"]) <= registers["launch"] * 384
    assert (plain.kernel["threads"], deterministic.kernel["threads"]) == (256, 384)
    assert deterministic.budget["occupancy"]["warps"] == 12
    traits = dataclasses.replace(traits, idle_warpgroup=True)
    idle = make_scene(BwdProblem.dense("bf16", 64, 64), "sm_90a", Choice("sm80", traits, Row(traits), "one's own"))
    assert [(role.name, role.threads) for role in idle.roles] == [("warps", 256), ("idle", 128)]


@ampere_rows
def test_sm80_tiles_fill_the_plan(name: str) -> None:
    scene = scene_of(name)
    regions = {region["id"]: (region["start"], region["bytes"]) for region in scene.budget["smem"]["regions"]}
    drawn = {tile.id: tile for tile in scene.tiles if tile.space == "shared"}
    assert set(regions) == {"sLSE", "sDelta", *drawn} - {"sdK", "sdV"}
    for tile in drawn.values():
        assert (tile.base, tile.layout.size() * 2) == regions[{"sdK": "sK", "sdV": "sV"}.get(tile.id, tile.id)]
        assert np.array_equal(np.sort(tile.offsets().reshape(-1)), np.arange(tile.layout.size()))
