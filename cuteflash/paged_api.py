"""Attention of packed queries to the pages of a cache: `flash_attn_varlen_func` with a page table."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.arguments import FwdOptions
from cuteflash.coerce import not_tensors
from cuteflash.kvcache_ops import kvcache_fwd, kvcache_fwd_cuda, kvcache_fwd_lse, kvcache_fwd_lse_cuda
from cuteflash.limits import Longest, can_read, known_limit
from cuteflash.renaming import NAMING, rename
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.traits.length_class import length_class_of_packed
from cuteflash.validate import reads_values, shown
from cuteflash.validate_kvcache import KvCacheInputs, check_cache_values, check_kvcache
from cuteflash.validate_packed import PackedInputs, check_longest, check_vector


def refuse_with_pages(**arguments: object) -> None:
    """Raise NotImplementedError if an argument is given that K and V of pages do not have."""
    for name, value in arguments.items():
        if value is not None:
            described = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise NotImplementedError(f"{name} is {described}; supported with page_table: not given")


def check_optional(**tensors: object) -> None:
    """TypeError if an argument that may be left out is given and no tensor."""
    for name, optional in tensors.items():
        if optional is not None and not isinstance(optional, Tensor):
            raise TypeError(f"{name} is a {type(optional).__name__}; allowed: None, a torch.Tensor")


def lengths_of_pages(cu_seqlens_k: object, seqused_k: object, device: torch.device) -> tuple[Tensor, str]:
    """How long the sequences of a call with pages are, and what of the call's arguments that is, for errors.

    Raises:
        TypeError: both arguments are given, one of which would be ignored, or one of another type.
        ValueError: neither is, or `cu_seqlens_k` is no vector on the device.
    """
    if seqused_k is not None and cu_seqlens_k is not None:
        raise TypeError("cu_seqlens_k and seqused_k are both given; allowed with page_table: one of them")
    if isinstance(seqused_k, Tensor):
        return seqused_k, "seqused_k"
    if isinstance(cu_seqlens_k, Tensor):
        check_vector("cu_seqlens_k", cu_seqlens_k, device)
        return cu_seqlens_k.diff(), "cu_seqlens_k.diff()"
    if seqused_k is None and cu_seqlens_k is None:
        raise ValueError("seqused_k is None; allowed with page_table: the lengths, as seqused_k or as cu_seqlens_k")
    raise not_tensors(**({"seqused_k": seqused_k} if cu_seqlens_k is None else {"cu_seqlens_k": cu_seqlens_k}))


def paged_inputs(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor,
    others: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[KvCacheInputs, str]:
    """The tensors of a call with pages, whose lengths may be ends, and the lengths' name, as of `lengths_of_pages`.

    Args:
        others: sinks and the scales of K and V.
    """
    named = dict(zip(("q", "k", "v"), tensors, strict=True)) | {"cu_seqlens_q": cu_seqlens_q, "page_table": page_table}
    if not all(isinstance(x, Tensor) for x in named.values()):
        raise not_tensors(**named)
    lengths, name = lengths_of_pages(cu_seqlens_k, seqused_k, tensors[0].device)
    sinks, k_descale, v_descale = others
    check_optional(sinks=sinks, k_descale=k_descale, v_descale=v_descale)
    inputs = KvCacheInputs(*tensors, cu_seqlens_q, lengths, page_table)
    return inputs._replace(sinks=sinks, k_descale=k_descale, v_descale=v_descale), name


def attend_paged(
    inputs: KvCacheInputs, options: FwdOptions, limits: dict[str, Longest], return_lse: bool, lengths: str
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with pages; `limits` are compared with the lengths, which have that name, and help to choose a kernel."""
    try:
        return _attend_paged(inputs, options, limits, return_lse)
    except NAMING as error:
        rename(error, {"k_cache": "k", "v_cache": "v", "seqused_k": lengths})
        raise


def _attend_paged(
    inputs: KvCacheInputs, options: FwdOptions, limits: dict[str, Longest], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    longest_q, longest_k = (known_limit(f"max_seqlen_{side}", limit) for side, limit in limits.items())
    if longest_q is not None and longest_k is not None and not torch.compiler.is_compiling():
        check_kvcache(inputs, options)
        if inputs.batch:
            rows_k = inputs.batch * min(longest_k, inputs.capacity)
            found = length_class_of_packed(inputs.q.shape[0], rows_k, inputs.batch, longest_q, longest_k)
            options = options._replace(lengths=found)
    q, k, v, cu_seqlens_q, seqused_k, *_ = inputs
    assert cu_seqlens_q is not None
    if any(limit is not None for limit in limits.values()) and can_read(cu_seqlens_q):
        check_kvcache(inputs, options)
        check_cache_values(inputs, complete=reads_values())
        check_longest(PackedInputs(q, k, v, cu_seqlens_q, cu_seqlens_q, seqused_k=seqused_k), limits)
    result: Tensor | tuple[Tensor, Tensor]
    if is_plain_cuda_call(q, k, v) and not (is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        result = (kvcache_fwd_lse_cuda if return_lse else kvcache_fwd_cuda)(*inputs, *options)
    else:
        result = (kvcache_fwd_lse if return_lse else kvcache_fwd)(*inputs, *options)
    return result
