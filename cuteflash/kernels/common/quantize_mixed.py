"""Rows of Q and K with a rotary embedding of all their columns and after it a Hadamard rotation of each 64.

A thread has the same columns of both halves of a row, which the embedding rotates together, in fp32. The result has 16
bits again, as that of `cuteflash.nn.apply_rotary_emb`, and four neighbouring threads have 64 columns between them: that
is a row of `Held`, but for the order of the columns' bits, in which Hadamard's matrix is symmetric.
"""

from __future__ import annotations

import dataclasses
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS, CUTE_DTYPES
from cuteflash.kernels.common.quantize_held import PAIRS, Held, half_of
from cuteflash.kernels.common.quantize_products import PTX_TYPES, QUAD, signs_of
from cuteflash.kernels.common.quantize_rotary import Rotary
from cuteflash.kernels.common.quantize_tile import NUMBERS, WORDS, Rows, Tile, own_thread, part_of, rounded
from cuteflash.kernels.common.quantize_work import Span
from cuteflash.problem import Dtype, Fp8Dtype
from cuteflash.traits.quantize import COLUMNS, ROWS, QuantizeTraits

TABLES = 2  # cosines and sines


@dataclasses.dataclass(frozen=True)
class MixedTile(Tile):
    """What a thread has of a tile of Q or K: `lane` says which columns, `quad` is its first row.

    Attributes:
        loads: 16 bytes that it has of each half of a row.
        rows: how many rows it has.
        spacing: from one of them to the next.
    """

    loads: cutlass.Constexpr[int] = 1
    rows: cutlass.Constexpr[int] = ROWS
    spacing: cutlass.Constexpr[int] = 1

    @classmethod
    def at(cls, span: Span, head_dim: int, tokens: int, thread: Int32 | None = None) -> MixedTile:
        """The calling thread's part of the first tile of `tokens` rows; `thread` is its number, if it is at hand."""
        lanes = max(head_dim // (2 * COLUMNS), QUAD)
        loads = head_dim // 2 // lanes // ALIGN_ELEMENTS
        rows = COLUMNS * ROWS // (2 * loads * ALIGN_ELEMENTS)
        thread, spacing = own_thread(thread), tokens // rows
        place = thread // lanes
        return cls(
            first=span.first,
            last=span.rows - 1,
            lane=thread % lanes,
            quad=cutlass.min(place, spacing - 1),
            is_own=place < spacing,
            end=span.end,
            half=lanes * loads,
            loads=loads,
            rows=rows,
            spacing=spacing,
        )

    def row(self, i: int | Int32) -> Int32:
        """The thread's row `i`."""
        return self.first + self.quad + i * self.spacing

    def chunks(self) -> tuple[Int32, ...]:
        """The thread's columns of a row of 16-bit elements, counted in 16 bytes: of the first half, of the second."""
        first = self.lane * self.loads
        return tuple(first + h * self.half + j for h in range(2) for j in range(self.loads))

    def words(self) -> cute.Tensor:
        """(pairs of columns, rows) for the thread's 16-bit elements."""
        return cute.make_rmem_tensor((2 * self.loads * WORDS, self.rows), Uint32)

    def load_words(self, rows: Rows, words: cute.Tensor, dtype: Dtype) -> None:
        """Load the thread's rows."""
        offsets = tuple(chunk * ALIGN_BYTES for chunk in self.chunks())
        for i in range(self.rows):
            self.load_row(rows, offsets, i, cute.recast_tensor(words[None, i], CUTE_DTYPES[dtype]))

    def store_row(self, target: Rows, i: int | Int32, words: cute.Tensor) -> None:
        """Write the thread's row `i` of 8-bit elements: words of its first half, then of the second."""
        nbytes = ALIGN_ELEMENTS * self.loads
        atom = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=nbytes * 8)
        pieces = cute.zipped_divide(words, (nbytes // 4,))
        for h in range(2):
            offset = self.lane * nbytes + h * self.half * ALIGN_ELEMENTS
            cute.copy(atom, pieces[None, h], target.piece(self.row(i), offset, Uint32, nbytes))


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Rotates rows of a tile.

    Attributes:
        tile: which one.
        signs: see `signs_of`.
        angles: (4, 16 bytes of a thread) its fp32 cosines and sines, in shared memory.
        dtype: element type of Q and K.
        hadamard: columns of a block of the rotation.
    """

    tile: MixedTile
    signs: Uint32
    angles: cute.Tensor
    dtype: cutlass.Constexpr[Dtype]
    hadamard: cutlass.Constexpr[int]

    @classmethod
    def of(cls, tile: MixedTile, dtype: Dtype, hadamard: int, traits: QuantizeTraits, memory: cute.Tensor) -> Mixer:
        """For a tile; `put_angles` is still to be called. `memory` begins with that for the angles."""
        shape = NUMBERS, traits.num_threads, tile.rows * TABLES * tile.loads * ALIGN_ELEMENTS // NUMBERS
        angles = part_of(memory, 0, shape)[None, cute.arch.thread_idx()[0], None]
        return cls(tile, signs_of(dtype), angles, dtype, hadamard)

    def put_angles(self, rotary: Rotary) -> None:
        """Bring cosines and sines of all rows: each thread what it needs itself."""
        columns = tuple((self.tile.lane * self.tile.loads + j) * ALIGN_ELEMENTS for j in range(self.tile.loads))
        tables = [rotary.tables(self.tile, columns, i) for i in range(self.tile.rows)]
        for i, of_row in enumerate(tables):
            for which, table in enumerate(of_row):
                for j in range(self.tile.loads):
                    for piece, target in enumerate(self._pieces(i, which, j)):
                        for x in range(NUMBERS):
                            target[x] = table[ALIGN_ELEMENTS * j + NUMBERS * piece + x]

    def turned(self, words: cute.Tensor) -> Held:
        """A thread's rows after the embedding, still to be mixed; `words` are its elements, see `MixedTile.words`.

        A row of 32 columns is two rows of `Held`, one of each half.
        """
        found, loads = cute.make_rmem_tensor((PAIRS, ROWS), Uint32), self.tile.loads
        for i, j in itertools.product(range(self.tile.rows), range(loads)):
            cos, sin = (self._table(i, which, j) for which in range(TABLES))
            for w in range(WORDS):
                first, second = ((h * loads + j) * WORDS + w for h in range(2))
                both = ([half_of(words[at, i], x, self.dtype) for at in (first, second)] for x in range(2))
                (a, b), (c, d) = both
                (p, r), (s, t) = ((table[2 * w], table[2 * w + 1]) for table in (cos, sin))
                turned = (a * p - b * s, c * r - d * t), (a * s + b * p, c * t + d * r)
                for at, pair in zip((first, second), turned, strict=True):
                    row, place = divmod(i * 2 * loads * WORDS + at, PAIRS)
                    found[place, row] = pair_of(*pair, self.dtype)
        return Held(found, self.tile, self.dtype, self.hadamard, self.signs)

    def _pieces(self, i: int | Int32, which: int, j: int) -> list[cute.Tensor]:
        """Both 16 bytes of a load's cosines (0) or sines (1) in row `i`."""
        count = ALIGN_ELEMENTS // NUMBERS
        first = ((i * TABLES + which) * self.tile.loads + j) * count
        return [self.angles[None, first + piece] for piece in range(count)]

    def _table(self, i: int | Int32, which: int, j: int) -> cute.Tensor:
        found = cute.make_rmem_tensor(ALIGN_ELEMENTS, Float32)
        targets = cute.zipped_divide(found, (NUMBERS,))
        for piece, source in enumerate(self._pieces(i, which, j)):
            cute.autovec_copy(source, targets[None, piece])
        return found


def pair_of(a: Float32, b: Float32, dtype: Dtype) -> Uint32:
    """Two numbers rounded to 16 bits, the first one in the low half."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{PTX_TYPES[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def eight_bits(held: Held, i: int, factor: Float32, to: Fp8Dtype) -> cute.Tensor:
    """(words,) of row `i` of a tile that `Mixer.turned` gave, mixed, times a factor, rounded."""
    loads = held.tile.loads  # as many rows of `held`
    words = cute.make_rmem_tensor(loads * WORDS, Uint32)
    for x in range(loads):
        for w in range(WORDS):
            words[WORDS * x + w] = rounded(*held.scaled(loads * i + x, w, factor), to)
    return words
