"""Rows of e4m3 caches: how bytes become fp16 in shared memory, against the kernel's own addresses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cuteflash.kernels.sm90.convert import place
from cuteflash.kernels.sm90.swizzle import swizzled
from cuteflash.traits.cache_sm90 import WARPS, FwdTraitsCacheSm90
from layouts.rows import ShippedRow, make_scene, shipped_rows, touch_ways
from layouts.scene import Scene
from tests.layouts.drawings import byte_addresses
from tests.layouts.dsl_oracle import smem_offsets

WARP = 32
ROWS = {row.name: row for row in shipped_rows() if isinstance(row.choice.traits, FwdTraitsCacheSm90)}
every_row = pytest.mark.parametrize("name", ROWS)
both_tensors = pytest.mark.parametrize("tensor", ["k", "v"])


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def traits_of(row: ShippedRow) -> FwdTraitsCacheSm90:
    assert isinstance(row.choice.traits, FwdTraitsCacheSm90)
    return row.choice.traits


@every_row
@both_tensors
def test_stored_tiles_are_the_kernels_pairs_of_bytes(name: str, tensor: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    tile = scene.tile(f"s{tensor.upper()}_stored")
    kernel: Any = row.choice.kernel_cls(row.choice.traits, row.problem)
    words = Words(kernel, kernel.loaded_columns["kv".index(tensor)])
    pairs = smem_offsets(words, "sm_90a", "loaded").reshape(tile.stages, -1, tile.shape[0])  # (stage, word, row)
    drawn = tile.offsets()
    assert np.array_equal(drawn[:, 0::2], pairs) and np.array_equal(drawn[:, 1::2], pairs + 1)
    region = next(one for one in scene.budget["smem"]["regions"] if one["id"] == tile.id)
    assert (region["start"], region["bytes"]) == (tile.base, drawn.size) and tile.element_bytes == 1


class Words:
    """A kernel's layout of stored tiles as the oracle asks for one."""

    family = "sm90"

    def __init__(self, kernel: Any, columns: int):
        self.kernel, self.columns = kernel, columns

    def __hash__(self) -> int:
        return hash((self.kernel, self.columns))

    def smem_layout_loaded(self) -> Any:
        return self.kernel.smem_layout_loaded(self.columns)


@every_row
@both_tensors
def test_lanes_convert_what_the_kernel_converts(name: str, tensor: str) -> None:
    """`convert_share`'s addresses, of each unit of each warp, in the order of its loops."""
    traits, scene = traits_of(ROWS[name]), scene_of(name)
    rows, columns = traits.tile_n, traits.head_dim if tensor == "k" else traits.head_dim_v
    share = traits.share(columns)
    read, write = scene.step(f"read_{tensor}").touches[0], scene.step(f"convert_{tensor}").touches[1]
    loads, stores = byte_addresses(scene, read), byte_addresses(scene, write)
    for warp in range(WARPS):
        for lane in range(WARP):
            row, chunk = place(share, lane)
            thread, expected_loads, expected_stores = WARP * warp + lane, [], []
            for column in range(share.columns):
                units = [(warp * share.row_units + i) * share.rows + row for i in range(share.row_units)]
                at = column * share.chunks + chunk
                expected_loads += [swizzled(unit, at, rows, columns) for unit in units]  # type: ignore[arg-type]
                for half in range(2):
                    expected_stores += [swizzled(unit, 2 * at + half, rows, 2 * columns) for unit in units]  # type: ignore[arg-type]
            assert loads[:, thread].tolist() == expected_loads
            assert stores[:, thread].tolist() == expected_stores
    held = scene.step(f"convert_{tensor}").touches[0]
    assert np.array_equal(held.elements(), write.elements())


@every_row
@both_tensors
def test_conversions_are_free_of_conflicts(name: str, tensor: str) -> None:
    scene = scene_of(name)
    for id in (f"read_{tensor}", f"convert_{tensor}"):
        step = scene.step(id)
        (touch,) = (touch for touch in step.touches if touch.lane_bytes)
        assert touch_ways(scene, step, touch).max() == 1


@every_row
def test_products_have_fp16_whatever_q_has(name: str) -> None:
    scene = scene_of(name)
    assert ROWS[name].problem.operands.qk_dtype == "bf16"
    assert scene.step("convert_p").instruction == "cvt.rn.f16x2.f32"
    assert all(scene.step(id).instruction.endswith(".f32.f16.f16") for id in ("wgmma_qk", "wgmma_pv"))


@every_row
def test_roles_are_those_of_the_kernel(name: str) -> None:
    scene, traits = scene_of(name), traits_of(ROWS[name])
    roles = scene.roles
    assert [role.first_thread for role in roles] == list(range(0, traits.num_threads, 128))
    assert sum(role.name.startswith("converter") for role in roles) == traits.converting_warpgroups
    assert sum(role.name.startswith("consumer") for role in roles) == traits.consumer_warpgroups
    limits = {role["name"]: role["limit"] for role in scene.budget["registers"]["roles"]}
    assert {limit for words, limit in limits.items() if "converts" in words} == {traits.converter_regs}
    merges = any(step.id == "merge_o" for step in scene.steps)
    assert merges == (traits.key_warpgroups > 1)
    fits = next(step for step in scene.steps if step.id == "fit_q")  # the shipped problem is of bf16
    assert {touch.id for touch in fits.touches} == {"rQ" if traits.q_in_regs else "sQ"}
