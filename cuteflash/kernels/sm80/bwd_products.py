"""The products of the sm80 backward and what becomes of their results, for one thread."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.softmax import exp2
from cuteflash.core.views import acc_as_operand_a
from cuteflash.kernels.sm80.bwd_bundles import Gradients, HalfGradients, KeyWork, Operand, QuerySources
from cuteflash.kernels.sm80.bwd_load import column_statistics


def accumulator(mma: cute.TiledMma, thread: Int32, rows: int, cols: int) -> cute.Tensor:
    """A thread's fp32 accumulator of a (rows, cols) product."""
    return cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((rows, cols)), Float32)


def make_operand(mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, *, is_a: bool, transpose: bool = False) -> Operand:
    """A thread's operand in shared memory, (rows, k) or (rows, k, stages); `transpose` if k runs over its rows."""
    mine, stage = mma.get_slice(thread), sX if cute.rank(sX) == 2 else sX[None, None, 0]
    atom = atoms.ldmatrix(sX.element_type, transpose)
    if is_a:
        fragment, tiled = mine.make_fragment_A(mine.partition_A(stage)), cute.make_tiled_copy_A(atom, mma)
    else:
        fragment, tiled = mine.make_fragment_B(mine.partition_B(stage)), cute.make_tiled_copy_B(atom, mma)
    copy = tiled.get_slice(thread)
    return Operand(fragment, copy, copy.partition_S(sX))


def product(kernel, mma: cute.TiledMma, acc: cute.Tensor, a: tuple, b: tuple) -> None:
    """acc = A B, see `accumulate_product`."""
    acc.fill(0.0)
    accumulate_product(kernel, mma, acc, a, b)


def accumulate_product(kernel, mma: cute.TiledMma, acc: cute.Tensor, a: tuple, b: tuple) -> None:
    """acc += A B; each is (operand, stage) in shared memory, or with stage None in registers."""
    fetches, fragments = (), []
    for operand, stage in (a, b):
        if not isinstance(operand, Operand):
            fragments.append(acc_as_operand_a(operand))
            continue
        fragments.append(operand.fragment)
        if stage is not None:
            source = operand.source if cute.rank(operand.source) == 3 else operand.source[None, None, None, stage]
            fetches += (atoms.Fetch(operand.copy, source, operand.copy.retile(operand.fragment)),)
    atoms.gemm(mma, acc, *fragments, fetches, kernel.traits.ahead)


@cute.jit
def probabilities(
    kernel: cutlass.Constexpr,
    g: Gradients | HalfGradients,
    sLSE: cute.Tensor,
    work: KeyWork,
    m_block: Int32,
    masked: cutlass.Constexpr[bool],
):
    """Scores become P, in place. Returns the derivative of the softcap, None without one."""
    scores, values = kernel.problem.scores, g.scores.values
    slopes = None
    if const_expr(scores.softcap):
        g.scores.apply_softcap()
        slopes = cute.make_rmem_tensor_like(g.acc_S)
        for i in cutlass.range_constexpr(cute.size(slopes)):
            slopes[i] = 1.0 - g.acc_S[i] * g.acc_S[i]
    if const_expr(masked):
        g.scores.hide(m_block * kernel.traits.tile_m, g.bounds, True, scores.mask == "window")
    lse = column_statistics(sLSE, g.scores)
    for r in cutlass.range_constexpr(cute.size(values.shape[0])):
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            values[r, c] = exp2(values[r, c] * work.launch.scale_log2 - lse[c])
    return slopes


def store_scores(kernel, mma: cute.TiledMma, thread: Int32, rounded: cute.Tensor, sX: cute.Tensor) -> None:
    """Write a rounded accumulator of `mma` to its place in shared memory."""
    copy = atoms.store_pairs(kernel.dtype, mma).get_slice(thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sX))


def add_dq(kernel, g: Gradients | HalfGradients, loads: QuerySources, m_block: Int32, head: Int32) -> None:
    """Add dQ of a query block to its sum in memory."""
    parts = kernel.dq_parts()
    tile = loads.workspace.tile(m_block, loads.first_head + head, loads.batch)
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
