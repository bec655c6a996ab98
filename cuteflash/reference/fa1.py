"""Step 4, FlashAttention-1: scores, softmax and output in one pass over tiles.

The online softmax also rescales the output, so that no tile of scores is computed twice or leaves fast memory:

    for each block of keys j:                      K_j, V_j are loaded once
        for each block of queries i:               O_i, m_i, l_i are read from and written to slow memory
            m' = max(m_i, rowmax(S_ij))            P = exp(S_ij - m')        l' = exp(m_i - m') l_i + rowsum(P)
            O_i = (l_i exp(m_i - m') O_i + P V_j) / l'

O_i is a finished softmax over the keys seen so far, after every step. Slow-memory traffic falls from O(s_q s_k) to
O(s_q s_k d / fast memory), but O_i makes the trip, and is divided, once for every block of keys.
Dao, Fu, Ermon, Rudra and Re, "FlashAttention", 2022, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import finite_or_zero, grouped, scores, ungrouped, weighted_values

TILE_M = 128  # queries of one block
TILE_N = 128  # keys of one block


def flash_attention_1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention with the outer loop over keys; arguments and results as `naive.naive_attention`."""
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(q, k, v)
    o = queries.new_zeros(*queries.shape[:-1], v.shape[3])
    m = queries.new_full(queries.shape[:-1], float("-inf"))
    ell = torch.zeros_like(m)
    for j0 in range(0, s_k, TILE_N):
        j1 = min(j0 + TILE_N, s_k)
        for i0 in range(0, s_q, TILE_M):
            i1 = min(i0 + TILE_M, s_q)
            mask = visible(i0, i1, j0, j1, s_k - s_q, window_left, window_right, q.device)
            s = scores(queries[:, :, :, i0:i1], keys[:, :, j0:j1], softmax_scale, softcap, mask)
            o_i, m_i, ell_i = o[:, :, :, i0:i1], m[:, :, :, i0:i1], ell[:, :, :, i0:i1]

            m_new = torch.maximum(m_i, s.amax(dim=-1))
            shift = finite_or_zero(m_new)
            p = torch.exp(s - shift[..., None])
            ell_old = torch.exp(m_i - shift) * ell_i
            ell_new = ell_old + p.sum(dim=-1)
            divisor = ell_new.masked_fill(ell_new == 0, 1.0)[..., None]
            o_i.copy_((ell_old[..., None] * o_i + weighted_values(p, values[:, :, j0:j1])) / divisor)
            m_i.copy_(m_new)
            ell_i.copy_(ell_new)
    return ungrouped(o, m + torch.log(ell), q.dtype)
