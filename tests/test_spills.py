"""Kernels of shipped rows that have spilled, and which of their options did it: none does, or it is listed."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cutlass")

from cuteflash.compile import Resources
from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.problem import BwdProblem, Dtype, FwdProblem, MaskKind, Operands, Problem, Scores, Storage
from cuteflash.traits.length_class import LengthClass
from tests import spills
from tests.kernel_store import KernelStore
from tests.spills import SPILLS, is_allowed, kernel_id

TARGET = "sm_90a"
VARLEN = Storage("varlen", "varlen")
PAGED = Storage("dense", "paged", used_k=True)
TABLE = dataclasses.replace(PAGED, has_page_table=True)
bwd, fwd = BwdProblem.dense, FwdProblem.dense


def fp8(
    head_dims: tuple[int, int], mask: MaskKind, storage: Storage, packed_heads: int, *, transposed_v: bool
) -> FwdProblem:
    """A forward of e4m3 with the log-sum-exp."""
    operands = Operands.of("e4m3", *head_dims, packed_heads)
    operands = dataclasses.replace(operands, transposed_v=transposed_v)
    return FwdProblem(operands, Scores(mask), storage, has_lse=True)


def split(mask: MaskKind, packed_heads: int) -> FwdProblem:
    """A forward that splits keys, of the widest heads in fp16."""
    return FwdProblem(Operands.of("fp16", 256, 256, packed_heads), Scores(mask), has_lse=True, is_split=True)


def packed(dtype: Dtype, head_dim: int) -> BwdProblem:
    """A causal backward of packed sequences, with a gradient of the log-sum-exp."""
    return dataclasses.replace(bwd(dtype, head_dim, head_dim, "causal", dlse=True), storage=VARLEN)


def paged(storage: Storage, packed_heads: int) -> FwdProblem:
    """A causal forward on a cache."""
    return FwdProblem(Operands.of("bf16", 64, 64, packed_heads), Scores("causal"), storage, has_lse=True)


# Those of the GPU tests that spilled at some time, or that spill with the options by which rows keep others from it.
CASES: list[tuple[LengthClass, Problem]] = [
    ("tiny", bwd("bf16", 40, 72, "window", softcap=True)),
    ("tiny", bwd("bf16", 64, 64, "causal", deterministic=True)),
    ("tiny", bwd("bf16", 64, 64, "window")),
    ("tiny", bwd("fp16", 96, 96, deterministic=True)),
    ("tiny", bwd("fp16", 256, 256, "window")),
    ("tiny", packed("fp16", 224)),
    ("tiny", packed("bf16", 256)),
    ("small", packed("fp16", 224)),
    ("long", bwd("bf16", 128, 128)),
    ("long", bwd("bf16", 128, 128, softcap=True, deterministic=True)),
    ("long", bwd("fp16", 256, 256)),
    ("long", bwd("fp16", 256, 256, deterministic=True)),
    ("long", bwd("bf16", 256, 256, softcap=True)),
    ("long", bwd("bf16", 248, 248, "causal")),
    ("long", bwd("bf16", 256, 256, "causal", softcap=True)),
    ("long", bwd("bf16", 256, 256, "window")),
    ("long", bwd("bf16", 256, 256, "window", softcap=True)),
    ("long", bwd("fp16", 256, 256, "window")),
    ("short", fwd("fp16", 24, 24)),
    ("short", fwd("fp16", 24, 24, lse=True)),
    ("short", fwd("bf16", 40, 72, "causal")),
    ("short", fwd("bf16", 40, 72, "causal", lse=True)),
    ("long", fwd("bf16", 64, 64, "causal", lse=True, packed_heads=6)),
    ("long", fwd("fp16", 64, 64, "causal", lse=True, packed_heads=7)),
    ("long", paged(PAGED, 4)),
    ("long", paged(TABLE, 7)),
    ("decode", fwd("fp16", 64, 64, "causal", softcap=True, lse=True)),
    ("decode", fwd("bf16", 64, 64, "causal", lse=True, packed_heads=7)),
    ("decode", paged(PAGED, 4)),
    ("long", fwd("fp16", 96, 96, "causal", lse=True)),
    ("short", fwd("fp16", 128, 128)),
    ("decode", split("full", 4)),
    ("decode", split("causal", 4)),
    ("decode", split("window", 7)),
]
CASES_FP8: list[tuple[LengthClass, Problem]] = [
    ("long", fp8((128, 128), "causal", VARLEN, 7, transposed_v=True)),
    ("long", fp8((80, 96), "causal", VARLEN, 1, transposed_v=True)),
    ("short", fp8((64, 64), "full", Storage(), 5, transposed_v=False)),
    ("long", fp8((256, 256), "full", Storage(), 5, transposed_v=False)),
]


@pytest.mark.parametrize(
    ("used", "is_unlisted_allowed", "is_listed_allowed"),
    [
        (Resources(64, 0, 0, 0), True, True),
        (Resources(64, 8, 4, 4), False, True),
        (Resources(64, 16, 5, 4), False, False),
        (Resources(64, 8, 0, 0), False, True),
        (Resources(64, 0, 0, 4), False, True),
        (Resources(64, 0, 0, 0, ("serialised",)), False, False),
    ],
)
def test_what_is_not_listed_may_not_spill_at_all(
    used: Resources, is_unlisted_allowed: bool, is_listed_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "SPILLS", {"listed": 4})
    assert is_allowed(used, "unlisted") is is_unlisted_allowed and is_allowed(used, "listed") is is_listed_allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lengths", "problem"),
    [*(("sm80", *case) for case in CASES), *(("sm90", *case) for case in CASES_FP8)],
    ids=lambda value: (
        kernel_id(type(value), None, value, TARGET) if isinstance(value, FwdProblem | BwdProblem) else value
    ),
)
def test_a_kernel_that_has_spilled_does_not_or_is_listed(
    family: str, lengths: LengthClass, problem: Problem, kernels: KernelStore
) -> None:
    traits = choose_shipped(problem, TARGET, family, lengths).traits  # type: ignore[arg-type]
    kernel_cls = kernel_class(traits)
    used = kernels(kernel_cls, traits, problem, TARGET).resources
    name = kernel_id(kernel_cls, traits, problem, TARGET)
    assert is_allowed(used, name)
    assert bool(used.stack_bytes) == (name in SPILLS)
