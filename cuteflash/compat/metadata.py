"""FlashAttention-3's `get_scheduler_metadata`, a function of `flash_attn_interface`."""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash import scheduling
from cuteflash.compat.common import window_of_others
from cuteflash.unsupported import ZERO, refuse

Window = tuple[int, int]


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    total_q: int | None = None,
) -> Tensor:
    """The schedule of the calls of `flash_attn_with_kvcache` of one step, as `cuteflash.get_scheduler_metadata`.

    Args:
        page_size, has_softcap: the schedule does not depend on them.
        total_q: rows of q with `cu_seqlens_q`, if they are not ``batch_size * max_seqlen_q``.

    Raises:
        NotImplementedError: `sm_margin` is used.
        TypeError, ValueError: as `cuteflash.get_scheduler_metadata`.
    """
    refuse(sm_margin=(sm_margin, ZERO))
    return scheduling.get_scheduler_metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype=qkv_dtype,
        headdim_v=headdim_v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        cache_leftpad=cache_leftpad,
        max_seqlen_k_new=max_seqlen_k_new,
        causal=causal,
        window_size=window_of_others(window_size),
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        total_q=total_q,
    )
