"""What a compiled kernel costs, read from ptxas' own report, and the cubin inside an exported object.

The DSL runs ptxas in-process; its verbose log reaches Python only as a remark, which is why kernels are built with
`remarks{ptx}`. Without it, ptxas' warnings (WGMMA serialised, setmaxnreg ignored) vanish.
"""

from __future__ import annotations

import dataclasses
import re
import struct

# Every performance diagnostic has a number, also those that ptxas calls "info": C7508 (setmaxnreg ignored), C7510 to
# C7519 (wgmma serialised, waits injected).
DIAGNOSTIC = re.compile(r"^ptxas[^\n]*?(?:warning|\(C\d+\))[^\n]*", re.MULTILINE)
DIAGNOSTIC_PREFIX = re.compile(r"^ptxas\s+\w+\s*:\s*")
FUNCTION_NAME = re.compile(r"\s+(?:in|of)( the)? function '+[^']*'+")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")

REMARK_PREFIX = "ptxas output: "  # precedes the log's first line, which may be a diagnostic

ELF_MAGIC = b"\x7fELF\x02\x01\x01"
ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF_MACHINE_CUDA = 190


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

    Raises ValueError where the log has no resource lines: that is a change of compiler, not a kernel without costs.
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


def extract_cubins(blob: bytes) -> list[bytes]:
    """The CUDA ELF images embedded in an exported host object, in file order."""
    cubins = []
    start = blob.find(ELF_MAGIC)
    while start >= 0:
        size = _cuda_elf_size(blob, start)
        if size:
            cubins.append(blob[start : start + size])
        start = blob.find(ELF_MAGIC, start + max(size, 1))
    return cubins


def _cuda_elf_size(blob: bytes, start: int) -> int:
    """Bytes of the CUDA ELF image at `start`, 0 where there is none (the host object is an ELF as well)."""
    if start + ELF_HEADER.size > len(blob):
        return 0
    fields = ELF_HEADER.unpack_from(blob, start)
    machine, program_offset, section_offset = fields[2], fields[5], fields[6]
    program_entry, programs, section_entry, sections = fields[9:13]
    if machine != ELF_MACHINE_CUDA:
        return 0
    size: int = max(program_offset + program_entry * programs, section_offset + section_entry * sections)
    return size if start + size <= len(blob) else 0
