"""Layouts as values: shape and stride, swizzle, and the two together; evaluated on integers or with numpy.

A layout maps coordinates to offsets. Coordinates count colexicographically, as in CuTe: the leftmost mode runs fastest,
and an integer stands for the coordinate of that rank. An integer beyond the size goes on in the last mode.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .messages import MAX_SIZE, message

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"
Nested: TypeAlias = "int | Sequence[Nested]"  # what constructors take: lists too, as they come from JSON
Coordinate: TypeAlias = "int | npt.NDArray[np.int64] | tuple[Coordinate, ...]"
Index = TypeVar("Index", int, npt.NDArray[np.int64])


class AlgebraError(ValueError):
    """An operation that does not exist for these operands. `argument` counts the operand at fault from 0."""

    def __init__(self, key: str, argument: int = 0, **values: object) -> None:
        super().__init__(message(key, **values))
        self.argument = argument


def text_of(nested: IntTuple) -> str:
    """CuTe's text of a shape or stride: `(2,(4,8))`; a tuple of one mode is `(2)`."""
    return f"({','.join(map(text_of, nested))})" if isinstance(nested, tuple) else str(nested)


def product(shape: IntTuple) -> int:
    """The number of coordinates of a shape."""
    return math.prod(map(product, shape)) if isinstance(shape, tuple) else shape


def leaves(nested: IntTuple) -> Iterator[int]:
    """The integers of a nested tuple from left to right."""
    if isinstance(nested, tuple):
        for part in nested:
            yield from leaves(part)
    else:
        yield nested


def compact(shape: IntTuple) -> IntTuple:
    """Column-major strides without gaps: the leftmost mode has stride 1. Extents of 1 get stride 0, as in CuTe."""

    def assign(part: IntTuple, stride: int) -> IntTuple:
        if not isinstance(part, tuple):
            return stride if part != 1 else 0
        strides = []
        for mode in part:
            strides.append(assign(mode, stride))
            stride *= product(mode)
        return tuple(strides)

    return assign(shape, 1)


@dataclasses.dataclass(frozen=True, init=False, repr=False, slots=True)
class Layout:
    """`shape:stride`, both integers or nested tuples of the same nesting; without a stride compact column-major.

    Extents are at least 1 and strides at least 0; anything else is a ValueError. Equal and hashed by shape and stride.
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: Nested, stride: Nested | None = None) -> None:
        extents = _frozen(shape)
        strides = compact(extents) if stride is None else _frozen(stride)
        if any(extent < 1 for extent in leaves(extents)):
            raise AlgebraError("shape", given=text_of(extents))
        if any(step < 0 for step in leaves(strides)):
            raise AlgebraError("stride", given=text_of(strides))
        if not congruent(extents, strides):
            raise AlgebraError("congruent", stride=text_of(strides), shape=text_of(extents))
        object.__setattr__(self, "shape", extents)
        object.__setattr__(self, "stride", strides)

    def __str__(self) -> str:
        return f"{text_of(self.shape)}:{text_of(self.stride)}"

    def __repr__(self) -> str:
        return f"Layout({self.shape!r}, {self.stride!r})"

    @property
    def rank(self) -> int:
        """The number of top-level modes; 1 for an integer shape."""
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    def size(self) -> int:
        """The number of coordinates."""
        return product(self.shape)

    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((extent - 1) * step for extent, step in self.flat_modes())

    def mode(self, index: int) -> Layout:
        """Top-level mode `index` as a layout of its own; ValueError if there is none."""
        if not 0 <= index < self.rank:
            raise AlgebraError("mode", layout=self, mode=index)
        return self.modes()[index]

    def modes(self) -> tuple[Layout, ...]:
        """The top-level modes; the layout itself if the shape is an integer."""
        if not isinstance(self.shape, tuple) or not isinstance(self.stride, tuple):
            return (self,)
        return tuple(Layout(extent, step) for extent, step in zip(self.shape, self.stride))

    def flat_modes(self) -> list[tuple[int, int]]:
        """(extent, stride) of every mode at any depth, from left to right."""
        return list(zip(leaves(self.shape), leaves(self.stride)))

    def __call__(self, coordinate: Coordinate) -> Any:
        """The offset at a coordinate: an integer, a tuple nested at most like the shape, or the same with int arrays.

        Arrays broadcast: `layout((rows[:, None], columns))` is a table. Raises ValueError if the coordinate is
        nested deeper than the shape, has another number of modes, or is negative.
        """
        return _offset(coordinate, self.shape, self.stride)

    def indices(self) -> npt.NDArray[np.int64]:
        """The offsets of all coordinates in colexicographic order; ValueError beyond MAX_SIZE elements."""
        if self.size() > MAX_SIZE:
            raise AlgebraError("size", layout=self, limit=MAX_SIZE)
        offsets = np.zeros(1, np.int64)
        for extent, step in self.flat_modes():
            offsets = np.add.outer(np.arange(extent, dtype=np.int64) * step, offsets).ravel()
        return offsets


@dataclasses.dataclass(frozen=True, slots=True)
class Swizzle:
    """XORs `bits` address bits, found `shift` above bit `base`, into the bits at `base`.

    A negative shift goes the other way: the bits at `base` are XORed into those -shift above. Either way the source
    bits stay as they are (|shift| >= bits), so applying it twice gives back the address.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        fits = self.bits >= 0 and self.base >= 0 and abs(self.shift) >= self.bits
        if not fits or self.base + self.bits + abs(self.shift) > 31:
            raise AlgebraError("swizzle", swizzle=self)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"

    def __call__(self, offset: Index) -> Index:
        """The swizzled offset, or array of offsets."""
        mask = (1 << self.bits) - 1 << self.base
        if self.shift >= 0:
            return offset ^ ((offset >> self.shift) & mask)
        return offset ^ ((offset & mask) << -self.shift)


@dataclasses.dataclass(frozen=True, slots=True)
class ComposedLayout:
    """`swizzle o offset o layout`: coordinate c goes to swizzle(offset + layout(c))."""

    swizzle: Swizzle
    offset: int
    layout: Layout

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise AlgebraError("offset", given=self.offset)

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.offset} o {self.layout}"

    @property
    def shape(self) -> IntTuple:
        """The shape of the layout inside."""
        return self.layout.shape

    @property
    def rank(self) -> int:
        """The number of top-level modes."""
        return self.layout.rank

    def size(self) -> int:
        """The number of coordinates."""
        return self.layout.size()

    def cosize(self) -> int:
        """One more than the largest offset; evaluates every coordinate (ValueError beyond MAX_SIZE elements)."""
        return int(self.indices().max()) + 1

    def __call__(self, coordinate: Coordinate) -> Any:
        """The offset at a coordinate; see `Layout.__call__`."""
        return self.swizzle(self.layout(coordinate) + self.offset)

    def indices(self) -> npt.NDArray[np.int64]:
        """The offsets of all coordinates in colexicographic order; ValueError beyond MAX_SIZE elements."""
        return self.swizzle(self.layout.indices() + self.offset)

    def map(self, operation: Callable[[Layout], Layout]) -> ComposedLayout:
        """The same swizzle and offset over `operation(layout)`."""
        return ComposedLayout(self.swizzle, self.offset, operation(self.layout))


def congruent(shape: IntTuple, stride: IntTuple) -> bool:
    """Whether two nested tuples have the same nesting."""
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        return len(shape) == len(stride) and all(map(congruent, shape, stride))
    return not isinstance(shape, tuple) and not isinstance(stride, tuple)


def concatenate(*layouts: Layout) -> Layout:
    """The layout whose modes are `layouts`, at least one."""
    return Layout(tuple(layout.shape for layout in layouts), tuple(layout.stride for layout in layouts))


def _frozen(nested: Nested) -> IntTuple:
    """Nested sequences of integers (Python's, numpy's) as nested tuples of int."""
    if isinstance(nested, Sequence) and not isinstance(nested, str):
        if not nested:
            raise AlgebraError("empty")
        return tuple(map(_frozen, nested))
    try:
        return operator.index(nested)  # type: ignore[arg-type]  # raises for anything but an integer
    except TypeError:
        raise AlgebraError("integer", given=repr(nested)) from None


def _offset(coordinate: Coordinate, shape: IntTuple, stride: IntTuple) -> Any:
    if isinstance(coordinate, tuple):
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(coordinate) != len(shape):
            raise AlgebraError("coordinate", given=coordinate, shape=text_of(shape))
        return sum(map(_offset, coordinate, shape, stride))
    if np.min(coordinate, initial=0) < 0:
        raise AlgebraError("negative", given=coordinate)
    *inner, (_, last) = zip(leaves(shape), leaves(stride))
    offset: Any = 0
    for extent, step in inner:
        offset = offset + coordinate % extent * step
        coordinate = coordinate // extent
    return offset + coordinate * last
