"""A tile of Q or K of which a thread has both columns of each pair that a rotary embedding rotates together.

Those are the same columns of both halves of what is rotated; threads for the rest of a row have neighbouring columns.
If a Hadamard rotation follows, four neighbouring threads have its 64 columns between them: that is a row of `Held`, but
for the order of the columns' bits, in which Hadamard's matrix is symmetric.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.signature import ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_products import QUAD
from cuteflash.kernels.common.quantize_tile import Rows, Tile, own_thread
from cuteflash.kernels.common.quantize_work import Span
from cuteflash.traits.quantize import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class SplitTile(Tile):
    """What a thread has of such a tile: `lane` says which columns, `quad` is its first row.

    Attributes:
        parts: 16 bytes that it has of each half.
        half: how many there are in half of what is rotated.
        is_whole: all of a row is rotated.
        spacing: from one of its rows to the next.
    """

    half: cutlass.Constexpr[int] = 1
    is_whole: cutlass.Constexpr[bool] = True
    spacing: cutlass.Constexpr[int] = 1

    @classmethod
    def at(cls, span: Span, dims: tuple[int, int], tokens: int, thread: Int32 | None = None) -> SplitTile:
        """The calling thread's part of the first tile of `tokens` rows.

        `dims` are the columns of a row and how many of them are rotated; `thread` is the thread's number, if it is at
        hand.
        """
        head_dim, rotary_dim = dims
        half, is_whole = rotary_dim // COLUMNS, rotary_dim == head_dim
        parts = 2 if is_whole and half > QUAD and half % 2 == 0 else 1
        lanes, rows = head_dim // COLUMNS // parts, ROWS // parts
        thread, spacing = own_thread(thread), tokens // rows
        place = thread // lanes
        return cls(
            first=span.first,
            last=span.rows - 1,
            lane=thread % lanes,
            quad=cutlass.min(place, spacing - 1),
            is_own=place < spacing,
            end=span.end,
            rows=rows,
            parts=parts,
            half=half,
            is_whole=is_whole,
            spacing=spacing,
        )

    def row(self, i: int | Int32) -> Int32:
        """The thread's row `i`."""
        return self.first + self.quad + i * self.spacing

    def chunks(self) -> tuple[Int32, ...]:
        """The thread's columns of a row of 16-bit elements, counted in 16 bytes: of the first half, of the second."""
        first = self.lane * self.parts
        if not self.is_whole:
            is_turned = self.is_turned()
            second = cutlass.select_(is_turned, first + self.half, 2 * first + 1)
            return cutlass.select_(is_turned, first, 2 * first), second
        return tuple(first + h * self.half + j for h in range(2) for j in range(self.parts))

    def store_row(self, target: Rows, i: int | Int32, words: cute.Tensor) -> None:
        """Write the thread's row `i` of 8-bit elements: words of its first half, then of the second."""
        nbytes = ALIGN_ELEMENTS * self.parts
        atom = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=nbytes * 8)
        pieces = cute.zipped_divide(words, (nbytes // 4,))
        for h, chunk in enumerate(self.chunks()[:: self.parts]):
            cute.copy(atom, pieces[None, h], target.piece(self.row(i), chunk * ALIGN_ELEMENTS, Uint32, nbytes))

    def is_turned(self) -> Boolean | bool:
        """Whether the embedding rotates the thread's columns."""
        return self.is_whole or self.lane < self.half
