"""The products of the sm80 backward and what becomes of their results, for one thread."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import computed_here
from cuteflash.core.softmax import exp2
from cuteflash.core.tile import KeyTile
from cuteflash.core.views import transposed
from cuteflash.kernels.sm80.bwd_bundles import (
    BwdTiles,
    Gradients,
    KeyWork,
    Operand,
    QuerySources,
)
from cuteflash.kernels.sm80.bwd_load import column_statistics


def accumulator(mma: cute.TiledMma, thread: Int32, rows: int, cols: int) -> cute.Tensor:
    """A thread's fp32 accumulator of a (rows, cols) product."""
    return cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((rows, cols)), Float32)


def make_operand(mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, *, is_a: bool, transpose: bool = False) -> Operand:
    """A thread's operand in shared memory, (rows, k); `transpose` if k runs over the rows of the tile as it lies."""
    mine = mma.get_slice(thread)
    atom = atoms.ldmatrix(sX.element_type, transpose)
    if is_a:
        fragment, tiled = mine.make_fragment_A(mine.partition_A(sX)), cute.make_tiled_copy_A(atom, mma)
    else:
        fragment, tiled = mine.make_fragment_B(mine.partition_B(sX)), cute.make_tiled_copy_B(atom, mma)
    copy = tiled.get_slice(thread)
    return Operand(fragment, (atoms.Fetch(copy, copy.partition_S(sX), copy.retile(fragment)),))


def product(kernel, mma: cute.TiledMma, acc: cute.Tensor, a: Operand, b: Operand) -> None:
    """acc = A B"""
    acc.fill(0.0)
    accumulate_product(kernel, mma, acc, a, b)


def accumulate_product(kernel, mma: cute.TiledMma, acc: cute.Tensor, a: Operand, b: Operand) -> None:
    """acc += A B"""
    atoms.gemm(mma, acc, a.fragment, b.fragment, a.fetches + b.fetches, kernel.traits.ahead)


def product_dq(kernel, g: Gradients, tiles: BwdTiles, thread: Int32) -> None:
    """dQ = dS K"""
    dS = make_operand(g.mma_dq, thread, transposed(tiles.sdS), is_a=True, transpose=True)
    k = make_operand(g.mma_dq, thread, transposed(tiles.sK[None, None, 0]), is_a=False, transpose=True)
    product(kernel, g.mma_dq, g.acc_dQ, dS, k)


@cute.jit
def set_bounds(g: Gradients, tile: KeyTile):
    """The queries that see each key of this thread."""
    for r in cutlass.range_constexpr(cute.size(g.bounds.shape[0])):
        g.bounds[r, 0], g.bounds[r, 1] = tile.q_bounds(g.scores.row(r))


@cute.jit
def probabilities(
    kernel: cutlass.Constexpr,
    g: Gradients,
    sLSE: cute.Tensor,
    work: KeyWork,
    m_block: Int32,
    masked: cutlass.Constexpr[bool],
):
    """P of the scores in `acc_S`, which are lost, rounded; and P times the derivative of the softcap, likewise."""
    scores, values = kernel.problem.scores, g.scores.values
    slopes = None
    if const_expr(scores.softcap):
        g.scores.apply_softcap()
        slopes = cute.make_rmem_tensor_like(g.acc_S)
        for i in cutlass.range_constexpr(cute.size(slopes)):
            slopes[i] = 1.0 - g.acc_S[i] * g.acc_S[i]
    if const_expr(masked):
        # Bounds from before the loop are registers in all of it; those of chunks, which cost a division, would be, too.
        if const_expr(scores.chunked or kernel.traits.fresh_bounds):
            set_bounds(g, dataclasses.replace(work.tile, first_key=computed_here(work.tile.first_key)))
        g.scores.hide(m_block * kernel.traits.tile_m, g.bounds, True, scores.mask == "window")
    lse = column_statistics(sLSE, g.scores)
    for r in cutlass.range_constexpr(cute.size(values.shape[0])):
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            values[r, c] = exp2(values[r, c] * work.launch.scale_log2 - lse[c])
    p = rounded_fragment(g.acc_S, kernel.dtype)
    if const_expr(slopes is None):
        return p, p
    for i in cutlass.range_constexpr(cute.size(slopes)):
        slopes[i] = slopes[i] * g.acc_S[i]
    return p, rounded_fragment(slopes, kernel.dtype)


@cute.jit
def differentiate(g: Gradients, weights: cute.Tensor, sDelta: cute.Tensor):
    """dP becomes dS = weight (dP - delta), in place.

    The weight of an element is P, times the derivative of the softcap if there is one; rounded, weights take half the
    registers while the tensor cores compute dP.
    """
    delta = column_statistics(sDelta, g.scores)
    for i in cutlass.range_constexpr(cute.size(g.acc_dP)):
        # A fragment's linear order: two neighbouring columns, two rows, rows of warps, column groups.
        column = i % 2 + i // (2 * cute.size(g.scores.values.shape[0])) * 2
        g.acc_dP[i] = weights[i].to(Float32) * (g.acc_dP[i] - delta[column])


def store_scores(kernel, mma: cute.TiledMma, thread: Int32, rounded: cute.Tensor, sX: cute.Tensor) -> None:
    """Write a rounded accumulator of `mma` to its place in shared memory."""
    copy = atoms.store_pairs(kernel.dtype, mma).get_slice(thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sX))


def add_dq(kernel, g: Gradients, loads: QuerySources, m_block: Int32, head: Int32) -> None:
    """Add dQ of a query block to its sum in memory."""
    parts = kernel.dq_parts()
    tile = loads.workspace.tile(m_block, loads.first_head + head, loads.sequence)
    target = parts.groups(tile.dq, 0, g.thread)
    source = cute.make_tensor(g.acc_dQ.iterator, cute.make_layout(target.shape))
    atoms.add_groups(source, target, kernel.traits.vector_add)


@cute.jit
def stage_rows(kernel: cutlass.Constexpr, mma: cute.TiledMma, thread: Int32, acc_scale: tuple, sX: cute.Tensor):
    """Write an accumulator times its factor, rounded, to shared memory."""
    acc, scale = acc_scale
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * scale
    store_scores(kernel, mma, thread, rounded_fragment(acc, kernel.dtype), sX)
