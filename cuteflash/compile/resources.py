"""What a compiled kernel costs, read from ptxas' own report.

The DSL runs ptxas in-process; its verbose log reaches Python only as a remark, which is why kernels are built with
remarks (`cuteflash.compile.options`). Without them, ptxas' warnings (WGMMA serialised, setmaxnreg ignored) vanish.
"""

from __future__ import annotations

import dataclasses
import re

# Every performance diagnostic has a number, also those that ptxas calls "info": C7508 (setmaxnreg ignored), C7510 to
# C7519 (wgmma serialised, waits injected).
DIAGNOSTIC = re.compile(r"^ptxas[^\n]*?(?:warning|\(C\d+\))[^\n]*", re.MULTILINE)
DIAGNOSTIC_PREFIX = re.compile(r"^ptxas\s+\w+\s*:\s*")
FUNCTION_NAME = re.compile(r"\s+(?:in|of)( the)? function '+[^']*'+")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")

REMARK_PREFIX = "ptxas output: "  # precedes the log's first line, which may be a diagnostic


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """Registers and local memory of one kernel, in bytes a thread, and what ptxas warned of.

    A kernel with setmaxnreg reports the registers it is launched with, not those of its widest role: judge by spills.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...] = ()


def parse_ptxas_log(remarks: str) -> Resources:
    """The resources in a ptxas verbose log, plain or quoted by a remark file; of several kernels the largest of each.

    Raises ValueError if the log has no resource lines: that is a change of compiler, not a kernel without costs.
    """
    log = remarks.replace(REMARK_PREFIX, "\n").replace("''", "'")
    frames = [tuple(map(int, found)) for found in FRAME.findall(log)]
    registers = [int(found) for found in REGISTERS.findall(log)]
    if not frames or not registers:
        raise ValueError(f"no resource usage in the ptxas log: {log.strip()[:400]!r}")
    stack, stores, loads = (max(column) for column in zip(*frames, strict=True))
    diagnostics = (DIAGNOSTIC_PREFIX.sub("", line) for line in DIAGNOSTIC.findall(log))
    warnings = dict.fromkeys(FUNCTION_NAME.sub("", line).strip() for line in diagnostics)
    return Resources(max(registers), stack, stores, loads, tuple(warnings))
