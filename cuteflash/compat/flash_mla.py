"""The decoding functions of the package `flash_mla`, FlashMLA: same names, arguments, order and results.

    from flash_mla import get_mla_metadata, flash_mla_with_kvcache            # before
    from cuteflash.compat.flash_mla import get_mla_metadata, flash_mla_with_kvcache

`get_mla_metadata` has both of its forms: without arguments it gives an object and None, with lengths and head counts
two tensors. Our kernels share a call's rows out by themselves and read neither, so either may be reused for any call.

What differs:

- `is_fp8_kvcache` says that the cache is e4m3 of 576 columns, with a scale in the argument `descale_k`, which FlashMLA
  does not have. FlashMLA's own format, rows of 656 bytes with scales among them, raises NotImplementedError.
- `indices` and what else belongs to sparse attention, and `attn_sink` raise NotImplementedError.
- CPU tensors run the reference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cuteflash import mla
from cuteflash.coerce import flag, not_tensors
from cuteflash.renaming import NAMING, rename
from cuteflash.unsupported import NOTHING, refuse
from cuteflash.validate import shown
from cuteflash.validate_mla import FP8, check_row_format
from cuteflash.validate_packed import check_vector

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

PART_INTS = 8  # of what FlashMLA calls TileSchedulerMetaData
TILE_ROWS = 64
NAMES = {"kv_cache": "k_cache", "page_table": "block_table", "descale": "descale_k"}  # what our arguments are here


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What FlashMLA keeps between calls of equal lengths. Ours keeps nothing."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What `flash_mla_with_kvcache` takes as `tile_scheduler_metadata` and `num_splits`.

    Args:
        args, kwargs: none, or the older form: `cache_seqlens`, int32 (batch,); `num_q_tokens_per_head_k`, seqlen_q *
            heads / kv_heads; `num_heads_k`; and of those that followed in between `num_heads_q`, `is_fp8_kvcache` and
            `topk`.

    Returns:
        (FlashMLASchedMeta, None) without arguments. Otherwise two int32 tensors of the shapes that FlashMLA gives,
        which CUDA graphs copy: (parts, 8), zeros, and (batch + 1,), 0, 1, ..: a split for each sequence.

    Raises:
        TypeError, ValueError: arguments that are not those.
        NotImplementedError: `topk` is used.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    return _older_metadata(*args, **kwargs)


def _older_metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    refuse(topk=(topk, NOTHING))
    if not isinstance(cache_seqlens, Tensor):
        raise not_tensors(cache_seqlens=cache_seqlens)
    check_vector("cache_seqlens", cache_seqlens, cache_seqlens.device)
    for name, value in (("num_q_tokens_per_head_k", num_q_tokens_per_head_k), ("num_heads_k", num_heads_k)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)}; allowed: an int")
        if value < 1:
            raise ValueError(f"{name} is {shown(value)}; allowed: 1 or more")
    device, batch = cache_seqlens.device, cache_seqlens.shape[0]
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    parts = max(num_sms // num_heads_k // -(-num_q_tokens_per_head_k // TILE_ROWS), 1)
    splits = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return torch.zeros(parts, PART_INTS, dtype=torch.int32, device=device), splits


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q to pages of latents, `cuteflash.flash_mla_decode`.

    Args:
        q: (batch, seqlen_q, heads, 576).
        k_cache: (num_blocks, block_size, 1, 576), block_size a multiple of 64.
        block_table: int32 (batch, blocks of a sequence).
        cache_seqlens: int32 (batch,).
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` gave, in either form.
        softmax_scale: None is ``1 / sqrt(576)``.
        causal: the last query is aligned with the last row.
        is_fp8_kvcache: k_cache is torch.float8_e4m3fn.
        descale_k: fp32, (), (1,) or (batch,), with `is_fp8_kvcache` only: what the cache's elements are multiplied
            with; None is 1.

    Returns:
        O, (batch, seqlen_q, heads, 512), and LSE, fp32 (batch, heads, seqlen_q). A query that sees no row has O = 0 and
        LSE = inf, as FlashMLA gives it; `cuteflash.flash_mla_decode` gives -inf.

    Raises:
        NotImplementedError: an argument or a format that the module's text names is used.
        TypeError: `is_fp8_kvcache` is not what k_cache's dtype says.
        TypeError, ValueError: as `cuteflash.flash_mla_decode`.
    """
    refuse(
        indices=(indices, NOTHING),
        attn_sink=(attn_sink, NOTHING),
        extra_k_cache=(extra_k_cache, NOTHING),
        extra_indices_in_kvcache=(extra_indices_in_kvcache, NOTHING),
        topk_length=(topk_length, NOTHING),
        extra_topk_length=(extra_topk_length, NOTHING),
    )
    for name, x in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if not isinstance(x, Tensor):
            raise not_tensors(**{name: x})
    _check_metadata(tile_scheduler_metadata, num_splits)
    is_fp8_kvcache = flag("is_fp8_kvcache", is_fp8_kvcache)
    if isinstance(k_cache, Tensor):
        check_row_format("k_cache", k_cache)
        if is_fp8_kvcache != (k_cache.dtype == FP8):
            raise TypeError(
                f"is_fp8_kvcache is {shown(is_fp8_kvcache)} with a k_cache of {k_cache.dtype}; allowed: True with "
                f"{FP8} only"
            )
        if is_fp8_kvcache and descale_k is None:
            descale_k = torch.ones((), dtype=torch.float32, device=k_cache.device)
    try:
        out, lse = mla.flash_mla_decode(
            q,
            k_cache,
            cache_seqlens,
            page_table=block_table,
            head_dim_v=head_dim_v,
            softmax_scale=softmax_scale,
            causal=causal,
            return_lse=True,
            descale=descale_k,
        )
    except NAMING as error:
        rename(error, NAMES)
        raise
    return out, torch.where(lse == float("-inf"), float("inf"), lse)


def _check_metadata(metadata: object, num_splits: object) -> None:
    """Raise TypeError if the two are of neither form."""
    if isinstance(metadata, FlashMLASchedMeta):
        if num_splits is not None:
            raise TypeError(
                f"num_splits is a {type(num_splits).__name__}; allowed with a FlashMLASchedMeta: None, as "
                "get_mla_metadata() gives it"
            )
        return
    for name, x in (("tile_scheduler_metadata", metadata), ("num_splits", num_splits)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: what get_mla_metadata gave")
