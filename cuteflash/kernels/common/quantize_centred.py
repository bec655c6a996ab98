"""Columns of V: minus their mean in fp32, their sums and their extremes over a tile's rows.

Products with the identity, see `quantize_products`, subtract and add. Elements that are not finite are left to what
these are faster than: they make NaN of more than themselves, and so of what tells whether all elements were finite.
"""

from __future__ import annotations

import functools
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cuteflash.core.signature import ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_held import PAIRS, Held, pair_extreme
from cuteflash.kernels.common.quantize_products import Identity, Sums
from cuteflash.kernels.common.quantize_tile import CHUNKS, NUMBERS, WORDS, Rows, peak_of
from cuteflash.traits.quantize import COLUMNS, ROWS

EXTREMES = ("min", "max")


@cute.jit
def less_than_mean(held: Held, rows: Rows, mean: cute.Tensor):
    """(columns of a load, rows, loads) the mean minus a thread's elements, fp32.

    Args:
        held: what a thread has of a tile of V; it may come to have nothing.
        rows: of V.
        mean: (4, columns / 4) of the thread.
    """
    values = products_less_than_mean(held, mean)
    # The first and the third of a load's sums depend on all of what the four threads of an operand's row have.
    known = [values[e, i, j] for j in range(CHUNKS) for i in range(ROWS) for e in (0, 2)]
    if not cute.arch.vote_all_sync(nothing_of(known) == Float32(0.0)):
        for j in cutlass.range_constexpr(CHUNKS):  # to keep them would take registers
            held.load_again(rows, held.tile, j)
        subtract(values, held, mean)
    return values


def products_less_than_mean(held: Held, mean: cute.Tensor) -> cute.Tensor:
    """The same if all elements are finite."""
    values = cute.make_rmem_tensor((ALIGN_ELEMENTS, ROWS, CHUNKS), Float32)
    minus = Identity.of(held.dtype, held.tile.last + 1, is_negative=True)
    for j in range(CHUNKS):
        first, second = (four_of(mean, 2 * j + x) for x in range(2))
        for i in range(ROWS):
            load = load_of(held, j, i)
            for e, value in enumerate((*minus.add_first(first, load), *minus.add_second(second, load))):
                values[e, i, j] = value
    return values


def subtract(values: cute.Tensor, held: Held, mean: cute.Tensor) -> None:
    """The same whatever the elements are, into `values`."""
    for e, i in itertools.product(range(COLUMNS), range(ROWS)):
        value = mean[e % NUMBERS, e // NUMBERS] - held.value(e, i)
        values[e % ALIGN_ELEMENTS, i, e // ALIGN_ELEMENTS] = value


def four_of(mean: cute.Tensor, x: int) -> Sums:
    """Four columns of a mean, loaded together."""
    found = cute.make_rmem_tensor(NUMBERS, Float32)
    cute.autovec_copy(mean[None, x], found)
    return tuple(found[b] for b in range(NUMBERS))


@cute.jit
def size_of_values(values: cute.Tensor):
    """The largest magnitude of finite values."""
    sizes = [cute.math.abs(values[x]) for x in range(cute.size(values))]
    size = peak_of(sizes)
    if size == Float32.inf:
        size = peak_of([cutlass.select_(x < Float32.inf, x, Float32(0.0)) for x in sizes])
    return size


def add_tile(sums: cute.Tensor, held: Held, identity: Identity) -> None:
    """Add a tile's rows to the sums of a thread's columns."""
    for j in range(CHUNKS):
        for add, first in ((identity.add_first, ALIGN_ELEMENTS * j), (identity.add_second, ALIGN_ELEMENTS * j + 4)):
            four = tuple(sums[first + b] for b in range(4))
            four = functools.reduce(lambda four, i, add=add, j=j: add(four, load_of(held, j, i)), range(ROWS), four)
            for b in range(4):
                sums[first + b] = four[b]


def load_of(held: Held, j: int, i: int) -> tuple[Uint32, ...]:
    """Load `j` of row `i`: as an operand it stays in the registers where it is."""
    return tuple(held.words[WORDS * j + w, i] for w in range(WORDS))


def take_extremes(extremes: cute.Tensor, held: Held) -> None:
    """Compare a tile's rows, of finite elements, with the extremes of a thread's columns."""
    for x, name in enumerate(EXTREMES):
        for pair in range(PAIRS):
            for i in range(ROWS):
                extremes[pair, x] = pair_extreme(name, extremes[pair, x], held.words[pair, i], dtype=held.dtype)


def replace_missing(held: Held, pair: int) -> None:
    """Put a pair of elements in place of all of rows that are not there."""
    for i in range(ROWS):
        for x in range(PAIRS):
            held.words[x, i] = cutlass.select_(held.tile.has(i), held.words[x, i], Uint32(pair))


def nothing_of(values: list[Float32]) -> Float32:
    """Zero; NaN if a value is not finite. A compiler may not leave out that it is multiplied by zero."""
    found = Float32(0.0)
    for value in values:
        found = cute.arch.inline_ptx(
            "fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r1};", write_only_types=[Float32], read_only_args=[value, found]
        )
    return found


def add_rows(sums: cute.Tensor, held: Held) -> None:
    """Add what is finite of a tile's rows to the sums of a thread's columns."""
    for i in range(ROWS):
        count = cutlass.select_(held.tile.has(i), Float32(1.0), Float32(0.0))  # not the last row again
        for e in range(COLUMNS):
            value = held.value(e, i)
            value = cutlass.select_(cute.math.abs(value) < Float32.inf, value, Float32(0.0))
            sums[e] = sums[e] + value * count


def add_extremes(extremes: cute.Tensor, held: Held) -> None:
    """Compare what is finite of a tile's rows with the extremes of a thread's columns."""
    for x, name in enumerate(EXTREMES):
        for pair in range(PAIRS):
            found = held.extreme(name, pair)
            extremes[pair, x] = pair_extreme(name, extremes[pair, x], found, dtype=held.dtype)
