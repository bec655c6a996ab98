"""Every shipped backward row's drawing against the DSL and the compiler, as `test_rows.py` does for the forward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from cuteflash.dispatch import Choice
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.row import Row
from layouts.dsl import context
from layouts.rows import ShippedRow, make_scene, shipped_rows, touch_ways, worst_ways
from layouts.scene import Scene
from tests.cross_compile import KernelStore
from tests.layouts.drawings import WARPGROUP, by_issuer, descriptors_in, descriptors_of, elements
from tests.layouts.dsl_oracle import copied_by, owned_by, smem_offsets
from tests.slow import slow_but

ROWS = {f"{row.target}-{row.family}-{row.choice.row.title}": row for row in shipped_rows("bwd")}
ONE_PASS = [name for name, row in ROWS.items() if isinstance(row.choice.traits, BwdTraitsSm90)]
FIRST = {row.choice.traits.dq: name for name, row in ROWS.items() if name in ONE_PASS}  # type: ignore[union-attr]
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
    assert set(regions) == {"barriers", "sLSE", "sDelta", *drawn} - set(place)
    for tile in drawn.values():
        nbytes = tile.layout.size() * tile.element_bytes
        assert (tile.base, nbytes) == regions[place.get(tile.id, tile.id)] or tile.id == "sdQ"
        assert tile.base % 1024 == 0
        assert tile.offsets().max() + 1 == tile.layout.size()
    assert drawn["sdQ"].layout.size() * 4 == regions["sdQ"][1]


@one_pass_rows
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
                for tile in (scene.tile("gdQ"), scene.tile("sdQ")):
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


@one_pass_rows
def test_steps_move_every_element_and_nothing_else(name: str) -> None:
    scene = scene_of(name)
    for step in scene.steps:
        for touch in step.touches:
            rows, cols = shape_of(scene, touch.id)
            counts = np.bincount(by_issuer(touch).reshape(-1), minlength=rows * cols)
            assert len(counts) == rows * cols and counts.min() >= 1, (step.id, touch.id)
            if step.kind in ("tma", "stmatrix", *POINTWISE):
                assert counts.max() == 1, (step.id, touch.id)


@one_pass_rows
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
    roles = scene_of(name).budget["registers"]["roles"]
    producer, consumers = roles
    traits = ROWS[name].choice.traits
    assert sum(part["registers"] for part in consumers["parts"]) == traits.accumulator_regs  # type: ignore[union-attr]
    assert (producer["limit"], consumers["limit"]) == (traits.producer_regs, traits.mma_regs)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST.values())
def test_descriptors_are_the_compilers(name: str, kernels: KernelStore) -> None:
    row, scene = ROWS[name], scene_of(name)
    compiled = kernels(row.choice.kernel_cls, row.choice.traits, row.problem, row.target)
    assert descriptors_in(compiled.ptx) >= descriptors_of(scene)
    assert scene.budget["smem"]["total"] == row.choice.traits.smem_bytes


def scene_of_own(changes: dict[str, Any], **problem: Any) -> Scene:
    """The scene of the shipped row of head dim 64, changed."""
    traits = dataclasses.replace(BwdTraitsSm90(64, 128, 64, 64), **changes)
    choice = Choice("sm90", traits, Row(traits, without=("softcap",)), "a table of one's own")
    return make_scene(BwdProblem.dense("bf16", 64, 64, **problem), "sm_90a", choice)


def test_an_overlapped_row_holds_p_and_ds_beside_the_next_scores() -> None:
    """dQ has registers of its own then, and both operands are rounded copies."""
    scene = scene_of_own({"overlap": True, "q_stage": 3, "do_stage": 3, "dq": "turns"})
    assert {"convert_p", "convert_ds"} <= {step.id for step in scene.steps}
    assert [fragment.id for fragment in scene.fragments if fragment.place_of] == []
    assert "Beside the next step's scores" in scene.step("wgmma_dk").note
    assert scene.tile("sdQ").stages == 2
    (consumers,) = (role for role in scene.budget["registers"]["roles"] if role["parts"])
    assert sum(part["registers"] for part in consumers["parts"]) == 32 + 32 + 32 + 32 + 16 + 16 + 32


def test_a_deterministic_row_adds_in_turns() -> None:
    assert "take turns" not in scene_of_own({"dq": "turns"}).step("add_dq").note
    assert "take turns" in scene_of_own({"dq": "turns"}, deterministic=True).step("add_dq").note


@pytest.mark.parametrize(("pingpong", "words"), [(True, "in the warpgroup's turn"), (False, "at the start of a step")])
def test_the_first_product_waits_for_its_turn(pingpong: bool, words: str) -> None:
    scene = scene_of_own({"dq": "turns", "pingpong": pingpong})
    assert words in scene.step("wgmma_s").note
