"""Reads layouts, atoms and tensors of CuTe DSL objects into plain values, without a kernel launch and without a GPU.

The DSL makes its objects inside an MLIR context that exists only while it traces a function. `context` opens one
outside of any function, by semi-private means, which therefore are used in this module alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .algebra import ComposedLayout, IntTuple, Layout, Swizzle


@contextlib.contextmanager
def context(arch: str) -> Iterator[None]:
    """A block in which DSL layouts, tiled copies and tiled MMAs can be made for a compile target."""
    from cutlass._mlir import ir
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    environment, options = dsl.envar, dsl.compile_options
    before = environment._arch
    environment.arch = arch
    dsl.compile_options = type(options)()  # those of a compilation that failed stay, and their target comes first
    try:
        with _mlir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
            yield
    finally:
        environment._arch, dsl.compile_options = before, options


@functools.cache
def _mlir_context() -> Any:
    """One for the process: to make one takes longer than most of what is asked in it."""
    from cutlass._mlir import ir

    return ir.Context()


def layout_of(value: Any) -> Layout | ComposedLayout:
    """A static DSL layout, plain or swizzled, as ours; a swizzle keeps its unit (elements on sm80, bytes on sm90).

    Raises TypeError if a mode is dynamic.
    """
    if not hasattr(value, "inner"):
        return Layout(_integers(value.shape), _integers(value.stride))
    inner = value.inner
    outer = Layout(_integers(value.outer.shape), _integers(value.outer.stride))
    return ComposedLayout(Swizzle(inner.num_bits, inner.num_base, inner.num_shift), value.offset, outer)


def plain(value: Any) -> Layout:
    """A static DSL layout without a swizzle as ours; TypeError if it has one."""
    layout = layout_of(value)
    if not isinstance(layout, Layout):
        raise TypeError(f"{value} is swizzled; a plain layout is needed")
    return layout


def coordinates(value: Any, strides: Sequence[int]) -> Layout:
    """A DSL layout of coordinates as a layout of offsets: a step in coordinate mode i becomes `strides[i]`."""
    return Layout(_integers(value.shape), _weighed(value.stride, strides))


def extents(tiler: Any) -> tuple[int, ...]:
    """The extents of a tiler's modes: integers, or layouts whose stride must be 1.

    Raises TypeError if a mode permutes: no kernel uses such a mode, and the explorer would draw it wrong.
    """
    found = []
    for mode in tiler:
        layout = Layout(mode) if isinstance(mode, int) else plain(mode)
        if layout.cosize() != layout.size() or (layout.size() > 1 and layout.flat_modes()[0][1] != 1):
            raise TypeError(f"tiler {tiler} permutes coordinates")
        found.append(layout.size())
    return tuple(found)


def _integers(value: Any) -> IntTuple:
    if isinstance(value, tuple):
        return tuple(_integers(part) for part in value)
    if not isinstance(value, int):
        raise TypeError(f"{value} is not static")
    return value


def _weighed(stride: Any, strides: Sequence[int]) -> IntTuple:
    """Strides that are basis elements (`8@1`: 8 steps in coordinate mode 1) as integers."""
    if isinstance(stride, tuple):
        return tuple(_weighed(part, strides) for part in stride)
    if isinstance(stride, int):
        if stride:
            raise TypeError(f"stride {stride} is not a coordinate")
        return 0
    (mode,) = stride.mode
    return math.prod((_integers(stride.value), strides[mode]))  # type: ignore[arg-type]  # an int by now
