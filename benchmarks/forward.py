"""The forward benchmark: our two kernel families against FlashAttention-2, cuDNN and FlashAttention-4.

    python -m benchmarks.forward --json PATH [--plot PATH] [--head-dims 64,128] [--seqlens 512,16384]
        [--masks full,causal] [--impls sm90,fa4] [--dtype bf16] [--quick] [--traits-override JSON|@FILE]

Each cell's outputs are checked before it is timed; a wrong or failing implementation is reported and takes no part
in the ratios. The file at --json is rewritten after every cell, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from cuteflash.problem import DTYPES
from cuteflash.tune import machine
from cuteflash.tune.cells import HEAD_DIMS, SEQLENS, grid
from cuteflash.tune.timing import HangError
from cuteflash.tune.variants import parse_variants

from . import device, report
from .contest import measure, progress, write
from .implementations import NAMES, maker, unavailable

QUICK_SEQLENS = (1024, 8192)
QUICK_ROUNDS = 3
FULL_ROUNDS = 12  # each of five implementations and the matrix product runs right after every other twice


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description="attention forward benchmark")
    parser.add_argument("--json", type=pathlib.Path, required=True, metavar="PATH", help="where the results go")
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="also draw them")
    parser.add_argument("--head-dims", type=_integers, default=HEAD_DIMS, metavar="64,128")
    parser.add_argument("--seqlens", type=_integers, metavar="512,16384")
    parser.add_argument("--masks", type=_texts, default=("full", "causal"), metavar="full,causal")
    parser.add_argument("--impls", type=_texts, default=NAMES, metavar="sm90,fa4", help=f"of {','.join(NAMES)}")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--quick", action="store_true", help=f"lengths {QUICK_SEQLENS} and {QUICK_ROUNDS} rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--traits-override", default="[]", metavar="JSON|@FILE", help="see cuteflash.tune.variants")
    arguments = parser.parse_args(argv)
    arguments.seqlens = arguments.seqlens or (QUICK_SEQLENS if arguments.quick else SEQLENS)
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else FULL_ROUNDS)
    unknown = [name for name in arguments.impls if name not in NAMES]
    if unknown:
        parser.error(f"--impls has {', '.join(unknown)}; allowed: {', '.join(NAMES)}")
    unknown = [mask for mask in arguments.masks if mask not in ("full", "causal")]
    if unknown:
        parser.error(f"--masks has {', '.join(unknown)}; allowed: full, causal")
    try:
        arguments.overrides = parse_variants(arguments.traits_override)
    except (OSError, ValueError) as failure:
        parser.error(f"--traits-override: {failure}")
    return arguments


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _texts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid; 0 where all outputs were right, 1 otherwise, 2 without a GPU."""
    arguments = parse(argv)
    if not torch.cuda.is_available():
        print("the benchmark needs a CUDA device; torch finds none", file=sys.stderr)
        return 2
    where = torch.device("cuda", torch.cuda.current_device())
    names = []
    for name in arguments.impls:
        reason = unavailable(name, where)
        print(f"{name}: left out, {reason}", file=sys.stderr) if reason else names.append(name)
    return run_grid(arguments, names, where)


def run_grid(arguments: argparse.Namespace, names: Sequence[str], where: torch.device) -> int:
    """Measure every cell of the command line on `where`, writing the file after each."""
    cells = grid(arguments.head_dims, arguments.seqlens, arguments.masks, arguments.dtype)
    result: dict[str, Any] = {
        "environment": device.environment(where),
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "overrides": [variant.label for variant in arguments.overrides],
        "device": {},
        "host_us": {},
        "cells": [],
    }
    matmul = machine.make_matmul(where) if where.type == "cuda" else None
    if matmul:
        result["device"] = {"matmul_tflops": matmul.tflops(where), "copy_gbps": device.copy_gbps(where)}
    try:
        for cell in cells:
            makers = {name: maker(name, cell, arguments.overrides) for name in names}
            result["cells"].append(measure(cell, makers, where, arguments.rounds, matmul))
            _write(result, arguments.json)
            print(progress(result["cells"][-1]), flush=True)
        result["host_us"] = device.host_microseconds(names, where, arguments.dtype)
    except HangError:
        # The context is lost with the kernel that never ends; a normal exit would wait for it.
        traceback.print_exc()
        _write(result, arguments.json)
        sys.stderr.flush()
        os._exit(3)
    _write(result, arguments.json)
    if arguments.plot:
        report.plot(result, arguments.plot)
    report.print_table(result)
    wrong = any(entry.get("problem") for cell in result["cells"] for entry in cell["results"].values())
    return 1 if wrong else 0


def _write(result: dict[str, Any], path: pathlib.Path) -> None:
    """The result with its summary."""
    write(result | {"summary": report.summary(result["cells"])}, path)


if __name__ == "__main__":
    sys.exit(main())
