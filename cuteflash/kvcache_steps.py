"""Calls of `flash_attn_with_kvcache` that look like an earlier one: launched without being checked and planned again.

A decode step calls it once a layer with tensors that look the same, and the host's time of a call is then most of the
step's. The first call of a kind goes the long way (`cuteflash.kvcache_api`), which checks everything, and leaves its
launches here. A later one takes them if it is equal in all that checks and plans depend on: sizes, strides, element
types, devices and settings are compared each time. What only some calls have goes the long way each time: gradients,
modes and transforms of torch, addresses that are not aligned, one length for all as an int, and `CUTEFLASH_CHECK=1`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled

from cuteflash.calls import Known
from cuteflash.operators import note_writes
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.validate import reads_values
from cuteflash.validate_append import AppendInputs
from cuteflash.validate_kvcache import KvCacheInputs

# Of these types equal settings mean the same; 1 and True are told apart by their types. Tensors compare element-wise.
SETTINGS = {NoneType, bool, int, float, str, tuple}


SETTING_NAMES = (  # the other arguments
    "softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "rotary_interleaved", "num_splits",
    "pack_gqa", "family", "max_seqlen_q", "return_lse",
)  # fmt: skip


class StepTensors(NamedTuple):
    """The tensors of a call; `cache_seqlens` may be an int instead."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Any
    v: Any
    cache_seqlens: Any
    page_table: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_seqlens: Any
    sinks: Any
    k_descale: Any
    v_descale: Any
    scheduler_metadata: Any
    tree_mask: Any


class Step:
    """The launches of one kind of calls; it holds none of their tensors.

    Args:
        attend: takes `KvCacheInputs`.
        append: takes `AppendInputs`, returns the rotated queries and the lengths after it; None if nothing is appended.
    """

    __slots__ = ("append", "attend")

    def __init__(self, attend: Callable[[KvCacheInputs], Any], append: Callable[[AppendInputs], Any] | None) -> None:
        self.attend = attend
        self.append = append

    def __call__(self, tensors: StepTensors) -> Any:
        """Append, if there is something to append, and attend."""
        (
            q, k_cache, v_cache, k, v, seqlens, page_table, cache_batch_idx, cache_leftpad, ends, ends_new, cos, sin,
            rotary_seqlens, sinks, k_descale, v_descale, metadata, tree_mask,
        ) = tensors  # fmt: skip
        if self.append is not None:
            rotates = cos is not None
            rotated, seqlens = self.append(
                AppendInputs(
                    k_cache, v_cache, k, v, seqlens, page_table, cache_batch_idx, ends_new, cos, sin, rotary_seqlens,
                    k_descale, v_descale, q if rotates else None, ends if rotates else None,
                )
            )  # fmt: skip
            note_writes(k_cache, v_cache)
            if rotates:
                q = rotated
        return self.attend(
            KvCacheInputs(
                q, k_cache, v_cache, ends, seqlens, page_table, cache_batch_idx, cache_leftpad, sinks, k_descale,
                v_descale, metadata, tree_mask,
            )
        )  # fmt: skip


steps: Known[Step] = Known()


def key_of(tensors: StepTensors, settings: tuple[Any, ...], window: object) -> tuple[Any, ...] | None:
    """What the launches of a call depend on; None if it has to go the long way.

    Args:
        tensors: of the call.
        settings: all other arguments, as they are given, in the order of `SETTING_NAMES`.
        window: of these the one that is a pair.
    """
    q, k_cache, v_cache, k, v = tensors[:5]
    if not is_plain_cuda_call(q, k_cache, v_cache) or reads_values():
        return None
    types = tuple(map(type, (*settings, *window) if type(window) is tuple else settings))
    if not SETTINGS.issuperset(types):
        return None
    try:
        addresses = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
        if tensors.scheduler_metadata is not None:
            addresses |= tensors.scheduler_metadata.data_ptr()
        if k is not None:
            addresses |= k.data_ptr() | v.data_ptr()
            if k.is_neg() or v.is_neg():
                return None
        if addresses & ALIGNMENT_MASK or (
            is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        ):
            return None
        looks = [x if x is None else (type(x), x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
    except (AttributeError, RuntimeError):  # not a tensor; a sparse one has no strides, a nested one no shape
        return None
    return tuple(looks), settings, types
