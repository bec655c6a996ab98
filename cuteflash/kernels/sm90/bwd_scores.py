"""The pointwise part of the backward, on scores that are held transposed: keys as rows, queries as columns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.convert import round_pair, unpack_pair
from cuteflash.core.scores import ScoreTile, computed_here, stay_a_branch
from cuteflash.core.softmax import exp2
from cuteflash.core.views import aligned
from cuteflash.kernels.sm90.bwd_bundles import Visit
from cuteflash.kernels.sm90.bwd_warpgroup import ROWS, KeyWarpgroup


def column_statistics(sX: cute.Tensor, thread: Int32) -> cute.Tensor:
    """The numbers of the queries that this thread's columns of S^T belong to, (2, column groups)."""
    start = aligned(sX.iterator + 2 * (thread % 4), 8)
    layout = cute.make_layout((2, cute.size(sX) // 8), stride=(1, 8))
    mine = cute.make_rmem_tensor(layout.shape, Float32)
    cute.autovec_copy(cute.make_tensor(start, layout), mine)
    return mine


@cute.jit
def prepare_scores(kernel: cutlass.Constexpr, scores: ScoreTile, visit: Visit, first_key: Int32, m_block: Int32):
    """Apply softcap and mask to the transposed scores of a query block, in place; they begin at a key of the tile."""
    if const_expr(kernel.problem.scores.softcap):
        scores.apply_softcap()
    if visit.blocks.is_cut(m_block):
        stay_a_branch()
        first_key = computed_here(first_key)
        bounds = cute.make_rmem_tensor((ROWS, 2), Int32)
        for r in cutlass.range_constexpr(ROWS):
            bounds[r, 0], bounds[r, 1] = visit.tile.q_bounds(first_key + scores.row(r))
        scores.hide(m_block * kernel.traits.tile_m, bounds, True, kernel.problem.scores.mask == "window")


def cap_slope(capped: Float32) -> Float32:
    """The derivative of tanh, of its value; 0 for hidden scores, which are -inf."""
    return 1.0 - cute.arch.fmin(capped * capped, Float32(1.0))


@cute.jit
def probabilities(kernel: cutlass.Constexpr, wg: KeyWarpgroup, lse: cute.Tensor, launch: BwdLaunch):
    """P of the scores, rounded into the operand of dV, and the weights of dP."""
    p = wg.products
    acc, pairs, weights = p.acc_S, cute.recast_tensor(p.tVrP, Uint32), cute.recast_tensor(p.weights, Uint32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        # A fragment's linear order: two neighbouring columns, two rows, column groups.
        low, high = (exp2(acc[2 * i + j] * launch.scale_log2 - lse[j, i // ROWS]) for j in range(2))
        pairs[i] = round_pair(low, high, kernel.dtype)
        if const_expr(kernel.problem.scores.softcap):
            low, high = low * cap_slope(acc[2 * i]), high * cap_slope(acc[2 * i + 1])
            weights[i] = round_pair(low, high, kernel.dtype)


@cute.jit
def differentiate(kernel: cutlass.Constexpr, wg: KeyWarpgroup, delta: cute.Tensor):
    """dS of P and dP, rounded into the operand of dK."""
    p = wg.products
    pairs, weights = cute.recast_tensor(p.tKrdS, Uint32), cute.recast_tensor(p.weights, Uint32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        low, high = (
            w * (p.acc_dP[2 * i + j] - delta[j, i // ROWS]) for j, w in enumerate(unpack_pair(weights[i], kernel.dtype))
        )
        pairs[i] = round_pair(low, high, kernel.dtype)
