"""What a cubin says without a disassembler, which takes a quarter of a second to start and half of one to print."""

from __future__ import annotations

import struct

import numpy as np

ELF_SECTIONS = struct.Struct("<40xQ10x3H")  # of a 64-bit ELF's header: where section headers are, their size and number
SECTION = struct.Struct("<IIQQQQIIQQ")  # a section header: name, type, flags, address, offset, size, ..
# What tells instructions whose names begin so: of an instruction's two words of 64 bits those bits that count, and
# their values; on every target from sm_80 on. The last twelve bits are the operation.
ENCODINGS = {
    "LDL": ((0xFFF, 0), (0x983, 0)),
    "STL": ((0xFFF, 0), (0x387, 0)),
    "LDGSTS.E.BYPASS": ((0xFFF, 0x03000000), (0xFAE, 0)),
    "LDSM.16.M88.4": ((0xFFF, 0xFF00), (0x83B, 0x0200)),
    "LDSM.16.MT88.4": ((0xFFF, 0xFF00), (0x83B, 0x4200)),
    "HMMA.16816.F32": ((0xFFF, 0xFFFBFF00), (0x23C, 0x1800)),  # of fp16 or bf16
    "F2FP.F16.E4M3.UNPACK_B": ((0xFFF, 0xFEFFFFFF), (0x23E, 0x020006FF)),  # of either half of a register
}


def functions(cubin: bytes) -> list[bytes]:
    """The instructions of each of a cubin's functions, without names, which hold those of Python classes."""
    section_offset, entry_size, count, names_index = ELF_SECTIONS.unpack_from(cubin)
    sections = [SECTION.unpack_from(cubin, section_offset + i * entry_size) for i in range(count)]
    names = sections[names_index][4]

    def name(start: int) -> bytes:
        return cubin[names + start : cubin.index(b"\0", names + start)]

    return [
        cubin[offset : offset + size]
        for start, _, _, _, offset, size, *_ in sections
        if name(start).startswith(b".text")
    ]


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin."""
    return b"".join(functions(cubin))


def count(cubin: bytes, *names: str) -> int:
    """How many instructions of a cubin have names that begin with one of these of `ENCODINGS`."""
    words = np.frombuffer(machine_code(cubin), np.uint64).reshape(-1, 2)
    found = 0
    for mask, values in (ENCODINGS[name] for name in names):
        found += int(((words & np.array(mask, np.uint64)) == np.array(values, np.uint64)).all(axis=1).sum())
    return found
