"""Attention on packed projections, as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash import packing
from cuteflash.coerce import Window
from cuteflash.unsupported import NOTHING, ZERO, refuse


class _Attention(torch.nn.Module):
    """The options of attention; no parameters and no buffers."""

    def __init__(
        self,
        *,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: Window,
        alibi_slopes: None,
        deterministic: bool,
        softcap: float,
    ) -> None:
        super().__init__()
        refuse(attention_dropout=(attention_dropout, ZERO), alibi_slopes=(alibi_slopes, NOTHING))
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.window_size = window_size
        self.deterministic = deterministic
        self.softcap = softcap

    def options(self, causal: bool | None = None) -> dict[str, Any]:
        """The keyword arguments of the public functions; `causal` replaces the module's own."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


class FlashSelfAttention(_Attention):
    """Attention of a sequence to itself.

    Args:
        causal: a query sees no key after its position.
        softmax_scale: factor of the scores; None is ``1 / sqrt(head_dim)``.
        attention_dropout: 0; other values are refused.
        window_size: (left, right) keys seen before and after a query's position; -1 is all.
        alibi_slopes: None; others are refused.
        deterministic: gradients are the same in every run.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.

    Raises:
        NotImplementedError: `attention_dropout` or `alibi_slopes` is used.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Window = (-1, -1),
        alibi_slopes: None = None,
        deterministic: bool = False,
        *,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(
            causal=causal,
            softmax_scale=softmax_scale,
            attention_dropout=attention_dropout,
            window_size=window_size,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            softcap=softcap,
        )

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
    ) -> Tensor:
        """O, (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).

        Args:
            qkv: (batch, seqlen, 3, heads, head_dim); with `cu_seqlens` packed, (total, 3, heads, head_dim).
            causal: replaces the module's own.
            cu_seqlens: int32 (batch + 1,), the first token of each sequence, then the total.
            max_seqlen: at least the longest sequence.
        """
        options = self.options(causal)
        if cu_seqlens is None:
            out: Tensor = packing.flash_attn_qkvpacked_func(qkv, **options)
        else:
            out = packing.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)
        return out


class FlashCrossAttention(_Attention):
    """Attention of one sequence to another; arguments as `FlashSelfAttention`, in FlashAttention-2's order."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: None = None,
        window_size: Window = (-1, -1),
        deterministic: bool = False,
        *,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(
            causal=causal,
            softmax_scale=softmax_scale,
            attention_dropout=attention_dropout,
            window_size=window_size,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            softcap=softcap,
        )

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | Tensor | None = None,
    ) -> Tensor:
        """O, shaped as q.

        Args:
            q: (batch, seqlen_q, heads, head_dim); with `cu_seqlens` packed, (total_q, heads, head_dim).
            kv: (batch, seqlen_k, 2, kv_heads, head_dim), or packed (total_k, 2, kv_heads, head_dim).
            causal: replaces the module's own.
            cu_seqlens, max_seqlen: the sequences of q, as `FlashSelfAttention.forward` takes them.
            cu_seqlens_k, max_seqlen_k: those of kv.
        """
        options = self.options(causal)
        if cu_seqlens is None and cu_seqlens_k is None:
            out: Tensor = packing.flash_attn_kvpacked_func(q, kv, **options)
        elif cu_seqlens is None or cu_seqlens_k is None:
            name = "cu_seqlens" if cu_seqlens is None else "cu_seqlens_k"
            raise ValueError(f"{name} is None; allowed: cu_seqlens and cu_seqlens_k both tensors, or both None")
        else:
            out = packing.flash_attn_varlen_kvpacked_func(
                q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
            )
        return out
