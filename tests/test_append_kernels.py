"""The appending kernel without a GPU: what it compiles to for both families' targets."""

from __future__ import annotations

import pytest

from cuteflash.append_planning import kernel_of
from cuteflash.append_problem import AppendProblem
from cuteflash.kernels.common.append_kv import AppendKv
from cuteflash.traits.append import AppendTraits
from tests.kernel_store import KernelStore
from tests.slow import slow_but

# Each case is there for what no other case compiles.
CASES = {
    "append": AppendProblem("bf16", 128, 128, "bf16", k="dense"),
    "rotated": AppendProblem(
        "bf16", 128, 128, "bf16", q="dense", k="dense", rotary_dim=128, has_batch_idx=True, counts=True
    ),
    "paged": AppendProblem(
        "fp16", 64, 64, "fp16", q="packed", k="packed", is_paged=True, has_rotary_seqlens=True, rotary_dim=32,
        rotary_interleaved=True, rotary_dtype="fp16", counts=True,
    ),
    "odd": AppendProblem("bf16", 72, 40, "bf16", q="dense", k="dense", is_paged=True, rotary_dim=32),
    "fp8": AppendProblem("bf16", 192, 128, "e4m3", q="packed", k="packed", rotary_dim=64),
    "rotation": AppendProblem("bf16", 128, q="dense", has_seqlens=False, rotary_dim=128),
    "packed rotation": AppendProblem("bf16", 256, q="packed", rotary_dim=192),
}  # fmt: skip
BUILDS = [f"{name} for {target}" for name in CASES for target in ("sm_90a", "sm_80")]
BUILDS.remove("fp8 for sm_80")


@pytest.mark.parametrize("case", slow_but(BUILDS, "append for sm_90a", "rotated for sm_90a"))
def test_kernels_are_clean_and_move_16_bytes_at_a_time(kernels: KernelStore, case: str) -> None:
    name, target = case.split(" for ")
    problem = CASES[name]
    compiled = kernels(AppendKv, AppendTraits(), problem, target)
    compiled.assert_clean()
    assert compiled.resources.registers <= 64  # at least half of a multiprocessor's threads
    tensors = (2 if problem.appends else 0) + (problem.q != "none")
    rotated = (1 if problem.appends else 0) + (problem.q != "none") if problem.rotary_dim else 0
    of_tables = 2 * (1 if problem.rotary_dtype == "fp16" else 2)
    assert compiled.count(r"LDG\.E\.128") == 2 * tensors + of_tables * rotated
    wide = 2 * tensors - (4 if problem.quantises else 0)
    assert compiled.count(r"STG\.E\.128") == wide
    assert compiled.count(r"STG\.E\.64") == 2 * tensors - wide
    assert not compiled.count(r"LDG\.E\.U16") and not compiled.count(r"STG\.E\.U")


def test_eight_bits_need_their_instruction() -> None:
    with pytest.raises(NotImplementedError, match="the GPU's target is sm_86; caches of"):
        kernel_of(CASES["fp8"], "sm_86")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fp32", 64), "dtype is 'fp32'"),
        (("bf16", 60), "head_dim is 60"),
        (("bf16", 64, 300, "bf16", "none", "dense"), "head_dim_v is 300"),
        (("bf16", 64, 64, "fp16", "none", "dense"), "cache_dtype is 'fp16'; allowed: None, bf16, e4m3"),
    ],
)
def test_wrong_problems_are_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AppendProblem(*arguments)
