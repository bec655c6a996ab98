"""The CuTe DSL as the oracle of the layout algebra: our values as DSL objects, inside `layouts.dsl.context`."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from layouts.algebra import IntTuple, Layout


def to_dsl(operand: Any) -> Any:
    """A Layout, or a tiler of them, as DSL objects; integers stay.

    Extents of 1 get stride 0: the DSL refuses one whose idle stride does not divide.
    """
    if isinstance(operand, Layout):
        operand = without_idle_strides(operand)
        return cute.make_layout(operand.shape, stride=operand.stride)
    return tuple(map(to_dsl, operand)) if isinstance(operand, tuple) else operand


def without_idle_strides(layout: Layout) -> Layout:
    """The layout with stride 0 wherever the extent is 1, where CuTe's stride is whatever is left over."""

    def idle(shape: IntTuple, stride: IntTuple) -> IntTuple:
        if isinstance(shape, tuple) and isinstance(stride, tuple):
            return tuple(map(idle, shape, stride))
        return 0 if shape == 1 else stride

    return Layout(layout.shape, idle(layout.shape, layout.stride))
