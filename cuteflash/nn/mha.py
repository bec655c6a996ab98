"""Multi-head attention: projections, rotary embedding, attention, projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash import api, packed_api
from cuteflash.coerce import Window
from cuteflash.nn.rotary import RotaryEmbedding, packed_positions
from cuteflash.problem import HEAD_DIM_MAX, HEAD_DIM_STEP
from cuteflash.unsupported import ZERO, refuse


class MHA(torch.nn.Module):
    """Multi-head self-attention or cross-attention, (batch, seqlen, embed_dim) → (batch, seqlen, embed_dim).

    The state dict has FlashAttention-2's names, and its layout: rows of `Wqkv` are those of q, of k, then of v, each
    head after head, which is also the layout of `torch.nn.MultiheadAttention.in_proj_weight`:

    ==================================  ==================================================
    `Wqkv.weight`, `Wqkv.bias`          self-attention: ((heads + 2 kv_heads) head_dim, embed_dim)
    `Wq.weight`, `Wq.bias`              cross-attention: (heads head_dim, embed_dim)
    `Wkv.weight`, `Wkv.bias`            cross-attention: (2 kv_heads head_dim, embed_dim)
    `out_proj.weight`, `out_proj.bias`  (embed_dim, heads head_dim)
    ==================================  ==================================================

    Args:
        embed_dim: columns of inputs and outputs.
        num_heads: query heads; `head_dim` is ``embed_dim / num_heads``, a multiple of 8 up to 256.
        num_heads_kv: KV heads, a divisor of `num_heads`; None is `num_heads`.
        cross_attn: keys and values come from `x_kv`.
        qkv_proj_bias, out_proj_bias: whether the projections have a bias.
        dropout: 0; other values are refused.
        softmax_scale, causal, window_size, softcap, deterministic: as `cuteflash.flash_attn_func` takes them.
        rotary_emb_dim: columns of a head that rotary embedding turns; 0 is none.
        rotary_emb_base, rotary_emb_interleaved: as `RotaryEmbedding` takes them.
        device, dtype: of the parameters.

    Raises:
        ValueError: head counts or sizes that do not fit together.
        NotImplementedError: `dropout` is used.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        *,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        refuse(dropout=(dropout, ZERO))
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.head_dim = _head_dim(embed_dim, num_heads, self.num_heads_kv)
        self.cross_attn = cross_attn
        self.options: dict[str, Any] = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "deterministic": deterministic,
        }
        self.rotary_emb = self._rotary(rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_dim = 2 * self.num_heads_kv * self.head_dim
        if cross_attn:
            self.Wq = torch.nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = torch.nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = torch.nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **factory)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def _rotary(self, dim: int, base: float, interleaved: bool) -> RotaryEmbedding | None:
        if dim == 0:
            return None
        if dim > self.head_dim:
            raise ValueError(f"rotary_emb_dim is {dim}; allowed: even numbers up to the head dim, {self.head_dim}")
        if self.cross_attn:
            raise ValueError(
                f"rotary_emb_dim is {dim} with cross_attn; allowed: 0, since positions of two sequences do not compare"
            )
        return RotaryEmbedding(dim, base, interleaved)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | Tensor | None = None,
    ) -> Tensor:
        """Shaped as x.

        Args:
            x: (batch, seqlen, embed_dim); with `cu_seqlens` packed sequences, (total, embed_dim).
            x_kv: cross-attention only: where keys and values come from, (batch, seqlen_k, embed_dim) or packed
                (total_k, embed_dim); None is x.
            cu_seqlens: int32 (batch + 1,), the first token of each packed sequence, then the total.
            max_seqlen: at least the longest sequence.
            cu_seqlens_k, max_seqlen_k: the same of `x_kv`.

        Raises:
            ValueError: an input has the wrong number of dimensions, or is not used by this module.
        """
        self._check_inputs(x, x_kv, cu_seqlens, cu_seqlens_k)
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_heads_kv * self.head_dim
        if self.cross_attn:
            q = self.Wq(x)
            k, v = self.Wkv(x if x_kv is None else x_kv).split((kv_dim, kv_dim), dim=-1)
        else:
            q, k, v = self.Wqkv(x).split((q_dim, kv_dim, kv_dim), dim=-1)
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (q, k, v))
        if self.rotary_emb is not None:
            positions = None if cu_seqlens is None else packed_positions(cu_seqlens, x.shape[0])
            q, k = self.rotary_emb(q, k, positions)
        if x_kv is None:
            cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
        out = self.attend(q, k, v, cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k)
        projected: Tensor = self.out_proj(out.flatten(-2))
        return projected

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_k: int | Tensor | None,
    ) -> Tensor:
        """Attention itself, shaped as q; a subclass may replace it by another implementation.

        Args:
            q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
            k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
            cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k: of packed sequences, as in `forward`; both vectors are
                None for dense ones.
        """
        if cu_seqlens is None or cu_seqlens_k is None:
            out: Tensor = api.flash_attn_func(q, k, v, **self.options)
        else:
            out = packed_api.flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self.options
            )
        return out

    def _check_inputs(
        self, x: Tensor, x_kv: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
    ) -> None:
        allowed = "(batch, seqlen, embed_dim)" if cu_seqlens is None else "packed, (total, embed_dim)"
        for name, tensor in (("x", x), ("x_kv", x_kv)):
            if tensor is not None and tensor.dim() != (3 if cu_seqlens is None else 2):
                raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; allowed: {allowed}")
        if x_kv is not None and not self.cross_attn:
            raise ValueError("x_kv is given to self-attention; allowed: None, or a module with cross_attn=True")
        if (cu_seqlens_k is not None) != (cu_seqlens is not None and x_kv is not None):
            raise ValueError(
                f"cu_seqlens_k is {'None' if cu_seqlens_k is None else 'given'}; allowed: a tensor if x_kv and "
                "cu_seqlens are given, otherwise None"
            )


def _head_dim(embed_dim: int, num_heads: int, num_heads_kv: int) -> int:
    if num_heads <= 0 or num_heads_kv <= 0 or num_heads % num_heads_kv:
        raise ValueError(f"num_heads is {num_heads}; allowed: positive multiples of num_heads_kv, {num_heads_kv}")
    head_dim, rest = divmod(embed_dim, num_heads)
    if rest or not 0 < head_dim <= HEAD_DIM_MAX or head_dim % HEAD_DIM_STEP:
        raise ValueError(
            f"embed_dim is {embed_dim} with {num_heads} heads; allowed: num_heads times a head dim that is a multiple "
            f"of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )
    return head_dim
