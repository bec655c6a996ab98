"""Every shipped row's drawing against the DSL and the compiler: addresses, owners, TMA boxes, descriptors, budgets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.problem import FwdProblem
from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import row_sets
from layouts.dsl import context
from layouts.rows import KERNELS_OWN, ShippedRow, make_scene, shipped_rows, touch_ways, worst_ways
from layouts.scene import AXES, Fragment, Scene, Step
from tests import test_e4m3_cache, test_e4m3_cache_sm80, test_split, test_tables
from tests.kernel_store import KernelStore
from tests.layouts.drawings import WARPGROUP, by_issuer, descriptors_in, descriptors_of, elements, limits_in
from tests.layouts.dsl_oracle import copied_by, owned_by, smem_offsets
from tests.slow import slow_but

OTHERS = ("every producer warp", "every converting warp")  # whose copies have no tiled copy of the DSL
SIZES = {"tile_m", "tile_n", "head_dim", "head_dim_v"}


def name_of(row: ShippedRow) -> str:
    dims = f"{row.problem.operands.head_dim}x{row.problem.operands.head_dim_v}"
    features = sorted(row.problem.features)
    return f"{row.target}-{row.family}-{dims}-{'-'.join((*row.masks, *row.dtypes, *row.lengths, *features))}"


# Rows of few query rows have a kernel of their own: see test_few_rows.py.
ROWS = {name_of(row): row for row in shipped_rows() if not isinstance(row.choice.traits, FwdTraitsFewSm90)}
# A target and a problem of each kernel with which other tests compile it, too: the most demanding ones.
COMPILED: dict[Traits, tuple[str, FwdProblem]] = {
    **{traits: (target, problem) for target, traits, problem in test_split.kernels()},
    **{traits: ("sm_90a", problem) for traits, problem in test_e4m3_cache.kernels(hard=True).items()},
    **{traits: (target, problem) for target, traits, problem in test_e4m3_cache_sm80.kernels()},
    **{
        case.traits: (case.target, case.problem)
        for case in test_tables.compiled_rows()[::-1]
        if isinstance(case.problem, FwdProblem)
    },
}
# What follows from the traits alone is the same on all targets: sm_89 and sm_120 share sm_86's table, and sm_120 has
# sm_89's rows of e4m3 caches.
IN_BYTES = {name for name, row in ROWS.items() if isinstance(row.choice.traits, FwdTraitsCacheSm80)}
DISTINCT = [
    name for name, row in ROWS.items() if row.target not in (("sm_120",) if name in IN_BYTES else ("sm_89", "sm_120"))
]


def first_of_their_kind() -> list[str]:
    """The rows with which a value of a trait other than a size appears in their table."""
    found, seen = [], set()
    for name in DISTINCT:
        row = ROWS[name]
        fields = dataclasses.asdict(row.choice.traits).items()
        kinds = {(row.peers, *field) for field in fields if field[0] not in SIZES}
        if not kinds <= seen:
            found.append(name)
        seen |= kinds
    return found


HOPPER = [name for name in DISTINCT if "-sm90-" in name]
QUICK = first_of_their_kind()
# Of the rows whose kernels nobody else compiles, every fourth, and those with something new; every fourth of bytes.
ALONE = [name for name in DISTINCT if ROWS[name].choice.traits not in COMPILED and name not in QUICK]
FEWER = ALONE, [name for name in DISTINCT if name in IN_BYTES]
WITH_KERNELS = [name for name in DISTINCT if all(name not in of or name in of[::4] for of in FEWER)]
distinct_rows = pytest.mark.parametrize("name", slow_but(DISTINCT, *QUICK))
# Operands made of pairs of bytes are no partitions of the DSL, and come by eight bytes a lane: see
# test_cache_rows_sm80.py.
PARTITIONED = [name for name in DISTINCT if name not in IN_BYTES]
partitioned_rows = pytest.mark.parametrize("name", slow_but(PARTITIONED, *(set(QUICK) - IN_BYTES)))
hopper_rows = pytest.mark.parametrize("name", slow_but(HOPPER, *(name for name in QUICK if name in HOPPER)))


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice)


def kernel_of(row: ShippedRow) -> Any:
    return row.choice.kernel_cls(row.choice.traits, row.problem)


def problem_for(row: Row, dtype: Any, head_dims: tuple[int, int], mask: Any, *features: Any) -> FwdProblem:
    """A problem with these features and those that the row's kernel always has."""
    return FwdProblem.dense(dtype, *head_dims, mask).asking((*features, *(KERNELS_OWN & row.traits.features)))


def is_chosen(row: Row, problem: FwdProblem, target: Any, family: Any, lengths: Any) -> bool:
    """Whether dispatch runs a problem with the row; rows of split keys do not serve every pair of head dims."""
    try:
        return choose_shipped(problem, target, family, lengths).row == row
    except NotImplementedError:
        return False


@pytest.mark.slow
def test_every_row_that_a_problem_of_its_head_dim_reaches_is_drawn_once() -> None:
    few = [row for row in shipped_rows() if isinstance(row.choice.traits, FwdTraitsFewSm90)]
    assert len(ROWS) + len(few) == len(shipped_rows())
    assert len({scene_of(name).id for name in ROWS}) == len(ROWS)
    drawn = [(row.target, row.family, row.choice.row) for row in ROWS.values()]
    assert len(set(drawn)) == len(drawn)
    for (_, *place), _, rows in row_sets("fwd"):
        for row in rows:
            reached = any(
                is_chosen(
                    row, problem_for(row, dtype, (row.traits.head_dim, head_dim_v), mask, *asked), *place, lengths
                )
                for head_dim_v in ROW_HEAD_DIMS
                if head_dim_v <= row.traits.head_dim_v
                for dtype, mask, lengths in itertools.product(row.dtypes, row.masks, row.lengths)
                for asked in ((), ("lse",), ("softcap",))
            )
            assert ((*place, row) in drawn) == reached


@distinct_rows
@pytest.mark.parametrize("tensor", ["q", "k", "v", "o"])
def test_shared_addresses_are_the_dsls(name: str, tensor: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    if tensor == "o" and row.family == "sm90" and not row.choice.traits.stages_o:
        assert "sO" not in {tile.id for tile in scene.tiles}  # it goes from registers to memory
        return
    tile = scene.tile(f"s{tensor.upper()}")
    if tile.element_bytes == 1 and (tensor == "v" or name in IN_BYTES):
        return  # V^T, see test_fp8_rows.py; pairs of bytes, see test_cache_rows_sm80.py
    expected = smem_offsets(kernel_of(row), row.target, tensor, tile.element_bytes)
    drawn = tile.offsets() * tile.element_bytes
    if row.family == "sm90" and tensor in "qo":  # the kernel counts (row, col, warpgroup, stage), the drawing all rows
        rows, cols = tile.shape
        drawn = drawn.reshape(tile.stages, cols, rows // 64, 64).transpose(0, 2, 1, 3)
    assert np.array_equal(drawn.reshape(-1), expected)
    assert len(np.unique(expected)) == expected.size


@distinct_rows
def test_live_tiles_do_not_overlap_and_fill_the_plan(name: str) -> None:
    scene = scene_of(name)
    for tile in (tile for tile in scene.tiles if tile.space == "shared"):
        place = tile.id.removesuffix("_sorted")  # a tile that is put back has the place it came from
        (region,) = (region for region in scene.budget["smem"]["regions"] if region["id"] == place)
        assert (region["start"], region["bytes"]) == (tile.base, tile.layout.size() * tile.element_bytes)
        assert tile.base % 1024 == 0  # the swizzle's period: the drawn XOR of offsets is that of addresses
        assert tile.offsets().max() + 1 == tile.layout.size()


@distinct_rows
def test_each_fragment_element_has_one_owner(name: str) -> None:
    for fragment in scene_of(name).fragments:
        rows, cols = fragment.shape
        threads, values = (mode.size() for mode in fragment.tv.modes())
        owned = fragment.tv.indices().reshape(values, threads)
        copies = threads * values // (rows * cols)
        assert np.array_equal(np.bincount(owned.reshape(-1), minlength=rows * cols), np.full(rows * cols, copies))
        if fragment.operand == "B":  # once in every warp
            per_warp = owned.reshape(values, threads // 32, 32)
            assert copies == threads // 32
            assert all(len(np.unique(per_warp[:, warp])) == rows * cols for warp in range(copies))
        else:  # warpgroups that share rows, and have other keys each, have Q and a part of O each
            sharing = getattr(ROWS[name].choice.traits, "key_warpgroups", 1)
            assert copies == (sharing if fragment.tensor in "QO" else 1)


def operands_of(scene: Scene) -> list[Fragment]:
    """The fragments whose elements lie as a product takes them; of an 8-bit P see test_fp8_rows.py."""
    return [one for one in scene.fragments if one.operand and not (one.id == "rP" and one.dtype == "e4m3")]


def consumers_of(row: ShippedRow) -> tuple[int, int, int]:
    """(warpgroups that divide a tile's rows, those that divide the keys of a block, threads of one)."""
    traits = row.choice.traits
    if isinstance(traits, FwdTraitsSm90):
        return traits.mma_warpgroups, traits.key_warpgroups, WARPGROUP
    return 1, 1, traits.num_threads


@partitioned_rows
def test_fragments_are_the_dsls_partitions(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    groups, sharing, of_group = consumers_of(row)
    with context(row.target):
        kernel = kernel_of(row)
        qk, pv = kernel.tiled_mma_qk(), kernel.tiled_mma_pv()
        for fragment in operands_of(scene):
            rows, cols = fragment.shape
            mma = qk if fragment.tensor in "QKS" else pv
            if fragment.tensor == "V":
                part = (cols, rows)
            else:
                part = (rows // groups if fragment.tensor in "QSPO" else rows, cols)
            if fragment.tensor in "SP":
                part = part[0], cols // sharing
            threads, values = (mode.size() for mode in fragment.tv.modes())
            owned = fragment.tv.indices().reshape(values, threads)
            for thread in (5, of_group - 2):
                at = owned_by(mma, thread, fragment.operand, part)
                expected = at[:, 1] + rows * at[:, 0] if fragment.tensor == "V" else at[:, 0] + rows * at[:, 1]
                assert set(owned[:, thread]) == set(expected)
                if fragment.operand == "C":  # whose registers are in the partition's order
                    assert np.array_equal(owned[:, thread], expected)


@partitioned_rows
def test_copies_are_the_dsls_partitions(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    groups, _, of_group = consumers_of(row)
    with context(row.target):
        kernel = kernel_of(row)
        for step in scene.steps:
            if step.kind not in ("ldmatrix", "stmatrix", "st.shared") or step.role in OTHERS:
                continue
            tensor = step.id[-1].upper()
            copy = getattr(kernel, f"copy_{step.id[-1]}")()
            source, target = step.touches
            for side, touch in (("S", source), ("D", target)):
                rows, cols = next(t.shape for t in (*scene.tiles, *scene.fragments) if t.id == touch.id)
                part = (cols, rows) if tensor == "V" else (rows // groups if tensor in "QPO" else rows, cols)
                named = elements(touch)
                for thread in (9, of_group - 2):
                    at = copied_by(copy, thread, side, part)
                    expected = at[:, 1] + rows * at[:, 0] if tensor == "V" else at[:, 0] + rows * at[:, 1]
                    assert np.array_equal(named[:, :, thread].reshape(-1), expected), (step.id, side, thread)


@distinct_rows
def test_steps_move_every_element_once_and_nothing_else(name: str) -> None:
    scene = scene_of(name)
    parts = (*scene.tiles, *scene.fragments)
    for step in scene.steps:
        for touch in step.touches:
            rows, cols = next(t.shape for t in parts if t.id == touch.id)
            counts = np.bincount(by_issuer(touch).reshape(-1), minlength=rows * cols)
            assert len(counts) == rows * cols and counts.min() >= 1
            if step.kind in (
                "tma",
                "cp.async",
                "st.shared",
                "ld.shared",
                "st.global",
                "stmatrix",
                "convert",
                "permute",
                "add",
                "softmax",
                "fixed softmax",
                "repair",
                "rescale",
            ):
                # Warpgroups that have other keys share what has no keys.
                shared = "n" not in AXES[next(t.tensor for t in parts if t.id == touch.id)]
                copies = getattr(ROWS[name].choice.traits, "key_warpgroups", 1) if shared else 1
                assert counts.max() in (1, copies), (step.id, touch.id)


@hopper_rows
def test_tma_boxes_tile_the_shared_tile(name: str) -> None:
    scene = scene_of(name)
    for step in (step for step in scene.steps if step.kind == "tma"):
        shared = next(touch for touch in step.touches if touch.id.startswith("s"))
        tile = scene.tile(shared.id)
        boxes = by_issuer(shared).transpose(0, 2, 1).reshape(-1, shared.tv.mode(1).size())
        assert np.array_equal(np.sort(boxes.reshape(-1)), np.arange(tile.shape[0] * tile.shape[1]))
        assert step.box is not None and boxes.shape[1] == step.box[0] * step.box[1]
        assert step.box[1] * tile.element_bytes == 16 << tile.swizzle.bits  # as wide as the swizzle, which TMA demands
        # TMA writes a box densely, its columns fastest, and swizzles the addresses: so must the tile lie.
        flat = tile.offsets(swizzled=False).reshape(-1)[: tile.shape[0] * tile.shape[1]]
        for box in boxes:
            assert np.array_equal(flat[box] - flat[box[0]], np.arange(len(box)))


@distinct_rows
def test_p_stays_with_the_threads_that_hold_s(name: str) -> None:
    scene = scene_of(name)
    if not any(fragment.id == "rP" for fragment in scene.fragments):
        return

    def owners(fragment: Fragment) -> np.ndarray[Any, Any]:
        threads, values = (mode.size() for mode in fragment.tv.modes())
        found = np.empty(threads * values, np.int64)
        found[fragment.tv.indices()] = np.tile(np.arange(threads), values)
        return found

    assert np.array_equal(owners(scene.fragment("acc_S")), owners(scene.fragment("rP")))


@partitioned_rows
def test_no_shipped_row_has_a_conflict_and_every_one_would_without_its_swizzle(name: str) -> None:
    scene = scene_of(name)
    # Matrices of V that are every other column; Q that is made into fp16, two lanes a row, once a tile.
    alike = not getattr(ROWS[name].choice.traits, "mixes_columns", True)
    in_pairs = [one for one in scene.steps if {touch.id for touch in one.touches} == {"sQ"}]
    assert worst_ways(scene) == (2 if in_pairs or (alike and "stmatrix_v" in {one.id for one in scene.steps}) else 1)
    unswizzled = [
        int(touch_ways(scene, step, touch, swizzled=False).max())
        for step in scene.steps
        for touch in step.touches
        if touch.lane_bytes
    ]
    assert max(unswizzled) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_budgets_and_descriptors_are_the_compilers(name: str, kernels: KernelStore) -> None:
    """They follow from the traits, so that the kernel of any target and problem which runs with them will do."""
    row, scene = ROWS[name], scene_of(name)
    traits = row.choice.traits
    target, problem = COMPILED.get(traits, (row.target, row.problem))
    compiled = kernels(row.choice.kernel_cls, traits, problem, target)
    registers = scene.budget["registers"]
    assert scene.budget["smem"]["total"] == row.choice.traits.smem_bytes
    ends = [region["start"] + region["bytes"] for region in scene.budget["smem"]["regions"]]
    assert max(ends) == row.choice.traits.smem_bytes
    if row.family == "sm90":
        assert compiled.resources.registers == registers["launch"]
        assert limits_in(compiled) == {role["limit"] for role in registers["roles"]}
        assert descriptors_in(compiled) >= descriptors_of(scene)
    else:
        held = sum(part["registers"] for part in registers["roles"][0]["parts"] if part["name"].startswith("acc"))
        assert held < compiled.resources.registers <= registers["launch"]


def touched(step: Step) -> set[tuple[str, str]]:
    return {(touch.id, touch.mode) for touch in step.touches}


@hopper_rows
def test_only_rows_with_fixed_maxima_are_drawn_with_them(name: str) -> None:
    """Which blocks move the maxima and rescale O, what the others do instead, and who mends it."""
    row, scene = ROWS[name], scene_of(name)
    steps = {step.id: step for step in scene.steps}
    fixed = row.choice.traits.fixed_max
    assert ("fixed_softmax" in steps, "repair" in steps) == (fixed, fixed)
    assert touched(steps["softmax"]) == {("acc_S", "read"), ("acc_S", "write")}
    assert touched(steps["rescale_o"]) == {("acc_O", "read"), ("acc_O", "write")}
    if not fixed:
        assert steps["softmax"].repeat == "every key block"
        return
    cut = "those cut by the mask or by the end of the keys"
    assert steps["softmax"].repeat == f"the tile's first key block, and {cut}"
    assert steps["rescale_o"].repeat == f"of the key blocks, {cut}"
    assert touched(steps["fixed_softmax"]) == {("acc_S", "read"), ("rP", "write")}  # S stays, O is not touched
    assert "shfl" not in steps["fixed_softmax"].instruction and "vote" in steps["fixed_softmax"].instruction
    limit = "448, the largest number of e4m3" if row.problem.operands.is_fp8 else "2^9 = 512"
    assert limit in steps["fixed_softmax"].note
    assert touched(steps["repair"]) == {("acc_S", "read"), ("rP", "write"), ("acc_O", "read"), ("acc_O", "write")}
    assert steps["repair"].repeat.startswith("seldom")


@pytest.mark.parametrize(
    ("changes", "step", "words"),
    [
        ({"exp_rows_before_wait": 1}, "softmax", "one of a thread's two rows"),
        (
            {"exp_rows_before_wait": 2, "fixed_max": True},
            "fixed_softmax",
            "both of a thread's two rows are taken while",
        ),
        ({"fixed_max": True}, "fixed_softmax", "The compiler takes them before or after the wait for the PV product"),
        ({"rescale_in_product": True}, "rescale_o", "After the next QK product has been issued"),
        ({}, "rescale_o", "Before the PV product is issued."),
        ({"pingpong": False}, "wgmma_qk", "Issued, before the PV product of the block before."),
        ({"overlap": False}, "wgmma_qk", "Issued in the warpgroup's turn, then waited for."),
        ({"kv_stage": 3}, "load_k", "Up to 3 tiles ahead"),
        ({"p_in_regs": False}, "stmatrix_p", "Lane i gives the address"),
    ],
)
def test_notes_of_an_sm90_row_of_ones_own_follow_its_traits(changes: dict[str, Any], step: str, words: str) -> None:
    scene = scene_of_own(FwdTraitsSm90(128, 64, 64, 64, **changes), "sm_90a")
    assert words in scene.step(step).note


def test_without_a_producer_a_consumer_loads() -> None:
    alone = {"warp_specialized": False, "pingpong": False, "overlap": False}
    scene = scene_of_own(FwdTraitsSm90(64, 64, 64, 64, **alone), "sm_90a")
    assert scene.step("load_k").role == "one thread of consumer 0"
    assert "1 block ahead" in scene.step("load_k").note


@pytest.mark.parametrize(("fused", "words"), [(True, "until the epilogue"), (False, "over the quad with every block")])
def test_a_plain_softmax_is_told_from_the_fused_one(fused: bool, words: str) -> None:
    scene = scene_of_own(FwdTraitsSm80(128, 64, 64, 64, fused_softmax=fused), "sm_80")
    assert words in scene.step("softmax").note


def test_a_softcap_is_one_of_the_softmaxs_instructions() -> None:
    traits = FwdTraitsSm90(128, 64, 64, 64, fixed_max=True)
    scene = scene_of_own(traits, "sm_90a", softcap=True)
    assert all(scene.step(id).instruction.startswith("tanh") for id in ("softmax", "fixed_softmax"))


def scene_of_own(traits: FwdTraitsSm80 | FwdTraitsSm90, target: str, **extra: Any) -> Scene:
    """The scene of a row that no table has."""
    choice = Choice(traits.family, traits, Row(traits), "a table of one's own")
    return make_scene(FwdProblem.dense("bf16", traits.head_dim, traits.head_dim_v, **extra), target, choice)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "cp.async", "While the QK product runs."),
        ({"eager_loads": False}, "cp.async", "At the start of a step, which waits for K and V."),
        ({"eager_loads": False, "async_copy": False}, "st.shared", "through registers"),
    ],
)
def test_a_row_of_ones_own_is_drawn_with_the_loads_it_has(changes: dict[str, bool], kind: str, words: str) -> None:
    scene = scene_of_own(FwdTraitsSm80(128, 64, 128, 128, **changes), "sm_80")
    step = next(step for step in scene.steps if step.id == "load_v")
    assert step.kind == kind and words in step.note
    touch = next(touch for touch in step.touches if touch.lane_bytes)
    assert touch_ways(scene, step, touch).max() == 1  # rows are swizzled either way
