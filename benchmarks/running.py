"""One run of a benchmark: its cells one after the other, and a file that has what was measured so far.

A wrong or failing implementation is reported and takes no part in the ratios. The file is rewritten after every cell,
so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cuteflash.problem import Dtype, MaskKind
from cuteflash.tune import machine
from cuteflash.tune.cells import HEAD_DIMS, SEQLENS, TOKENS, Cell, grid
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.machine import Matmul
from cuteflash.tune.timing import HangError
from cuteflash.tune.variants import Variant

from . import contest, device, report
from .implementations import NAMES, unavailable

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What to measure: the product of all fields but the last two.

    Attributes:
        names: the implementations.
        tokens: keys of all sequences of a cell.
    """

    head_dims: tuple[int, ...] = HEAD_DIMS
    masks: tuple[MaskKind, ...] = ("full", "causal")
    seqlens: tuple[int, ...] = SEQLENS
    dtypes: tuple[Dtype, ...] = ("bf16",)
    inputs: tuple[str, ...] = (PLAIN,)
    names: tuple[str, ...] = NAMES
    tokens: int = TOKENS

    @property
    def cells(self) -> list[Cell]:
        cells = grid(self.head_dims, self.seqlens, self.masks, self.dtypes, self.inputs)
        return [dataclasses.replace(cell, tokens=self.tokens) for cell in cells]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        cells: in the order of their measurement; of the kind that the benchmark's `Measures.cell` takes.
        names: implementations.
        rounds: samples of each in a cell.
        overrides: traits that one of our families runs in place of its table's row; of a forward.
    """

    cells: Sequence[Any]
    names: Sequence[str]
    rounds: int
    overrides: Sequence[Variant] = ()


class Measures(NamedTuple):
    """What a benchmark measures.

    Attributes:
        once: (plan, device) → entries of the result, measured before the cells.
        cell: (plan, cell, device, a matrix product to time beside) → the cell's results, by the lists of the result
            that they go to; the first one's progress is shown.
    """

    once: Callable[[Plan, torch.device], Result]
    cell: Callable[[Plan, Any, torch.device, Matmul | None], dict[str, Result]]


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """What is called before a cell, and with its results after it."""

    begin: Callable[[Any], object] = lambda cell: None
    end: Callable[[Result], object] = lambda measured: None


UNSEEN = Watch()


def available(names: Sequence[str], where: torch.device) -> list[str]:
    """Those that can run on `where`; stderr is told why the others cannot."""
    found = []
    for name in names:
        reason = unavailable(name, where)
        print(f"{name}: left out, {reason}", file=sys.stderr) if reason else found.append(name)
    return found


def run(
    measures: Measures, plan: Plan, where: torch.device, path: pathlib.Path | None = None, watch: Watch = UNSEEN
) -> Result:
    """Measure every cell of a plan on `where`; after Ctrl-C the result has those that were measured.

    A kernel that hangs ends the process with status 3, after `path` was written: its context is lost.

    Args:
        measures: what is measured.
        plan: of which cells and implementations.
        where: the device.
        path: file to write after each cell; its directory is made.
        watch: told of every cell.
    """
    result: Result = {
        "environment": device.environment(where),
        "dtype": ", ".join(dict.fromkeys(cell.dtype for cell in plan.cells)),
        "rounds": plan.rounds,
        "overrides": [variant.label for variant in plan.overrides],
        "device": {},
        "cells": [],
    }
    try:
        matmul = machine.make_matmul(where) if where.type == "cuda" else None
        if matmul:
            result["device"] = {"matmul_tflops": matmul.tflops(where), "copy_gbps": device.copy_gbps(where)}
        result |= measures.once(plan, where)
        for cell in plan.cells:
            watch.begin(cell)
            measured = measures.cell(plan, cell, where, matmul)
            for key, value in measured.items():
                result.setdefault(key, []).append(value)
            _write(result, path)
            watch.end(next(iter(measured.values())))
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
    """The result with its summaries."""
    if path is not None:
        contest.write(result | report.summaries(result), path)
