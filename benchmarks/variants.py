"""Tries trait variants of a kernel family side by side, with the peers as yardsticks.

    python -m benchmarks.variants --family sm90 --cells 128:16384:causal,128:512:full
        --variants '[{"tile_m": 128, "tile_n": 176}, {"tile_m": 192, "tile_n": 128, "mask": "full"}]' [--json PATH]

A variant is a set of trait fields; `head_dim`, `head_dim_v` default to the cell's, everything else to the traits'
defaults. Variants are compiled first, in parallel processes that never touch the GPU, into the disk cache. Then a
worker process checks and times them; one that raises is reported and left out. One that hangs the GPU or breaks its
context takes the worker down with it: it is named, and a new worker goes on with the rest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.implementations import (
    PEERS,
    Variant,
    build_variant,
    parse_variants,
    runner,
    target_of,
    unavailable,
    variant_runner,
)
from cuteflash.problem import DTYPES
from cuteflash.traits.arch import FAMILIES
from cuteflash.tune import accuracy
from cuteflash.tune.cells import Cell, make_inputs, parse_cell
from cuteflash.tune.timing import ROUNDS, HangError, Runner, first_call, interleaved, median, spread

LOST_CONTEXT = 3  # exit status of a worker whose GPU context is gone
CONTEXT_ERRORS = (
    "CUDA error",
    "illegal memory access",
    "unspecified launch failure",
    "cudaError",
    "misaligned address",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one command asks for."""

    variants: list[Variant]
    cells: list[Cell]
    peers: list[str]
    rounds: int
    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """What compiling a variant for a cell gave: the reason it failed, or what ptxas said."""

    problem: str | None = None
    note: str = ""


Key = tuple[int | str, str]  # (variant's index or peer's name, cell label)


def build_one(variant: Variant, cell: Cell, target: str) -> Built:
    """Compile a variant into the disk cache."""
    try:
        report = build_variant(variant, cell, target)
    except Exception as failure:
        return Built(problem=describe(failure))
    return Built(note="; ".join(report.complaints))


def build_all(plan: Plan, jobs: int) -> dict[Key, Built]:
    """Compile each variant for each kind of cell (head dim and mask) that it applies to, in `jobs` processes."""
    kinds: dict[tuple[int, int, str], list[Cell]] = {}
    for index, variant in enumerate(plan.variants):
        for cell in plan.cells:
            if variant.applies(cell):
                kinds.setdefault((index, cell.head_dim, cell.mask), []).append(cell)
    found: dict[Key, Built] = {}
    spawn = multiprocessing.get_context("spawn")  # a forked child would inherit the parent's compiler and CUDA state
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        futures = {
            key: pool.submit(build_one, plan.variants[key[0]], cells[0], plan.target) for key, cells in kinds.items()
        }
        for key, future in futures.items():
            try:
                built = future.result()
            except concurrent.futures.process.BrokenProcessPool:
                built = Built(problem="a compiler process died")
            found |= {(key[0], cell.label): built for cell in kinds[key]}
    return found


def candidates(plan: Plan) -> list[tuple[int | str, Variant | None]]:
    """Everything that is timed: the peers by name, then the variants by index."""
    return [(peer, None) for peer in plan.peers] + list(enumerate(plan.variants))


def describe(failure: BaseException) -> str:
    """An exception on one line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:240]


class Worker:
    """Checks and times the variants of a plan in this process, appending one JSON line per cell to a journal."""

    def __init__(self, plan: Plan, skip: dict[Key, str], journal: pathlib.Path, device: torch.device):
        self.plan, self.skip, self.journal, self.device = plan, skip, journal, device

    def run(self) -> None:
        """All cells that the journal does not have yet."""
        done = {row["cell"] for row in read_journal(self.journal) if "results" in row}
        for cell in self.plan.cells:
            if cell.label not in done:
                self._append({"cell": cell.label, "flops": cell.flops, "results": self.measure(cell)})

    def _append(self, row: dict[str, Any]) -> None:
        with self.journal.open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    def measure(self, cell: Cell) -> dict[str, dict[str, Any]]:
        """Results of one cell by name: a peer's, or the variant's index."""
        inputs = make_inputs(cell, self.device)
        reference = accuracy.make_reference(inputs)
        results: dict[str, dict[str, Any]] = {}
        runners: dict[str, Runner] = {}
        right: torch.Tensor | None = None
        for key, variant in candidates(self.plan):
            if variant is not None and not variant.applies(cell):
                continue
            entry = results[str(key)] = {}
            problem = self.skip.get((key, cell.label))
            if problem is None:
                try:
                    run = variant_runner(variant, inputs, self.plan.target) if variant else runner(str(key), inputs)
                    out = first_call(run, self.device)
                    problem = accuracy.complaint(out, reference, right)
                    entry["error"] = accuracy.error(out, reference)
                except Exception as failure:
                    problem = describe(failure)
                    if isinstance(failure, HangError) or any(text in problem for text in CONTEXT_ERRORS):
                        self._append({"cell": cell.label, "lost": key, "problem": problem})
                        raise
            if problem is not None:
                entry["problem"] = problem
                continue
            right = out.clone() if right is None else right
            runners[str(key)] = run
        for name, samples in (interleaved(runners, self.device, self.plan.rounds) if runners else {}).items():
            ms = median(samples)
            results[name] |= {"ms": ms, "spread": spread(samples), "tflops": cell.flops / (ms * 1e9)}
        return results


def read_journal(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows a worker has written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def supervise(arguments: Sequence[str], journal: pathlib.Path, most: int, seconds: float) -> None:
    """Run workers until one ends in peace, at most `most` + 1; one that loses its GPU context leaves a "lost" row."""
    for _ in range(most + 1):
        command = [sys.executable, "-m", "benchmarks.variants", *arguments, "--worker", str(journal)]
        try:
            status = subprocess.run(command, check=False, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            print(f"the worker was stopped after {seconds:g} s", file=sys.stderr)
            return
        if status != LOST_CONTEXT:
            if status:
                print(f"the worker ended with status {status}", file=sys.stderr)
            return


def table(plan: Plan, rows: Sequence[dict[str, Any]], built: Mapping[Key, Built]) -> list[str]:
    """The results as text, fastest first within each cell."""
    lines = []
    for row in rows:
        if "results" not in row:
            continue
        results = row["results"]
        best_peer = max((results[p]["tflops"] for p in plan.peers if "tflops" in results.get(p, {})), default=None)
        lines.append(f"\n{row['cell']}: TFLOP/s, share of the best peer, spread")
        for name, entry in sorted(results.items(), key=lambda item: -item[1].get("tflops", 0.0)):
            label, note = name, ""
            if name not in plan.peers:
                label = f"[{name}] {plan.variants[int(name)].label}"
                note = built.get((int(name), row["cell"]), Built()).note
            if "tflops" not in entry:
                lines.append(f"        -                   {label}: {entry['problem']}")
                continue
            share = f"{entry['tflops'] / best_peer:5.3f}" if best_peer else "    -"
            line = f"  {entry['tflops']:7.1f}  {share}  {100 * entry['spread']:4.1f} %   {label}"
            lines.append(f"{line}  ({note})" if note else line)
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description="try trait variants")
    parser.add_argument("--family", choices=FAMILIES, help="family of the variants that name none")
    parser.add_argument("--variants", required=True, metavar="JSON|@FILE", help="list of objects of trait fields")
    parser.add_argument("--cells", required=True, metavar="D:S:full|causal,...", help="problem cells")
    parser.add_argument("--peers", default="fa4,cudnn", help=f"yardsticks, of {','.join(PEERS)}; empty for none")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compiler processes")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="where to write the results")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds a worker may take")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="[]", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        arguments.parsed_variants = parse_variants(arguments.variants, arguments.family)
        arguments.parsed_cells = [parse_cell(text, arguments.dtype) for text in arguments.cells.split(",")]
    except (OSError, ValueError) as failure:
        parser.error(str(failure))
    return arguments


def make_plan(arguments: argparse.Namespace, device: torch.device) -> Plan:
    """The plan of a command line; peers that cannot run here are named on standard error and left out."""
    peers = []
    for peer in filter(None, arguments.peers.split(",")):
        reason = unavailable(peer, device)
        print(f"{peer}: left out, {reason}", file=sys.stderr) if reason else peers.append(peer)
    return Plan(
        arguments.parsed_variants,
        arguments.parsed_cells,
        peers,
        arguments.rounds,
        target_of(device),
    )


def work(arguments: argparse.Namespace, plan: Plan, device: torch.device) -> int:
    """A worker's whole life."""
    skip: dict[Key, str] = {(index, label): problem for index, label, problem in json.loads(arguments.skip)}
    before = [row for row in read_journal(arguments.worker) if "lost" in row]
    for row in before:
        skip |= {(row["lost"], cell.label): f"lost the GPU: {row['problem']}" for cell in plan.cells}
    try:
        Worker(plan, skip, arguments.worker, device).run()
    except Exception as failure:
        print(describe(failure), file=sys.stderr, flush=True)
        lost = [row for row in read_journal(arguments.worker) if "lost" in row]
        os._exit(LOST_CONTEXT if len(lost) > len(before) else 1)  # a normal exit would wait for a kernel without end
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, check, time, print; 0 unless there is no GPU (2)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(argv)
    if not torch.cuda.is_available():
        print("timing variants needs a CUDA device; torch finds none", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    plan = make_plan(arguments, device)
    if arguments.worker:
        return work(arguments, plan, device)
    built = build_all(plan, arguments.jobs)
    skip = json.dumps([[*key, result.problem] for key, result in built.items() if result.problem])
    with tempfile.TemporaryDirectory() as folder:
        journal = pathlib.Path(folder) / "journal.jsonl"
        supervise([*argv, "--skip", skip], journal, len(candidates(plan)), arguments.timeout)
        rows = read_journal(journal)
    print("\n".join(table(plan, rows, built)))
    if arguments.json:
        content = {"variants": [dataclasses.asdict(variant) for variant in plan.variants], "cells": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
