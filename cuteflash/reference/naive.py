"""Step 1, naive attention: the formula as it is written.

    S = scale Q K^T        P = exp(S)        O = P V / rowsum(P)        LSE = log rowsum(P)

It holds the whole (s_q, s_k) matrix of every head, and exp() overflows fp32 once a score passes 88: there the
result is inf or NaN. The next step repairs the second, the step after it begins to repair the first.
Vaswani et al., "Attention Is All You Need", 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import grouped, scores, ungrouped, weighted_values


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention with an unprotected softmax, right for moderate scores only.

    Args:
        q: (b, s_q, h_q, d), any floating dtype; h_q a multiple of h_k.
        k: (b, s_k, h_k, d).
        v: (b, s_k, h_k, d_v).
        softmax_scale: multiplies Q K^T.
        window_left, window_right: visible keys before and after a query, see `masks`; -1 is unbounded.
        softcap: scores become softcap * tanh(score / softcap); 0 is none.

    Returns:
        O (b, s_q, h_q, d_v) in q's dtype and LSE (b, h_q, s_q) in fp32 (fp64 for fp64 inputs); a query without a
        visible key has 0 and -inf.
    """
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(q, k, v)
    mask = visible(0, s_q, 0, s_k, s_k - s_q, window_left, window_right, q.device, chunk=attention_chunk)
    p = torch.exp(scores(queries, keys, softmax_scale, softcap, mask))
    rowsum = p.sum(dim=-1)
    o = weighted_values(p, values) / rowsum.masked_fill(rowsum == 0, 1.0)[..., None]
    return ungrouped(o, torch.log(rowsum), q.dtype)
