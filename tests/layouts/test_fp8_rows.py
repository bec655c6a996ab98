"""Rows of 8-bit operands: how V becomes V^T, and P an operand, against the kernel's functions and the hardware's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuteflash.dispatch import Choice
from cuteflash.kernels.sm90.fp8_load import CHUNK, EVEN_BYTES, ODD_BYTES, swizzled
from cuteflash.problem import FwdProblem
from cuteflash.reference.fp8 import natural_keys, permuted_keys
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.row import Row
from layouts.dsl import context
from layouts.rows import ShippedRow, make_scene, shipped_rows, touch_ways
from layouts.scene import Scene, Touch
from tests.layouts.drawings import WARPGROUP, elements
from tests.layouts.dsl_oracle import owned_by, smem_offsets

WARP = 32
Numbers = npt.NDArray[np.int64]


def name_of(row: ShippedRow) -> str:
    operands, words = row.problem.operands, [*row.masks, *row.lengths, *sorted(row.problem.features - {"turned_v"})]
    return f"{operands.head_dim}x{operands.head_dim_v} {'-'.join(words)}{' vt' if operands.transposed_v else ''}"


ROWS = {name_of(row): row for row in shipped_rows() if row.problem.operands.is_fp8}
TURNING = [name for name in ROWS if not name.endswith("vt")]
every_row = pytest.mark.parametrize("name", ROWS)
turning_rows = pytest.mark.parametrize("name", TURNING)


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def kernel_of(name: str) -> Any:
    row = ROWS[name]
    return row.choice.kernel_cls(row.choice.traits, row.problem)


def keys_in_order(count: int) -> Numbers:
    """The key at each position of V^T, by the reference."""
    return permuted_keys(torch.arange(count)).numpy()


def test_rows_are_drawn_with_v_as_they_take_it() -> None:
    assert len(ROWS) == len([row for row in shipped_rows() if row.problem.operands.is_fp8]) and len(TURNING) > 5
    for name in ROWS:
        scene, row = scene_of(name), ROWS[name]
        assert ("sV_stored" in {tile.id for tile in scene.tiles}) == (name in TURNING) == row.choice.traits.turns_v
        assert (
            {tile.element_bytes for tile in scene.tiles if tile.tensor != "O"} == {scene.kernel["element_bytes"]} == {1}
        )
        assert {tile.element_bytes for tile in scene.tiles if tile.tensor == "O"} == {2}
        assert "k32.f32.e4m3.e4m3" in scene.step("wgmma_qk").instruction


@every_row
def test_the_tile_that_the_product_reads_is_vt_in_the_order_of_keys(name: str) -> None:
    scene = scene_of(name)
    keys, columns = scene.tile("sV").shape
    laid = smem_offsets(kernel_of(name), "sm_90a", "vt", 1).reshape(scene.tile("sV").stages, keys, columns)
    drawn = scene.tile("sV").offsets().reshape(scene.tile("sV").stages, columns, keys)
    assert np.array_equal(drawn[:, :, keys_in_order(keys)], laid.transpose(0, 2, 1))
    if name in TURNING:
        stored = smem_offsets(kernel_of(name), "sm_90a", "stored_v", 1)
        assert np.array_equal(scene.tile("sV_stored").offsets().reshape(-1), stored)


@every_row
def test_a_thread_has_four_keys_of_p_in_a_register_and_none_of_another_threads(name: str) -> None:
    scene = scene_of(name)
    p, s = scene.fragment("rP"), scene.fragment("acc_S")
    rows, keys = p.shape
    threads, values = (mode.size() for mode in p.tv.modes())
    owned = p.tv.indices().reshape(values, threads)
    groups = threads // WARPGROUP
    with context("sm_90a"):
        at = owned_by(kernel_of(name).tiled_mma_pv(), 9, "A", (rows // groups, keys))
    assert np.array_equal(owned[:, 9], at[:, 0] + rows * keys_in_order(keys)[at[:, 1]])
    held = s.tv.indices().reshape(-1, threads)
    assert all(set(owned[:, thread]) == set(held[:, thread]) for thread in (0, 9, threads - 1))
    words = (owned[:, 9] // rows).reshape(-1, 4)  # keys, by register
    assert np.array_equal(words - words[:, :1], np.tile([0, 1, 8, 9], (len(words), 1)))


def addresses(scene: Scene, touch: Touch) -> Numbers:
    """(instructions, warps, lanes) byte offsets that lanes give, from the tile's start."""
    offsets = scene.tile(touch.id).offsets().reshape(-1)
    named = elements(touch)[:, 0]
    return offsets[named].reshape(len(named), -1, WARP)


@turning_rows
def test_lanes_address_what_the_kernel_computes(name: str) -> None:
    """The drawing's addresses are those of `Turning`, for every part that its warps visit."""
    scene, traits = scene_of(name), ROWS[name].choice.traits
    keys, columns = traits.tile_n, traits.head_dim_v
    loaded, stored = scene.step("ldmatrix_v").touches[0], scene.step("stmatrix_v").touches[1]
    found = [{tuple(one) for one in addresses(scene, touch).reshape(-1, WARP)} for touch in (loaded, stored)]
    expected: list[set[tuple[int, ...]]] = [set(), set()]
    lanes = [(lane // 8, lane % 8) for lane in range(WARP)]
    for key in range(0, keys, 16):
        for column in range(0, columns, 32):
            read = [swizzled(key + m % 2 * 8 + r, column // CHUNK + m // 2, keys, columns) for m, r in lanes]
            odd = [m % 2 ^ (r // 4 if traits.mixes_columns else 0) for m, r in lanes]
            write = [
                swizzled(column + m // 2 * CHUNK + one + 2 * r, key // CHUNK, columns, keys)
                for one, (m, r) in zip(odd, lanes, strict=True)
            ]
            expected[0].add(tuple(map(int, read)))
            expected[1].add(tuple(map(int, write)))
    assert found == expected


@turning_rows
def test_bytes_go_where_the_instructions_put_them(name: str) -> None:
    """ldmatrix.trans, byte permutes and stmatrix, by their definitions, on the numbers of V's elements."""
    scene = scene_of(name)
    load, permute, store = (scene.step(f"{kind}_v") for kind in ("ldmatrix", "permute", "stmatrix"))
    rows = by_warp(elements(load.touches[0]))  # (.., lane that gives the address, byte)
    got = by_warp(elements(load.touches[1]))  # (.., lane, byte of its four registers)
    lane = np.arange(WARP)
    for matrix in range(4):
        for half in range(2):  # of a register: a pair of bytes at row 2 (lane % 4) + half, b16-column lane / 4
            source = 8 * matrix + 2 * (lane % 4) + half
            for byte in range(2):
                expected = rows[:, source, 2 * (lane // 4) + byte]
                assert np.array_equal(got[:, lane, 4 * matrix + 2 * half + byte], expected)
    assert np.array_equal(by_warp(elements(permute.touches[0])), got)
    words = got.reshape(len(got), WARP, 4, 4)
    selected = [[selector >> shift & 7 for shift in (0, 4, 8, 12)] for selector in (EVEN_BYTES, ODD_BYTES)]
    pairs = [np.concatenate((words[:, :, 2 * half], words[:, :, 2 * half + 1]), axis=-1) for half in range(2)]
    sorted_bytes = np.concatenate([pair[:, :, picks] for pair in pairs for picks in selected], axis=-1)
    if ROWS[name].choice.traits.mixes_columns:  # the upper half of the lanes has the selectors the other way around
        others = np.concatenate([pair[:, :, picks] for pair in pairs for picks in selected[::-1]], axis=-1)
        sorted_bytes[:, 16:] = others[:, 16:]
    assert np.array_equal(by_warp(elements(permute.touches[1])), sorted_bytes)
    assert np.array_equal(by_warp(elements(store.touches[0])), sorted_bytes)
    written = by_warp(elements(store.touches[1]))
    for matrix in range(4):  # a lane's register is 4 bytes of row lane / 4
        for byte in range(4):
            target = written[:, 8 * matrix + lane // 4, 4 * (lane % 4) + byte]
            assert np.array_equal(target, sorted_bytes[:, lane, 4 * matrix + byte])


def by_warp(named: Numbers) -> Numbers:
    """(instructions x warps, lanes, values) of (instructions, values, threads)."""
    instructions, values, threads = named.shape
    return named.reshape(instructions, values, threads // WARP, WARP).transpose(0, 2, 3, 1).reshape(-1, WARP, values)


@turning_rows
def test_the_stores_of_vt_are_without_conflicts_if_columns_are_mixed(name: str) -> None:
    """Of eight columns of a kind, two share their banks; V as it is stored is read without conflicts anyway."""
    scene, mixed = scene_of(name), ROWS[name].choice.traits.mixes_columns
    load, store = scene.step("ldmatrix_v"), scene.step("stmatrix_v")
    assert touch_ways(scene, load, load.touches[0]).max() == 1
    assert touch_ways(scene, store, store.touches[1]).max() == (1 if mixed else 2)


@every_row
def test_keys_of_vt_in_global_memory_lie_in_their_order(name: str) -> None:
    tile = scene_of(name).tile("gV")
    keys, columns = tile.shape
    drawn = tile.offsets()
    if name in TURNING:
        assert np.array_equal(drawn[0], np.arange(keys) * drawn[0, 1]) and drawn[1, 0] == 1
    else:
        assert np.array_equal(natural_keys(torch.arange(keys)).numpy(), drawn[0])
        assert len(np.unique(drawn[:, 0])) == columns


def of_own(**changes: Any) -> Scene:
    traits = FwdTraitsFp8Sm90(128, 128, 128, 128, **{"turns_v": True} | changes)
    problem = FwdProblem.dense("e4m3", 128, 128)
    problem = problem if traits.turns_v else problem.asking(())
    return make_scene(problem, "sm_90a", Choice("sm90", traits, Row(traits, dtypes=("e4m3",)), "a table of one's own"))


def test_two_levels_have_an_accumulator_beside_o() -> None:
    one, two = of_own(), of_own(two_level=True)
    assert one.step("wgmma_pv").touches[2].id == "acc_O" and "acc_PV" not in {part.id for part in one.fragments}
    assert two.step("wgmma_pv").touches[2].id == "acc_PV"
    added = {(touch.id, touch.mode) for touch in two.step("add_pv").touches}
    assert added == {("acc_PV", "read"), ("acc_O", "read"), ("acc_O", "write")}
    assert two.fragment("acc_PV").registers == two.fragment("acc_O").registers == 64
    (held,) = (role for role in two.budget["registers"]["roles"] if role["name"] == "consumer warpgroup")
    assert sum(part["registers"] for part in held["parts"]) == 64 + 16 + 64 + 64


def test_the_producer_holds_what_it_turns() -> None:
    scene = of_own()
    producer = scene.budget["registers"]["roles"][0]
    assert (producer["name"], producer["limit"]) == ("producer warpgroup", 24)
    assert producer["parts"] == [{"name": "rV", "registers": 8}]  # two parts of 16 bytes
    assert "all warps turn V" in scene.roles[0].does
    given = of_own(turns_v=False)
    assert given.budget["registers"]["roles"][0]["parts"] == [] and "all warps" not in given.roles[0].does
    assert dataclasses.asdict(given)["budget"]["smem"]["total"] < scene.budget["smem"]["total"]
