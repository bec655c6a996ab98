"""The forward benchmark: our two kernel families against FlashAttention-2, cuDNN and FlashAttention-4.

    python -m benchmarks.forward --help          # the options; `cuteflash bench` is the same command
    python -m benchmarks.forward --json PATH     # the published grid
    python -m benchmarks.forward --set real      # inputs like those of language models
    python -m benchmarks.forward --set brief     # many short sequences
    python -m benchmarks.forward --set fp8       # 8-bit operands beside bf16

Each cell's outputs are checked before it is timed. If implementations with 8-bit operands take part, all of a cell's
get what those operands stand for.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

import torch

from cuteflash.tune.cells import Cell
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.machine import Matmul

from . import contest, device, fp8, running
from .ahead import compile_all, fp8_kernels
from .implementations import NAMES, maker, target_of
from .judges import OutputJudge
from .names import FP8_NAMES, is_fp8
from .running import Choice, Plan, Result

QUICK_SEQLENS = (1024, 8192)
QUICK_ROUNDS = 3
FULL_ROUNDS = 12  # each of five implementations and the matrix product runs right after every other twice

REAL_INPUTS = (PLAIN, "sink:8", "sink:12", "sink:30", "peaked", "outliers")
SETS = {
    "grid": Choice(),  # the published one
    "real": Choice((64, 128), ("causal",), (8192,), ("bf16", "fp16"), REAL_INPUTS, ("sm90", "fa4", "cudnn")),
    "brief": Choice((32, 64, 128), seqlens=(64, 128, 256), names=("sm90", "fa4", "cudnn")),
    "fp8": Choice(seqlens=(1024, 2048, 4096, 8192, 16384), names=("sm90", *FP8_NAMES)),
}
ALLOWED = (*NAMES, *FP8_NAMES)  # implementations


def once(plan: Plan, where: torch.device) -> Result:
    """Host times of 16-bit calls, of a known shape and of one not seen before; the rate of the 8-bit matrix product."""
    names = [name for name in plan.names if not is_fp8(name)]
    host = device.host_microseconds(names, where, plan.cells[0].dtype)
    times = {"host_us": host.known, "host_new_us": host.new}
    if names == list(plan.names) or where.type != "cuda":
        return times
    target = target_of(where)
    compile_all(fp8_kernels(plan.cells, plan.names, target), target, os.cpu_count() or 1)
    return times | {"fp8_matmul_tflops": fp8.make_matmul(where).tflops(where)}


def measure_cell(plan: Plan, cell: Cell, where: torch.device, matmul: Matmul | None) -> dict[str, Result]:
    """See `running.Measures`."""
    makers = {name: maker(name, cell, plan.overrides) for name in plan.names if not is_fp8(name)}
    if len(makers) == len(plan.names):
        return {"cells": contest.measure(OutputJudge.of(cell, where), makers, where, plan.rounds, matmul)}
    mixed = {name: fp8.maker(name, makers.get(name)) for name in plan.names}
    judge = fp8.Fp8Judge(fp8.make_fp8_inputs(cell, where))
    beside = fp8.make_matmul(where) if matmul else None
    return {"cells": contest.measure(judge, mixed, where, plan.rounds, matmul, beside)}


run = functools.partial(running.run, running.Measures(once, measure_cell))


def main(argv: Sequence[str] | None = None) -> int:
    """`cuteflash bench` under this module's name."""
    from cuteflash.cli.bench import run_alone

    return run_alone(argv, f"python -m {__package__}.forward")


if __name__ == "__main__":
    sys.exit(main())
