"""The backward of attention, as FlashAttention-2 computes it: blocks of keys outside, scores computed again.

    D_i = rowsum(dO_i * O_i) - dLSE_i              what all scores of a row share; LSE's own gradient only enters here
    for each block of keys j:                      dK_j, dV_j stay in registers
        for each block of queries i that see j:
            P = exp(S_ij - LSE_i)                  no maximum and no sum: the forward kept both in LSE
            dV_j += P^T dO_i                       dP = dO_i V_j^T
            dS = P * (dP - D_i) * (1 - (S_ij / softcap)^2)
            dQ_i += scale dS K_j                   dK_j += scale dS^T Q_i

Five products for the forward's two: S and dP, then dV, dK and dQ. A query that sees no key has LSE -inf; taken as +inf
its P is 0, and its gradients are, whatever dLSE holds there. The query heads that share a KV head are rows of one
product, which sums their shares of dK and dV.
This is the algorithm of the GPU kernels, and the CPU implementation of the backward operator.
Dao, "FlashAttention-2", 2023, algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import block_bounds, visible
from cuteflash.reference.tiles import grouped, grouped_rows, heads_last, scores, weighted_values

TILE_M = 128  # queries of one block
TILE_N = 256  # keys of one block


def flash_attention_2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of Q, K and V.

    Accumulates in fp32 (in fp64 for fp64 inputs). The results are new and contiguous.

    Args:
        dout: gradient of O, (b, s_q, h_q, d_v).
        q, k, v: as of the forward, see `naive.naive_attention`, like the options.
        out, lse: results of the forward, (b, s_q, h_q, d_v) and (b, h_q, s_q).
        dlse: gradient of LSE, (b, h_q, s_q); None is 0.

    Returns:
        dQ, dK and dV, each with the shape and dtype of what it belongs to.
    """
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(q, k, v)
    douts, outs = grouped_rows(dout, k.shape[2]), grouped_rows(out, k.shape[2])
    rows = queries.shape[:-1]  # (b, h_k, g, s_q)
    delta = (douts * outs).sum(dim=-1)
    if dlse is not None:
        delta = delta - dlse.reshape(rows)
    log_sums = lse.reshape(rows)
    sees_none = log_sums == float("-inf")
    log_sums, delta = log_sums.masked_fill(sees_none, float("inf")), delta.masked_fill(sees_none, 0.0)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    for j0 in range(0, s_k, TILE_N):
        j1 = min(j0 + TILE_N, s_k)
        k_j, v_j = keys[:, :, j0:j1], values[:, :, j0:j1]
        for i0 in range(0, s_q, TILE_M):
            i1 = min(i0 + TILE_M, s_q)
            lo, hi = block_bounds(i0, i1, s_q, s_k, window_left, window_right, attention_chunk)
            if j1 <= lo or hi <= j0:
                continue
            i = (..., slice(i0, i1), slice(None))
            s = scores(queries[i], k_j, softmax_scale, softcap, None)
            p = torch.exp(s - log_sums[..., i0:i1, None])
            mask = visible(i0, i1, j0, j1, s_k - s_q, window_left, window_right, q.device, chunk=attention_chunk)
            if mask is not None:
                p = p.masked_fill(~mask, 0.0)
            dp = weighted_values(douts[i], v_j.mT)
            ds = p * (dp - delta[..., i0:i1, None])
            if softcap > 0:
                ds = ds * (1 - (s / softcap).square())
            dv[:, :, j0:j1] += _sum_over_rows(p, douts[i])
            dk[:, :, j0:j1] += _sum_over_rows(ds, queries[i]) * softmax_scale
            dq[i] += weighted_values(ds, k_j) * softmax_scale
    return heads_last(dq, q.dtype), heads_last(dk[:, :, None], k.dtype), heads_last(dv[:, :, None], v.dtype)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sinks: Tensor) -> Tensor:
    """The gradient of the sinks (h_q,), fp32 (fp64 for fp64 inputs): a sink's P is exp(sink - LSE), its dP is 0.

    The other arguments are as of `flash_attention_2_backward`. A row with LSE -inf has no share.
    """
    dtype = lse.dtype
    delta = (dout.to(dtype) * out.to(dtype)).sum(dim=-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sinks.to(dtype)[:, None] - lse) * delta
    return -share.masked_fill(lse == float("-inf"), 0.0).sum(dim=(0, 2))


def _sum_over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights (b, h_k, g, rows, cols), transposed, with (b, h_k, g, rows, d) give (b, h_k, cols, d)."""
    return weights.flatten(2, 3).mT @ rows.flatten(2, 3)
