"""V by products with the identity, see `quantize_products`: minus its mean in fp32, and added up over a tile's rows.

Elements that are not finite are left to the code that these are faster than. They make NaN of more than themselves, and
so of what tells whether all elements were finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cuteflash.core.signature import ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_held import PAIRS, Held, pair_extreme
from cuteflash.kernels.common.quantize_products import Identity
from cuteflash.kernels.common.quantize_tile import CHUNKS, WORDS
from cuteflash.traits.quantize import COLUMNS, ROWS

Eight = Callable[[int], list[list[Float32]]]  # of each of a thread's rows the eight columns of a load, fp32


@dataclasses.dataclass(frozen=True)
class Centred:
    """A thread's rows of a tile of V, subtracted from their mean.

    Attributes:
        held: the rows.
        mean: (columns,) of the thread.
        minus: the identity's negative.
    """

    held: Held
    mean: cute.Tensor
    minus: Identity

    @classmethod
    def of(cls, held: Held, mean: cute.Tensor) -> Centred:
        """Of rows and their mean."""
        return cls(held, mean, Identity.of(held.dtype, held.tile.last + 1, is_negative=True))

    def eight(self, j: int) -> list[list[Float32]]:
        """Of each row the mean minus the eight columns of load `j`, fp32."""
        first, second = (tuple(self.mean[ALIGN_ELEMENTS * j + 4 * x + b] for b in range(4)) for x in range(2))
        loads = [load_of(self.held, j, i) for i in range(ROWS)]
        return [[*self.minus.add_first(first, load), *self.minus.add_second(second, load)] for load in loads]

    def size(self) -> Float32:
        """The largest magnitude; NaN or infinity if an element is not finite."""
        peaks = [Float32(0.0)] * ROWS  # independent chains
        for j in range(CHUNKS):
            for i, values in enumerate(self.eight(j)):
                for value in values:
                    peaks[i] = larger_or_nan(peaks[i], value)
        return larger_or_nan(larger_or_nan(peaks[0], peaks[1]), larger_or_nan(peaks[2], peaks[3]))

    def nothing(self) -> Float32:
        """Zero; NaN if an element is not finite: the first and the third of a load depend on all of it."""
        found = Float32(0.0)
        for j in range(CHUNKS):
            for values in self.eight(j):
                found = times_zero(values[2], times_zero(values[0], found))
        return found


def load_of(held: Held, j: int, i: int) -> tuple[Uint32, ...]:
    """Load `j` of row `i`: as an operand it stays in the registers where it is."""
    return tuple(held.words[WORDS * j + w, i] for w in range(WORDS))


def add_tile(sums: cute.Tensor, held: Held, identity: Identity) -> None:
    """Add a tile's rows to the sums of a thread's columns."""
    for j in range(CHUNKS):
        for add, first in ((identity.add_first, ALIGN_ELEMENTS * j), (identity.add_second, ALIGN_ELEMENTS * j + 4)):
            four = tuple(sums[first + b] for b in range(4))
            for i in range(ROWS):
                four = add(four, load_of(held, j, i))
            for b in range(4):
                sums[first + b] = four[b]


def nothing_of(sums: cute.Tensor) -> Float32:
    """Zero; NaN if a sum is not finite."""
    found = Float32(0.0)
    for e in range(COLUMNS):
        found = times_zero(sums[e], found)
    return found


def take_extremes(extremes: cute.Tensor, held: Held, names: tuple[str, ...]) -> None:
    """Compare a tile's rows, of finite elements, with the extremes of a thread's columns."""
    for x, name in enumerate(names):
        for pair in range(PAIRS):
            for i in range(ROWS):
                extremes[pair, x] = pair_extreme(name, extremes[pair, x], held.words[pair, i], dtype=held.dtype)


def clear_missing(held: Held) -> None:
    """Put zeros in place of rows that are not there."""
    for i in range(ROWS):
        for pair in range(PAIRS):
            held.words[pair, i] = cutlass.select_(held.tile.has(i), held.words[pair, i], Uint32(0))


def larger_or_nan(a: Float32, b: Float32) -> Float32:
    """The larger of a magnitude and a number's magnitude; NaN if one of both is."""
    return cute.arch.inline_ptx(
        "{.reg .b32 size; abs.f32 size, {$r1}; max.NaN.f32 {$w0}, {$r0}, size;}",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def times_zero(value: Float32, c: Float32) -> Float32:
    """c plus zero times a value, which a compiler may not leave out."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r1};", write_only_types=[Float32], read_only_args=[value, c]
    )
