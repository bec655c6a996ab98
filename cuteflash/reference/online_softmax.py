"""Step 3, online softmax: maximum and sum of a row in one pass, block by block.

If a block has a larger maximum m', the sum so far is multiplied with exp(m - m'):

    m' = max(m, rowmax(S_j))        l' = exp(m - m') l + rowsum(exp(S_j - m'))

So a row's LSE = m + log l needs only one block of scores at a time, and the (s_q, s_k) matrix is gone. The output
takes a second pass that computes the scores again: O = sum_j exp(S_j - LSE) V_j. The next step fuses the two.
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import finite_or_zero, grouped, scores, ungrouped, weighted_values

TILE_N = 128  # keys of one block


def online_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention in two passes over blocks of keys; arguments and results as `naive.naive_attention`."""
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(q, k, v)
    blocks = [(j0, min(j0 + TILE_N, s_k)) for j0 in range(0, s_k, TILE_N)]

    def block_scores(j0: int, j1: int) -> Tensor:
        mask = visible(0, s_q, j0, j1, s_k - s_q, window_left, window_right, q.device)
        return scores(queries, keys[:, :, j0:j1], softmax_scale, softcap, mask)

    m = queries.new_full(queries.shape[:-1], float("-inf"))
    ell = torch.zeros_like(m)
    for j0, j1 in blocks:
        s = block_scores(j0, j1)
        m_new = torch.maximum(m, s.amax(dim=-1))
        shift = finite_or_zero(m_new)
        ell = torch.exp(m - shift) * ell + torch.exp(s - shift[..., None]).sum(dim=-1)
        m = m_new
    lse = m + torch.log(ell)

    o = queries.new_zeros(*queries.shape[:-1], v.shape[3])
    for j0, j1 in blocks:
        p = torch.exp(block_scores(j0, j1) - finite_or_zero(lse)[..., None])
        o += weighted_values(p, values[:, :, j0:j1])
    return ungrouped(o, lse, q.dtype)
