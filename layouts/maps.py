"""Layouts as functions: simplify, compose, complement, invert. Definitions follow CuTe's, with stricter checks.

CuTe computes composition mode by mode, which is correct only if strides and extents divide and no carry runs from one
mode into the next. If the result would not be the composed function, these functions raise an error instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from .layout import AlgebraError, ComposedLayout, IntTuple, Layout, concatenate

AnyLayout = TypeVar("AnyLayout", Layout, ComposedLayout)
Tiler: TypeAlias = "Layout | int | tuple[Tiler, ...]"  # n is the layout n:1; a tuple works mode by mode
Mode = tuple[int, int]  # (extent, stride)


def flatten(layout: AnyLayout) -> AnyLayout:
    """The same function with all modes at the top level."""
    if isinstance(layout, ComposedLayout):
        return layout.map(flatten)
    if not isinstance(layout.shape, tuple):
        return layout
    return concatenate(*(Layout(extent, step) for extent, step in layout.flat_modes()))


def coalesce(layout: AnyLayout, profile: IntTuple | None = None) -> AnyLayout:
    """The same function of an integer with as few modes as possible; with a profile each of its modes by itself.

    Modes beyond the profile stay as they are. Raises ValueError if the profile has more modes than the layout.
    """
    if isinstance(layout, ComposedLayout):
        return layout.map(lambda inner: coalesce(inner, profile))
    if not isinstance(profile, tuple):
        return _layout_of([mode for mode in _coalesced(layout) if mode[0] > 1])
    if len(profile) > layout.rank:
        raise AlgebraError("profile", 1, layout=layout, modes=len(profile))
    modes = layout.modes()
    return concatenate(*map(coalesce, modes, profile), *modes[len(profile) :])


def filter_zeros(layout: Layout) -> Layout:
    """The layout with every mode of stride 0 cut to extent 1."""
    if isinstance(layout.shape, tuple):
        return concatenate(*map(filter_zeros, layout.modes()))
    return layout if layout.stride != 0 else Layout(1, 0)


def filter(layout: Layout) -> Layout:
    """The coalesced layout without modes of stride 0 or extent 1: the same set of offsets."""
    return coalesce(filter_zeros(layout))


def select(layout: AnyLayout, modes: Sequence[int]) -> AnyLayout:
    """The layout of the top-level modes with these indices, in this order; ValueError if a mode does not exist."""
    if isinstance(layout, ComposedLayout):
        return layout.map(lambda inner: select(inner, modes))
    return concatenate(*(layout.mode(index) for index in modes))


def group(layout: AnyLayout, begin: int, end: int) -> AnyLayout:
    """The same function with the top-level modes begin <= i < end nested into one; ValueError if they do not exist."""
    if isinstance(layout, ComposedLayout):
        return layout.map(lambda inner: group(inner, begin, end))
    if not 0 <= begin < end <= layout.rank:
        raise AlgebraError("group", begin=begin, end=end, layout=layout)
    modes = layout.modes()
    return concatenate(*modes[:begin], concatenate(*modes[begin:end]), *modes[end:])


def composition(left: AnyLayout, right: Tiler) -> AnyLayout:
    """The layout i -> left(right(i)) with the shape of `right`, whose modes may split.

    A tuple composes mode by mode and drops the modes of `left` beyond it. `right` may reach beyond the size of `left`,
    whose last mode then goes on. Raises ValueError if the composed function is not a layout: a stride or extent
    that does not divide, or modes of `right` whose sum carries from one mode of `left` into the next.
    """
    if isinstance(left, ComposedLayout):
        return left.map(lambda inner: composition(inner, right))
    if isinstance(right, tuple):
        check_tiler(left, right)
        return concatenate(*map(composition, left.modes(), right))
    target = as_layout(right)
    modes = _coalesced(left)
    reach = [0] * len(modes)  # the largest index that all modes of `right` together have in each mode of `left`

    def compose(mode: Layout) -> Layout:
        if isinstance(mode.shape, tuple):
            return concatenate(*map(compose, mode.modes()))
        return _layout_of(_compose_mode(left, modes, mode, reach))

    result = compose(target)
    for (extent, _), largest in zip(modes[:-1], reach):
        if largest >= extent:
            raise AlgebraError("compose_carry", 1, left=left, right=target, extent=extent)
    return result


def complement(layout: Layout, cotarget: int | None = None) -> Layout:
    """The layout of the smallest offsets that, added to those of `layout`, fill up `cotarget` (default: its cosize).

    Increasing, and disjoint from `layout` except for 0. Raises ValueError if the modes of `layout` overlap.
    """
    cotarget = layout.cosize() if cotarget is None else cotarget
    if cotarget < 1:
        raise AlgebraError("cotarget", 1, given=cotarget)
    result: list[Mode] = []
    covered = 1
    for step, extent in sorted((step, extent) for extent, step in layout.flat_modes() if step and extent > 1):
        if step < covered:
            raise AlgebraError("overlap", layout=layout)
        result.append((step // covered, covered))
        covered = step * extent
    result.append((-(-cotarget // covered), covered))
    return coalesce(_layout_of(result))


def right_inverse(layout: Layout) -> Layout:
    """The largest layout R with layout(R(i)) == i, over the offsets that `layout` reaches without a gap from 0."""
    result: list[Mode] = []
    reached = 1
    for step, extent, unit in _by_stride(layout):
        if step == reached:
            result.append((extent, unit))
            reached *= extent
    return coalesce(_layout_of(result))


def left_inverse(layout: Layout) -> Layout:
    """A layout L with L(layout(i)) == i, except that the coordinate of a mode of stride 0 is lost and becomes 0.

    Raises ValueError if offsets collide or the strides do not divide each other.
    """
    modes = _by_stride(layout)
    if not modes:
        return Layout(1, 0)
    result: list[Mode] = [(modes[0][0], 0)]
    for (step, extent, unit), (following, _, _) in itertools.pairwise(modes):
        if following < step * extent:
            raise AlgebraError("repeats", layout=layout)
        if following % step:
            raise AlgebraError("left_inverse", layout=layout, first=step, second=following)
        result.append((following // step, unit))
    _, extent, unit = modes[-1]
    return coalesce(_layout_of([*result, (extent, unit)]))


def as_layout(tiler: Layout | int) -> Layout:
    """The layout that a tiler's integer stands for."""
    return Layout(tiler, 1) if isinstance(tiler, int) else tiler


def check_tiler(layout: Layout, tiler: tuple[Tiler, ...]) -> None:
    """Raises ValueError if a tiler has no modes, or more of them than the layout."""
    if not 0 < len(tiler) <= layout.rank:
        raise AlgebraError("tiler_rank", 1, tiler=len(tiler), layout=layout)


def _layout_of(modes: Sequence[Mode]) -> Layout:
    """The layout of these modes: an integer one for one mode, 1:0 for none, else a flat tuple."""
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(*zip(*modes)) if modes else Layout(1, 0)


def _coalesced(layout: Layout) -> list[Mode]:
    """The fewest modes that are the same function of an integer, including integers beyond the size.

    At least one mode. The last one may have extent 1: its stride counts for the integers beyond the size.
    """
    *inner, last = layout.flat_modes()
    result: list[Mode] = []
    for extent, step in [mode for mode in inner if mode[0] > 1] + [last]:
        if result and step == math.prod(result[-1]):
            extent, step = result[-1][0] * extent, result.pop()[1]
        result.append((extent, step))
    return result


def _compose_mode(left: Layout, modes: Sequence[Mode], right: Layout, reach: list[int]) -> list[Mode]:
    """The modes of `left` (coalesced: `modes`) after one integer mode of `right`; adds the largest indices to `reach`.

    `right` walks through left's index space, read as digits whose bases are left's extents.
    """
    ((extent, stride),) = right.flat_modes()
    if extent == 1 or stride == 0:
        return [(extent, 0)]
    result: list[Mode] = []
    for digit, (base, step) in enumerate(modes):
        if digit == len(modes) - 1 or (extent - 1) * stride < base:  # the rest of the walk stays in this digit
            reach[digit] += (extent - 1) * stride
            result.append((extent, stride * step))
            break
        if stride % base == 0:  # the walk leaves this digit at 0
            stride //= base
            continue
        if base % stride:
            raise AlgebraError("compose_stride", 1, left=left, mode=right, stride=stride, extent=base)
        count = base // stride
        if extent % count:
            raise AlgebraError("compose_shape", 1, left=left, mode=right, shape=extent, step=count)
        reach[digit] += (count - 1) * stride
        result.append((count, stride * step))
        extent, stride = extent // count, 1
    return result


def _by_stride(layout: Layout) -> list[tuple[int, int, int]]:
    """(stride, extent, stride in the coordinate) of the coalesced modes that move, ordered by stride."""
    result = []
    unit = 1
    for extent, step in coalesce(layout).flat_modes():
        if step:
            result.append((step, extent, unit))
        unit *= extent
    return sorted(result, key=lambda mode: mode[0])
