"""Rows of Q and K with a rotary embedding of all their columns and after it a Hadamard rotation of each 64.

A thread has the same columns of both halves of a row, which the embedding rotates together, in fp32; four neighbouring
threads have 64 columns between them, which tensor cores mix, in products of tf32. A number has 24 bits and an operand
11 of them, so that there is a product for a number's first bits and one for the rest: exact to 22 bits, and but for
sums in fp32. Of the columns' bits products mix those between threads and one within them; sums and differences in fp32
mix the others, the last of them where they are used. Elements become fp32 by a product with the identity.

A row with something that is not finite is mixed again, "careful": products would make NaN of all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS, CUTE_DTYPES
from cuteflash.kernels.common.quantize_held import half_of
from cuteflash.kernels.common.quantize_products import QUAD, ZEROS, Identity, first_bits, mma_tf32, tf32_signs
from cuteflash.kernels.common.quantize_rotary import Rotary
from cuteflash.kernels.common.quantize_tile import NUMBERS, WORDS, Rows, Tile, own_thread, part_of, peak_of, rounded
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
        """(pairs of columns) for a row of 16-bit elements."""
        return cute.make_rmem_tensor(2 * self.loads * WORDS, Uint32)

    def load_words(self, rows: Rows, i: int | Int32, words: cute.Tensor, dtype: Dtype) -> None:
        """Load the thread's row `i`."""
        offsets = tuple(chunk * ALIGN_BYTES for chunk in self.chunks())
        self.load_row(rows, offsets, i, cute.recast_tensor(words, CUTE_DTYPES[dtype]))

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
        identity: see there.
        signs: see `tf32_signs`.
        angles: (4, 16 bytes of a thread) its fp32 cosines and sines, in shared memory.
        dtype: element type of Q and K.
    """

    tile: MixedTile
    identity: Identity
    signs: tuple[Uint32, Uint32]
    angles: cute.Tensor
    dtype: cutlass.Constexpr[Dtype]

    @classmethod
    def of(cls, tile: MixedTile, dtype: Dtype, traits: QuantizeTraits, memory: cute.Tensor) -> Mixer:
        """For a tile; `put_angles` is still to be called. `memory` begins with that for the angles."""
        shape = NUMBERS, traits.num_threads, tile.rows * TABLES * tile.loads * ALIGN_ELEMENTS // NUMBERS
        angles = part_of(memory, 0, shape)[None, cute.arch.thread_idx()[0], None]
        return cls(tile, Identity.of(dtype, tile.last + 1), tf32_signs(), angles, dtype)

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

    def row(self, words: cute.Tensor, i: int | Int32, is_careful: bool = False) -> cute.Tensor:
        """(numbers,) of a row of elements `words` the rotation but for its last bit, without its factor.

        Of each 16 numbers the first 8 and the last 8 are to be added and to be subtracted. Those are two loads of
        neighbouring columns, or the only ones of both halves of a row.
        """
        loads = self.tile.loads
        found = cute.make_rmem_tensor(2 * loads * ALIGN_ELEMENTS, Float32)
        for j in range(loads):
            a, b = (self._unpacked(words, h * loads + j, is_careful) for h in range(2))
            cos, sin = (self._table(i, which, j) for which in range(TABLES))
            turned = (
                [a[e] * cos[e] - b[e] * sin[e] for e in range(ALIGN_ELEMENTS)],
                [a[e] * sin[e] + b[e] * cos[e] for e in range(ALIGN_ELEMENTS)],
            )
            for h, values in enumerate(turned):
                for e, value in enumerate(self._mixed(values, is_careful)):
                    found[(h * loads + j) * ALIGN_ELEMENTS + e] = value
        return found

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

    def _unpacked(self, words: cute.Tensor, load: int, is_careful: bool) -> list[Float32]:
        """The eight elements of a load, fp32."""
        own = tuple(words[WORDS * load + w] for w in range(WORDS))
        if is_careful:
            return [half_of(word, b, self.dtype) for word in own for b in range(2)]
        return [*self.identity.add_first(ZEROS, own), *self.identity.add_second(ZEROS, own)]

    def _mixed(self, values: list[Float32], is_careful: bool) -> list[Float32]:
        """Eight numbers after the rotation's bits within them and between threads."""
        found = [x for first in (0, 4) for x in self._product(values[first : first + 4], is_careful)]
        for distance in (2, 4):
            for low in (x for x in range(ALIGN_ELEMENTS) if not x & distance):
                a, b = found[low], found[low + distance]
                found[low], found[low + distance] = a + b, a - b
        return found

    def _product(self, values: list[Float32], is_careful: bool) -> tuple[Float32, ...]:
        """Four numbers after the rotation's bits between threads and its lowest one within them."""
        firsts = [first_bits(x) for x in values]
        rests = [x - first for x, first in zip(values, firsts, strict=True)]
        if is_careful:  # an infinity's, and NaN's, may be any number
            rests = [cute.arch.fmin(x, Float32(1.0)) for x in rests]
        sums: tuple[Float32, ...] = ZEROS
        for part in (rests, firsts):
            sums = mma_tf32(sums, tuple(part[x] for x in (0, 2, 1, 3)), self.signs)
        return sums


def pairs_of(mixed: cute.Tensor) -> Iterator[tuple[Float32, Float32]]:
    """What of a result of `Mixer.row` is to be added and subtracted."""
    for first in range(0, cute.size(mixed), 2 * ALIGN_ELEMENTS):
        for e in range(first, first + ALIGN_ELEMENTS):
            yield mixed[e], mixed[e + ALIGN_ELEMENTS]


def all_finite(rows: list[cute.Tensor]) -> Boolean:
    """Whether all elements of some rows were: in a sum or difference are all that are mixed with each other."""
    firsts = (next(pairs_of(mixed)) for mixed in rows)
    return functools.reduce(operator.and_, (size_of_pair(a, b) < Float32.inf for a, b in firsts))


def size_of_pair(a: Float32, b: Float32) -> Float32:
    """The larger magnitude of a sum and a difference: the sum of magnitudes, rounded alike."""
    return cute.math.abs(a) + cute.math.abs(b)


@cute.jit
def size_of(rows: list[cute.Tensor]):
    """The largest magnitude of finite numbers in results of `Mixer.row`."""
    size = peak_of(size_of_pair(a, b) for mixed in rows for a, b in pairs_of(mixed))  # NaN is left out by itself
    if size == Float32.inf:
        size = finite_size_of(rows)
    return size


def finite_size_of(rows: list[cute.Tensor]) -> Float32:
    """The same without a branch, of each sum and each difference."""
    values = (x for mixed in rows for a, b in pairs_of(mixed) for x in (a + b, a - b))
    sizes = (cute.math.abs(x) for x in values)
    return peak_of(cutlass.select_(size < Float32.inf, size, Float32(0.0)) for size in sizes)


def eight_bits(mixed: cute.Tensor, factor: Float32, to: Fp8Dtype) -> cute.Tensor:
    """(words,) of a result of `Mixer.row`, times a factor, rounded."""
    words = cute.make_rmem_tensor(cute.size(mixed) // 4, Uint32)
    both = list(pairs_of(mixed))
    for w in range(len(both) // 4):
        scaled = [(a * factor, b) for a, b in both[4 * w : 4 * w + 4]]
        at = w // 2 * 4 + w % 2
        words[at] = rounded(*(b * factor + a for a, b in scaled), to)
        words[at + 2] = rounded(*(a - b * factor for a, b in scaled), to)
    return words
