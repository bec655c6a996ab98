"""Rotations of a thread's rows in fp32: the rotary embedding, and Hadamard's by sums, differences and shuffles."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_tile import Numeric, Rows, Tile, widened
from cuteflash.quantize_problem import QuantizeProblem
from cuteflash.traits.quantize import COLUMNS


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A rotary embedding of the first columns of a head: its cosines and sines, (seqlen, rotary_dim / 2).

    Of packed sequences `last` is the last row of both: what the vectors of lengths say may exceed them.
    """

    problem: cutlass.Constexpr[QuantizeProblem]
    cos: Rows
    sin: Rows
    last: Int32
    dtype: cutlass.Constexpr[Numeric]

    def angles(self, tile: Tile, i: int) -> tuple[cute.Tensor, cute.Tensor]:
        """Cosines and sines of the thread's columns in its row `i`, fp32: of each pair's, or of each column's."""
        if self.problem.rotary_interleaved:
            column = cutlass.min(tile.lane * COLUMNS, self.problem.rotary_dim - COLUMNS)
            return self.tables(tile, (column // 2,), i)
        if tile.half:
            return self.tables(tile, (tile.lane * ALIGN_ELEMENTS,), i)
        half = self._half()
        return self.tables(tile, tuple(chunk % half * ALIGN_ELEMENTS for chunk in tile.chunks()), i)

    def rotate(self, values: cute.Tensor, rows: Rows, dtype: Numeric, tile: Tile, i: int, angles) -> None:
        """Rotate a thread's row `i` of `rows` by `angles`, and round it to their element type `dtype`."""
        if self.problem.rotary_interleaved:
            self._rotate_neighbours(values, tile, angles)
        elif tile.half:
            self._rotate_own_halves(values, angles)
        else:
            half = self._half()
            others = (
                cutlass.select_(chunk < half, chunk + half, cutlass.select_(chunk < 2 * half, chunk - half, chunk))
                for chunk in tile.chunks()
            )
            partners = cute.make_rmem_tensor(COLUMNS, dtype)  # in the cache: a neighbouring thread loads them as well
            tile.load_row(rows, tuple(chunk * ALIGN_BYTES for chunk in others), i, partners)
            self._rotate_halves(values, widened(partners), tile, angles)
        values.store(values.load().to(dtype).to(Float32))

    def _half(self) -> int:
        """Chunks of 8 columns in half of those that are rotated."""
        return self.problem.rotary_dim // 2 // ALIGN_ELEMENTS

    def tables(self, tile: Tile, columns: tuple[Int32, ...], i: int) -> tuple[cute.Tensor, cute.Tensor]:
        """8 neighbouring cosines and sines from each of `columns` on, for row `i`, fp32."""
        nbytes = self.dtype.width // 8
        steps = range(0, ALIGN_ELEMENTS * nbytes, ALIGN_BYTES)
        offsets = tuple(column * nbytes + step for column in columns for step in steps)
        tables = tuple(cute.make_rmem_tensor(ALIGN_ELEMENTS * len(columns), self.dtype) for _ in range(2))
        row = tile.nearest(i)
        if self.problem.is_packed:
            row = cutlass.min(row, self.last)
        for rows, table in zip((self.cos, self.sin), tables, strict=True):
            tile.load_pieces(rows, offsets, row, table)
        cos, sin = (widened(table) for table in tables)
        return cos, sin

    def _rotate_own_halves(self, values: cute.Tensor, angles) -> None:
        cos, sin = angles
        for e in range(ALIGN_ELEMENTS):
            a, b = values[e], values[e + ALIGN_ELEMENTS]
            values[e] = a * cos[e] - b * sin[e]
            values[e + ALIGN_ELEMENTS] = a * sin[e] + b * cos[e]

    def _rotate_neighbours(self, values: cute.Tensor, tile: Tile, angles) -> None:
        cos, sin = angles
        is_turned = tile.lane * COLUMNS < self.problem.rotary_dim
        for e in range(COLUMNS // 2):
            a, b = values[2 * e], values[2 * e + 1]
            values[2 * e] = cutlass.select_(is_turned, a * cos[e] - b * sin[e], a)
            values[2 * e + 1] = cutlass.select_(is_turned, a * sin[e] + b * cos[e], b)

    def _rotate_halves(self, values: cute.Tensor, partners: cute.Tensor, tile: Tile, angles) -> None:
        half, chunks = self._half(), tile.chunks()
        cos, sin = angles
        for e in range(COLUMNS):
            chunk = chunks[e // ALIGN_ELEMENTS]
            turned = values[e] * cos[e] + partners[e] * cutlass.select_(chunk < half, -sin[e], sin[e])
            values[e] = cutlass.select_(chunk < 2 * half, turned, values[e])


def mix(values: cute.Tensor, tile: Tile, block: int) -> None:
    """Multiply each `block` columns of a row by Sylvester's Hadamard matrix, whose elements are 1 and -1.

    A butterfly for each bit of the column: some within a thread, the others between threads.
    """
    within, between = COLUMNS, block // COLUMNS
    if tile.half:  # the fourth bit within a thread is that of a row's halves
        within = COLUMNS if block > tile.half * ALIGN_ELEMENTS else ALIGN_ELEMENTS
        between = min(block // ALIGN_ELEMENTS, tile.half)
    for distance in (1 << bit for bit in range(within.bit_length() - 1)):
        for low in (x for x in range(COLUMNS) if not x & distance):
            a, b = values[low], values[low + distance]
            values[low], values[low + distance] = a + b, a - b
    for lanes in (1 << bit for bit in range(between.bit_length() - 1)):
        sign = cutlass.select_(tile.lane & lanes == 0, Float32(1.0), Float32(-1.0))
        for e in range(COLUMNS):
            other = cute.arch.shuffle_sync_bfly(values[e], offset=lanes)
            values[e] = values[e] * sign + other
