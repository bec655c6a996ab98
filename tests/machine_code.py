"""What a cubin says without a disassembler, which takes a quarter of a second to start and half of one to print."""

from __future__ import annotations

import struct

ELF_SECTIONS = struct.Struct("<40xQ10x3H")  # of a 64-bit ELF's header: where section headers are, their size and number
SECTION = struct.Struct("<IIQQQQIIQQ")  # a section header: name, type, flags, address, offset, size, ..
LOCAL_MEMORY = {"LDL": 0x983, "STL": 0x387}  # loads and stores: the last twelve bits, on every target from sm_70 on


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


def local_accesses(cubin: bytes) -> int:
    """How many instructions of a cubin load from local memory or store to it."""
    instructions = memoryview(machine_code(cubin)).cast("Q")[::2]  # 16 bytes each, its operation in the first
    return sum(word & 0xFFF in LOCAL_MEMORY.values() for word in instructions)
