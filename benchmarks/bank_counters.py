"""Shared-memory wavefronts as Nsight Compute counts them, for kernels launched in a known order.

Names of metrics differ between versions and chips: the tool is asked which it has, and the first suitable one that
counted anything is used.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from .bank_patterns import Instruction

WAVEFRONTS = "data_pipe_lsu_wavefronts_mem_shared"
CONFLICTS = "data_bank_conflicts_pipe_lsu_mem_shared"
PER_SASS, PER_UNIT = "smsp__sass_l1tex_", "l1tex__"
ESSENTIAL = tuple(f"{PER_UNIT}{what}_op_{op}.sum" for what in (WAVEFRONTS, CONFLICTS) for op in ("ld", "st"))
METRICS = (
    *ESSENTIAL,
    f"{PER_UNIT}{WAVEFRONTS}.sum",
    f"{PER_UNIT}{WAVEFRONTS}_op_ldgsts.sum",
    f"{PER_SASS}{WAVEFRONTS}.sum",
    *(f"{PER_SASS}{WAVEFRONTS}_op_{op}.sum" for op in ("ld", "ldsm", "st", "ldgsts", "ldgsts_cache_bypass")),
    "smsp__inst_executed_op_ldsm.sum",
)
TOLERANCE = 0.02
QUERY_SECONDS, PROFILE_SECONDS = 60.0, 400.0


class CounterError(RuntimeError):
    """Nsight Compute is not installed, or its output cannot be read."""


def sources(instruction: Instruction) -> list[str]:
    """Metrics that count the wavefronts of `instruction`, best first."""
    if instruction.path == "copy":
        names = [f"{PER_SASS}{WAVEFRONTS}_op_ldgsts_cache_bypass", f"{PER_SASS}{WAVEFRONTS}_op_ldgsts"]
        names.append(f"{PER_UNIT}{WAVEFRONTS}_op_ldgsts")
    elif instruction.path == "store":
        names = [f"{PER_SASS}{WAVEFRONTS}_op_st", f"{PER_UNIT}{WAVEFRONTS}_op_st"]
    else:
        op = "ldsm" if instruction.is_matrix else "ld"
        names = [f"{PER_SASS}{WAVEFRONTS}_op_{op}", f"{PER_UNIT}{WAVEFRONTS}_op_ld"]
    names += [f"{PER_SASS}{WAVEFRONTS}", f"{PER_UNIT}{WAVEFRONTS}"]
    return [f"{name}.sum" for name in names]


def available(ncu: str) -> tuple[str, ...]:
    """Those of METRICS that this GPU has, according to `ncu`; ESSENTIAL if `ncu` does not tell."""
    try:
        asked = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ESSENTIAL
    known = {line.split()[0] for line in asked.stdout.splitlines() if line.strip()}
    return tuple(name for name in METRICS if name.removesuffix(".sum") in known) or ESSENTIAL


def profile(command: Sequence[str], kernels: str) -> list[dict[str, float]]:
    """Metrics of each launch whose kernel's name has `kernels` in it, in the order of launching.

    CounterError if ncu is missing or reports no launch.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CounterError("ncu is not on the PATH")
    said = ""
    for metrics in dict.fromkeys((available(ncu), ESSENTIAL)):  # a single unknown name makes ncu reject all of them
        options = ["--clock-control", "none", "--csv", "--kernel-name", f"regex:{kernels}"]
        try:
            done = subprocess.run(
                [ncu, *options, "--metrics", ",".join(metrics), *command],
                capture_output=True,
                text=True,
                timeout=PROFILE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as failure:
            raise CounterError(f"ncu: {failure}") from failure
        launches = parse_csv(done.stdout)
        if launches:
            return launches
        said = " ".join((done.stdout + done.stderr).split())[-400:]
    raise CounterError(f"ncu reported no launch: {said}")


def parse_csv(text: str) -> list[dict[str, float]]:
    """Metrics by launch from `ncu --csv`, one row a metric, after whatever else the program printed."""
    lines = text.splitlines()
    header = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return []
    launches: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[header:]))):
        if not (row["ID"] or "").isdigit():
            continue
        found = launches.setdefault(int(row["ID"]), {})
        try:
            found[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except (AttributeError, KeyError, ValueError):
            continue  # "n/a": this GPU does not have it
    return [launches[index] for index in sorted(launches)]


def per_instruction(
    instruction: Instruction, low: Mapping[str, float], high: Mapping[str, float], extra: int
) -> tuple[str, float] | None:
    """(metric, wavefronts an instruction); `high` issues `extra` instructions more than `low`. None if not counted."""
    for name in sources(instruction):
        more = high.get(name, 0.0) - low.get(name, 0.0)
        if more > 0:
            return name, more / extra
    return None


def agrees(counted: float, predicted: int) -> bool:
    """Whether counter and model agree, except for the few wavefronts of the kernel's other instructions."""
    return abs(counted / predicted - 1) <= TOLERANCE
