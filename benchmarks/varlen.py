"""The benchmark of packed sequences: our kernels against FlashAttention-4, by distribution of lengths.

    python -m benchmarks.varlen --json PATH                # all distributions, forward
    python -m benchmarks.varlen --backward --json PATH     # gradients of a saved forward
    python -m benchmarks.varlen --help                     # the options

65,536 tokens, hidden size 2048, in sequences of equal, uniformly or Zipf-distributed lengths, one long among many
short, and 4,096 of 16 tokens (`packed.DISTRIBUTIONS`). Equal lengths also run as a dense batch. Each cell's results are
checked before it is timed; a backward runs through torch's autograd, as in `benchmarks.backward`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import cuteflash
from cuteflash.problem import MaskKind
from cuteflash.tune.gradients import BwdInputs
from cuteflash.tune.machine import Matmul
from cuteflash.tune.peers import Attention, backward_runner, forward_runner
from cuteflash.tune.timing import Runner

from . import contest, running
from .command import add_json, current_gpu
from .judges import GradientJudge, Judge, OutputJudge
from .names import DENSE, DETERMINISTIC, OURS, UNNAMED, family_of, is_deterministic, is_ours
from .packed import DISTRIBUTIONS, PackedCell, PackedInputs
from .running import Plan, Result

ROUNDS = 10  # each of five implementations and the matrix product runs right after every other once, and more
QUICK_ROUNDS = 3
HEAD_DIMS = (64, 128)
MASKS: tuple[MaskKind, ...] = ("full", "causal")
ALLOWED = (*(name + end for end in ("", DETERMINISTIC, DENSE) for name in (UNNAMED, *OURS)), "fa4")
NAMES = (UNNAMED, "sm80", UNNAMED + DENSE, "sm80" + DENSE, "fa4")


def packed_runner(name: str, inputs: PackedInputs) -> Runner:
    """The forward of the implementation called `name`."""
    return forward_runner(packed_attention(name, inputs), inputs.q, inputs.k, inputs.v)


def packed_backward_runner(name: str, inputs: BwdInputs[PackedInputs]) -> Runner:
    """The backward of the implementation called `name`."""
    return backward_runner(packed_attention(name, inputs.forward), inputs)


def packed_attention(name: str, inputs: PackedInputs) -> Attention:
    """The implementation called `name` over inputs' sequences: packed, or for equal lengths as a dense batch."""
    causal = inputs.cell.mask == "causal"
    if name.endswith(DENSE):
        return Attention(functools.partial(dense, batch=inputs.cell.batch, family=family_of(name), causal=causal))
    sequences: dict[str, Any] = {
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_k": inputs.cu_seqlens,
        "max_seqlen_q": inputs.longest,
        "max_seqlen_k": inputs.longest,
        "causal": causal,
    }
    if is_ours(name):
        if is_deterministic(name):
            sequences["deterministic"] = True
        return Attention(functools.partial(cuteflash.flash_attn_varlen_func, family=family_of(name), **sequences))
    from flash_attn.cute import flash_attn_varlen_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, **sequences)[0]
        return out

    return Attention(call)


def dense(q: Tensor, k: Tensor, v: Tensor, batch: int, **options: Any) -> Tensor:
    """Ours of sequences of equal lengths as a dense batch."""
    q, k, v = (tensor.unflatten(0, (batch, -1)) for tensor in (q, k, v))
    out: Tensor = cuteflash.flash_attn_func(q, k, v, **options).flatten(0, 1)
    return out


def measure_cell(
    plan: Plan, cell: PackedCell, where: torch.device, matmul: Matmul | None, *, backward: bool
) -> dict[str, Result]:
    """See `running.Measures`."""
    make = packed_backward_runner if backward else packed_runner
    equal = len(set(cell.lengths)) == 1
    makers = {name: functools.partial(make, name) for name in plan.names if equal or not name.endswith(DENSE)}
    judge: Judge = (GradientJudge if backward else OutputJudge).of_packed(cell, where)
    return {"cells": contest.measure(judge, makers, where, plan.rounds, matmul)}


def run_of(backward: bool) -> Callable[..., Result]:
    """`running.run` of the forward or of the backward."""
    words = "backward" if backward else "forward"
    cell = functools.partial(measure_cell, backward=backward)
    return functools.partial(running.run, running.Measures(lambda plan, where: {"packed": words}, cell))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a result was wrong or an implementation failed, 2 without a GPU, else 0."""
    from cuteflash.cli.bench import measure

    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.varlen", description="packed sequences, measured")
    parser.add_argument("--backward", action="store_true", help="gradients of a saved forward")
    add_json(parser, "cell")
    parser.add_argument("--lengths", nargs="+", choices=tuple(DISTRIBUTIONS), default=list(DISTRIBUTIONS))
    parser.add_argument("--head-dim", nargs="+", type=int, choices=(64, 128, 256), default=list(HEAD_DIMS))
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--impls", nargs="+", choices=ALLOWED, default=list(NAMES))
    parser.add_argument("--quick", action="store_true", help="three rounds")
    arguments = parser.parse_args(argv)
    cells = [PackedCell(n, d, mask) for d in arguments.head_dim for mask in arguments.mask for n in arguments.lengths]
    where = current_gpu("packed sequences")
    if where is None:
        return 2
    names = running.available(sorted(arguments.impls, key=ALLOWED.index), where)  # references last
    plan = Plan(cells, names, QUICK_ROUNDS if arguments.quick else ROUNDS)
    return measure(run_of(arguments.backward), plan, where, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
