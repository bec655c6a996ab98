"""The forward benchmark: our two kernel families against FlashAttention-2, cuDNN and FlashAttention-4.

    python -m benchmarks.forward --help          # the options; `cuteflash bench` is the same command
    python -m benchmarks.forward --json PATH     # the published grid
    python -m benchmarks.forward --set real      # inputs like those of language models

Each cell's outputs are checked before it is timed; a wrong or failing implementation is reported and takes no part
in the ratios. The file at --json is rewritten after every cell, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuteflash.problem import Dtype, MaskKind
from cuteflash.tune import machine
from cuteflash.tune.cells import HEAD_DIMS, SEQLENS, Cell, grid
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.timing import HangError
from cuteflash.tune.variants import Variant

from . import contest, device, report
from .implementations import NAMES, maker, unavailable

QUICK_SEQLENS = (1024, 8192)
QUICK_ROUNDS = 3
FULL_ROUNDS = 12  # each of five implementations and the matrix product runs right after every other twice

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What to measure: the product of all fields but the last, which are the implementations."""

    head_dims: tuple[int, ...] = HEAD_DIMS
    masks: tuple[MaskKind, ...] = ("full", "causal")
    seqlens: tuple[int, ...] = SEQLENS
    dtypes: tuple[Dtype, ...] = ("bf16",)
    inputs: tuple[str, ...] = (PLAIN,)
    names: tuple[str, ...] = NAMES

    @property
    def cells(self) -> list[Cell]:
        return grid(self.head_dims, self.seqlens, self.masks, self.dtypes, self.inputs)


REAL_INPUTS = (PLAIN, "sink:8", "sink:12", "sink:30", "peaked", "outliers")
SETS = {
    "grid": Choice(),  # the published one
    "real": Choice((64, 128), ("causal",), (8192,), ("bf16", "fp16"), REAL_INPUTS, ("sm90", "fa4", "cudnn")),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        cells: in the order of their measurement.
        names: implementations.
        rounds: samples of each in a cell.
        overrides: traits that one of our families runs in place of its table's row.
    """

    cells: Sequence[Cell]
    names: Sequence[str]
    rounds: int = FULL_ROUNDS
    overrides: Sequence[Variant] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """What is called before a cell, and with its results after it."""

    begin: Callable[[Cell], object] = lambda cell: None
    end: Callable[[Result], object] = lambda measured: None


UNSEEN = Watch()


def available(names: Sequence[str], where: torch.device) -> list[str]:
    """Those that can run on `where`; stderr is told why the others cannot."""
    found = []
    for name in names:
        reason = unavailable(name, where)
        print(f"{name}: left out, {reason}", file=sys.stderr) if reason else found.append(name)
    return found


def run(plan: Plan, where: torch.device, path: pathlib.Path | None = None, watch: Watch = UNSEEN) -> Result:
    """Measure every cell of a plan on `where`; after Ctrl-C the result has those that were measured.

    A kernel that hangs ends the process with status 3, after `path` was written: its context is lost.

    Args:
        path: file to write after each cell; its directory is made.
        watch: told of every cell.
    """
    result: Result = {
        "environment": device.environment(where),
        "dtype": ", ".join(dict.fromkeys(cell.dtype for cell in plan.cells)),
        "rounds": plan.rounds,
        "overrides": [variant.label for variant in plan.overrides],
        "device": {},
        "host_us": {},
        "host_new_us": {},
        "cells": [],
    }
    try:
        matmul = machine.make_matmul(where) if where.type == "cuda" else None
        if matmul:
            result["device"] = {"matmul_tflops": matmul.tflops(where), "copy_gbps": device.copy_gbps(where)}
        host = device.host_microseconds(plan.names, where, plan.cells[0].dtype)
        result |= {"host_us": host.known, "host_new_us": host.new}
        for cell in plan.cells:
            watch.begin(cell)
            makers = {name: maker(name, cell, plan.overrides) for name in plan.names}
            result["cells"].append(contest.measure(cell, makers, where, plan.rounds, matmul))
            _write(result, path)
            watch.end(result["cells"][-1])
    except KeyboardInterrupt:
        result["interrupted"] = True
    except HangError:
        traceback.print_exc()
        _write(result, path)
        sys.stderr.flush()
        os._exit(3)  # a normal exit would wait for the kernel that never ends
    _write(result, path)
    return result


def _write(result: Result, path: pathlib.Path | None) -> None:
    """The result with its summary."""
    if path is not None:
        contest.write(result | {"summary": report.summary(result["cells"])}, path)


def main(argv: Sequence[str] | None = None) -> int:
    """`cuteflash bench` under this module's name."""
    from cuteflash.cli.bench import run_alone

    return run_alone(argv, f"python -m {__package__}.forward")


if __name__ == "__main__":
    sys.exit(main())
