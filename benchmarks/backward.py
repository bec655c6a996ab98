"""The backward benchmark: gradients of a saved forward, forward + backward, their memory and their host time.

    python -m benchmarks.backward --help         # the options; `cuteflash bench --backward` is the same command
    python -m benchmarks.backward --json PATH    # the published grid
    python -m benchmarks.backward --set more     # head dims between those of the grid
    python -m benchmarks.backward --set brief    # many short sequences
    python -m benchmarks.backward --set few      # an eighth of the tokens: few heads, or a last wave of blocks

All implementations run through torch's autograd: what it adds on the device is nothing, and what it adds on the host is
not charged to a kernel (see `cuteflash.tune.timing`). Every gradient of each cell is checked before it is timed. A
backward counts as five products for the forward's two. The default measures 36 cells: in each, eight rounds of seven
implementations of the backward and a matrix product, and five of forward + backward. Batches of 12 ms make that 40
seconds of the device, to which come the checks, the idle time around batches, and what compiles: our kernels in
parallel into the disk cache, flash-attn-4's one after the other in each process unless its own cache is on
(FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1). `--quick` has two lengths and three rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

import torch

from cuteflash.tune.cells import Cell
from cuteflash.tune.gradients import make_bwd_inputs
from cuteflash.tune.machine import Matmul

from . import contest, device, memory, running
from .ahead import compile_all, kernels_with_gradients
from .implementations import backward_runner, target_of, training_runner
from .judges import GradientJudge, TrainingJudge
from .names import UNNAMED, is_deterministic
from .running import Choice, Plan, Result

QUICK_SEQLENS = (1024, 8192)
QUICK_ROUNDS = 3
FULL_ROUNDS = 8  # each of seven implementations and the matrix product runs right after every other once
TRAINING_ROUNDS = 5  # at most, of forward + backward, whose two parts are measured more often
HOST_CALLS = 100  # launches of that many fit into the launch queue

# References last.
ALLOWED = (UNNAMED, "sm90", "sm80", "sm90-det", "sm80-det", "fa4", "fa4-det", "cudnn", "fa2")
# flash-attn-4 compiles its deterministic kernels in each process, for a minute.
NAMES = tuple(name for name in ALLOWED if name not in (UNNAMED, "fa4-det"))
WITH_UNNAMED = (UNNAMED, "sm90", "sm80", "fa4", "cudnn", "fa2")
SETS = {
    "grid": Choice(names=NAMES),  # the published one
    "more": Choice(head_dims=(96, 192), seqlens=(1024, 8192), names=NAMES),
    "brief": Choice((32, 64, 128), seqlens=(16, 64, 128, 256), names=WITH_UNNAMED),
    "few": Choice((64, 128), seqlens=(256, 512, 1024, 2048), names=WITH_UNNAMED, tokens=2048),
}


def once(plan: Plan, where: torch.device) -> Result:
    """Host times of forward + backward, and peak memory; before it, our kernels are compiled."""
    if where.type == "cuda":
        target = target_of(where)
        compile_all(kernels_with_gradients(plan.cells, plan.names, target), target, os.cpu_count() or 1)
    names = [name for name in plan.names if not is_deterministic(name)]
    cell = dataclasses.replace(device.TINY, dtype=plan.cells[0].dtype)
    inputs = make_bwd_inputs(cell, where)
    calls = HOST_CALLS if where.type == "cuda" else 2
    host = device.known_microseconds({name: training_runner(name, inputs) for name in names}, where, calls)
    used = memory.peaks([*names, "materialised"], where, cell.dtype) if where.type == "cuda" else []
    return {"both": [], "host_us": host, "memory": used}


def measure_cell(plan: Plan, cell: Cell, where: torch.device, matmul: Matmul | None) -> dict[str, Result]:
    """See `running.Measures`."""
    makers = {name: functools.partial(backward_runner, name) for name in plan.names}
    both = {name: functools.partial(training_runner, name) for name in plan.names if not is_deterministic(name)}
    return {
        "cells": contest.measure(GradientJudge.of(cell, where), makers, where, plan.rounds, matmul),
        "both": contest.measure(TrainingJudge.of(cell, where), both, where, min(plan.rounds, TRAINING_ROUNDS)),
    }


run = functools.partial(running.run, running.Measures(once, measure_cell))


def main(argv: Sequence[str] | None = None) -> int:
    """`cuteflash bench --backward` under this module's name."""
    from cuteflash.cli.bench import run_alone

    given = sys.argv[1:] if argv is None else argv
    return run_alone(["--backward", *given], f"python -m {__package__}.backward")


if __name__ == "__main__":
    sys.exit(main())
