"""A thread's 16-bit rows of a tile, kept as they were loaded or as a rotary embedding left them: half the registers of
fp32.

Extremes are found two elements at a time. A Hadamard rotation of 64 columns is a product of tensor cores, exact but for
the sums in fp32: four neighbouring threads have 64 columns of a row, which is how an operand of mma.m16n8k16 lies in a
warp if its columns are counted so. Of the four words of a load, pairs of columns, the even ones are taken for a row of
the operand and the odd ones for the eighth after it: registers stay in place, and a sum and a difference of both rows'
results are two pairs of the rotation's. Other blocks of columns are rotated by sums and differences in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cuteflash.core.signature import ALIGN_BYTES, CUTE_DTYPES
from cuteflash.kernels.common.quantize_products import PTX_TYPES, SIGNS, ZEROS, Sums, mma, signs_of
from cuteflash.kernels.common.quantize_tile import WORDS, Rows, Tile, peak_of, rounded
from cuteflash.problem import Dtype, Fp8Dtype
from cuteflash.quantize_problem import HADAMARD_OF_MMA
from cuteflash.traits.quantize import COLUMNS, ROWS

FIRST_KEY = 1 << 24  # of zero: twice its bits, plus what carries an infinity beyond 32 bits
PAIRS = COLUMNS // 2  # words of a thread in a row


@dataclasses.dataclass(frozen=True)
class Held:
    """A thread's rows.

    Attributes:
        words: (pairs of columns, rows), 16-bit elements. More than 16 columns of a row of the tile are rows that follow
            each other here.
        tile: where they are from.
        dtype: their element type.
        hadamard: columns of a block of the rotation, 0 is none; its factor is left out.
        signs: of a rotation of 64 columns what `signs_of` gives.
    """

    words: cute.Tensor
    tile: Tile
    dtype: cutlass.Constexpr[Dtype]
    hadamard: cutlass.Constexpr[int] = 0
    signs: Uint32 | None = None

    @classmethod
    def load(cls, rows: Rows, tile: Tile, dtype: Dtype, hadamard: int = 0) -> Held:
        """Of `rows`; a tile's rows after the last are loaded as the last."""
        words = tile.words()
        tile.load_words(rows, words, CUTE_DTYPES[dtype])
        return cls(words, tile, dtype, hadamard, signs_if_mixed(dtype, hadamard))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return cute.size(self.words) // PAIRS

    def only(self, i: int) -> Held:
        """Row `i` alone."""
        words = cute.make_rmem_tensor((PAIRS, 1), Uint32)
        for pair in range(PAIRS):
            words[pair, 0] = self.words[pair, i]
        return dataclasses.replace(self, words=words)

    def load_again(self, rows: Rows, tile: Tile, j: int) -> None:
        """Load `j` of each row comes from another tile."""
        for i in range(ROWS):
            words = cute.zipped_divide(self.words[None, i], (WORDS,))[None, j]
            target = cute.recast_tensor(words, CUTE_DTYPES[self.dtype])
            tile.load_row(rows, (tile.chunks()[j] * ALIGN_BYTES,), i, target)

    def value(self, e: int, i: int, mean: cute.Tensor | None = None) -> Float32:
        """Column `e` of row `i` as it was loaded, minus a mean (columns,) if there is one, fp32."""
        value = half_of(self.words[e // 2, i], e % 2, self.dtype)
        return value if mean is None else value - mean[e]

    def eight_bits(self, i: int, factor: Float32, to: Fp8Dtype) -> cute.Tensor:
        """(words,) the thread's row `i` of the tile, rotated, times a factor, in 8 bits.

        Of packed sequences it is 0 if it does not count.
        """
        parts = self.tile.parts
        words = cute.make_rmem_tensor(parts * WORDS, Uint32)
        for x in range(parts):
            for w, four in enumerate(self.scaled(parts * i + x, factor)):
                words[WORDS * x + w] = rounded(*four, to)
        if self.tile.end is not None:
            for w in range(parts * WORDS):
                words[w] = cutlass.select_(self.tile.has(i), words[w], Uint32(0))
        return words

    def scaled(self, i: int, factor: Float32) -> Iterator[list[Float32]]:
        """Row `i`, rotated, times a factor, four columns at a time: fp32."""
        if self.hadamard in (0, HADAMARD_OF_MMA):
            yield from (self.scaled_four(i, w, factor) for w in range(WORDS))
        else:
            values = [x * factor for x in self.mixed(i)]
            yield from (values[ROWS * w : ROWS * (w + 1)] for w in range(WORDS))

    def scaled_four(self, i: int, w: int, factor: Float32) -> list[Float32]:
        """The same of the four columns from 4w on, if tensor cores or nothing rotates them."""
        if not self.hadamard:
            return [self.value(e, i) * factor for e in range(ROWS * w, ROWS * (w + 1))]
        even, odd = self.halves(i, w, "convert")
        products = [x * factor for x in even]
        return [x * factor + y for x, y in zip(odd, products)] + [y - x * factor for x, y in zip(odd, products)]

    def mixed(self, i: int) -> list[Float32]:
        """Row `i`, rotated by a butterfly for each bit of the column: some within a thread, the others between threads.

        The threads have neighbouring columns.
        """
        values = [self.value(e, i) for e in range(COLUMNS)]
        for distance in (1 << bit for bit in range(COLUMNS.bit_length() - 1)):
            for low in (x for x in range(COLUMNS) if not x & distance):
                a, b = values[low], values[low + distance]
                values[low], values[low + distance] = a + b, a - b
        for lanes in (1 << bit for bit in range((self.hadamard // COLUMNS).bit_length() - 1)):
            sign = cutlass.select_(self.tile.lane & lanes == 0, Float32(1.0), Float32(-1.0))
            values = [x * sign + cute.arch.shuffle_sync_bfly(x, offset=lanes) for x in values]
        return values

    def halves(self, i: int, w: int, use: str) -> tuple[Sums, Sums]:
        """Two pairs of numbers whose sums and differences are the four columns from 4w on of row `i` when rotated.

        What was made for another `use` is made again: to keep it would take 64 registers.
        """
        sums: Sums = ZEROS
        for first in range(0, PAIRS, 4):  # pairs of a load
            own = tuple(self.words[first + p, i] for p in range(4))
            sums = mma(sums, own, tuple(self.sign(first + p, 2 * w) for p in (0, 2)), self.dtype, use)
        return sums[:2], sums[2:]

    def sign(self, pair: int, n: int) -> Uint32:
        """The matrix's elements where a thread has such a pair of rows in the product for columns 2n."""
        is_negative = (pair & n).bit_count() % 2
        return self.signs ^ Uint32(SIGNS) if is_negative else self.signs

    def extreme(self, name: str, pair: int) -> Uint32:
        """Of both columns of a pair the largest ("max") or the smallest ("min") finite element, NaN without one."""
        words = (finite_pair(self.words[pair, i], self.dtype) for i in range(ROWS))
        return functools.reduce(functools.partial(pair_extreme, name, dtype=self.dtype), words)

    def magnitude(self, mean: cute.Tensor | None = None) -> Float32:
        """The largest finite magnitude: after a rotation, or minus a mean (columns,) if there is one; 0 without one."""
        if mean is not None:
            return peak_of(size for pair in range(PAIRS) for size in self.distances(pair, mean))
        return finite_or_again(self)

    def largest(self) -> Float32:
        """The largest magnitude after a rotation: also an infinity, but not NaN."""
        if not self.hadamard:
            return self.size(is_finite=False)
        if self.hadamard != HADAMARD_OF_MMA:
            return peak_of(cute.math.abs(x) for i in range(self.rows) for x in self.mixed(i))
        halves = [self.halves(i, w, "peak") for i, w in self.places()]
        # The larger one of a sum and a difference is the sum of magnitudes, rounded alike.
        return peak_of(cute.math.abs(a) + cute.math.abs(b) for even, odd in halves for a, b in zip(even, odd))

    def largest_finite(self) -> Float32:
        """The same without infinities and without a branch, in which a product could not be."""
        if not self.hadamard:
            return self.size(is_finite=True)
        values = (x for i in range(self.rows) for x in self.mixed(i))
        if self.hadamard == HADAMARD_OF_MMA:
            halves = (self.halves(i, w, "keys") for i, w in self.places())
            values = (f(a, b) for even, odd in halves for f in (operator.add, operator.sub) for a, b in zip(even, odd))
        return size_of_key(functools.reduce(larger, map(finite_key, values)))

    def size(self, is_finite: bool) -> Float32:
        """The largest magnitude of rows as they were loaded, without NaN; `is_finite` leaves infinities out, too."""
        extremes = []
        for name in ("min", "max"):
            chains = []  # of each row, independent
            for i in range(self.rows):
                words = (self.words[pair, i] for pair in range(PAIRS))
                words = (finite_pair(word, self.dtype) for word in words) if is_finite else words
                chains.append(functools.reduce(functools.partial(pair_extreme, name, dtype=self.dtype), words))
            extremes.append(functools.reduce(functools.partial(pair_extreme, name, dtype=self.dtype), chains))
        return peak_of(cute.math.abs(half_of(extreme, b, self.dtype)) for extreme in extremes for b in range(2))

    def places(self) -> Iterator[tuple[int, int]]:
        """All rows and fours of columns."""
        return itertools.product(range(self.rows), range(WORDS))

    def distances(self, pair: int, mean: cute.Tensor) -> Iterator[Float32]:
        """How far a pair of columns' extremes are from their mean; to subtract it keeps the order of elements."""
        low, high = (self.extreme(name, pair) for name in ("min", "max"))
        for b in range(2):
            yield half_of(high, b, self.dtype) - mean[2 * pair + b]
            yield mean[2 * pair + b] - half_of(low, b, self.dtype)


@cute.jit
def finite_or_again(held: Held):
    """The largest finite magnitude; infinities are rare."""
    size = held.largest()
    if const_expr(held.hadamard):
        if cute.arch.vote_any_sync(size == Float32.inf):
            size = held.largest_finite()
    elif size == Float32.inf:
        size = held.largest_finite()
    return size


def signs_if_mixed(dtype: Dtype, hadamard: int) -> Uint32 | None:
    """What `Held.signs` is."""
    return signs_of(dtype) if hadamard == HADAMARD_OF_MMA else None


def finite_key(value: Float32) -> Uint32:
    """A number that grows with the magnitude of a finite value; those of infinities and NaN are smaller than all."""
    return cute.arch.inline_ptx(
        f"mad.lo.u32 {{$w0}}, {{$r0}}, 2, {FIRST_KEY};", write_only_types=[Uint32], read_only_args=[value]
    )


def larger(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two keys, which `cutlass.max` compares with their signs if one is a constant."""
    return cute.arch.inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def size_of_key(key: Uint32) -> Float32:
    """The magnitude of a key; 0 of one that is no finite value's."""
    bits = (larger(key, Uint32(FIRST_KEY)) - Uint32(FIRST_KEY)) >> 1
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def half_of(pair: Uint32, b: int, dtype: Dtype) -> Float32:
    """The first or the second of a pair, fp32."""
    if dtype == "bf16":
        return cute.arch.inline_ptx(
            "and.b32 {$w0}, {$r0}, 0xffff0000;" if b else "shl.b32 {$w0}, {$r0}, 16;",
            write_only_types=[Float32],
            read_only_args=[pair],
        )
    names = "skipped, taken" if b else "taken, skipped"
    return cute.arch.inline_ptx(
        f"{{.reg .b16 taken, skipped; mov.b32 {{{names}}}, {{$r0}}; cvt.f32.f16 {{$w0}}, taken;}}",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def finite_pair(pair: Uint32, dtype: Dtype) -> Uint32:
    """A pair, NaN in place of infinities: an element plus zero times itself."""
    return cute.arch.inline_ptx(
        f"{{.reg .b32 zero; mov.b32 zero, 0; fma.rn.{PTX_TYPES[dtype]}x2 {{$w0}}, {{$r0}}, zero, {{$r0}};}}",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


def pair_extreme(name: str, a: Uint32, b: Uint32, *, dtype: Dtype) -> Uint32:
    """The larger ("max") or the smaller ("min") elements of two pairs; of a number and NaN the number."""
    return cute.arch.inline_ptx(
        f"{name}.{PTX_TYPES[dtype]}x2 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[a, b]
    )
