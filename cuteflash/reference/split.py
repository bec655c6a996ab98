"""Split keys: the keys cut into parts, each attended to by itself, and the parts put together.

    for each part p of the keys:     independent of each other: one thread block each on a GPU
        S = scale Q K_pᵀ             m_p = rowmax(S)       P = exp(S - m_p)       l_p = rowsum(P)
        O_p = P V_p / l_p            LSE_p = m_p + log l_p
    LSE = log sum_p exp(LSE_p)       O = sum_p exp(LSE_p - LSE) O_p

A part is the result over its own keys, and its log-sum-exp all that the others have to know of it. FlashAttention-2
is parallel over queries; with one query and a long cache, keys are all that can be shared.
`cuteflash.core.split` is how the kernels cut the keys of many sequences of all lengths into equal parts.
Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import finite_or_zero, grouped, scores, ungrouped, weighted_values

PARTS = 4


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    parts: int = PARTS,
) -> tuple[Tensor, Tensor]:
    """Attention with the keys in up to `parts` parts of one size; the rest as `naive.naive_attention`."""
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(q, k, v)
    if s_k == 0:  # no part, and nothing to put together
        return q.new_zeros(*q.shape[:3], v.shape[3]), queries.new_full((q.shape[0], q.shape[2], s_q), float("-inf"))
    found = []
    size = -(-s_k // parts)
    for j0 in range(0, s_k, size):
        j1 = min(j0 + size, s_k)
        mask = visible(0, s_q, j0, j1, s_k - s_q, window_left, window_right, q.device)
        s = scores(queries, keys[:, :, j0:j1], softmax_scale, softcap, mask)
        found.append(attend(s, values[:, :, j0:j1]))
    o, lse = merge(torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found]))
    return ungrouped(o, lse, q.dtype)


def attend(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O and log-sum-exp of scores over some keys, 0 and -inf in rows that see none of them."""
    m = s.amax(dim=-1)
    p = torch.exp(s - finite_or_zero(m)[..., None])
    ell = p.sum(dim=-1)
    return weighted_values(p, v) / ell.masked_fill(ell == 0, 1.0)[..., None], m + torch.log(ell)


def merge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of O (parts, .., rows, columns) and their log-sum-exps (parts, .., rows) put together."""
    whole = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - finite_or_zero(whole))
    return (weights[..., None] * o).sum(dim=0), whole
