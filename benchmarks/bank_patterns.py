"""The access patterns of the bank-conflict benchmark, as plain arithmetic: each lane's addresses and resulting data.

Everything here is derived from the PTX description of the instructions, not from CuTe, so that the kernels' addresses
and data are checked against an independent source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

ROWS = COLS = 64  # a tile of 128-byte rows, the widest that one swizzle atom covers
ELEMENT_BYTES = 2
LANES = 32
INSTRUCTIONS = 16  # different ones in a row; together they cover the tile once (st.shared.b32: its first 16 columns)
REGISTERS = 4  # room for each lane's data; 32-bit stores use the first
POISON = 0x7FC1  # a value that no element of the tile has

Ints = npt.NDArray[np.int64]
# (32 byte addresses, bytes of a lane's access, whether it is an asynchronous copy) -> ways of each phase
Model = Callable[[Ints, int, bool], npt.NDArray[Any]]
Path = Literal["load", "store", "copy"]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One shared-memory instruction with one way of spreading a warp over a tile.

    Attributes:
        name: as the table calls it.
        path: shared memory to registers, registers to shared memory, or global to shared memory.
        lane_bytes: bytes that one lane accesses at its address.
        pattern: "matrices" 16x16 elements, lane l at row l % 16; "pairs" accumulators of mma.sync m16n8; "rows" eight
            lanes side by side in a row of 128 bytes; "halves" four in each of two rows, four apart; "columns" lane
            l in row l.
        sass: its name in machine code, a regular expression.
        judged: whether cycles can contradict the model; copies also wait for L2, so that only counters can.
    """

    name: str
    path: Path
    lane_bytes: int
    pattern: Literal["matrices", "pairs", "rows", "halves", "columns"]
    sass: str
    judged: bool = True

    @property
    def transposes(self) -> bool:
        """Whether the matrices arrive transposed."""
        return self.name.endswith(".trans")

    @property
    def is_matrix(self) -> bool:
        """Whether a lane's registers hold other lanes' rows."""
        return self.pattern == "matrices"


INSTRUCTION_SET = {
    instruction.name: instruction
    for instruction in (
        Instruction("ldmatrix.x4", "load", 16, "matrices", r"LDSM\.16\.M88\.4"),
        Instruction("ldmatrix.x4.trans", "load", 16, "matrices", r"LDSM\.16\.MT88\.4"),
        Instruction("stmatrix.x4", "store", 16, "matrices", r"STSM\.16\.M88\.4"),
        Instruction("st.shared.b32", "store", 4, "pairs", r"STS"),
        Instruction("ld.shared.v4 rows", "load", 16, "rows", r"LDS\.128"),
        Instruction("ld.shared.v4 columns", "load", 16, "columns", r"LDS\.128"),
        Instruction("cp.async.16 rows", "copy", 16, "rows", r"LDGSTS\.E\.BYPASS\.128", judged=False),
        Instruction("cp.async.16 halves", "copy", 16, "halves", r"LDGSTS\.E\.BYPASS\.128", judged=False),
        Instruction("cp.async.16 columns", "copy", 16, "columns", r"LDGSTS\.E\.BYPASS\.128", judged=False),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """An instruction on a tile whose 16-byte chunks are XORed with the row by S<swizzle_bits,3,3>."""

    instruction: str
    swizzle_bits: int

    def __post_init__(self) -> None:
        if self.instruction not in INSTRUCTION_SET:
            raise ValueError(f"instruction is {self.instruction!r}; allowed: {', '.join(INSTRUCTION_SET)}")
        if not 0 <= self.swizzle_bits <= 3:
            raise ValueError(f"swizzle_bits is {self.swizzle_bits}; allowed: 0 to 3")

    @property
    def what(self) -> Instruction:
        """The instruction's description."""
        return INSTRUCTION_SET[self.instruction]

    @property
    def swizzle(self) -> str:
        """In CuTe's notation, in elements."""
        return f"S<{self.swizzle_bits},3,3>" if self.swizzle_bits else "none"

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return ROWS * COLS * ELEMENT_BYTES


def lane_coordinates(instruction: Instruction) -> tuple[Ints, Ints]:
    """(rows, columns) of the element each lane's address points at, both (INSTRUCTIONS, LANES)."""
    j, lane = np.ogrid[:INSTRUCTIONS, :LANES]
    if instruction.pattern == "matrices":
        # Transposed operands are walked along the tile's columns first: those are the product's N.
        block_row, block_col = (j // 4, j % 4) if instruction.transposes else (j % 4, j // 4)
        rows, cols = block_row * 16 + lane % 16, block_col * 16 + lane // 16 * 8
    elif instruction.pattern == "pairs":
        rows, cols = j // 4 * 16 + j % 2 * 8 + lane // 4, j % 4 // 2 * 8 + lane % 4 * 2
    elif instruction.pattern == "rows":
        rows, cols = j * 4 + lane // 8, lane % 8 * 8 + 0 * j
    elif instruction.pattern == "halves":
        rows, cols = j % 8 * 8 + lane // 8 + lane % 8 // 4 * 4, j // 8 * 32 + lane % 4 * 8
    else:
        rows, cols = j % 2 * 32 + lane, j // 2 * 8 + 0 * lane
    return tuple(np.broadcast_to(x, (INSTRUCTIONS, LANES)).astype(np.int64) for x in (rows, cols))  # type: ignore[return-value]


def byte_offset(rows: Ints, cols: Ints, swizzle_bits: int) -> Ints:
    """Offset of an element of the row-major tile, in bytes from the tile's 1024-byte aligned base."""
    chunk = (cols // 8) ^ (rows & ((1 << swizzle_bits) - 1))
    return ELEMENT_BYTES * (rows * COLS + chunk * 8 + cols % 8)


def addresses(case: Case) -> Ints:
    """Byte addresses of the lanes, from the tile's base: (INSTRUCTIONS, LANES)."""
    return byte_offset(*lane_coordinates(case.what), case.swizzle_bits)


def ways(case: Case, model: Model) -> list[int]:
    """Ways of each phase by `model`, which must be the same for all instructions of the case (ValueError)."""
    copies = case.what.path == "copy"
    found = {tuple(map(int, model(lanes, case.what.lane_bytes, copies))) for lanes in addresses(case)}
    if len(found) != 1:
        raise ValueError(f"{case}: instructions differ in their conflicts: {sorted(found)}")
    return list(found.pop())


def fragments(instruction: Instruction) -> npt.NDArray[np.uint32]:
    """Contents of each lane's registers before a store or after a load: (INSTRUCTIONS, LANES, REGISTERS).

    An element's value is its number, row * COLS + column; the lower half of a register is the first of its two.
    Registers that the instruction does not use are 0.
    """
    rows, cols = lane_coordinates(instruction)
    out = np.zeros((INSTRUCTIONS, LANES, REGISTERS), np.uint32)
    lane = np.arange(LANES)
    for register in range(instruction.lane_bytes // 4):
        if instruction.is_matrix:
            # Matrix r: its row i is addressed by lane 8 r + i; lane l holds elements 2 (l % 4) and the next of row l/4.
            outer, inner = lane // 4, lane % 4 * 2
            if instruction.transposes:
                first = rows[:, 8 * register + inner] * COLS + cols[:, 8 * register + inner] + outer
                second = rows[:, 8 * register + inner + 1] * COLS + cols[:, 8 * register + inner + 1] + outer
            else:
                first = rows[:, 8 * register + outer] * COLS + cols[:, 8 * register + outer] + inner
                second = first + 1
        else:
            first = rows * COLS + cols + 2 * register
            second = first + 1
        out[:, :, register] = first | second << 16
    return out


def tile_image(case: Case, touched: bool) -> npt.NDArray[np.uint16]:
    """The tile's raw shared memory, (ROWS * COLS,): every element, or with `touched` those that the case stores."""
    rows, cols = np.divmod(np.arange(ROWS * COLS), COLS)
    if touched and case.what.lane_bytes < 16:
        first_rows, first_cols = lane_coordinates(case.what)
        rows = np.concatenate([first_rows.ravel()] * 2)
        cols = np.concatenate([first_cols.ravel(), first_cols.ravel() + 1])
    image = np.full(ROWS * COLS, POISON, np.uint16)
    image[byte_offset(rows, cols, case.swizzle_bits) // ELEMENT_BYTES] = rows * COLS + cols
    return image
