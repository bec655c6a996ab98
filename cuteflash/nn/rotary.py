"""Rotary position embedding: pairs of columns of q and k are rotated by angles proportional to their position.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. The score of a query and a key then
depends on the difference of their positions. Angles, sines and products are in fp32, in fp64 for fp64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryEmbedding(torch.nn.Module):
    """Rotates the first `dim` columns of q and k.

    It has no parameters and no buffers: its sines are computed in each call, of a size that does not matter beside
    attention, so that nothing depends on the lengths of earlier calls, on a dtype that the module was cast to, or on
    a device that it was created on.

    Args:
        dim: columns that are rotated, even, at most the head dim; the others stay as they are.
        base: column pair i turns by ``base ** (-2 i / dim)`` radians a position.
        interleaved: pairs are neighbouring columns (GPT-J), not columns ``dim / 2`` apart (GPT-NeoX, Llama).

    Raises:
        ValueError: `dim` or `base` is not allowed.
    """

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim is {dim}; allowed: positive even numbers")
        if not base > 0:
            raise ValueError(f"base is {base}; allowed: positive numbers")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """New tensors, rotated.

        Args:
            q, k: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).
            positions: (seqlen,), (batch, seqlen) or (total,); None is 0, 1, ... along the sequence, which packed
                sequences do not have: theirs are `packed_positions`.
        """
        if positions is None:
            if q.dim() != 4 or k.shape[1] != q.shape[1]:
                raise ValueError(
                    f"positions is None with shapes {tuple(q.shape)} and {tuple(k.shape)}; allowed: None with q and k "
                    "(batch, seqlen, heads, head_dim) of one seqlen"
                )
            positions = torch.arange(q.shape[1], device=q.device)
        cos, sin = self.cos_sin(positions, torch.promote_types(q.dtype, torch.float32))
        return apply_rotary_emb(q, cos, sin, self.interleaved), apply_rotary_emb(k, cos, sin, self.interleaved)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The cosines and sines of all angles, each (..., dim / 2) for positions (...)."""
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=dtype) / self.dim
        angles = positions.to(dtype)[..., None] * self.base**-exponents
        return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first `rotary_dim` columns of every head.

    Args:
        x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).
        cos, sin: (seqlen, rotary_dim / 2), (batch, seqlen, rotary_dim / 2), or packed (total, rotary_dim / 2).
        interleaved: whether a pair is two neighbouring columns.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: the sines are for more columns than a head has, or for other tokens.
    """
    rotary_dim = 2 * cos.shape[-1]
    if cos.shape != sin.shape or rotary_dim > x.shape[-1] or cos.shape[:-1] != x.shape[x.dim() - cos.dim() - 1 : -2]:
        raise ValueError(
            f"cos.shape is {tuple(cos.shape)} and sin.shape {tuple(sin.shape)}; allowed with x.shape "
            f"{tuple(x.shape)}: both (..., {x.shape[-3]}, rotary_dim / 2), rotary_dim at most {x.shape[-1]}"
        )
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for all heads
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """The position of each of `total` packed tokens within its sequence, without a synchronisation.

    Args:
        cu_seqlens: (batch + 1,), integers: the first token of each sequence, then the end of the last.
        total: tokens; those beyond the last sequence count from its end.

    Returns:
        (total,), dtype and device of `cu_seqlens`.
    """
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return tokens - cu_seqlens[torch.bucketize(tokens, cu_seqlens[1:], right=True)]
