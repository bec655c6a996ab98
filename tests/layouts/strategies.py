"""Hypothesis strategies for layouts, small enough that a test can look at every coordinate."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from layouts.algebra import IntTuple, Layout, Swizzle, leaves, product

MAX_SIZE = 1024

extents = st.sampled_from([1, 2, 2, 3, 4, 4, 5, 6, 8])
powers = st.sampled_from([1, 2, 2, 4, 8])
some_gaps = st.sampled_from([1, 1, 1, 2, 4])


def shapes(extents: st.SearchStrategy[int] = extents, nested: bool = True) -> st.SearchStrategy[IntTuple]:
    """Integers and tuples of at most MAX_SIZE coordinates; with `nested` up to three levels deep."""

    def lists(parts: st.SearchStrategy[IntTuple]) -> st.SearchStrategy[IntTuple]:
        return st.lists(parts, min_size=1, max_size=3).map(tuple)

    flat = extents | lists(extents)
    chosen = flat | lists(flat) | lists(lists(flat)) if nested else flat
    return chosen.filter(lambda shape: product(shape) <= MAX_SIZE)


def with_strides(shape: IntTuple, flat_strides: list[int]) -> Layout:
    """The layout whose strides, read from left to right, are `flat_strides`."""
    remaining = iter(flat_strides)

    def fill(part: IntTuple) -> IntTuple:
        return tuple(map(fill, part)) if isinstance(part, tuple) else next(remaining)

    return Layout(shape, fill(shape))


@st.composite
def layouts(draw: st.DrawFn, nested: bool = True) -> Layout:
    """Any strides: modes may overlap and repeat."""
    shape = draw(shapes(nested=nested))
    count = len(list(leaves(shape)))
    strides = st.integers(0, 12) | st.sampled_from([16, 24, 32, 48, 64])
    return with_strides(shape, draw(st.lists(strides, min_size=count, max_size=count)))


@st.composite
def ordered_layouts(
    draw: st.DrawFn,
    extents: st.SearchStrategy[int] = extents,
    gaps: st.SearchStrategy[int] = some_gaps,
    nested: bool = True,
) -> Layout:
    """Injective layouts: strides nest in any order, with a gap of a factor drawn from `gaps` before each mode."""
    shape = draw(shapes(extents, nested))
    flat = list(leaves(shape))
    strides = [0] * len(flat)
    unit = 1
    for mode in draw(st.permutations(range(len(flat)))):
        unit *= draw(gaps)
        strides[mode] = unit
        unit *= flat[mode]
    return with_strides(shape, strides)


def any_layouts(nested: bool = True) -> st.SearchStrategy[Layout]:
    """Both kinds, and compact ones."""
    return ordered_layouts(nested=nested) | layouts(nested) | shapes(nested=nested).map(Layout)


def tiles() -> st.SearchStrategy[Layout]:
    """Layouts that often divide others: small and strided by powers of two."""
    strided = st.builds(Layout, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 1, 2, 4, 8]))
    return strided | ordered_layouts(nested=False)


@st.composite
def tilers(draw: st.DrawFn, layout: Layout) -> tuple[Layout | int, ...]:
    """One tile or integer for each of the first modes of `layout`, of extents that divide the mode's size."""
    tiler: list[Layout | int] = []
    for mode in layout.modes()[: draw(st.integers(1, layout.rank))]:
        size = mode.size()
        extent = draw(st.sampled_from([tile for tile in range(1, size + 1) if size % tile == 0]))
        rest = size // extent
        stride = draw(st.sampled_from([step for step in range(1, rest + 1) if rest % step == 0]))
        tiler.append(extent if stride == 1 and draw(st.booleans()) else Layout(extent, stride))
    return tuple(tiler)


@st.composite
def swizzles(draw: st.DrawFn) -> Swizzle:
    """Swizzles of up to ten address bits, of either direction."""
    bits = draw(st.integers(0, 4))
    shift = draw(st.integers(bits, 5)) * draw(st.sampled_from([1, 1, -1]))
    return Swizzle(bits, draw(st.integers(0, 4)), shift)


def unravelled(layout: Layout) -> list[int]:
    """All offsets in colexicographic order, from the definition: digits of the index times strides."""
    extents, strides = list(leaves(layout.shape)), list(leaves(layout.stride))
    units = [math.prod(extents[:mode]) for mode in range(len(extents))]
    return [
        sum(index // unit % extent * stride for unit, extent, stride in zip(units, extents, strides))
        for index in range(math.prod(extents))
    ]
