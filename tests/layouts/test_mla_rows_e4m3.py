"""Rows of latent attention from an e4m3 cache: which bytes become whose operands, by the kernel's own addresses."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuteflash.dispatch import choose_mla
from cuteflash.kernels.sm80.mla_e4m3 import FlashMlaDecodeE4m3
from cuteflash.mla_problem import HEADS_MAX, LATENT_DIM, LATENT_DIM_V, MlaProblem
from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3
from layouts.rows import make_scene, shipped_rows, touch_ways, worst_ways
from layouts.scene import Scene
from tests.kernel_store import KernelStore
from tests.layouts.drawings import assert_operands_covered, byte_addresses

WARP, CHUNK = 32, 16  # lanes; bytes
ROWS = {row.name: row for row in shipped_rows("mla") if isinstance(row.choice.traits, MlaTraitsE4m3)}
# sm_120 has sm_89's rows: what follows from the traits is the same.
DISTINCT = list({ROWS[name].choice.traits: name for name in ROWS}.values())
distinct_rows = pytest.mark.parametrize("name", DISTINCT)
Places = list[tuple[int, int]]


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def traits_of(name: str) -> MlaTraitsE4m3:
    traits: Any = ROWS[name].choice.traits
    assert isinstance(traits, MlaTraitsE4m3)
    return traits


class Lane(NamedTuple):
    """A thread as `make_fragments` and `fetch_q` see it."""

    thread: int
    lane: int
    warp: int
    row_group: int
    key_group: int
    key_part: int
    k_part: int
    q_groups: tuple[int, ...]  # of 16 query rows, in the product with K


def lanes_of(traits: MlaTraitsE4m3) -> list[Lane]:
    """Some lanes of every warp."""
    found = []
    for warp, lane in itertools.product(range(traits.num_warps), (0, 7, 18, 31)):
        group, keys = warp % traits.warps_m, warp // traits.warps_m
        part = warp % 2 if traits.trades_rows else keys % traits.k_parts
        groups = (group // 2 * 2, group // 2 * 2 + 1) if traits.trades_rows else (group,)
        found.append(Lane(warp * WARP + lane, lane, warp, group, keys, keys // traits.k_parts, part, groups))
    return found


def columns_of(traits: MlaTraitsE4m3, who: Lane) -> list[int]:
    """The first column of each of a warp's steps of 16, by `place_of_pair`."""
    found = []
    for step in range(traits.steps):
        pair = step // 2
        slab, half = (pair, who.k_part) if traits.column_parts > 1 else (pair // 2, pair % 2)
        found.append(64 * slab + 32 * half + 16 * (step % 2))
    return found


def operands(traits: MlaTraitsE4m3, who: Lane) -> dict[str, Places]:
    """What a thread holds, as the kernel's comments and PTX's fragments of m16n8k16 say, in the order of registers."""
    g, t = divmod(who.lane, 4)
    m, n, two = traits.tile_m, traits.tile_n, range(2)
    columns, own = columns_of(traits, who), traits.warp_columns
    keys = range(who.key_part * traits.warp_keys, (who.key_part + 1) * traits.warp_keys, 8)
    mine = range(who.key_group * (n // traits.key_groups), (who.key_group + 1) * (n // traits.key_groups), 8)
    of_16 = range(who.warp * own, (who.warp + 1) * own, 16)
    product = "acc_QK" if traits.column_parts > 1 else "acc_S"
    found = {
        product: [(16 * r + g + 8 * i, k + 2 * t + b) for k in keys for r in who.q_groups for i in two for b in two],
        "rQ": [
            (16 * r + g + 8 * i, c + 4 * t + 2 * h + b)
            for c in columns for r in who.q_groups for h in two for i in two for b in two
        ],
        "rK": [(k + g, c + 4 * t + 2 * h + b) for c in columns for k in keys for h in two for b in two],
        "rP": [
            (r + g + 8 * i, k + 2 * t + b + 8 * h)
            for k in range(0, n, 16) for r in range(0, m, 16) for h in two for i in two for b in two
        ],
        "rV": [
            (k + 2 * t + b + 8 * h, c + 2 * g + odd)
            for k in range(0, n, 16) for c in of_16 for odd in two for h in two for b in two
        ],
        "acc_O": [
            (r + g + 8 * i, c + 4 * t + 2 * b + odd)
            for c in of_16 for odd in two for r in range(0, m, 16) for i in two for b in two
        ],
    }  # fmt: skip
    in_the_end = [(16 * who.row_group + g + 8 * i, k + 2 * t + b) for k in mine for i in two for b in two]
    assert product == "acc_QK" or found["acc_S"] == in_the_end
    return found | {"acc_S": in_the_end}


def numbers(places: Places, rows: int) -> list[int]:
    """The elements at these (row, column)."""
    return [row + rows * column for row, column in places]


def test_every_row_that_dispatch_takes_is_drawn_once() -> None:
    problem = MlaProblem("bf16", is_e4m3=True)
    expected = {
        (target, choose_mla(problem, heads, target))
        for target in ("sm_89", "sm_90a", "sm_120")
        for heads in range(1, HEADS_MAX + 1)
    }
    drawn: list[Any] = [(row.target, row.choice.traits) for row in ROWS.values()]
    assert set(drawn) == expected and len(drawn) == len(expected)
    assert len({row.name for row in shipped_rows("mla")}) == len(shipped_rows("mla"))
    assert all(row.features == ("e4m3_cache",) and "e4m3_cache" in scene_of(name).id for name, row in ROWS.items())


@distinct_rows
def test_fragments_are_what_the_kernel_makes_of_the_bytes(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    for who in lanes_of(traits):
        expected = operands(traits, who)
        assert set(expected) == {fragment.id for fragment in scene.fragments}
        for id, places in expected.items():
            fragment = scene.fragment(id)
            owned = fragment.tv.indices().reshape(-1, traits.num_threads)[:, who.thread]
            assert owned.tolist() == numbers(places, fragment.shape[0]), id


@distinct_rows
def test_ldmatrix_has_the_kernels_addresses(name: str) -> None:
    """`fetch_q` and `fetch_pairs`, in the order of the loops of `product_qk` and `product_pv`."""
    scene, traits = scene_of(name), traits_of(name)
    found = {x: byte_addresses(scene, scene.step(f"ldmatrix_{x}").touches[0]) for x in ("q", "k", "v")}
    m, n = traits.tile_m, traits.tile_n

    def pairs(row: int, chunk: int, slab: int) -> int:
        return slab * n * 64 + row * 64 + (chunk ^ row // 2 % 4) * CHUNK

    for who in lanes_of(traits):
        columns, row, side = columns_of(traits, who), who.lane % 16, who.lane // 16
        first = who.key_part * traits.warp_keys
        expected_q = []
        for column, group in itertools.product(columns, who.q_groups):
            at, chunk = group * 16 + row, column % 64 // 8 + side
            expected_q.append(column // 64 * m * 128 + at * 128 + (chunk ^ at % 8) * CHUNK)
        expected_k = [
            pairs(first + key + row, column % 64 // 16 + side, column // 64)
            for column in columns[::2]
            for key in range(0, traits.warp_keys, 16)
        ]
        chunks = traits.warp_columns // CHUNK
        expected_v = [
            pairs(k + row, chunk % 4 + side, who.warp * (chunks // 4) + chunk // 4)
            for k in range(0, n, 16)
            for chunk in range(0, chunks, 2)
        ]
        for tensor, expected in (("q", expected_q), ("k", expected_k), ("v", expected_v)):
            assert found[tensor][:, who.thread].tolist() == expected, tensor


@distinct_rows
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_lanes_get_what_ldmatrix_gives_them(name: str, tensor: str) -> None:
    """Of matrix i lane 8 i + r gives row r; lane 4 g + t gets elements 2 t, 2 t + 1 of row g, or transposed."""
    step, traits = scene_of(name).step(f"ldmatrix_{tensor}"), traits_of(name)
    read, write = (touch.elements() for touch in step.touches)  # (instructions, bytes, threads)
    for number, warp in ((0, 0), (len(read) - 1, traits.num_warps - 1)):
        matrices = read[number, :, warp * WARP : (warp + 1) * WARP].T.reshape(4, 8, 8, 2)
        for lane in range(WARP):
            group, t = divmod(lane, 4)
            at = (group, slice(2 * t, 2 * t + 2))
            got = [one[at if tensor == "k" else at[::-1]] for one in matrices]
            assert sorted(np.concatenate(got).reshape(-1)) == sorted(write[number, :, warp * WARP + lane])


@distinct_rows
def test_q_is_sorted_as_the_kernel_sorts_it(name: str) -> None:
    """`prepare_q`: words are moved, and what a product's lane then reads are its four neighbouring columns."""
    scene, traits = scene_of(name), traits_of(name)
    read, write = (touch.elements() for touch in scene.step("prepare_q").touches)
    rows = traits.tile_m
    moved = np.empty(rows * LATENT_DIM, np.int64)  # place in the sorted tile -> element
    moved[write.reshape(-1)] = read.reshape(-1)
    for who in lanes_of(traits):
        pair = who.lane % 8
        target = who.lane - pair + pair // 2 + pair % 2 * 4
        assert (write[0, 0, who.thread] // rows, read[0, 0, who.thread] // rows) == (2 * target, 2 * who.lane)
        assert set(read[:, :, who.thread].reshape(-1) % rows) == set(range(who.warp, rows, traits.num_warps))
        fetched = scene.step("ldmatrix_q").touches[0].elements()
        places = fetched[:, :, who.warp * WARP : (who.warp + 1) * WARP]  # (instructions, 8 elements, lanes)
        group, t = divmod(who.lane, 4)
        matrices = places.transpose(0, 2, 1).reshape(len(places), 4, 8, 4, 2)[:, :, group, t]
        expected = numbers(operands(traits, who)["rQ"], rows)
        assert moved[matrices].reshape(-1).tolist() == expected


@distinct_rows
def test_warps_that_share_columns_leave_products_for_each_other(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    if traits.column_parts == 1:
        assert "add_parts" not in {step.id for step in scene.steps}
        return
    places = scene.tile("sS").offsets().reshape(-1)
    assert len(np.unique(places)) == places.size
    for who in lanes_of(traits):
        found = operands(traits, who)
        mine = numbers(found["acc_S"], traits.tile_m)
        assert set(found["acc_S"]) < set(found["acc_QK"])
        expected = [e % 4 + 4 * (who.thread + traits.num_threads * (e // 4)) for e in range(len(mine))]
        assert places[mine].tolist() == expected
    words = "half of the rows" if traits.trades_rows else "half of the keys"
    assert words in scene.step("add_parts").note


@distinct_rows
def test_every_step_covers_its_operands_without_conflicts(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    assert_operands_covered(scene)
    scores, values = (scene.step(id).instructions * traits.num_warps for id in ("mma_qk", "mma_pv"))
    assert scores == traits.tile_m // 16 * traits.tile_n // 8 * LATENT_DIM // 16
    assert values == traits.tile_m // 16 * LATENT_DIM_V // 8 * traits.tile_n // 16
    assert worst_ways(scene) == 1
    for tensor in ("k", "v"):
        step = scene.step(f"ldmatrix_{tensor}")
        assert touch_ways(scene, step, step.touches[0], swizzled=False).max() >= 4


@distinct_rows
@pytest.mark.parametrize(("tensor", "count"), [("gO", 4), ("gO_part", 2)])
def test_stores_write_neighbours_once(name: str, tensor: str, count: int) -> None:
    scene = scene_of(name)
    (step,) = (step for step in scene.steps if step.kind == "st.global" and step.touches[1].id == tensor)
    read, written = (touch.elements() for touch in step.touches)
    assert np.array_equal(read, written) and written.shape[1] == count
    assert sorted(written.reshape(-1)) == list(range(scene.sizes["m"] * LATENT_DIM_V))
    places = scene.tile(tensor).offsets().reshape(-1)[written]
    assert (np.diff(places, axis=1) == 1).all() and (places[:, 0] % count == 0).all()


@distinct_rows
def test_held_registers_and_regions_are_those_of_the_traits(name: str) -> None:
    scene, traits = scene_of(name), traits_of(name)
    (role,) = scene.budget["registers"]["roles"]
    held = {part["name"]: part["registers"] for part in role["parts"]}
    block = scene.fragment("rQ").registers // traits.steps
    fetched = 0 if traits.q_kept == traits.steps else block
    product = held["acc_QK" if traits.column_parts > 1 else "acc_S"]
    assert held["rQ"] - fetched + product + held["acc_O"] == traits.accumulator_regs
    regions = {region["id"]: region for region in scene.budget["smem"]["regions"]}
    for tile in (tile for tile in scene.tiles if tile.space == "shared" and tile.id != "sV"):
        region = regions.pop(tile.id)
        assert (region["start"], region["bytes"]) == (tile.base, tile.layout.size() * tile.element_bytes)
    assert set(regions) == {"maxima", "factors", "scales"}
    assert np.array_equal(scene.tile("sV").offsets(), scene.tile("sK").offsets()[:, :LATENT_DIM_V])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DISTINCT if traits_of(name).trades_rows][:1])
def test_instructions_are_the_compilers(name: str, kernels: KernelStore) -> None:
    scene, traits = scene_of(name), traits_of(name)
    compiled = kernels(FlashMlaDecodeE4m3, traits, MlaProblem("bf16", is_e4m3=True), ROWS[name].target)
    assert traits.accumulator_regs < compiled.resources.registers <= scene.budget["registers"]["launch"]
    assert scene.budget["smem"]["total"] == traits.smem_bytes
    kinds = ("ldmatrix", "mma", "st.global")
    for instruction in {part for one in scene.steps if one.kind in kinds for part in one.instruction.split(", ")}:
        assert compiled.found(re.escape(instruction)), instruction
