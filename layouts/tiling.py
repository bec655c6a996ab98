"""Cutting a layout into tiles (divide) and repeating a tile (product), from composition and complement alone.

Every function takes `trace`, which is called with each intermediate result as (operation, operands, result): the
playground draws them. The default does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .layout import AlgebraError, ComposedLayout, Layout, Swizzle, concatenate
from .maps import AnyLayout, Tiler, as_layout, check_tiler, coalesce, complement, composition

Operand: TypeAlias = Layout | ComposedLayout | Swizzle | int | tuple[Tiler, ...]
Trace: TypeAlias = Callable[[str, tuple[Operand, ...], Layout | ComposedLayout], None]


def no_trace(operation: str, operands: tuple[Operand, ...], result: Layout | ComposedLayout) -> None:
    """The default trace, which does nothing."""


def logical_divide(layout: AnyLayout, tiler: Tiler, trace: Trace = no_trace) -> AnyLayout:
    """(tile, rest): first the elements that `tiler` picks, then how the tile repeats over `layout`.

    With a tuple every mode of `layout` is divided by its own tiler; modes beyond stay. Tiles may overhang the end.
    Raises ValueError if the tiler's modes overlap or do not divide the layout.
    """
    if isinstance(layout, ComposedLayout):
        return _inside(layout, lambda inner: logical_divide(inner, tiler, trace), trace)
    if isinstance(tiler, tuple):
        check_tiler(layout, tiler)
        modes = layout.modes()
        parts = [logical_divide(mode, part, trace) for mode, part in zip(modes, tiler)] + list(modes[len(tiler) :])
        return _concatenate(trace, *parts)
    tile = as_layout(tiler)
    try:
        rest = complement(tile, layout.size())
    except AlgebraError as error:  # complement's own operand is this function's second
        error.argument = 1
        raise
    trace("complement", (tile, layout.size()), rest)
    both = _concatenate(trace, tile, rest)
    result = composition(coalesce(layout), both)  # coalesced: extents of 1 at the end would stop an overhanging tile
    trace("compose", (layout, both), result)
    return result


def zipped_divide(layout: AnyLayout, tiler: Tiler, trace: Trace = no_trace) -> AnyLayout:
    """((tiles of all modes), (rests of all modes)): one mode for inside the tile, one for which tile."""
    return _regrouped(layout, tiler, trace, concatenate)


def tiled_divide(layout: AnyLayout, tiler: Tiler, trace: Trace = no_trace) -> AnyLayout:
    """((tiles), rest, rest, ...): as zipped_divide with the second mode opened."""
    return _regrouped(layout, tiler, trace, lambda tile, rest: concatenate(tile, *rest.modes()))


def flat_divide(layout: AnyLayout, tiler: Tiler, trace: Trace = no_trace) -> AnyLayout:
    """(tile, tile, ..., rest, rest, ...): as zipped_divide with both modes opened."""
    return _regrouped(layout, tiler, trace, lambda tile, rest: concatenate(*tile.modes(), *rest.modes()))


def logical_product(block: Layout, tiler: Tiler, trace: Trace = no_trace) -> Layout:
    """(block, repeats): `block`, repeated over the free offsets in the order of `tiler`.

    With a tuple every mode of `block` is repeated by its own tiler; modes beyond stay. Raises ValueError if the
    modes of `block` overlap or `tiler` does not divide the free offsets.
    """
    if isinstance(tiler, tuple):
        check_tiler(block, tiler)
        modes = block.modes()
        parts = [logical_product(mode, part, trace) for mode, part in zip(modes, tiler)] + list(modes[len(tiler) :])
        return _concatenate(trace, *parts)
    order = as_layout(tiler)
    room = block.size() * order.cosize()
    free = complement(block, room)
    trace("complement", (block, room), free)
    repeats = composition(free, order)
    trace("compose", (free, order), repeats)
    return _concatenate(trace, block, repeats)


def zipped_product(block: Layout, tiler: Tiler, trace: Trace = no_trace) -> Layout:
    """((blocks of all modes), (repeats of all modes))."""
    product = logical_product(block, tiler, trace)
    return _regroup(product, tiler, trace, concatenate)


def tiled_product(block: Layout, tiler: Tiler, trace: Trace = no_trace) -> Layout:
    """((blocks), repeat, repeat, ...): as zipped_product with the second mode opened."""
    product = logical_product(block, tiler, trace)
    return _regroup(product, tiler, trace, lambda tile, rest: concatenate(tile, *rest.modes()))


def flat_product(block: Layout, tiler: Tiler, trace: Trace = no_trace) -> Layout:
    """(block, block, ..., repeat, repeat, ...): as zipped_product with both modes opened."""
    product = logical_product(block, tiler, trace)
    return _regroup(product, tiler, trace, lambda tile, rest: concatenate(*tile.modes(), *rest.modes()))


def blocked_product(block: Layout, tiler: Layout, trace: Trace = no_trace) -> Layout:
    """Mode i is (block's mode i, tiler's mode i): blocks side by side, as in a matrix of blocks."""
    blocks, repeats = _padded_product(block, tiler, trace).modes()
    result = concatenate(*map(concatenate, blocks.modes(), repeats.modes()))
    trace("regroup", (blocks, repeats), result)
    return result


def raked_product(block: Layout, tiler: Layout, trace: Trace = no_trace) -> Layout:
    """Mode i is (tiler's mode i, block's mode i), coalesced: the elements of the blocks interleaved."""
    blocks, repeats = _padded_product(block, tiler, trace).modes()
    result = concatenate(*map(coalesce, map(concatenate, repeats.modes(), blocks.modes())))
    trace("regroup", (repeats, blocks), result)
    return result


def _concatenate(trace: Trace, *parts: Layout) -> Layout:
    result = concatenate(*parts)
    trace("concatenate", parts, result)
    return result


def _inside(composed: ComposedLayout, operation: Callable[[Layout], Layout], trace: Trace) -> ComposedLayout:
    result = composed.map(operation)
    trace("swizzle", (result.swizzle, result.offset, result.layout), result)
    return result


def _regrouped(layout: AnyLayout, tiler: Tiler, trace: Trace, arrange: Callable[[Layout, Layout], Layout]) -> AnyLayout:
    if isinstance(layout, ComposedLayout):
        return _inside(layout, lambda inner: _regrouped(inner, tiler, trace, arrange), trace)
    return _regroup(logical_divide(layout, tiler, trace), tiler, trace, arrange)


def _regroup(layout: Layout, tiler: Tiler, trace: Trace, arrange: Callable[[Layout, Layout], Layout]) -> Layout:
    """`arrange(tile, rest)` of a logical divide or product by `tiler`."""
    result = arrange(*_tile_and_rest(layout, tiler))
    if result != layout:
        trace("regroup", (layout,), result)
    return result


def _tile_and_rest(layout: Layout, tiler: Tiler) -> tuple[Layout, Layout]:
    """The modes inside the tile and the modes that count tiles; one that the tiler does not reach counts tiles."""
    if not isinstance(tiler, tuple):
        return layout.mode(0), layout.mode(1)
    modes = layout.modes()
    tiles, rests = zip(*map(_tile_and_rest, modes, tiler))
    return concatenate(*tiles), concatenate(*rests, *modes[len(tiler) :])


def _padded_product(block: Layout, tiler: Layout, trace: Trace) -> Layout:
    rank = max(block.rank, tiler.rank)
    return logical_product(_padded(block, rank), _padded(tiler, rank), trace)


def _padded(layout: Layout, rank: int) -> Layout:
    """The layout as a tuple of `rank` modes, filled up with 1:0."""
    return concatenate(*layout.modes(), *[Layout(1, 0)] * (rank - layout.rank))
