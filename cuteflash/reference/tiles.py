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
    dtype = compute_dtype(q)
    return grouped_rows(q, k.shape[2]), k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)


def grouped_rows(x: Tensor, h_k: int) -> Tensor:
    """What has a row for each query and head, (b, s_q, h_q, d), as (b, h_k, g, s_q, d) in fp32 (fp64 stays fp64)."""
    b, s_q, h_q, d = x.shape
    group = h_q // h_k if h_k else 1
    return x.to(compute_dtype(x)).reshape(b, s_q, h_k, group, d).permute(0, 2, 3, 1, 4)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The element type that sums and exponentials are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def ungrouped(o: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O (b, h_k, g, s_q, d_v) as (b, s_q, h_q, d_v) in `dtype`, LSE (b, h_k, g, s_q) as (b, h_q, s_q)."""
    return heads_last(o, dtype), lse.flatten(1, 2)


def heads_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(b, h_k, g, s, d) as (b, s, h_k * g, d) in `dtype`, contiguous."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype).contiguous()


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
