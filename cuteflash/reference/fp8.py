"""Attention on 8-bit operands: what their elements and scales stand for, and the attention of that."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.reference.quantize import of_elements

GROUP = 16  # keys that Vᵀ permutes among themselves


def natural_keys(v_transposed: Tensor) -> Tensor:
    """(..., keys) with the keys in order, of Vᵀ as the product with an 8-bit P reads it.

    In each 16 keys, position 4 t + 2 j + b holds key 8 j + 2 t + b: see `cuteflash.kernels.sm90.warpgroup.round_p`.
    """
    groups: Tensor = v_transposed.unflatten(-1, (-1, 4, 2, 2))
    return groups.transpose(-3, -2).flatten(-4)


def permuted_keys(natural: Tensor) -> Tensor:
    """The inverse of `natural_keys`: (..., keys) in the order that the product reads; keys are a multiple of 16."""
    groups: Tensor = natural.unflatten(-1, (-1, 2, 4, 2))
    return groups.transpose(-3, -2).flatten(-4)


def stored_rows(v_transposed: Tensor, keys: int) -> Tensor:
    """V as rows, (batch, keys, heads, head_dim_v), of Vᵀ (batch, heads, head_dim_v, padded keys)."""
    return natural_keys(v_transposed)[..., :keys].permute(0, 3, 1, 2)


def dequantised(tensor: Tensor, descale: Tensor) -> Tensor:
    """What a (batch, seqlen, heads, columns) tensor stands for, fp32; heads share their KV head's scales."""
    return tensor.float() * of_elements(descale, tensor)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Iterable[Tensor],
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    *,
    v_mean: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """O and LSE by definition: attention in fp32 of what the operands stand for, with P neither rounded nor scaled.

    Args:
        q, k, v: (b, s, h, d) of 8 bits, v as rows.
        descales: the scales of q, k and v, fp32 (b, h_k) or (b, h_k, blocks of 128 tokens).
        softmax_scale, window_left, window_right, softcap: see `naive.naive_attention`.
        v_mean: (b, h_k, d_v) fp32, taken out of V before it was quantised; it is added to O.
        out_dtype: element type of O.
    """
    q, k, v = (dequantised(x, scale) for x, scale in zip((q, k, v), descales, strict=True))
    out, lse = flash_attention_2(q, k, v, softmax_scale, window_left, window_right, softcap)
    if v_mean is not None:
        out = out + of_visible_rows(v_mean, lse)
    return out.to(out_dtype), lse


def of_visible_rows(v_mean: Tensor, lse: Tensor) -> Tensor:
    """What V's mean (b, h_k, d_v) adds to O, (b, s_q, h, d_v): the weights of a row sum to 1, or to 0 without a key.

    Args:
        v_mean: V's mean.
        lse: (b, h, s_q), -inf for rows that see no key.
    """
    heads_per_kv = lse.shape[1] // max(v_mean.shape[1], 1)
    mean = v_mean.repeat_interleave(heads_per_kv, dim=1)[:, None]
    return torch.where(lse.mT[..., None] == float("-inf"), 0.0, mean)
