"""Rows of latent attention in the sm80 family: tiles, owners, shared columns and budgets against the kernel's own."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from cuteflash.kernels.sm80.mla_decode import FlashMlaDecodeSm80
from cuteflash.mla_problem import HEADS_MAX, LATENT_DIM, LATENT_DIM_V, MlaProblem
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from layouts.dsl import context, layout_of
from layouts.layout import ComposedLayout
from layouts.read import smem_start
from layouts.rows import latent_row, make_scene, scene_id, shipped_rows, touch_ways, worst_ways
from layouts.scene import Scene
from tests import test_mla_decode_sm80
from tests.kernel_store import KernelStore
from tests.layouts.drawings import assert_operands_covered
from tests.layouts.dsl_oracle import copied_by, owned_by, smem_offsets

WARP = 32
COLUMNS = 32  # of Q and K that a warp has beside each other, where two share them
ROWS = {row.name: row for row in shipped_rows("mla") if isinstance(row.choice.traits, MlaTraitsSm80)}
# sm_89 and sm_120 have sm_86's rows, sm_90a has those of sm_80: what follows from the traits alone is the same.
DISTINCT = list({ROWS[name].choice.traits: name for name in ROWS}.values())
SHARING = [name for name in DISTINCT if ROWS[name].choice.traits.k_parts > 1]  # type: ignore[union-attr]
# A target and a problem of each kernel with which another test compiles it, too.
COMPILED = {row: (target, problem) for target, row, problem in (case.values for case in test_mla_decode_sm80.cases())}
distinct_rows = pytest.mark.parametrize("name", DISTINCT)
sharing_rows = pytest.mark.parametrize("name", SHARING)


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def kernel_of(name: str) -> FlashMlaDecodeSm80:
    kernel = ROWS[name].choice.kernel_cls(ROWS[name].choice.traits, ROWS[name].problem)
    assert isinstance(kernel, FlashMlaDecodeSm80)
    return kernel


def some_threads(traits: MlaTraitsSm80) -> Iterator[tuple[int, int, int]]:
    """(thread, its number among those with the same part of the columns, this part) of a lane of every warp."""
    for warp in range(traits.num_warps):
        group, others = warp % traits.warps_m, warp // traits.warps_m
        lane = (7 * warp + 5) % WARP
        yield (
            warp * WARP + lane,
            (others // traits.k_parts * traits.warps_m + group) * WARP + lane,
            others % traits.k_parts,
        )


def numbers(coordinates: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """The elements at these (row, column)."""
    return coordinates[:, 0] + rows * coordinates[:, 1]


def of_part(found: npt.NDArray[np.int64], part: int, parts: int) -> npt.NDArray[np.int64]:
    """Of what a thread has of all 576 columns, that in its warp's columns."""
    return found[found[:, 1] // COLUMNS % parts == part]


def test_every_row_that_dispatch_takes_is_drawn_once() -> None:
    drawn = [(row.target, row.choice.traits.tile_m, row.choice.traits.tile_n) for row in ROWS.values()]
    expected = {(target, *tile) for target, tiles in test_mla_decode_sm80.TILES.items() for tile in tiles}
    assert set(drawn) == expected and len(drawn) == len(expected)
    assert len({scene_of(name).id for name in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ((16, "sm_90a", None), "sm_90a-sm80-mla-576x512-bf16-16x64"),
        ((33, "sm_90a", None), "sm_90a-sm90-mla-576x512-bf16-64x64"),
        ((HEADS_MAX, "sm_90a", None), "sm_90a-sm90-mla-576x512-bf16-64x64"),
        ((HEADS_MAX, "sm_90a", "sm80"), "sm_90a-sm80-mla-576x512-bf16-64x32"),
        ((16, "sm_80", None), "sm_80-sm80-mla-576x512-bf16-16x64"),
        ((16, "sm_89", None), "sm_89-sm80-mla-576x512-bf16-16x32"),
    ],
)
def test_query_heads_draw_what_dispatch_runs(asked: tuple[int, str, str | None], name: str) -> None:
    heads, target, family = asked
    problem, found, choice = latent_row(heads, "bf16", target, family)  # type: ignore[arg-type]
    assert scene_id(problem, found, choice) == name
    assert getattr(choice.traits, "early_launch", False) == (target == "sm_90a" and choice.family == "sm80")


@distinct_rows
def test_tiles_are_the_kernels(name: str) -> None:
    """K's addresses are those of the DSL, V is its first columns, and all lie where the plan says."""
    scene, kernel, row = scene_of(name), kernel_of(name), ROWS[name]
    plan = kernel.traits.smem_plan
    for tensor in ("k", "v"):
        tile = scene.tile(f"s{tensor.upper()}")
        assert np.array_equal(2 * tile.offsets().reshape(-1), smem_offsets(kernel, row.target, tensor))
        assert tile.base == plan["pages"].start and tile.stages == kernel.traits.kv_stage
    assert np.array_equal(scene.tile("sV").offsets(), scene.tile("sK").offsets()[:, :LATENT_DIM_V])
    with context(row.target):
        tiles = kernel.make_tiles(smem_start())
        for id, held in (("sQ", tiles.sQ), ("sP", tiles.sP)):
            expected = layout_of(held.layout)
            assert isinstance(expected, ComposedLayout) and expected.swizzle.bits > 0
            assert np.array_equal(scene.tile(id).offsets().reshape(-1), expected.indices())
    assert (scene.tile("sQ").base, scene.tile("sP").base) == (plan["q"].start, plan["p"].start)
    regions = {region["id"]: region for region in scene.budget["smem"]["regions"]}
    for tile in (tile for tile in scene.tiles if tile.space == "shared" and tile.id != "sV"):
        size = (int(tile.offsets().max()) + 1) * tile.element_bytes
        assert (regions.pop(tile.id)["start"], size) == (tile.base, tile.layout.size() * tile.element_bytes)
    assert set(regions) == {"maxima", "factors"}


@distinct_rows
def test_fragments_are_the_dsls_partitions(name: str) -> None:
    scene, kernel = scene_of(name), kernel_of(name)
    traits = kernel.traits
    m, n, parts = traits.tile_m, traits.tile_n, traits.k_parts
    product = "acc_QK" if parts > 1 else "acc_S"
    with context(ROWS[name].target):
        qk, pv, scores = kernel.tiled_mma_qk(), kernel.tiled_mma_pv(), kernel.tiled_mma_s()
        for thread, among, part in some_threads(traits):
            expected = {
                "rQ": of_part(owned_by(qk, among, "A", (m, LATENT_DIM)), part, parts),
                "rK": of_part(owned_by(qk, among, "B", (n, LATENT_DIM)), part, parts),
                product: owned_by(qk, among, "C", (m, n)),
                "acc_S": owned_by(scores, thread, "C", (m, n)),
                "rP": owned_by(pv, thread, "A", (m, n)),
                "rV": owned_by(pv, thread, "B", (LATENT_DIM_V, n))[:, ::-1],
                "acc_O": owned_by(pv, thread, "C", (m, LATENT_DIM_V)),
            }
            assert set(expected) == {fragment.id for fragment in scene.fragments}
            for id, at in expected.items():
                fragment = scene.fragment(id)
                owned = fragment.tv.indices().reshape(-1, traits.num_threads)[:, thread]
                assert sorted(owned) == sorted(numbers(at, fragment.shape[0])), id


@distinct_rows
def test_ldmatrix_reads_what_the_kernels_copies_read(name: str) -> None:
    """A warp's fetches of Q and K in their order, those of its own columns; P and V by all warps."""
    scene, kernel = scene_of(name), kernel_of(name)
    traits = kernel.traits
    m, n, parts = traits.tile_m, traits.tile_n, traits.k_parts
    with context(ROWS[name].target):
        copies = {"q": kernel.copy_q(), "k": kernel.copy_k(), "p": kernel.copy_p(), "v": kernel.copy_v()}
        for thread, among, part in some_threads(traits):
            expected = {
                "q": of_part(copied_by(copies["q"], among, "S", (m, LATENT_DIM)), part, parts),
                "k": of_part(copied_by(copies["k"], among, "S", (n, LATENT_DIM)), part, parts),
                "p": copied_by(copies["p"], thread, "S", (m, n)),
                "v": copied_by(copies["v"], thread, "S", (LATENT_DIM_V, n))[:, ::-1],
            }
            for tensor, at in expected.items():
                read = scene.step(f"ldmatrix_{tensor}").touches[0]
                rows = scene.tile(read.id).shape[0]
                assert read.elements()[:, :, thread].reshape(-1).tolist() == numbers(at, rows).tolist(), tensor


@sharing_rows
def test_warps_that_share_columns_add_up_what_the_kernel_adds(name: str) -> None:
    """As `add_parts` does: where a thread finds the other product of its elements, and that the other warp has it."""
    scene, kernel = scene_of(name), kernel_of(name)
    traits = kernel.traits
    rows, count = traits.tile_m, traits.tile_m * traits.tile_n // traits.num_threads
    places = scene.tile("sS").offsets().reshape(-1)
    with context(ROWS[name].target):
        qk, scores = kernel.tiled_mma_qk(), kernel.tiled_mma_s()
        for thread, among, part in some_threads(traits):
            mine = numbers(owned_by(scores, thread, "C", (rows, traits.tile_n)), rows)
            both = numbers(owned_by(qk, among, "C", (rows, traits.tile_n)), rows)  # of the other warp, too
            assert mine.tolist() == both[part * count : (part + 1) * count].tolist()
            expected = [e % 4 + 4 * (thread + traits.num_threads * (e // 4)) for e in range(count)]
            assert places[mine].tolist() == expected
            for touch in scene.step("add_parts").touches:
                assert touch.elements()[:, :, thread].reshape(-1).tolist() == mine.tolist()
    assert len(np.unique(places)) == places.size


@distinct_rows
def test_every_product_and_copy_covers_its_operands(name: str) -> None:
    scene, traits = scene_of(name), kernel_of(name).traits
    assert_operands_covered(scene)
    scores, values = (scene.step(id).instructions * traits.num_warps for id in ("mma_qk", "mma_pv"))
    assert scores == traits.tile_m // 16 * traits.tile_n // 8 * LATENT_DIM // 16
    assert values == traits.tile_m // 16 * LATENT_DIM_V // 8 * traits.tile_n // 16


@distinct_rows
def test_shared_memory_is_free_of_conflicts(name: str) -> None:
    scene = scene_of(name)
    assert worst_ways(scene) == 1
    fetches = [step for step in scene.steps if step.kind == "ldmatrix"]
    assert len(fetches) == 4
    unswizzled = [touch_ways(scene, step, step.touches[0], swizzled=False).max() for step in fetches]
    assert min(unswizzled) >= 4


@distinct_rows
def test_what_is_kept_of_q_is_fetched_once(name: str) -> None:
    scene, traits = scene_of(name), kernel_of(name).traits
    step, fragment = scene.step("ldmatrix_q"), scene.fragment("rQ")
    assert fragment.registers == 8 * traits.steps
    if traits.q_kept == traits.steps:
        assert (step.phase, step.repeat, fragment.live) == ("prologue", "once a tile", fragment.registers)
    else:
        assert step.phase == "loop" and f"the last {32 * traits.q_kept} columns once a tile" in step.repeat
        assert fragment.live == 8 * traits.q_kept + traits.fetch // 4


@distinct_rows
def test_held_registers_are_those_that_the_traits_count(name: str) -> None:
    scene, traits = scene_of(name), kernel_of(name).traits
    (role,) = scene.budget["registers"]["roles"]
    held = {part["name"]: part["registers"] for part in role["parts"]}
    product = held["acc_QK" if traits.k_parts > 1 else "acc_S"]
    assert product == traits.chains * scene.fragment("acc_S").registers * traits.k_parts
    fetched = 0 if traits.q_kept == traits.steps else traits.fetch // 4
    assert held["rQ"] - fetched + product + held["acc_O"] == traits.accumulator_regs
    assert role["threads"] == traits.num_threads


@pytest.mark.slow
@distinct_rows
def test_budgets_are_the_compilers(name: str, kernels: KernelStore) -> None:
    scene, traits = scene_of(name), kernel_of(name).traits
    target, problem = COMPILED[traits]
    assert isinstance(problem, MlaProblem)
    compiled = kernels(FlashMlaDecodeSm80, traits, problem, target)
    registers = scene.budget["registers"]
    assert traits.accumulator_regs < compiled.resources.registers <= registers["launch"]
    ends = [region["start"] + region["bytes"] for region in scene.budget["smem"]["regions"]]
    assert max(ends) == scene.budget["smem"]["total"] == traits.smem_bytes
    for instruction in {step.instruction for step in scene.steps if step.kind in ("ldmatrix", "st.global")}:
        assert compiled.found(re.escape(instruction)), instruction
