"""Rows of latent attention in the sm90 family: tiles, owners, descriptors against the kernel's own and the compiler."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

from cuteflash.kernels.sm90.mla_decode import FlashMlaDecodeSm90
from cuteflash.kernels.sm90.mla_decode_half import make_half
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaProblem
from cuteflash.traits.mla_sm90 import SLAB, MlaTraitsSm90
from layouts.dsl import context, layout_of, plain
from layouts.read import smem_start
from layouts.rows import make_scene, shipped_rows, touch_ways, worst_ways
from layouts.scene import Scene
from tests.kernel_store import KernelStore
from tests.layouts.drawings import WARPGROUP, descriptors_in, descriptors_of, limits_in
from tests.layouts.dsl_oracle import owned_by

OF_BOTH_FAMILIES = {row.name: row for row in shipped_rows("mla") if not row.features}  # caches of 16 bits
ROWS = {name: row for name, row in OF_BOTH_FAMILIES.items() if row.family == "sm90"}
every_row = pytest.mark.parametrize("name", ROWS)


@functools.cache
def scene_of(name: str) -> Scene:
    row = OF_BOTH_FAMILIES[name]
    return make_scene(row.problem, row.target, row.choice)


def kernel_of(name: str) -> FlashMlaDecodeSm90:
    kernel = ROWS[name].choice.kernel_cls(ROWS[name].choice.traits, ROWS[name].problem)
    assert isinstance(kernel, FlashMlaDecodeSm90)
    return kernel


def traits_of(name: str) -> MlaTraitsSm90:
    return kernel_of(name).traits


def test_every_shipped_row_is_drawn_once() -> None:
    assert [type(row.choice.traits) for row in ROWS.values()] == [MlaTraitsSm90]
    assert len({scene_of(name).id for name in ROWS}) == len(ROWS)


@every_row
def test_tiles_are_the_kernels(name: str) -> None:
    """Q and K are two tensors each, which together are the kernel's tiles; V is K."""
    scene, kernel = scene_of(name), kernel_of(name)
    with context("sm_90a"):
        page = layout_of(kernel.smem_layout(LATENT_DIM, 2)).indices().reshape(2, LATENT_DIM, -1)  # bytes are swizzled
        halves = [plain(tensor.layout).indices().reshape(2, 64, 256) for tensor in kernel.make_tiles(smem_start()).sVt]
    plan = traits_of(name).smem_plan
    k, kr, v, q, qr = (scene.tile(id) for id in ("sK", "sKr", "sV", "sQ", "sQr"))
    pages = plan["pages"].start
    assert (k.base, kr.base, q.base) == (pages, pages + 2 * LATENT_DIM_V * 64, plan["q"].start)
    together = np.concatenate((k.offsets(swizzled=False), kr.offsets(swizzled=False) + LATENT_DIM_V * 64), axis=1)
    with context("sm_90a"):
        outer = layout_of(kernel.smem_layout(LATENT_DIM, 2)).layout  # type: ignore[union-attr]
    assert np.array_equal(together, outer.indices().reshape(2, LATENT_DIM, -1))
    assert together.shape == page.shape
    assert (v.base, v.layout) == (k.base, k.layout)
    for who, half in enumerate(halves):  # (page, key, column): the warpgroup's columns, from its own half on
        own = v.offsets(swizzled=False)[:, 256 * who : 256 * (who + 1)].transpose(0, 2, 1)
        assert np.array_equal(own - own[0, 0, 0], half)
    whole = outer.indices().reshape(2, LATENT_DIM, -1)[0]
    assert np.array_equal(np.concatenate((q.offsets(False), qr.offsets(False) + LATENT_DIM_V * 64)), whole)
    assert qr.base == plan["p1"].start == q.base + 2 * LATENT_DIM_V * 64


@every_row
def test_p_lies_where_the_plan_says(name: str) -> None:
    scene, plan = scene_of(name), traits_of(name).smem_plan
    tile = scene.tile("sP")
    starts = [tile.base + tile.element_bytes * int(stage.min()) for stage in tile.offsets()]
    assert starts == [plan["p1"].start, plan["p0"].start] and tile.stages == 2
    with context("sm_90a"):
        p = plain_of(kernel_of(name).smem_layout(SLAB))
    assert np.array_equal(tile.offsets(swizzled=False)[0].reshape(-1), p)
    assert tile.swizzle is not None and tile.swizzle.base == 3  # of elements: 4 of bytes


def plain_of(composed: Any) -> np.ndarray[Any, Any]:
    found = layout_of(composed)
    return found.layout.indices()  # type: ignore[union-attr]


@every_row
def test_fragments_are_the_dsls_partitions(name: str) -> None:
    scene = scene_of(name)
    with context("sm_90a"):
        kernel = kernel_of(name)
        half = make_half(kernel, kernel.make_tiles(smem_start()), 0)
        shapes = {"rQr": (half.mma_qk_last, (64, 64)), "acc_S": (half.mma_qk, (64, 64)), "rP": (half.mma_own, (64, 64)),
                  "acc_O": (half.mma_own, (64, 256))}  # fmt: skip
        for id, (mma, shape) in shapes.items():
            fragment = scene.fragment(id)
            rows, _ = fragment.shape
            owned = fragment.tv.indices().reshape(-1, 2 * WARPGROUP)
            for who in (0, 1):
                at = owned_by(mma, 77, fragment.operand, shape)
                columns = at[:, 1] + (256 * who if id == "acc_O" else 0)
                assert set(owned[:, WARPGROUP * who + 77]) == set(at[:, 0] + rows * columns)
        assert fragment.registers == 128


@every_row
def test_every_product_and_copy_covers_its_operands(name: str) -> None:
    scene = scene_of(name)
    parts = {part.id: part.shape for part in (*scene.tiles, *scene.fragments)}
    for step in scene.steps:
        for touch in step.touches:
            rows, cols = parts[touch.id]
            named = touch.elements()
            assert set(named.reshape(-1)) == set(range(rows * cols)), (step.id, touch.id)
    products = {step.id: step for step in scene.steps if step.kind == "wgmma"}
    assert [step.instructions for step in products.values()] == [32, 4, 8, 8]
    assert {step.descriptor["b"].tile for step in products.values()} == {"sK", "sKr", "sV"}  # type: ignore[index, union-attr]
    assert worst_ways(scene) == 1
    stored = scene.step("stmatrix_p")
    assert touch_ways(scene, stored, stored.touches[1], swizzled=False).max() == 8


@every_row
def test_pages_come_in_the_rows_groups(name: str) -> None:
    step, traits = scene_of(name).step("load_k"), traits_of(name)
    assert ", ".join(map(str, traits.groups)) in step.note


@pytest.mark.slow
@every_row
def test_budgets_and_descriptors_are_the_compilers(name: str, kernels: KernelStore) -> None:
    scene = scene_of(name)
    compiled = kernels(FlashMlaDecodeSm90, traits_of(name), MlaProblem("bf16"), "sm_90a")
    registers = scene.budget["registers"]
    assert compiled.resources.registers == registers["launch"]
    assert limits_in(compiled) == {role["limit"] for role in registers["roles"]}
    assert descriptors_in(compiled) >= descriptors_of(scene)
    kinds = ("tma", "wgmma", "ldmatrix", "stmatrix", "st.global")
    for instruction in {step.instruction for step in scene.steps if step.kind in kinds}:
        assert compiled.found(re.escape(instruction)), instruction


@pytest.mark.parametrize("name", OF_BOTH_FAMILIES)
@pytest.mark.parametrize(("tensor", "size"), [("gO", 8), ("gO_part", 4)])
def test_stores_of_16_bytes_write_everything_once(name: str, tensor: str, size: int) -> None:
    scene = scene_of(name)
    (step,) = (step for step in scene.steps if step.kind == "st.global" and step.touches[1].id == tensor)
    read, written = (touch.elements() for touch in step.touches)  # (instructions, values, threads)
    assert written.shape[1] == size and sorted(written.reshape(-1)) == list(range(scene.sizes["m"] * 512))
    places = scene.tile(tensor).offsets().reshape(-1)[written]
    assert (np.diff(places, axis=1) == 1).all() and (places[:, 0] % size == 0).all()
    quads = (np.sort(x.swapaxes(1, 2).reshape(len(x), -1, 4 * size), axis=2) for x in (read, written))
    assert np.array_equal(*quads)  # lanes that trade have just what they write
