"""The sm90 forward kernel without a GPU: what each variant compiles to for sm_90a, and that ptxas has no complaint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from cuteflash.dispatch import choose
from cuteflash.kernels.sm90.fwd import FlashFwdSm90
from cuteflash.problem import FwdProblem, Storage
from cuteflash.traits.arch import get_arch
from cuteflash.traits.sm90 import FwdTraitsSm90
from tests.kernel_record import Kernel
from tests.kernel_store import KernelStore
from tests.slow import slow_but

TARGET = "sm_90a"
PACKED = Storage("varlen", "varlen", used_q=True, used_k=True)


def shipped(problem: FwdProblem, **change: Any) -> tuple[FwdTraitsSm90, FwdProblem]:
    """The traits that the tables choose for a problem, with changes."""
    traits = choose(problem, TARGET, "sm90").traits
    assert isinstance(traits, FwdTraitsSm90)
    return dataclasses.replace(traits, **change), problem


def packed_sequences(problem: FwdProblem, storage: Storage = PACKED) -> FwdProblem:
    return dataclasses.replace(problem, storage=storage)


# Each case is there for what no other case compiles.
CASES = {
    "causal-lse": shipped(FwdProblem.dense("bf16", 64, 64, "causal", lse=True)),
    "full-fp16": shipped(FwdProblem.dense("fp16", 128, 128), q_in_regs=False),
    "window-softcap-lse": shipped(FwdProblem.dense("bf16", 128, 128, "window", softcap=True, lse=True)),
    "q-in-regs": (FwdTraitsSm90(128, 128, 96, 96, q_in_regs=True), FwdProblem.dense("bf16", 96, 96, "causal")),
    "p-in-smem": (FwdTraitsSm90(192, 128, 96, 96, p_in_regs=False), FwdProblem.dense("bf16", 96, 96)),
    "packed-7": shipped(FwdProblem.dense("bf16", 128, 128, "causal", lse=True, packed_heads=7)),
    "packed-8": shipped(FwdProblem.dense("bf16", 64, 64, packed_heads=8)),
    "varlen": shipped(packed_sequences(FwdProblem.dense("bf16", 128, 128, "window", softcap=True, lse=True))),
    "varlen-queries-packed-7": shipped(
        packed_sequences(FwdProblem.dense("fp16", 64, 64, "causal", lse=True, packed_heads=7), Storage("varlen"))
    ),
    "padded": shipped(FwdProblem.dense("bf16", 72, 40, "window")),
    "latent": shipped(FwdProblem.dense("bf16", 192, 128, "causal")),
    "share-q-o": shipped(FwdProblem.dense("bf16", 256, 256, "causal"), share_q_o=True, q_in_regs=False),
    "one-warpgroup": (
        FwdTraitsSm90(64, 64, 64, 64, kv_stage=3, pingpong=False, overlap=False, persistent=False),
        FwdProblem.dense("bf16", 64, 64, "causal"),
    ),
    "no-producer": (
        FwdTraitsSm90(128, 128, 128, 128, warp_specialized=False, pingpong=False, overlap=False, persistent=False),
        FwdProblem.dense("bf16", 128, 128, "causal"),
    ),
    "fixed": (FwdTraitsSm90(192, 128, 64, 64, fixed_max=True), FwdProblem.dense("bf16", 64, 64, "causal", lse=True)),
    "fixed-softcap": (FwdTraitsSm90(192, 128, 64, 64, fixed_max=True), FwdProblem.dense("bf16", 64, 64, softcap=True)),
    "repaired-apart": (
        FwdTraitsSm90(
            128,
            128,
            128,
            128,
            q_stage=2,
            fixed_max=True,
            repair_apart=True,
            exp_rows_before_wait=1,
            longest_first=False,
        ),
        FwdProblem.dense("fp16", 128, 128, "causal", packed_heads=3),
    ),
}


# Instructions that a kernel has exactly where its traits or its problem ask for them.
CONDITIONAL: dict[str, Callable[[FwdTraitsSm90, FwdProblem], bool]] = {
    r"MUFU\.LG2": lambda traits, problem: problem.has_lse,
    r"STG\.E\b": lambda traits, problem: problem.has_lse,
    r"VOTE\.ANY": lambda traits, problem: traits.fixed_max,
    r"MUFU\.TANH": lambda traits, problem: problem.scores.softcap,
    r"LDSM\.16\.M88\.4": lambda traits, problem: traits.q_in_regs,
    r"BAR\.ARV": lambda traits, problem: traits.pingpong,
}


def products(compiled: Kernel, shape: str, *, transposed: bool) -> tuple[int, int]:
    """How many WGMMA products have a shape and B as it lies in memory, or transposed; of how many A is in registers."""
    b = "(?=" if transposed else "(?!"
    every, with_a = (rf"HGMMA\.{shape} {operands}{b}[^;]*\.tnspB)" for operands in ("", r"[^,;]*, R"))
    return compiled.count(every), compiled.count(with_a)


@pytest.mark.parametrize("case", slow_but(CASES, "causal-lse"))
def test_case_uses_hopper_instructions_and_nothing_slows_it_down(case: str, kernels: KernelStore) -> None:
    traits, problem = CASES[case]
    assert traits.check(get_arch(TARGET)) is None
    compiled = kernels(FlashFwdSm90, traits, problem, TARGET)
    compiled.assert_clean()
    assert compiled.count(r"UTMALDG\.") and compiled.count(r"UTMASTG\.")  # TMA in, TMA out
    assert compiled.count(r"STSM\.16\.M88\.4")  # stmatrix
    assert compiled.count("MUFU.EX2")
    assert not compiled.count("LDGSTS") and not compiled.count(r"HMMA\.") and not compiled.count(r"STG\.E\.128")
    for instruction, asked_for in CONDITIONAL.items():
        assert bool(compiled.count(instruction)) == asked_for(traits, problem), instruction

    # Q leaves shared memory before TMA may bring the next tile's, see `Ring.release_loaded`.
    assert compiled.times(r"ldmatrix[^;]*;\s+fence\.proxy\.async\.shared::cta;") == traits.q_in_regs

    split = {traits.producer_regs, traits.mma_regs} if traits.warp_specialized else set()
    changes = [compiled.count(rf"USETMAXREG\S* (?:UP\d, )?{registers:#x}\b") for registers in split]
    assert all(changes) and sum(changes) == compiled.count("USETMAXREG")

    # S = Q K^T and O += P V, unrolled over their k-blocks, with A from registers if the traits say so.
    types = {"bf16": r"F32\.BF16", "fp16": "F32"}[problem.operands.qk_dtype]
    qk, qk_of_registers = products(compiled, rf"64x{traits.tile_n}x16\.{types}", transposed=False)
    pv, pv_of_registers = products(compiled, rf"64x{traits.head_dim_v}x16\.{types}", transposed=True)
    assert qk and qk % (traits.head_dim // 16) == 0
    assert pv and pv % (traits.tile_n // 16) == 0
    assert (qk_of_registers, pv_of_registers) == (qk * traits.q_in_regs, pv * traits.p_in_regs)
    assert qk + pv == compiled.count(r"HGMMA\.")

    barriers, words = traits.smem_handout  # in the gap that the plan leaves
    assert traits.smem_plan["barriers"].end <= barriers.start and words.end <= traits.smem_plan["q"].start

    if problem.scores.softcap:  # every score of every S, in whichever loop it is
        assert compiled.count(r"MUFU\.TANH") == qk // (traits.head_dim // 16) * traits.tile_n // 2
