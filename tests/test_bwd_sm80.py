"""The sm80 backward without a GPU: what it compiles to, the order of its turns, what its traits refuse."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cuteflash.core.mask import IntervalMask
from cuteflash.core.tile import is_lone
from cuteflash.core.turns import turn_of
from cuteflash.core.workspace import PARTS, Workspace
from cuteflash.problem import MASK_KINDS, BwdProblem
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80

pytest.importorskip("cutlass")

from cuteflash.kernels.common.bwd_prepare import THREADS, lanes_of_row
from cuteflash.kernels.sm80.bwd import FlashBwdSm80
from tests.cross_compile import KernelStore

ROW = BwdTraitsSm80(64, 128, 64, 64, dq_warps=4)  # shipped for sm_80, so that it is compiled anyway
HARDEST = BwdProblem.dense("bf16", 64, 64, "window", softcap=True, deterministic=True)
STAGED = BwdTraitsSm80(64, 64, 96, 32, num_warps=4, s_warps=2, dkv_warps=2, stages=1)
ALONG_KEYS = BwdTraitsSm80(32, 128, 64, 64, num_warps=4)


@pytest.mark.slow
def test_a_kernel_uses_ampere_instructions_and_does_not_spill(kernels: KernelStore) -> None:
    compiled = kernels(FlashBwdSm80, ROW, HARDEST, "sm_80")
    for instruction in (
        "LDGSTS.E.BYPASS",  # cp.async past L1
        "LDSM.16.M88.4",  # ldmatrix
        "LDSM.16.MT88.4",  # transposing ldmatrix
        "HMMA.16816.F32.BF16",
        "RED.E.ADD.F32",  # dQ
        "LDG.E.128",  # O and dO before, dQ after the main kernel
        "STG.E.128",
    ):
        assert instruction in compiled.sass, instruction
    compiled.assert_clean()
    assert compiled.ptx.count(".entry") == 3  # prepare, main, finish
    assert "mbarrier" not in compiled.ptx and "cp.async.bulk" not in compiled.ptx


@pytest.mark.slow
def test_a_deterministic_kernel_with_all_options_compiles(kernels: KernelStore) -> None:
    problem = BwdProblem.dense("fp16", 72, 24, "window", softcap=True, dlse=True, deterministic=True)
    traits = dataclasses.replace(STAGED, vector_add=True, fresh_addresses=True)
    ptx = kernels(FlashBwdSm80, traits, problem, "sm_90a").ptx
    assert "red.relaxed.gpu.global.add.v4.f32" in ptx  # dQ, 16 bytes at once
    assert "fence.acq_rel.gpu" in ptx  # turns


def visits(mask: IntervalMask, tile_m: int, tile_n: int) -> dict[int, list[int]]:
    """The key blocks that add to each query tile, by ascending key."""
    found: dict[int, list[int]] = {}
    for n_block in range(-(-mask.seqlen_k // tile_n)):
        first = n_block * tile_n
        for m_block in range(*mask.m_blocks(first, min(first + tile_n, mask.seqlen_k) - 1, tile_m)):
            found.setdefault(m_block, []).append(n_block)
    return found


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_the_key_blocks_of_a_query_tile_take_turns_without_a_gap(mask: str) -> None:
    windows = [(0, 0), (3, 2), (0, 9), (9, 0)] if mask == "window" else [(0, 0)]
    for seqlen_q, seqlen_k, (left, right) in itertools.product((1, 5, 8, 13, 24), (1, 4, 9, 16, 30), windows):
        for tile_m, tile_n in ((2, 4), (4, 2), (4, 4)):
            interval = IntervalMask(mask, seqlen_q, seqlen_k, left, right)
            for m_block, n_blocks in visits(interval, tile_m, tile_n).items():
                turns = [turn_of(interval, n_block, m_block, tile_m, tile_n) for n_block in n_blocks]
                assert turns == list(range(len(turns)))


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_the_only_block_of_a_lone_sequence_visits_its_queries(mask: str) -> None:
    windows = itertools.product((0, 1, 9), (0, 2, 9)) if mask == "window" else [(0, 0)]
    for seqlen_q, seqlen_k, (left, right) in itertools.product(range(1, 7), range(7), windows):
        found = visits(IntervalMask(mask, seqlen_q, seqlen_k, left, right), 5, 4)
        assert is_lone(seqlen_q, seqlen_k, 5, 4) == (seqlen_q < 6 and 0 < seqlen_k < 5)
        if is_lone(seqlen_q, seqlen_k, 5, 4):
            assert found == {0: [0]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
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


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_lanes_of_a_row_cover_it_and_divide_a_warp(head_dim: int) -> None:
    chunks = head_dim // 8
    lanes = lanes_of_row(chunks)
    assert 32 % lanes == 0 and THREADS % lanes == 0
    assert -(-chunks // lanes) * lanes - chunks < 4  # threads without work in the last pass
