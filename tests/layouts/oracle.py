"""The CuTe DSL as the oracle of the layout algebra: our values into DSL objects and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass.cutlass_dsl import CuTeDSL

from layouts.algebra import IntTuple, Layout


@contextlib.contextmanager
def context(arch: str = "sm_90a") -> Iterator[None]:
    """Inside, DSL layouts can be made outside of jit."""
    environment = CuTeDSL._get_dsl().envar
    previous = environment._arch
    environment.arch = arch
    try:
        with ir.Context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
            yield
    finally:
        environment._arch = previous


def to_dsl(operand: Any) -> Any:
    """A Layout, or a tiler of them, as DSL objects; integers stay.

    Extents of 1 get stride 0: the DSL refuses one whose idle stride does not divide.
    """
    if isinstance(operand, Layout):
        operand = without_idle_strides(operand)
        return cute.make_layout(operand.shape, stride=operand.stride)
    return tuple(map(to_dsl, operand)) if isinstance(operand, tuple) else operand


def from_dsl(layout: Any) -> Layout:
    return Layout(layout.shape, layout.stride)


def without_idle_strides(layout: Layout) -> Layout:
    """The layout with stride 0 wherever the extent is 1, where CuTe's stride is whatever is left over."""

    def idle(shape: IntTuple, stride: IntTuple) -> IntTuple:
        if isinstance(shape, tuple) and isinstance(stride, tuple):
            return tuple(map(idle, shape, stride))
        return 0 if shape == 1 else stride

    return Layout(layout.shape, idle(layout.shape, layout.stride))
