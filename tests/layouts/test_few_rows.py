"""Rows of few query rows and e4m3 caches: whose bytes become whose operands, against the kernel's own addresses."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest

from cuteflash.kernels.sm90.few import FlashFewSm90
from cuteflash.kernels.sm90.swizzle import swizzled
from cuteflash.traits.few_sm90 import PADDING, WARPS, FwdTraitsFewSm90
from cuteflash.traits.tables import FEW_ROWS
from layouts.rows import make_scene, shipped_rows, touch_ways
from layouts.scene import Scene
from tests import test_few_rows
from tests.kernel_store import KernelStore
from tests.layouts.drawings import assert_operands_covered, byte_addresses, limits_in
from tests.layouts.dsl_oracle import smem_offsets
from tests.layouts.test_cache_rows import Words

WARP, CHUNK, COLUMNS = 32, 16, 32  # lanes; bytes; columns that an ldmatrix brings
ROWS = {row.name: row for row in shipped_rows() if isinstance(row.choice.traits, FwdTraitsFewSm90)}
every_row = pytest.mark.parametrize("name", ROWS)
both_tensors = pytest.mark.parametrize("tensor", ["k", "v"])


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def traits_of(name: str) -> FwdTraitsFewSm90:
    traits: Any = ROWS[name].choice.traits
    assert isinstance(traits, FwdTraitsFewSm90)
    return traits


def test_every_shipped_row_is_drawn_once() -> None:
    assert [row.choice.row for row in ROWS.values()] == list(FEW_ROWS["sm90"])
    ids = [row.name for row in shipped_rows()]
    assert len(ids) == len(set(ids))  # beside rows of more query rows of the same problems
    for name, row in ROWS.items():
        assert (f"-{traits_of(name).tile_m}-rows" in name) and row.features == ("split", "e4m3_cache")


@every_row
@both_tensors
def test_tiles_are_the_kernels_pairs_of_bytes(name: str, tensor: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    tile = scene.tile(f"s{tensor.upper()}")
    kernel: Any = row.choice.kernel_cls(row.choice.traits, row.problem)
    words = Words(kernel, kernel.loaded_columns["kv".index(tensor)])
    pairs = smem_offsets(words, "sm_90a", "loaded").reshape(tile.stages, -1, tile.shape[0])  # (stage, word, row)
    drawn = tile.offsets()
    assert np.array_equal(drawn[:, 0::2], pairs) and np.array_equal(drawn[:, 1::2], pairs + 1)
    region = next(one for one in scene.budget["smem"]["regions"] if one["id"] == tile.id)
    assert (region["start"], region["bytes"]) == (tile.base, drawn.size)


@every_row
@both_tensors
def test_ldmatrix_has_the_addresses_of_the_kernels_fetch(name: str, tensor: str) -> None:
    traits, scene = traits_of(name), scene_of(name)
    columns = traits.head_dim if tensor == "k" else traits.head_dim_v
    found = byte_addresses(scene, scene.step(f"ldmatrix_{tensor}").touches[0])
    pairs, keys = range(columns // COLUMNS), range(0, traits.warp_keys, CHUNK)
    places = [(k, p) for p in pairs for k in keys] if tensor == "k" else list(itertools.product(keys, pairs))
    for thread in range(0, WARPS * WARP, 3):
        warp, lane = divmod(thread, WARP)
        expected = [
            swizzled(warp * traits.warp_keys + key + lane % 16, 2 * pair + lane // 16, traits.tile_n, columns)  # type: ignore[arg-type]
            for key, pair in places
        ]
        assert found[:, thread].tolist() == expected


@every_row
@both_tensors
def test_lanes_get_what_ldmatrix_gives_them(name: str, tensor: str) -> None:
    """Of matrix i lane 8 i + r gives row r; lane 4 g + t gets elements 2 t, 2 t + 1 of row g, or transposed."""
    step = scene_of(name).step(f"ldmatrix_{tensor}")
    read, write = (touch.elements() for touch in step.touches)  # (instructions, bytes, threads)
    for number, warp in ((0, 0), (len(read) - 1, WARPS - 1)):
        lanes = slice(warp * WARP, (warp + 1) * WARP)
        matrices = read[number, :, lanes].T.reshape(4, 8, 8, 2)  # (matrix, row, pair of bytes, byte)
        for lane in range(WARP):
            group, t = divmod(lane, 4)
            got = [m[group, 2 * t : 2 * t + 2] if tensor == "k" else m[2 * t : 2 * t + 2, group] for m in matrices]
            assert sorted(np.concatenate(got).reshape(-1)) == sorted(write[number, :, warp * WARP + lane])


@every_row
def test_operands_are_what_the_kernel_makes_of_them(name: str) -> None:
    """`load_q`, `multiply_k`, `multiply_v`, `operand_p` and `hand_over`, register by register of some lanes."""
    traits, scene = traits_of(name), scene_of(name)
    m, n, own = traits.tile_m, traits.tile_n, traits.warp_keys
    rows, keys = range(0, m, 8), range(0, own, 16)
    wide, narrow = range(0, traits.head_dim, 16), range(0, traits.head_dim_v, 16)
    two = range(2)
    for thread in (0, 77, 138, WARPS * WARP - 1):
        warp, (g, t) = thread // WARP, divmod(thread % WARP, 4)
        first = warp * own
        expected = {
            "rQ": [(r + g, c + 4 * t + e) for c in wide for r in rows for e in range(4)],
            "rK": [
                (first + k + g + 8 * i, c + 4 * t + 2 * h + b)
                for c in wide for k in keys for h in two for i in two for b in two
            ],
            "acc_S": [(r + 2 * t + b, first + k + g + 8 * i) for r in rows for k in keys for i in two for b in two],
            "rP": [(r + g, first + k + 2 * t + b + 8 * i) for k in keys for r in rows for i in two for b in two],
            "rV": [
                (first + k + 2 * t + b + 8 * i, c + 2 * g + h)
                for k in keys for c in narrow for i in two for h in two for b in two
            ],
            "acc_O": [(r + 2 * t + b, c + 2 * g + h) for r in rows for c in narrow for h in two for b in two],
        }  # fmt: skip
        height = {"rK": n, "rV": n}
        for fragment in scene.fragments:
            places = [row + height.get(fragment.id, m) * column for row, column in expected.pop(fragment.id)]
            owned = fragment.tv.indices().reshape(-1, WARPS * WARP)[:, thread]
            assert owned.tolist() == places, fragment.id
        assert not expected


@every_row
def test_q_is_read_where_the_kernel_reads_it(name: str) -> None:
    traits, scene = traits_of(name), scene_of(name)
    found = byte_addresses(scene, scene.step("read_q").touches[0])
    for thread in range(0, WARPS * WARP, 5):
        group, t = divmod(thread % WARP, 4)
        expected = [
            swizzled(first + group, 2 * k + t // 2, traits.tile_m, 2 * traits.head_dim) + t % 2 * 8  # type: ignore[arg-type]
            for k in range(traits.head_dim // 16)
            for first in range(0, traits.tile_m, 8)
        ]
        assert found[:, thread].tolist() == expected


@every_row
def test_warps_hand_over_what_they_found_and_merge_rows_of_their_own(name: str) -> None:
    traits, scene = traits_of(name), scene_of(name)
    tile, plan = scene.tile("sO"), traits.smem_plan["found"]
    rows, columns = traits.tile_m, traits.head_dim_v
    places = tile.offsets()  # (warp, column, row)
    warp, column, row = np.indices((WARPS, columns, rows))
    assert np.array_equal(places, (warp * rows + row) * (columns + PADDING) + column)
    statistics = 2 * rows * WARPS
    assert tile.base == plan.start
    assert 4 * ((columns + PADDING) * rows * WARPS + statistics) == plan.nbytes
    read = scene.step("merge_o").touches[0].elements()
    for thread in (0, 40, WARPS * WARP - 1):
        own = rows // WARPS
        merged = set(read[:, :, thread].reshape(-1) % rows)
        assert merged == set(range(thread // WARP * own, (thread // WARP + 1) * own))


@every_row
def test_every_product_and_copy_covers_its_operands(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    assert_operands_covered(scene)
    of_16_keys = traits.warp_keys // 16 * traits.tile_m // 8
    products = [scene.step(id).instructions for id in ("mma_qk", "mma_pv")]
    assert products == [of_16_keys * traits.head_dim // 16, of_16_keys * traits.head_dim_v // 16]


@every_row
def test_shared_memory_is_free_of_conflicts_but_for_q(name: str) -> None:
    scene = scene_of(name)
    banked = {(step.id, touch): step for step in scene.steps for touch in step.touches if touch.lane_bytes}
    worst = {id: int(touch_ways(scene, step, touch).max()) for (id, touch), step in banked.items()}
    assert set(worst) == {"read_q", "ldmatrix_k", "ldmatrix_v", "stage_o"}
    assert worst.pop("read_q") <= 2 and set(worst.values()) == {1}


@every_row
def test_roles_and_registers_are_those_of_the_traits(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    assert [(role.first_thread, role.threads) for role in scene.roles] == [(0, 128), (128, 256)]
    producer, consumers = scene.budget["registers"]["roles"]
    assert (producer["limit"], consumers["limit"]) == (traits.producer_regs, traits.mma_regs)
    held = {part["name"]: part["registers"] for part in consumers["parts"]}
    p = scene.fragment("rP").registers
    assert held["rQ"] + held["acc_S"] + p + held["acc_O"] == traits.accumulator_regs
    assert scene.kernel["query_rows"] == traits.tile_m


@pytest.mark.slow
@pytest.mark.parametrize("row", [FEW_ROWS["sm90"][0], FEW_ROWS["sm90"][-1]], ids=lambda row: row.title)
def test_budgets_and_instructions_are_the_compilers(row: Any, kernels: KernelStore) -> None:
    name = next(name for name in ROWS if ROWS[name].choice.row == row)
    scene, problem = scene_of(name), test_few_rows.problem_of(row.traits.head_dim)
    compiled = kernels(FlashFewSm90, row.traits, problem, "sm_90a")
    registers = scene.budget["registers"]
    assert compiled.resources.registers == registers["launch"]
    assert limits_in(compiled) == {role["limit"] for role in registers["roles"]}
    assert scene.budget["smem"]["total"] == row.traits.smem_bytes
    asked = {part for step in scene.steps if step.kind in ("ldmatrix", "mma") for part in step.instruction.split(", ")}
    for instruction in {*asked, *scene.step("turn_p").instruction.split(", ")}:
        assert compiled.found(re.escape(instruction)), instruction
