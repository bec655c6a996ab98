"""What people and tables call a problem."""

from __future__ import annotations

from cuteflash.mla_problem import AnyProblem, MlaProblem
from cuteflash.problem import FEATURES, FP8_OUT, SINK_DTYPES, BwdProblem, Problem


def extras_of(problem: Problem) -> list[str]:
    """What a problem has beyond operands and mask, in words: features, `used_q`, `dlse`, `packed 4`, `fp16 out`, .."""
    extras: list[str] = [name for name in FEATURES if name in problem.features]
    extras += ["chunked"] * problem.scores.chunked
    extras += [name for name in ("used_q", "used_k") if getattr(problem.storage, name)]
    if problem.storage.k == "paged":
        extras.append(f"paged {problem.storage.page_rows}")
        extras += ["wide boxes"] * problem.storage.wide_boxes
        extras += [
            name.removeprefix("has_")
            for name in ("has_page_table", "has_cache_batch_idx", "has_leftpad")
            if getattr(problem.storage, name)
        ]
    if problem.scores.sink not in (None, SINK_DTYPES[0]):
        extras.append(f"{problem.scores.sink} sink")
    if isinstance(problem, BwdProblem) and problem.has_dlse:
        extras.append("dlse")
    if problem.operands.packed_heads > 1:
        extras.append(f"packed {problem.operands.packed_heads}")
    if problem.operands.is_fp8 and problem.operands.o_dtype != FP8_OUT:
        extras.append(f"{problem.operands.o_dtype} out")
    return extras


def problem_id(problem: AnyProblem) -> str:
    """Identity of an operation's problem, readable: `"bf16 128x128 causal"`, then `extras_of`, of latents features."""
    if isinstance(problem, MlaProblem):
        extras: list[str] = [name for name in FEATURES if name in problem.features]
    else:
        extras = extras_of(problem)
    return " ".join(
        [
            problem.operands.qk_dtype,
            f"{problem.operands.head_dim}x{problem.operands.head_dim_v}",
            problem.scores.mask,
            *extras,
        ]
    )
