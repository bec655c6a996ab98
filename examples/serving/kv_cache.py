"""Pages of keys and values, (pages, page_size, heads, columns) of each."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuteflash import append_kv, flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata
from serving.caches import Step

UNBOUNDED = (-1, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of a layer's keys and values: heads, and columns of a key and of a value."""

    heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    captures_prompts: ClassVar[bool] = True

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.head_dim + self.head_dim_v) * self.dtype.itemsize

    def check(self, page_size: int, device: torch.device) -> None:
        """Pages have any size, and what a device has no kernel for, attention refuses by name."""

    def make(self, pages: int, page_size: int, device: torch.device) -> KvPages:
        shape = pages, page_size, self.heads
        return KvPages(
            torch.zeros(*shape, self.head_dim, dtype=self.dtype, device=device),
            torch.zeros(*shape, self.head_dim_v, dtype=self.dtype, device=device),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class KvCall:
    """One layer's attention with keys and values.

    Attributes:
        layer: its index.
        q: (tokens, heads, head_dim).
        k, v: (tokens, kv heads, head_dim), and head_dim_v; the new tokens'.
        options: of `flash_attn_varlen_func` and `flash_attn_with_kvcache`.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @property
    def layout(self) -> KvLayout:
        heads, head_dim = self.k.shape[1:]
        return KvLayout(heads, head_dim, self.v.shape[2], self.k.dtype)

    @property
    def window(self) -> tuple[int, int]:
        """Keys that a query sees before and after its own; -1 is all."""
        window: tuple[int, int] = self.options.get("window_size", UNBOUNDED)
        return window

    def nothing(self) -> Tensor:
        return self.q.new_zeros(*self.q.shape[:2], self.v.shape[2])


@dataclasses.dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values of one layer."""

    k: Tensor
    v: Tensor

    def attend(self, call: KvCall, step: Step) -> Tensor:
        return self._decode(call, step) if step.longest_q == 1 else self._extend(call, step)

    def _decode(self, call: KvCall, step: Step) -> Tensor:
        """Each row has one token: few rows do not fill a GPU, so that their keys are split among its blocks."""
        o: Tensor = flash_attn_with_kvcache(
            call.q[:, None],
            self.k,
            self.v,
            call.k[:, None],
            call.v[:, None],
            cache_seqlens=step.cached,
            page_table=step.page_table,
            causal=True,
            scheduler_metadata=step.once((call.layout, call.q.shape, call.window), lambda: self._shares(call, step)),
            **call.options,
        )
        return o[:, 0]

    def _shares(self, call: KvCall, step: Step) -> Tensor:
        """How the blocks share the keys, which is the same for all layers with the same sizes and window."""
        layout = call.layout
        rows, heads, _ = call.q.shape
        return get_scheduler_metadata(
            rows,
            1,
            step.page_table.shape[1] * self.k.shape[1],
            heads,
            layout.heads,
            layout.head_dim,
            step.cached,
            qkv_dtype=layout.dtype,
            headdim_v=layout.head_dim_v,
            max_seqlen_k_new=1,
            causal=True,
            window_size=call.window,
        )

    def _extend(self, call: KvCall, step: Step) -> Tensor:
        """Rows have any number of tokens, which fill a GPU."""
        append_kv(
            self.k,
            self.v,
            call.k,
            call.v,
            step.cached,
            page_table=step.page_table,
            cu_seqlens_k_new=step.cu_seqlens,
        )
        o: Tensor = flash_attn_varlen_func(
            call.q,
            self.k,
            self.v,
            step.cu_seqlens,
            max_seqlen_q=step.longest_q,
            max_seqlen_k=step.longest_k,
            seqused_k=step.used,
            page_table=step.page_table,
            causal=True,
            num_splits=1,
            **call.options,
        )
        return o
