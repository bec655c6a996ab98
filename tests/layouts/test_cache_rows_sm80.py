"""Rows of e4m3 caches in the sm80 family: which bytes become whose operands, by the kernel's loops and the DSL."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cuteflash.dispatch import choose_shipped
from cuteflash.kernels.sm80.fwd import FlashFwdSm80
from cuteflash.problem import FwdProblem
from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.tables import CACHE_ROWS
from layouts.command import scene_json
from layouts.dsl import context
from layouts.rows import make_scene, shipped_rows, touch_ways
from layouts.scene import Scene
from tests import test_e4m3_cache_sm80
from tests.kernel_store import KernelStore
from tests.layouts.drawings import assert_operands_covered, byte_addresses
from tests.layouts.dsl_oracle import copied_by, owned_by, smem_offsets
from tests.layouts.test_web_kernel import of_scores
from tests.test_e4m3_cache_sm80 import HEAD_DIMS, TARGETS

WARP, QUAD, MMA_K = 32, 4, 16
ROWS = {row.name: row for row in shipped_rows() if isinstance(row.choice.traits, FwdTraitsCacheSm80)}
# Targets share rows, and a row that splits keys has the tiles of the one that does not.
DISTINCT = list({row.choice.traits: name for name, row in ROWS.items() if "split" in row.features}.values())
SORTING = [name for name in DISTINCT if not ROWS[name].choice.traits.q_in_regs]  # type: ignore[union-attr]
distinct_rows = pytest.mark.parametrize("name", DISTINCT)
sorting_rows = pytest.mark.parametrize("name", SORTING)
both_tensors = pytest.mark.parametrize("tensor", ["k", "v"])
Numbers = npt.NDArray[np.int64]


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def traits_of(name: str) -> FwdTraitsCacheSm80:
    traits: Any = ROWS[name].choice.traits
    assert isinstance(traits, FwdTraitsCacheSm80)
    return traits


def kernel_of(name: str) -> FlashFwdSm80:
    kernel = ROWS[name].choice.kernel_cls(ROWS[name].choice.traits, ROWS[name].problem)
    assert isinstance(kernel, FlashFwdSm80)
    return kernel


def some_threads(name: str) -> Iterator[tuple[int, list[int], int]]:
    """(thread, its query rows as `ScoreTile.row` counts them, its place among the four lanes with these rows)."""
    for warp, lane in itertools.product(range(traits_of(name).num_warps), (0, 7, 18, 31)):
        group, t = divmod(lane, QUAD)
        yield warp * WARP + lane, [MMA_K * warp + group + 8 * half for half in range(2)], t


def columns_of_words(tensor: str, traits: FwdTraitsCacheSm80) -> int:
    """Pairs of bytes of a row."""
    return traits.loaded_columns["kv".index(tensor)]


def both_bytes(pairs: Numbers, rows: int) -> Numbers:
    """(pairs, 2): the numbers of both elements of pairs at (row, column)."""
    first = pairs[:, 0] + rows * 2 * pairs[:, 1]
    return np.stack([first, first + rows], axis=-1)


def held_pairs(name: str, tensor: str, thread: int) -> Numbers:
    """(blocks, groups, halves, elements of a register, 2): elements that a thread's registers of pairs of bytes have.

    In the order of `stored` in `product_qk` and `product_pv`.
    """
    traits, kernel = traits_of(name), kernel_of(name)
    words = columns_of_words(tensor, traits)
    is_v = tensor == "v"
    shape = (words, traits.tile_n) if is_v else (traits.tile_n, words)
    with context(ROWS[name].target):
        held = owned_by(kernel.tiled_mma(), thread, "B", shape)
    groups, blocks = shape[0] // 8, shape[1] // MMA_K
    return both_bytes(held[:, ::-1] if is_v else held, traits.tile_n).reshape(blocks, groups, 2, 2, 2)


def owned(scene: Scene, id: str, thread: int) -> list[int]:
    tv = scene.fragment(id).tv
    found: list[int] = tv.indices().reshape(-1, tv.mode(0).size())[:, thread].tolist()
    return found


def test_every_shipped_row_is_drawn_once() -> None:
    expected = {
        (
            target,
            choose_shipped(test_e4m3_cache_sm80.problem_of(dims, hard=True, is_split=split), target, "sm80", of).row,
        )
        for target, dims, split, of in itertools.product(TARGETS, HEAD_DIMS, (True, False), LENGTH_CLASSES)
    }
    drawn = [(row.target, row.choice.row) for row in ROWS.values()]
    assert set(drawn) == expected and len(drawn) == len(expected)
    assert {row for _, row in drawn} == set(CACHE_ROWS["sm80"])
    ids = [row.name for row in shipped_rows()]
    assert len(ids) == len(set(ids))
    for name, row in ROWS.items():
        assert row.features == (("split", "e4m3_cache") if traits_of(name).splits else ("e4m3_cache",))
        assert scene_of(name).id == name and row.peers.rows == CACHE_ROWS["sm80"]


@distinct_rows
@both_tensors
def test_tiles_are_the_kernels_pairs_of_bytes(name: str, tensor: str) -> None:
    scene = scene_of(name)
    tile = scene.tile(f"s{tensor.upper()}")
    places = smem_offsets(kernel_of(name), ROWS[name].target, tensor)
    pairs = places.reshape(tile.stages, -1, tile.shape[0])  # (stage, pair of columns, row)
    drawn = tile.offsets().reshape(tile.stages, tile.shape[1], tile.shape[0])
    assert np.array_equal(drawn[:, 0::2], pairs) and np.array_equal(drawn[:, 1::2], pairs + 1)
    region = next(one for one in scene.budget["smem"]["regions"] if one["id"] == tile.id)
    assert (region["start"], region["bytes"], region["stages"]) == (tile.base, drawn.size, tile.stages)
    assert tile.element_bytes == scene.tile(f"g{tensor.upper()}").element_bytes == 1


@distinct_rows
@both_tensors
def test_copies_are_the_dsls_partitions(name: str, tensor: str) -> None:
    """cp.async and ldmatrix of pairs, and the same byte by byte."""
    traits, kernel, scene = traits_of(name), kernel_of(name), scene_of(name)
    words = columns_of_words(tensor, traits)
    shape = traits.tile_n, words
    with context(ROWS[name].target):
        copies = (
            (f"load_{tensor}", kernel.load_copy(words)),
            (f"ldmatrix_{tensor}", getattr(kernel, f"copy_{tensor}")()),
        )
        for (id, copy), (side, which) in itertools.product(copies, (("S", 0), ("D", 1))):
            touch = scene.step(id).touches[which]
            is_turned = tensor == "v" and id.startswith("ldmatrix")
            for thread in (9, traits.num_threads - 2):
                found = copied_by(copy, thread, side, shape[::-1] if is_turned else shape)
                expected = both_bytes(found[:, ::-1] if is_turned else found, traits.tile_n)
                assert touch.elements()[:, :, thread].reshape(-1).tolist() == expected.reshape(-1).tolist(), (id, side)


@distinct_rows
@both_tensors
def test_lanes_get_what_ldmatrix_gives_them(name: str, tensor: str) -> None:
    """Of matrix i lane 8 i + r gives row r; lane 4 g + t gets elements 2 t, 2 t + 1 of row g, or transposed."""
    read, write = (touch.elements() for touch in scene_of(name).step(f"ldmatrix_{tensor}").touches)
    for number, warp in ((0, 0), (len(read) - 1, traits_of(name).num_warps - 1)):
        matrices = read[number, :, warp * WARP : (warp + 1) * WARP].T.reshape(4, 8, 8, 2)  # (.., row, pair, byte)
        for lane in range(WARP):
            group, t = divmod(lane, QUAD)
            at = (group, slice(2 * t, 2 * t + 2))
            got = [one[at if tensor == "k" else at[::-1]] for one in matrices]
            assert sorted(np.concatenate(got).reshape(-1)) == sorted(write[number, :, warp * WARP + lane])


@distinct_rows
def test_operands_are_what_the_kernel_makes_of_them(name: str) -> None:
    """`take_q`, `product_qk`, `product_pv` and `quads_view`, register by register."""
    traits, scene = traits_of(name), scene_of(name)
    m, two = traits.tile_m, range(2)
    wide, narrow = range(0, traits.head_dim, MMA_K), range(0, traits.head_dim_v, MMA_K)
    for thread, rows, t in some_threads(name):
        k, v = (held_pairs(name, tensor, thread) for tensor in "kv")
        keys = range(0, traits.tile_n, 8)
        expected = {
            "rQ": [rows[i] + m * (c + QUAD * t + 2 * h + b) for c in wide for h in two for i in two for b in two],
            # A register's four bytes are a fragment; its halves are those of two k-blocks.
            "rK": k.transpose(0, 2, 1, 3, 4).reshape(-1).tolist(),
            "acc_S": [rows[i] + m * (key + 2 * t + b) for key in keys for i in two for b in two],
            "rP": [rows[i] + m * (key + 2 * t + b + 8 * h) for key in keys[::2] for h in two for i in two for b in two],
            # The bytes of one column come together: fragments of the even columns, then of the odd ones.
            "rV": v.transpose(0, 1, 4, 2, 3).reshape(-1).tolist(),
            "acc_O": [
                rows[i] + m * (c + QUAD * t + 2 * b + odd) for c in narrow for odd in two for i in two for b in two
            ],
        }
        assert set(expected) == {fragment.id for fragment in scene.fragments}
        for id, places in expected.items():
            assert owned(scene, id, thread) == places, id


@distinct_rows
def test_q_is_read_where_the_kernel_reads_it(name: str) -> None:
    traits, scene = traits_of(name), scene_of(name)
    places = smem_offsets(kernel_of(name), ROWS[name].target, "q").reshape(traits.head_dim, traits.tile_m)
    read, *held = scene.step("read_q").touches
    assert read.elements().shape[1] == QUAD and (np.diff(read.elements(), axis=1) == traits.tile_m).all()
    found = byte_addresses(scene, read)
    for thread, rows, t in some_threads(name):
        columns = [column + QUAD * t for column in range(0, traits.head_dim, MMA_K)]
        assert found[:, thread].tolist() == [places[column, row] for row in rows for column in columns]
        if name not in SORTING:
            (written,) = held
            assert np.array_equal(written.elements(), read.elements())
            fitted = scene.step("fit_q").touches[0].elements()[:, :, thread]
            assert [set(of_row % traits.tile_m) for of_row in fitted] == [{row} for row in rows]


@sorting_rows
def test_q_is_put_back_where_ldmatrix_finds_it(name: str) -> None:
    traits, scene, kernel = traits_of(name), scene_of(name), kernel_of(name)
    shape = traits.tile_m, traits.head_dim
    places = smem_offsets(kernel, ROWS[name].target, "q").reshape(shape[::-1])
    read, write, step = scene.step("read_q").touches[0], scene.step("sort_q").touches[0], scene.step("ldmatrix_q")
    stored, fetched = (byte_addresses(scene, touch) for touch in (write, step.touches[0]))
    for thread, rows, t in some_threads(name):
        columns = [c + 8 * half + 2 * t for c in range(0, traits.head_dim, MMA_K) for half in range(2)]
        assert stored[:, thread].tolist() == [places[column, row] for row in rows for column in columns]
        assert set(write.elements()[:, :, thread].reshape(-1)) == set(read.elements()[:, :, thread].reshape(-1))
        with context(ROWS[name].target):
            given, got = (copied_by(kernel.copy_q(), thread, side, shape) for side in "SD")
        assert fetched[:, thread].tolist() == places[given[::8, 1], given[::8, 0]].tolist()
        # What lies where the copy finds this thread's elements is what the fragment has.
        held = step.touches[1].elements()[:, :, thread].reshape(-1)
        tile = scene.tile("sQ_sorted")
        assert (tile.offsets().reshape(-1)[held] * tile.element_bytes).tolist() == places[got[:, 1], got[:, 0]].tolist()
        assert held.tolist() == owned(scene, "rQ", thread)
    assert step.phase == "loop" and scene.tile("sQ_sorted").base == scene.tile("sQ").base


@distinct_rows
def test_q_that_stays_is_not_put_back(name: str) -> None:
    ids = {step.id for step in scene_of(name).steps} | {tile.id for tile in scene_of(name).tiles}
    alone = {"sort_q", "ldmatrix_q", "sQ_sorted"} if name in SORTING else {"fit_q"}
    assert ids & {"sort_q", "ldmatrix_q", "sQ_sorted", "fit_q"} == alone
    if name in SORTING:
        assert "cvt.rn.f16x2.f32" in scene_of(name).step("sort_q").instruction


def test_the_page_draws_q_on_its_way_there_and_back_as_one_way() -> None:
    scene = scene_json(scene_of(SORTING[0]))
    column = dict(of_scores(scene, "[...CF.flow.columns(s)]"))
    way = ["step load_q", "sQ", "step read_q", "step sort_q", "sQ_sorted", "step ldmatrix_q", "rQ", "step mma_qk"]
    assert [column[one] for one in way] == sorted({column[one] for one in way})
    assert "shared memory" in of_scores(scene, "CF.explain.partWords(s.part('sQ_sorted'))")


@distinct_rows
def test_o_is_written_where_the_kernel_writes_it(name: str) -> None:
    """`stage_quads` to shared memory, `Partials.write` to a slot: neighbours, row by row."""
    traits, scene = traits_of(name), scene_of(name)
    places = smem_offsets(kernel_of(name), ROWS[name].target, "o").reshape(traits.head_dim_v, traits.tile_m)
    held, staged = scene.step("stage_o").touches
    found = byte_addresses(scene, staged)
    for thread, rows, t in some_threads(name):
        columns = [column + QUAD * t for column in range(0, traits.head_dim_v, MMA_K)]
        assert found[:, thread].tolist() == [places[column, row] for row in rows for column in columns]
        pairs = [(row, column + b) for row in rows for column in columns for b in (0, 2)]
        stored = scene.step("store_o_part").touches[1].elements()[:, :, thread]
        assert stored[:, 0].tolist() == [row + traits.tile_m * column for row, column in pairs]
    for (source, target), count in (((held, staged), QUAD), (scene.step("store_o_part").touches, 2)):
        written = target.elements()
        assert np.array_equal(source.elements(), written) and written.shape[1] == count
        assert (np.diff(written, axis=1) == traits.tile_m).all()


@distinct_rows
def test_every_product_and_copy_covers_its_operands(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    assert_operands_covered(scene)
    tiles = traits.tile_m // traits.num_warps // MMA_K
    scores, values = (scene.step(id) for id in ("mma_qk", "mma_pv"))
    assert scores.instructions == tiles * traits.tile_n // 8 * traits.head_dim // MMA_K
    assert values.instructions == tiles * traits.head_dim_v // 8 * traits.tile_n // MMA_K
    assert all(step.instruction.endswith(".f32.f16.f16.f32") for step in (scores, values))
    assert scene.step("convert_p").instruction == "cvt.rn.f16x2.f32"
    assert {one.dtype for one in scene.fragments if one.operand != "C"} == {"f16"}


@distinct_rows
def test_shared_memory_is_free_of_conflicts_but_for_eight_bytes_a_lane(name: str) -> None:
    scene = scene_of(name)

    def worst(swizzled: bool) -> dict[str, int]:
        banked = ((step, touch) for step in scene.steps for touch in step.touches if touch.lane_bytes)
        return {step.id: int(touch_ways(scene, step, touch, swizzled).max()) for step, touch in banked}

    ways = worst(swizzled=True)
    expected = {"load_q", "load_k", "load_v", "read_q", "ldmatrix_k", "ldmatrix_v", "stage_o", "read_o"}
    assert set(ways) == expected | ({"sort_q", "ldmatrix_q"} if name in SORTING else set())
    assert (ways.pop("read_q"), ways.pop("stage_o")) == (2, 2) and set(ways.values()) == {1}
    plain = worst(swizzled=False)
    assert min(plain["ldmatrix_k"], plain["ldmatrix_v"]) >= 2


@distinct_rows
def test_held_registers_are_those_of_the_traits(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    (role,) = scene.budget["registers"]["roles"]
    held = {part["name"]: part["registers"] for part in role["parts"]}
    of_q = held["rQ"] if traits.q_in_regs else 0
    assert of_q + held["acc_S"] + held["acc_O"] == traits.accumulator_regs
    # A k-block of 16 pairs of bytes has as many registers as a product's operand made of it; one of V as half of it.
    k_blocks, v_blocks = (min(1 + traits.ahead, blocks) for blocks in (traits.head_dim // 32, traits.tile_n // MMA_K))
    assert held["rK"] == (k_blocks + 1) * traits.tile_n // 4
    assert held["rV"] == (v_blocks + 2) * traits.head_dim_v // 8
    if not traits.q_in_regs:
        assert held["rQ"] == 2 * (1 + traits.ahead) * 4
    assert (role["limit"], role["threads"]) == (scene.budget["registers"]["launch"], traits.num_threads)


def test_a_q_of_fp16_is_taken_as_it_is() -> None:
    name = DISTINCT[0]
    row, traits = ROWS[name], traits_of(name)
    problem = FwdProblem.dense("fp16", traits.head_dim, traits.head_dim_v).asking(row.problem.features)
    steps = [step.id for step in make_scene(problem, row.target, row.choice).steps]
    assert steps == [step.id for step in scene_of(name).steps if step.id != "fit_q"]


def compiled_rows() -> list[Any]:
    """A row that keeps Q and one that does not, with the problems and targets that other tests compile them with."""
    cases = {traits: (target, problem) for target, traits, problem in test_e4m3_cache_sm80.kernels()}
    drawn = {traits_of(name): name for name in ROWS if ROWS[name].target == "sm_89" and traits_of(name).splits}
    names = [next(name for traits, name in drawn.items() if traits.head_dim == size) for size in (128, 192)]
    return [pytest.param(name, *cases[traits_of(name)], id=name) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "problem"), compiled_rows())
def test_instructions_are_the_compilers(name: str, target: str, problem: FwdProblem, kernels: KernelStore) -> None:
    scene = scene_of(name)
    compiled = kernels(FlashFwdSm80, traits_of(name), problem, target)
    kinds = ("cp.async", "ldmatrix", "mma", "ld.shared", "st.shared", "st.global")
    instructions = [step.instruction for step in scene.steps if step.kind in kinds]
    asked = {part.split(" ")[0] for one in instructions for part in one.split(", ") if part[0].isalpha()}
    assert {"cvt.rn.f16x2.e4m3x2", "prmt.b32", "ld.shared.v2.b32", "st.shared.v2.b32"} <= asked
    assert ("st.shared.b32" in asked) == (not traits_of(name).q_in_regs)
    for instruction in (*asked, scene.step("convert_p").instruction):
        assert compiled.found(re.escape(instruction)), instruction
    assert traits_of(name).accumulator_regs < compiled.resources.registers <= scene.budget["registers"]["launch"]
    assert scene.budget["smem"]["total"] == traits_of(name).smem_bytes
