"""Where 16 bytes of a swizzled tile lie, for warps that address shared memory by hand."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32

CHUNK = 16  # bytes that a swizzle moves together


def swizzle_bytes(columns: int) -> int:
    """The bytes of a slab's row, of a tile with so many bytes a row: its pattern repeats after eight rows."""
    return next(width for width in (128, 64, 32) if columns % width == 0)


def swizzled(row: Int32, column_chunk: Int32, rows: int, columns: int) -> Int32:
    """Where a chunk of a row-major tile of bytes begins, laid out as `atoms.smem_tile_layout` does.

    Slabs are as wide as the swizzle; in a slab, the row's number in the swizzle's pattern is added to the chunk's.
    """
    width = swizzle_bytes(columns)
    chunks = width // CHUNK
    pattern = row * width // 128 % chunks
    return column_chunk // chunks * (rows * width) + row * width + (column_chunk % chunks ^ pattern) * CHUNK


def beside(address: Int32, rows: int, chunks: int, shape: tuple[int, int]) -> Int32:
    """Where the chunk so many rows and chunks beside the one at `address` begins, of a tile of `shape` bytes.

    Nothing is computed but an XOR for each other chunk of a slab: `rows` are multiples of 8, after which the pattern
    repeats, and the chunk at `address` and `chunks` differ in other bits, so that their sum is an XOR. The tile lies on
    a multiple of its pattern.
    """
    width = swizzle_bytes(shape[1])
    slabs, inside = divmod(chunks, width // CHUNK)
    return (address ^ inside * CHUNK) + (slabs * shape[0] + rows) * width


def chunk_beside(address: Int32, rows: int, chunks: int, shape: tuple[int, int]) -> cute.Tensor:
    """The chunk at `beside`, as the eight 16-bit elements of a matrix's row."""
    place = beside(address, rows, chunks, shape)
    start = cute.make_ptr(cutlass.Uint16, place, AddressSpace.smem, assumed_align=CHUNK)
    return cute.make_tensor(start, cute.make_layout((CHUNK // 2, 1)))
