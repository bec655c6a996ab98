"""Step 2, safe softmax: subtract each row's largest score first.

    m = rowmax(S)        P = exp(S - m)        O = P V / rowsum(P)        LSE = m + log rowsum(P)

Both factors exp(-m) cancel, so the result is the same, and no exponential exceeds 1. The price is one more pass over
the row: all of S must be known before the first exponential. The (s_q, s_k) matrix is still there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import finite_or_zero, grouped, scores, ungrouped, weighted_values


def safe_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention with the row maximum subtracted; arguments and results as `naive.naive_attention`."""
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(q, k, v)
    mask = visible(0, s_q, 0, s_k, s_k - s_q, window_left, window_right, q.device)
    s = scores(queries, keys, softmax_scale, softcap, mask)
    if s_k == 0:  # amax of an empty row would raise
        m = s.new_full(s.shape[:-1], float("-inf"))
    else:
        m = s.amax(dim=-1)
    p = torch.exp(s - finite_or_zero(m)[..., None])
    rowsum = p.sum(dim=-1)
    o = weighted_values(p, values) / rowsum.masked_fill(rowsum == 0, 1.0)[..., None]
    return ungrouped(o, m + torch.log(rowsum), q.dtype)
