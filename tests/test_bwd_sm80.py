"""The sm80 backward without a GPU: what it compiles to, the order of its turns, what its traits refuse."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest

from cuteflash.core.bwd_launch import LONE_HEADS
from cuteflash.core.lengths import Lengths, Sequence
from cuteflash.core.mask import IntervalMask
from cuteflash.core.tile import is_lone
from cuteflash.core.workspace import PARTS, Workspace
from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DTYPES, MASK_KINDS, BwdProblem, MaskKind
from cuteflash.traits.arch import ARCHS, get_arch
from cuteflash.traits.bwd_sm80 import TURN_REGS, TURN_STEPS, WARPGROUP, BwdTraitsSm80
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.row import ROW_HEAD_DIMS

pytest.importorskip("cutlass")


from cuteflash.kernels.common.bwd_prepare import THREADS, lanes_of_row
from cuteflash.kernels.common.workspace import WorkspaceTensors, WorkspaceTiles
from cuteflash.kernels.sm80.bwd import FlashBwdSm80
from cuteflash.kernels.sm80.bwd_barriers import NamedBarrier, threads_of
from cuteflash.kernels.sm80.bwd_turns import batch_of, last_batch, starts_batch
from tests.kernel_store import KernelStore

ROW = BwdTraitsSm80(64, 128, 64, 64, dq_warps=4)  # shipped for sm_80, so that it is compiled anyway
HARDEST = BwdProblem.dense("bf16", 64, 64, "window", softcap=True, deterministic=True)
STAGED = BwdTraitsSm80(64, 64, 96, 32, num_warps=4, s_warps=2, dkv_warps=2, stages=1)
ALONG_KEYS = BwdTraitsSm80(32, 128, 64, 64, num_warps=4)
SPILLING = ("fp16", "window", 96), ("fp16", "causal", 128)  # on Hopper, if warps of their own keep the turns
TURNS_APART = dataclasses.replace(ROW, vector_add=True, turn_warpgroup=True)  # shipped for sm_90a


@pytest.mark.slow
def test_a_kernel_uses_ampere_instructions_and_does_not_spill(kernels: KernelStore) -> None:
    compiled = kernels(FlashBwdSm80, ROW, HARDEST, "sm_80")
    for instruction in (
        "LDGSTS.E.BYPASS",  # cp.async past L1
        "LDSM.16.M88.4",  # ldmatrix
        "LDSM.16.MT88.4",  # transposing ldmatrix
        r"HMMA\.16816\.F32\.BF16",
        r"RED\.E\.ADD\.F32",  # dQ
        r"LDG\.E\.128",  # O and dO before, dQ after the main kernel
        r"STG\.E\.128",
    ):
        assert compiled.count(instruction), instruction
    compiled.assert_clean()
    assert compiled.times(r"\.entry") == 3  # prepare, main, finish
    assert not compiled.times(r"mbarrier|cp\.async\.bulk")


@pytest.mark.slow
def test_a_deterministic_kernel_with_all_options_compiles(kernels: KernelStore) -> None:
    problem = BwdProblem.dense("fp16", 72, 24, "window", softcap=True, dlse=True, deterministic=True)
    traits = dataclasses.replace(STAGED, vector_add=True, fresh_addresses=True, turn_steps=4)
    compiled = kernels(FlashBwdSm80, traits, problem, "sm_90a")
    assert compiled.times(r"red\.relaxed\.gpu\.global\.add\.v4\.f32")  # dQ, 16 bytes at once
    assert compiled.times(r"fence\.acq_rel\.gpu")  # turns


@pytest.mark.slow
def test_two_warps_of_their_own_keep_the_turns(kernels: KernelStore) -> None:
    compiled = kernels(FlashBwdSm80, TURNS_APART, HARDEST, "sm_90a")
    (main,) = (entry for entry in compiled.ptx.split(".entry ") if "setmaxnreg" in entry)
    changes = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", main)
    assert sorted(changes) == [("dec", str(TURN_REGS)), ("inc", "240")]
    assert "ld.acquire.gpu" in main and re.search(r"atom\.\S*release", main)
    assert "fence.acq_rel.gpu" not in main  # the loads acquire and the additions release
    # All barriers have a number of threads: of the turn warpgroup two warps come to some, two to none.
    kernel = FlashBwdSm80(TURNS_APART, HARDEST)
    threads = {str(barrier.value): str(threads_of(kernel, barrier)) for barrier in NamedBarrier}
    assert set(re.findall(r"\bbar\.(?:sync|arrive)\s+(.*);", main)) == {f"{name}, {n}" for name, n in threads.items()}


@pytest.mark.slow
def test_an_idle_warpgroup_leaves_registers_that_other_calls_need(kernels: KernelStore) -> None:
    traits = BwdTraitsSm80(
        64, 128, 128, 128, double_buffer=False, vector_add=True, turn_warpgroup=True, idle_warpgroup=True
    )
    compiled = kernels(FlashBwdSm80, traits, BwdProblem.dense("bf16", 128, 128, "causal"), "sm_90a")
    compiled.assert_clean()  # without the warpgroup it spills
    (main,) = (entry for entry in compiled.ptx.split(".entry ") if "setmaxnreg" in entry)
    assert set(re.findall(r"\bbar\.sync\s+(.*);", main)) == {"1, 256", "2, 256"}
    assert "bar.arrive" not in main and "ld.acquire" not in main


def test_only_deterministic_calls_have_warps_for_the_turns() -> None:
    plain, deterministic = (
        FlashBwdSm80(TURNS_APART, BwdProblem.dense("bf16", 64, 64, deterministic=asked)) for asked in (False, True)
    )
    assert (plain.turn_threads, plain.turns_between) == (0, False)
    assert (deterministic.turn_threads, deterministic.turns_between) == (WARPGROUP, False)
    idle = FlashBwdSm80(dataclasses.replace(TURNS_APART, idle_warpgroup=True), BwdProblem.dense("bf16", 64, 64))
    assert (idle.turn_threads, idle.turns_apart, idle.turns_between, idle.is_descending) == (
        WARPGROUP,
        False,
        False,
        True,
    )
    between = FlashBwdSm80(ROW, HARDEST)
    assert (between.turn_threads, between.turns_between) == (0, True)


@pytest.mark.parametrize("turn_steps", TURN_STEPS)
def test_batches_await_each_turn_before_the_additions_and_pass_it_on_after_them(turn_steps: int) -> None:
    kernel: Any = SimpleNamespace(traits=SimpleNamespace(turn_steps=turn_steps))
    for count, heads in itertools.product((1, 2, 3, 4, 5, 8, 17), (1, 2)):
        work: Any = SimpleNamespace(blocks=SimpleNamespace(lo=3, hi=3 + count, count=count))

        def batch(head: int, first: Any, work: Any = work) -> list[tuple[int, int]]:
            lanes: Any = (batch_of(kernel, work, lane, first) for lane in range(32))  # type: ignore[arg-type]
            return [(head, block) for block, has_tile in lanes if has_tile]

        steps = [(head, m_block) for head in range(heads) for m_block in reversed(range(3, 3 + count))]
        awaited: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        for number, (head, m_block) in enumerate(steps):
            if starts_batch(kernel, work, m_block):  # type: ignore[arg-type]
                awaited += batch(head, m_block)
                if m_block + turn_steps < work.blocks.hi:
                    passed += batch(head, m_block + turn_steps)
                elif number:
                    passed += batch(head - 1, last_batch(kernel, work))
            assert steps[number] in awaited and passed == steps[: len(passed)] and len(passed) <= number
            assert number - len(passed) < 2 * turn_steps
        assert awaited == steps == passed + batch(heads - 1, last_batch(kernel, work))


def test_deterministic_calls_on_hopper_wait_for_no_fence_in_each_step() -> None:
    for dtype, mask, size in itertools.product(DTYPES, MASK_KINDS, ROW_HEAD_DIMS):
        problem = BwdProblem.dense(dtype, size, size, mask, deterministic=True)
        traits: Any = choose_shipped(problem, "sm_90a", "sm80").traits
        fences = (mask, size) == ("window", 256) or (dtype, mask, size) in SPILLING
        assert (traits.turn_warpgroup or traits.turn_steps > 1) != fences, problem
        assert traits.blocks_per_sm == (2 if size == 64 and mask != "window" else 1)


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_the_only_block_of_a_lone_tile_visits_all_queries(mask: MaskKind) -> None:
    windows = itertools.product((0, 1, 9), (0, 2, 9)) if mask == "window" else [(0, 0)]
    chunks = (None, 1, 3) if mask == "window" else (None,)
    for seqlen_q, seqlen_k, (left, right), chunk in itertools.product(range(1, 9), range(7), windows, chunks):
        lone = is_lone(seqlen_q, seqlen_k, mask, 4)
        assert lone == (0 < seqlen_k < 5 and (mask == "full" or seqlen_q <= seqlen_k))
        if lone:
            interval = IntervalMask(mask, seqlen_q, seqlen_k, left, right, chunk)
            assert interval.m_blocks(0, seqlen_k - 1, 3) == (0, -(-seqlen_q // 3))


def test_a_warpgroup_for_turns_leaves_its_registers_to_the_others() -> None:
    hopper = get_arch("sm_90a")
    assert TURNS_APART.check(hopper) is None
    assert TURNS_APART.register_limit(hopper) == TURNS_APART.mma_regs(hopper) == 240
    assert 240 * TURNS_APART.num_threads + TURN_REGS * WARPGROUP <= hopper.regs_per_sm


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_warps": 4, "s_warps": 2, "dkv_warps": 2, "dq_warps": 2}, "leaves no registers to 4 warps"),
        ({"num_warps": 2, "s_warps": 2, "dkv_warps": 2, "dq_warps": 2}, "a multiple of 4; the target is sm_90a"),
        ({"turn_steps": 4}, "turn_steps 4 is not 1, but turn_warpgroup"),
        ({"lone_tiles": True}, "lone_tiles with turn_warpgroup"),
        ({"turn_warpgroup": False, "idle_warpgroup": True}, "idle_warpgroup needs turn_warpgroup"),
    ],
)
def test_a_warpgroup_for_turns_says_why_it_cannot_run(change: dict[str, int], reason: str) -> None:
    assert reason in str(dataclasses.replace(TURNS_APART, **change).check(get_arch("sm_90a")))


@pytest.mark.parametrize("target", [name for name in ARCHS if name != "sm_90a"])
def test_only_sm_90a_has_a_warpgroup_for_turns(target: str) -> None:
    traits = dataclasses.replace(TURNS_APART, vector_add=False, tile_m=32, tile_n=64, dq_warps=2)
    assert f"turn_warpgroup needs sm_90a and num_warps a multiple of 4; the target is {target}" in str(
        traits.check(get_arch(target))
    )


def test_batches_of_turns_take_fewer_blocks_of_a_head_at_once() -> None:
    assert STAGED.turns_at_once == TURNS_APART.turns_at_once == 4
    assert dataclasses.replace(STAGED, turn_steps=4).turns_at_once == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"turn_steps": 3}, "turn_steps 3 is not one of 1, 2, 4, 8, 16"),
        ({"tile_m": 48}, "s_warps 4 of 8 warps take 64x32 at once, which does not divide 128x48"),
        ({"s_warps": 3}, "s_warps 3 does not divide num_warps 8"),
        ({"dq_warps": 8}, "dq_warps 8 of 8 warps take 128x16 at once, which does not divide 64x128"),
        ({"stages": 3}, "stages 3 is not 1 or 2"),
        ({"vector_add": True}, "vector_add needs sm_90 or later, the target is sm_80"),
        ({"tile_n": 256}, "needs 263168 bytes of shared memory, sm_80 has 166912"),
        ({"blocks_per_sm": 2}, "2 blocks of 164864 + 1024 bytes of shared memory need 331776"),
        ({"head_dim": 264}, "head_dim 264 is not a multiple of 16 up to 256"),
        ({"num_warps": 4}, "fragments take 384 registers a thread, 255 less 16"),
        ({"head_dim_v": 96, "tile_m": 32}, "256 threads copy 64 rows of head_dim_v at once: tile_m 32"),
    ],
)
def test_traits_say_why_they_cannot_run(change: dict[str, int], reason: str) -> None:
    traits = BwdTraitsSm80(64, 128, 128, 128)
    assert traits.check(get_arch("sm_80")) is None
    assert reason in str(dataclasses.replace(traits, **change).check(get_arch("sm_80")))


def test_p_goes_through_shared_memory_unless_warps_divide_the_keys_only() -> None:
    assert not STAGED.p_in_regs and "p" in STAGED.smem_plan
    assert ALONG_KEYS.p_in_regs and "p" not in ALONG_KEYS.smem_plan


def test_a_workspace_holds_statistics_the_sum_and_turns_of_whole_tiles() -> None:
    assert ROW.workspace(2, 3, 65) == Workspace(batch=2, heads=3, tiles=2, tile_m=64, head_dim=64)
    assert ROW.workspace(2, 3, 65).size == 3 * (2 * 128 * (2 + 64) + 2 * 2 * PARTS)


def test_a_workspace_without_a_sum_holds_statistics_only() -> None:
    two_passes = BwdTwoPassTraitsSm90(64, 64, 64, 64)
    assert two_passes.workspace(2, 3, 65).size == 3 * 2 * 128 * 2
    assert two_passes.workspace_packed(2, 3, 65).size == 3 * (65 // 64 + 3) * 64 * 2


def test_tiles_of_all_heads_are_numbered_head_by_head() -> None:
    tiles, heads = 3, 2
    turns: Any = SimpleNamespace(shape=(PARTS, 2 * tiles, heads))
    unused: Any = None
    workspace = WorkspaceTensors(unused, unused, unused, turns, tiles, unused, 64)  # type: ignore[arg-type]
    first = [workspace.first_number(head, entry) for head in range(heads) for entry in range(2)]  # type: ignore[arg-type]
    assert first == [0, 3, 6, 9]


def tiles_of(
    order: Any,
    heads: int,
    at_once: int,
    lengths: Any,
    is_packed: bool,
    lone_tiles: bool,
    mask: MaskKind,
    all_rounded: bool = False,
) -> WorkspaceTiles:
    """Of 32 rows, for a kernel that skips those whose dQ is no sum."""
    return WorkspaceTiles(
        order=order,
        heads=heads,  # type: ignore[arg-type]
        heads_per_kv=1,  # type: ignore[arg-type]
        heads_at_once=at_once,
        lengths=lengths,
        is_packed=is_packed,
        skips_lone=lone_tiles,
        all_rounded=all_rounded,
        lone_tiles=lone_tiles,
        held_dq=0,
        mask=mask,
        tile_m=32,
        tile_n=32,
    )


@pytest.mark.parametrize("lone_tiles", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_dq_is_summed_up_in_memory_unless_its_only_block_stores_it(is_packed: bool, lone_tiles: bool) -> None:
    for seqlen_q, seqlen_k, m_block in itertools.product((1, 32, 33, 64), (0, 1, 32, 33), (0, 1)):
        order: Any = SimpleNamespace(tile=lambda index: (index, 0, 0))
        lengths: Any = SimpleNamespace(sequence=lambda n, q=seqlen_q, k=seqlen_k: Sequence(0, q, 0, k))
        tiles = tiles_of(order, 1, 1, lengths, is_packed, lone_tiles, "causal")
        exists = 32 * m_block < seqlen_q
        if exists or is_packed:  # of a dense batch no tile is asked for that does not exist
            place = tiles.place(m_block)  # type: ignore[arg-type]
            assert place.exists == exists
            assert place.has_sum == (exists and not (lone_tiles and is_lone(seqlen_q, seqlen_k, "causal", 32)))


@pytest.mark.usefixtures("selects_now")
@pytest.mark.parametrize(
    ("lone_tiles", "seqlen_k", "blocks"), [(True, 32, 1), (True, 33, 7), (True, 0, 7), (False, 9, 7)]
)
def test_a_dense_batch_of_lone_tiles_has_no_sums_to_look_for(lone_tiles: bool, seqlen_k: int, blocks: int) -> None:
    order: Any = SimpleNamespace(size=lambda: 7)
    tiles = tiles_of(order, 1, 1, Lengths(5, seqlen_k), False, lone_tiles, "full")
    assert tiles.blocks() == blocks


@pytest.mark.usefixtures("selects_now")
@pytest.mark.parametrize(
    ("mask", "seqlen_q", "seqlen_k", "blocks"),
    [("full", 99, 1, 1), ("full", 99, 0, 7), ("causal", 99, 99, 1), ("causal", 99, 98, 7), ("window", 99, 200, 1)],
)
def test_a_dense_batch_whose_last_blocks_round_has_no_sums_to_look_for_unless_a_query_sees_no_key(
    mask: MaskKind, seqlen_q: int, seqlen_k: int, blocks: int
) -> None:
    order: Any = SimpleNamespace(size=lambda: 7)
    tiles = tiles_of(order, 1, 1, Lengths(seqlen_q, seqlen_k), False, False, mask, all_rounded=True)
    assert tiles.blocks() == blocks


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 24])
def test_blocks_take_each_head_of_a_tile_once(heads: int) -> None:
    taken = []
    for group in range(-(-heads // LONE_HEADS)):
        order: Any = SimpleNamespace(tile=lambda index, group=group: (0, group, 0))
        lengths: Any = SimpleNamespace(sequence=lambda n: Sequence(0, 1, 0, 64))
        tiles = tiles_of(order, heads, LONE_HEADS, lengths, True, True, "full")
        first = tiles.place(0).head  # type: ignore[arg-type]
        taken += list(range(first, min(first + LONE_HEADS, heads)))
    assert taken == list(range(heads))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_lanes_of_a_row_cover_it_and_divide_a_warp(head_dim: int) -> None:
    chunks = head_dim // 8
    lanes = lanes_of_row(chunks)
    assert 32 % lanes == 0 and THREADS % lanes == 0
    assert -(-chunks // lanes) * lanes - chunks < 4  # threads without work in the last pass
