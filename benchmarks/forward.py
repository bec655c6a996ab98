"""The forward benchmark: our two kernel families against FlashAttention-2, cuDNN and FlashAttention-4.

    python -m benchmarks.forward --help          # the options; `cuteflash bench` is the same command
    python -m benchmarks.forward --json PATH     # the published grid
    python -m benchmarks.forward --set real      # inputs like those of language models

Each cell's outputs are checked before it is timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from cuteflash.tune.cells import Cell
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.machine import Matmul

from . import contest, device, running
from .implementations import NAMES, maker
from .judges import OutputJudge
from .running import Choice, Plan, Result

QUICK_SEQLENS = (1024, 8192)
QUICK_ROUNDS = 3
FULL_ROUNDS = 12  # each of five implementations and the matrix product runs right after every other twice

REAL_INPUTS = (PLAIN, "sink:8", "sink:12", "sink:30", "peaked", "outliers")
SETS = {
    "grid": Choice(),  # the published one
    "real": Choice((64, 128), ("causal",), (8192,), ("bf16", "fp16"), REAL_INPUTS, ("sm90", "fa4", "cudnn")),
}
ALLOWED = NAMES  # implementations


def host_times(plan: Plan, where: torch.device) -> Result:
    """Of calls of a known shape and of one not seen before."""
    host = device.host_microseconds(plan.names, where, plan.cells[0].dtype)
    return {"host_us": host.known, "host_new_us": host.new}


def measure_cell(plan: Plan, cell: Cell, where: torch.device, matmul: Matmul | None) -> dict[str, Result]:
    """See `running.Measures`."""
    makers = {name: maker(name, cell, plan.overrides) for name in plan.names}
    return {"cells": contest.measure(OutputJudge.of(cell, where), makers, where, plan.rounds, matmul)}


run = functools.partial(running.run, running.Measures(host_times, measure_cell))


def main(argv: Sequence[str] | None = None) -> int:
    """`cuteflash bench` under this module's name."""
    from cuteflash.cli.bench import run_alone

    return run_alone(argv, f"python -m {__package__}.forward")


if __name__ == "__main__":
    sys.exit(main())
