"""Where 16 bytes of a swizzled tile lie, for warps that address shared memory by hand."""

from __future__ import annotations

from cutlass import Int32

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
