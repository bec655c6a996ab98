"""Step 5, FlashAttention-2: the loops exchanged, and the division done once.

    for each block of queries i:                   independent of each other: one thread block each on a GPU
        for each block of keys j that i can see:   O, m, l stay in registers
            m' = max(m, rowmax(S_ij))              P = exp(S_ij - m')        l = exp(m - m') l + rowsum(P)
            O = exp(m - m') O + P V_j              not normalised
        O_i = O / l                                LSE_i = m + log l

O is written once, the division leaves the inner loop, and blocks of keys outside the mask are never visited, which
halves the work of causal attention. Only blocks on the edge of the mask need a mask at all.
This is the algorithm of the GPU kernels, and the CPU implementation of the forward operator.
Dao, "FlashAttention-2", 2023, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import block_bounds, on_branch, visible
from cuteflash.reference.tiles import finite_or_zero, grouped, scores, weighted_values

TILE_M = 128  # queries of one block
TILE_N = 256  # keys of one block: on a CPU the loop's own cost asks for larger tiles than a GPU's registers allow


def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    *,
    sinks: Tensor | None = None,
    tree: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with the outer loop over queries; arguments and results as `naive.naive_attention`.

    With `sinks` (h_q,) each head has a logit that joins the softmax of its rows and has no value: LSE includes it, and
    O of a row that sees no key is 0. With `tree` (s_q,) the last keys, those of the queries, are tokens of a tree, see
    `masks.on_branch`.

    Accumulates in fp32 (in fp64 for fp64 inputs), which is LSE's type, too. The results are new and contiguous.
    """
    b, s_q, h_q, _ = q.shape
    s_k, d_v = k.shape[1], v.shape[3]
    queries, keys, values = grouped(q, k, v)
    o = q.new_empty(b, s_q, h_q, d_v)
    lse = queries.new_empty(b, h_q, s_q)
    for i0 in range(0, s_q, TILE_M):
        i1 = min(i0 + TILE_M, s_q)
        q_i = queries[:, :, :, i0:i1]
        acc = q_i.new_zeros(*q_i.shape[:-1], d_v)
        m = q_i.new_full(q_i.shape[:-1], float("-inf"))
        ell = torch.zeros_like(m)
        lo, hi = block_bounds(i0, i1, s_q, s_k, window_left, window_right, attention_chunk)
        for j0 in range(lo, hi, TILE_N):
            j1 = min(j0 + TILE_N, hi)
            mask = visible(i0, i1, j0, j1, s_k - s_q, window_left, window_right, q.device, chunk=attention_chunk)
            if tree is not None:
                branch = on_branch(tree, i0, i1, j0, j1, s_k - s_q)
                mask = branch if mask is None else mask & branch
            s = scores(q_i, keys[:, :, j0:j1], softmax_scale, softcap, mask)
            m_new = torch.maximum(m, s.amax(dim=-1))
            shift = finite_or_zero(m_new)
            p = torch.exp(s - shift[..., None])
            rescale = torch.exp(m - shift)
            ell = rescale * ell + p.sum(dim=-1)
            acc = rescale[..., None] * acc + weighted_values(p, values[:, :, j0:j1])
            m = m_new
        acc = acc / ell.masked_fill(ell == 0, 1.0)[..., None]
        log_sums = m + torch.log(ell)
        if sinks is not None:
            of_rows = sinks.to(m.dtype).view(m.shape[1], m.shape[2], 1)
            with_sinks = torch.logaddexp(log_sums, of_rows)
            acc = acc * torch.exp(log_sums - finite_or_zero(with_sinks))[..., None]
            log_sums = with_sinks
        o[:, i0:i1] = acc.permute(0, 3, 1, 2, 4).reshape(b, i1 - i0, h_q, d_v)
        lse[:, :, i0:i1] = log_sums.reshape(b, h_q, i1 - i0)
    return o, lse
