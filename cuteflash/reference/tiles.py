"""The two products of attention on a tile, and the layout that the ladder works in.

Public tensors are (batch, seqlen, heads, head_dim). Inside, the query heads that share one KV head form a
group: Q is (b, h_k, g, s_q, d) with g = h_q / h_k, K and V are (b, h_k, s_k, d). A group is folded into the rows of the
matrix products, so that K and V are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q as (b, h_k, g, s_q, d), K and V as (b, h_k, s_k, d or d_v), in fp32 (fp64 stays fp64)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    b, s_q, h_q, d = q.shape
    h_k = k.shape[2]
    group = h_q // h_k if h_k else 1
    q = q.to(dtype).view(b, s_q, h_k, group, d).permute(0, 2, 3, 1, 4)
    return q, k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)


def ungrouped(o: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O (b, h_k, g, s_q, d_v) as (b, s_q, h_q, d_v) in `dtype`, LSE (b, h_k, g, s_q) as fp32 (b, h_q, s_q)."""
    b, h_k, group, s_q, d_v = o.shape
    o = o.permute(0, 3, 1, 2, 4).reshape(b, s_q, h_k * group, d_v)
    return o.to(dtype).contiguous(), lse.reshape(b, h_k * group, s_q).float()


def scores(q: Tensor, k: Tensor, softmax_scale: float, softcap: float, mask: Tensor | None) -> Tensor:
    """S = scale * Q K^T, capped, with -inf in places where the mask is False.

    Args:
        q: (b, h_k, g, rows, d).
        k: (b, h_k, cols, d).
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        mask: bool (rows, cols) or None, from `masks.visible`.

    Returns:
        (b, h_k, g, rows, cols).
    """
    b, h_k, group, rows, d = q.shape
    s = (q.reshape(b, h_k, group * rows, d) @ k.mT).view(b, h_k, group, rows, k.shape[2])
    s = s * softmax_scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    return s if mask is None else s.masked_fill(~mask, float("-inf"))


def weighted_values(p: Tensor, v: Tensor) -> Tensor:
    """P V: weights (b, h_k, g, rows, cols) with values (b, h_k, cols, d_v) give (b, h_k, g, rows, d_v)."""
    b, h_k, group, rows, cols = p.shape
    return (p.reshape(b, h_k, group * rows, cols) @ v).view(b, h_k, group, rows, v.shape[3])


def finite_or_zero(m: Tensor) -> Tensor:
    """The row maximum to subtract: 0 if no key was visible, since exp(-inf - -inf) would be NaN."""
    return m.masked_fill(m == float("-inf"), 0.0)
