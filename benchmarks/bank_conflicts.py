"""Measures the cost of bank conflicts on this GPU and compares it with the explorer's model.

    python -m benchmarks.bank_conflicts [--json FILE] [--ncu]

For each instruction and swizzle: a block of 8 warps issues it in a loop on one multiprocessor, at addresses that come
from the CuTe layout. Cycles an instruction are the difference between a long and a short run over the difference of
their instruction counts, so that prologue and epilogue of the loop cancel; with two warps a scheduler, each with 16
instructions in flight, they measure throughput. Addresses and data are compared with `bank_patterns` before and after.

Shared memory serves one wavefront a cycle, so the model predicts cycles = sum of the ways over the phases. Verdicts:
    yes     within 10 % of the prediction
    issue   conflict-free and up to twice the prediction: the limit is issue, not the banks
    ratio   neither of these, but the ratio to the conflict-free case is the predicted one, within 10 %
    hidden  as fast as the conflict-free case, which takes longer than the predicted wavefronts
    no      anything else: the exit status is 1
Global-to-shared copies also wait for L2: the verdict on their cycles is printed in brackets and does not count. With
`--ncu` every case runs again under Nsight Compute, whose wavefronts must agree with the prediction within 2 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cuteflash.companions import companion
from cuteflash.tune.timing import HangError, first_call, median

from . import bank_counters
from .bank_patterns import (
    INSTRUCTION_SET,
    INSTRUCTIONS,
    LANES,
    POISON,
    REGISTERS,
    Case,
    Model,
    addresses,
    fragments,
    tile_image,
    ways,
)
from .device import environment
from .implementations import target_of

SWIZZLES = (0, 2, 3)  # none, half, full
WARPS = (1, 4, 8)
SATURATING = WARPS[-1]
PASSES = (32, 96)
EXTRA = (PASSES[1] - PASSES[0]) * INSTRUCTIONS  # instructions of a warp between a short and a long run
ROUNDS = 9
TOLERANCE = 0.10
ISSUE_LIMIT = 2.0
HANG_SECONDS = 10.0
KERNEL_NAME = "bank_probe"


@dataclasses.dataclass(slots=True)
class Row:
    """The results of one case.

    Attributes:
        predicted_ways: of each phase; their sum is `wavefronts`.
        cycles: cycles an instruction, by number of warps.
        counted: wavefronts an instruction by Nsight Compute, from its counter `metric`.
        problem: why the case has no cycles.
    """

    case: Case
    predicted_ways: list[int] = dataclasses.field(default_factory=list)
    cycles: dict[int, float] = dataclasses.field(default_factory=dict)
    verdict: str = ""
    ratio: float | None = None
    counted: float | None = None
    metric: str = ""
    problem: str = ""

    @property
    def wavefronts(self) -> int:
        return sum(self.predicted_ways)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON values."""
        flat = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return flat | {
            "case": dataclasses.asdict(self.case),
            "swizzle": self.case.swizzle,
            "judged": self.case.what.judged,
            "predicted_wavefronts": self.wavefronts,
        }


def cases() -> list[Case]:
    """All cases that are measured."""
    return [Case(name, bits) for name in INSTRUCTION_SET for bits in SWIZZLES]


class Probe:
    """A case's kernel with its tensors on `device`, for blocks of `warps` warps."""

    def __init__(self, case: Case, device: torch.device, warps: int) -> None:
        from cuteflash.compile import compiled

        from .bank_kernels import BankProbe

        self.case, self.warps = case, warps
        self.function = compiled(BankProbe, case, case.what, target_of(device))
        self.is_load = case.what.path == "load"
        image = tile_image(case, touched=False) if self.is_load else np.full_like(tile_image(case, False), POISON)
        self.tile = torch.from_numpy(image.view(np.int32).copy()).to(device)
        self.source = torch.from_numpy(fragments(case.what).view(np.int32)).to(device)
        self.loaded = torch.full((warps, INSTRUCTIONS, LANES, REGISTERS), -1, dtype=torch.int32, device=device)
        self.address = torch.full((INSTRUCTIONS, LANES), -1, dtype=torch.int32, device=device)
        self.clock = torch.zeros((warps, 2), dtype=torch.int64, device=device)

    def launch(self, passes: int) -> torch.Tensor:
        """One block; returns the clocks without waiting for them."""
        self.function(self.tile, self.source, self.loaded, self.address, self.clock, passes, 0)
        return self.clock

    def cycles(self, passes: int) -> int:
        """From the first warp's start to the last one's end."""
        clock = self.launch(passes).cpu()
        return int(clock[:, 1].max() - clock[:, 0].min())

    def complaint(self) -> str:
        """The first error in the addresses or the data of the launches so far, or ""."""
        if not np.array_equal(self.address.cpu().numpy(), addresses(self.case)):
            return "the addresses from the CuTe layout are not the expected ones"
        tile = self.tile.cpu().numpy().view(np.uint16)
        if not np.array_equal(tile, tile_image(self.case, touched=not self.is_load)):
            return "shared memory does not contain the expected data"
        if self.is_load:
            loaded = self.loaded.cpu().numpy().view(np.uint32)
            if not (loaded == fragments(self.case.what)).all():
                return "the registers do not contain the expected data"
        return ""


def measure(case: Case, device: torch.device, model: Model) -> Row:
    """One case, checked and timed. HangError if the kernel hangs; other failures are recorded in the row."""
    row = Row(case)
    try:
        row.predicted_ways = ways(case, model)
        for warps in WARPS:
            probe = Probe(case, device, warps)
            first_call(probe.launch, device, HANG_SECONDS)
            row.problem = probe.complaint()
            if row.problem:
                return row
            low, high = ([float(probe.cycles(passes)) for _ in range(ROUNDS)] for passes in PASSES)
            row.cycles[warps] = (median(high) - median(low)) / (EXTRA * warps)
            row.problem = probe.complaint()
    except HangError:
        raise
    except Exception as failure:
        row.problem = " ".join(f"{type(failure).__name__}: {failure}".split())[:240]
    return row


def judge(cycles: float, wavefronts: int, free_cycles: float, free_wavefronts: int) -> str:
    """The verdict on one case beside the conflict-free case of its instruction (see the module's text)."""

    def close(measured: float, expected: float) -> bool:
        return abs(measured / expected - 1) <= TOLERANCE

    if close(cycles, wavefronts):
        return "yes"
    if cycles < wavefronts:
        return "no"  # fewer wavefronts than predicted
    if wavefronts == free_wavefronts:
        return "issue" if cycles <= ISSUE_LIMIT * (1 + TOLERANCE) * wavefronts else "no"
    if close(cycles / free_cycles, wavefronts / free_wavefronts):
        return "ratio"
    return "hidden" if wavefronts < free_cycles and close(cycles, free_cycles) else "no"


def judge_all(rows: Sequence[Row]) -> None:
    """Fill in ratios and verdicts; the conflict-free case of an instruction is the one with the fewest wavefronts."""
    for name in INSTRUCTION_SET:
        timed = [row for row in rows if row.case.instruction == name and not row.problem]
        free = min(timed, key=lambda row: (row.wavefronts, row.cycles[SATURATING]), default=None)
        for row in timed:
            assert free is not None
            row.ratio = row.cycles[SATURATING] / free.cycles[SATURATING]
            row.verdict = judge(row.cycles[SATURATING], row.wavefronts, free.cycles[SATURATING], free.wavefronts)


def failed(row: Row) -> bool:
    """Whether a row makes the whole run fail."""
    if row.problem:
        return True
    miscounted = row.counted is not None and not bank_counters.agrees(row.counted, row.wavefronts)
    return miscounted or (row.case.what.judged and row.verdict == "no")


def table(rows: Iterable[Row], counted: bool) -> list[str]:
    """The rows as text; `counted` adds Nsight Compute's column."""
    warps = "".join(f"{f'{count}w':>8}" for count in WARPS)
    head = f"{'instruction':<22}{'swizzle':<10}{'ways by phase':<16}{'wavefronts':>10}{warps}{'ratio':>8}"
    lines = [f"{head}{'ncu':>8}  agree" if counted else f"{head}  agree"]
    for row in rows:
        text = f"{row.case.instruction:<22}{row.case.swizzle:<10}"
        text += f"{' '.join(map(str, row.predicted_ways)):<16}{row.wavefronts:>10}"
        if row.problem:
            lines.append(f"{text}  failed: {row.problem}")
            continue
        text += "".join(f"{row.cycles[count]:8.2f}" for count in WARPS) + f"{row.ratio:8.2f}"
        if counted:
            text += f"{row.counted:8.2f}" if row.counted is not None else f"{'-':>8}"
        note = row.verdict if row.case.what.judged else f"({row.verdict})"
        if failed(row) and row.verdict != "no":
            note += ", but not the counter"
        lines.append(f"{text}  {note}")
    return lines


def launch_for_counters(path: pathlib.Path, device: torch.device) -> None:
    """The profiled process: a short and a long launch of each case; writes the names of the cases to `path`."""
    done = []
    for case in cases():
        try:
            probe = Probe(case, device, SATURATING)
            for passes in PASSES:
                probe.launch(passes)
                torch.cuda.synchronize()
        except Exception as failure:
            print(f"{case}: {failure}", file=sys.stderr)
            continue
        done.append(dataclasses.asdict(case))
        path.write_text(json.dumps(done))


def count(rows: Sequence[Row]) -> str:
    """Fill in the counters' wavefronts by profiling this module in another process; the reason if that fails, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "launched.json"
        command = [sys.executable, "-m", f"{__package__}.bank_conflicts", "--launch-only", str(path)]
        try:
            launches = bank_counters.profile(command, KERNEL_NAME)
        except bank_counters.CounterError as failure:
            return str(failure)
        launched = [Case(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    if len(launches) != len(PASSES) * len(launched):
        return f"ncu reported {len(launches)} launches of {len(PASSES) * len(launched)}"
    by_case = {row.case: row for row in rows}
    for case, low, high in zip(launched, launches[::2], launches[1::2], strict=True):
        found = bank_counters.per_instruction(case.what, low, high, EXTRA * SATURATING)
        if found and case in by_case:
            by_case[case].metric, by_case[case].counted = found
    return ""


def measure_all(device: torch.device, model: Model) -> tuple[list[Row], bool]:
    """(all rows with their verdicts, whether a kernel hung: the rows after it are then missing)."""
    rows: list[Row] = []
    hung = False
    for case in cases():
        try:
            rows.append(measure(case, device, model))
        except HangError as failure:
            rows.append(Row(case, problem=str(failure)))
            hung = True
            break
    judge_all(rows)
    return rows, hung


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 if model and GPU agree, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bank_conflicts", description="bank conflicts, measured")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write the results")
    parser.add_argument("--ncu", action="store_true", help="count wavefronts with Nsight Compute as well")
    parser.add_argument("--launch-only", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("measuring bank conflicts needs a CUDA device; torch finds none", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if arguments.launch_only:
        launch_for_counters(arguments.launch_only, device)
        return 0
    rows, hung = measure_all(device, companion("layouts.banks").ways)
    uncounted = count(rows) if arguments.ncu and not hung else ""
    print("\n".join(table(rows, arguments.ncu and not uncounted)))
    if uncounted:
        print(f"no counters: {uncounted}", file=sys.stderr)
    bad = sum(map(failed, rows))
    print(f"{len(rows) - bad} of {len(cases())} cases agree with the model")
    if arguments.json:
        content = {"environment": environment(device), "uncounted": uncounted, "cases": [row.as_dict() for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    status = 1 if bad or hung or uncounted else 0
    if hung:
        sys.stdout.flush()
        os._exit(status)  # a normal exit would wait for the kernel that hangs
    return status


if __name__ == "__main__":
    sys.exit(main())
