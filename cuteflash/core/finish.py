"""The end of a query tile: the row sums with their sinks, O divided by them, and the log-sum-exp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cuteflash.core.scores import ScoreTile
from cuteflash.core.sinks import Sinks
from cuteflash.core.softmax import OnlineSoftmax, scale_rows
from cuteflash.core.tile import QueryTile


@cute.jit
def normalize(
    softmax: OnlineSoftmax,
    scores: ScoreTile,
    out: cute.Tensor,
    tile: QueryTile,
    mLSE: cute.Tensor | None,
    v_scale: Float32 | None = None,
    sinks: Sinks | None = None,
):
    """Divide O by the row sums; write the log-sum-exp if it is asked for.

    Args:
        scores: for the rows that this thread's elements belong to.
        out: O's accumulator as (rows, columns).
        tile: the rows of `scores`.
        mLSE: (b, h_q, s_q) fp32; of packed sequences (1, h_q, total).
        v_scale: what V is multiplied with, if it has a scale.
        sinks: those that join the row sums, if there are sinks.
    """
    lse = finish_rows(softmax, scores, tile, v_scale, sinks)
    scale_rows(out, softmax.row_scale)
    write_lse(lse, scores, tile, mLSE)


@cute.jit
def finish_rows(
    softmax: OnlineSoftmax, scores: ScoreTile, tile: QueryTile, v_scale: Float32 | None, sinks: Sinks | None
):
    """The log-sum-exp of this thread's rows, whose `row_scale` becomes what O is multiplied with; as of `normalize`."""
    lse = cute.make_rmem_tensor_like(softmax.row_scale)
    if const_expr(sinks is not None):
        of_rows = cute.make_rmem_tensor_like(lse)
        for r in cutlass.range_constexpr(cute.size(lse)):
            of_rows[r] = sinks.of(tile, scores.token(r)[1])
        softmax.finish_with_sinks(lse, of_rows)
    else:
        softmax.finish(lse)
    if const_expr(v_scale is not None):
        for r in cutlass.range_constexpr(cute.size(lse)):
            softmax.row_scale[r] = softmax.row_scale[r] * v_scale
    return lse


@cute.jit
def write_lse(lse: cute.Tensor, scores: ScoreTile, tile: QueryTile, mLSE: cute.Tensor | None):
    """Write the log-sum-exp of this thread's rows if it is asked for; arguments as of `normalize`."""
    if const_expr(mLSE is not None):
        rows = tile.rows()
        if scores.first_key == 0:
            for r in cutlass.range_constexpr(cute.size(lse)):
                token, head = scores.token(r)
                if scores.row(r) < rows:
                    mLSE[tile.batch, tile.head * tile.packed_heads + head, tile.first_row + token] = lse[r]
