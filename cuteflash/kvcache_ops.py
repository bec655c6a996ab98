"""The operators of caches, `torch.ops.cuteflash.kvcache_fwd` and `kvcache_fwd_lse`: inference only.

K and V lie in pages that a table names, or in a row of a dense cache for each sequence; see `KvCacheInputs`. The host
reads no vector and no table, so that a CUDA graph replays with other lengths and pages. Entries of the table that
belong to no key are not looked up, and rows of a page past the last key are not read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import FwdOptions
from cuteflash.autograd import NO_GRADIENT
from cuteflash.calls import Known
from cuteflash.kvcache_planning import Planner, result_shapes
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK, check_target
from cuteflash.packed_ops import call_of
from cuteflash.planning import Result
from cuteflash.reference import flash_attention_2
from cuteflash.schedule_planning import check_metadata_size
from cuteflash.torch_internals import OpOverload
from cuteflash.transforms import register_autocast, register_one_by_one
from cuteflash.validate import lse_dtype, reads_values
from cuteflash.validate_kvcache import (
    KvCacheInputs,
    check_cache_addresses,
    check_cache_values,
    check_kvcache,
    key_spans,
)

TENSORS = KvCacheInputs._fields


class CudaForward:
    """The CUDA implementation: look the launch of an equal call up, or plan one.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.planner = Planner(has_lse)
        self.known: Known[Any] = Known()

    def __call__(self, *arguments: Any) -> Result:
        """The results, as the operator returns them."""
        inputs, options = KvCacheInputs(*arguments[: len(TENSORS)]), arguments[len(TENSORS) :]
        launch = self.launch_of(inputs, options)
        q, k, v = inputs[:3]
        addresses, metadata = q.data_ptr() | k.data_ptr() | v.data_ptr(), inputs.scheduler_metadata
        if (addresses if metadata is None else addresses | metadata.data_ptr()) & ALIGNMENT_MASK:
            check_cache_addresses(inputs)
        if reads_values():
            check_cache_values(inputs, complete=True)
        return launch(inputs)

    def launch_of(self, inputs: KvCacheInputs, options: tuple[Any, ...]) -> Callable[[KvCacheInputs], Result]:
        """The launch of a call, which is checked for all but the addresses of its tensors and what they say."""
        call = call_of(inputs, options, check_kvcache, FwdOptions)
        launch: Callable[[KvCacheInputs], Result]
        last, launch = self.known.last
        return launch if call == last else self.known.find(call, self.plan, inputs, options)

    def plan(self, inputs: KvCacheInputs, options: tuple[Any, ...]) -> Callable[[KvCacheInputs], Result]:
        """A new launch."""
        return self.planner.launch(inputs, FwdOptions(*options))


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_kvcache(KvCacheInputs(*tensors), options)


def _fake(*arguments: Any, has_lse: bool) -> Result:
    _check(*arguments)
    *tensors, options = arguments
    inputs = KvCacheInputs(*tensors)
    q = inputs.q
    check_target(q, options.family)
    o_shape, lse_shape = result_shapes(inputs)
    o = q.new_empty(o_shape)
    return (o, q.new_empty(lse_shape, dtype=lse_dtype(q))) if has_lse else o


def _cpu(*arguments: Any, has_lse: bool) -> Result:
    """One sequence after the other through the reference, its pages gathered and what has 8 bits dequantised."""
    _check(*arguments)
    *tensors, options = arguments
    inputs = KvCacheInputs(*tensors)
    check_cache_addresses(inputs)
    check_metadata_size(inputs.scheduler_metadata, 0)
    check_cache_values(inputs, complete=reads_values())
    q = inputs.q
    o_shape, lse_shape = result_shapes(inputs)
    o, lse = q.new_zeros(o_shape), q.new_full(lse_shape, float("-inf"), dtype=lse_dtype(q))
    definition = options.definition(q.shape[-1])
    if inputs.is_e4m3:
        q = q.to(torch.promote_types(q.dtype, torch.float32))
    for queries, (k, v) in zip(_query_spans(inputs), _keys(inputs), strict=True):
        is_packed = inputs.cu_seqlens_q is not None
        q_part = q[None, queries] if is_packed else q[queries]
        tree = None if inputs.tree_mask is None else inputs.tree_mask[queries].flatten()
        o_part, lse_part = flash_attention_2(q_part, k[None], v[None], **definition, sinks=inputs.sinks, tree=tree)
        if is_packed:
            o[queries], lse[:, queries] = o_part[0].to(o.dtype), lse_part[0]
        else:
            o[queries], lse[queries] = o_part.to(o.dtype), lse_part
    return (o, lse) if has_lse else o


def _query_spans(inputs: KvCacheInputs) -> Iterator[slice]:
    """Each sequence's rows of packed queries, or its entry of the batch."""
    ends = range(inputs.batch + 1) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.tolist()
    return (slice(begin, end) for begin, end in itertools.pairwise(ends))


def _keys(inputs: KvCacheInputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Each sequence's K and V, (seqlen_k, kv_heads, columns), in q's type or, of 8 bits, what they stand for."""
    page_size, descales = inputs.k_cache.shape[1], inputs.descales
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    for i, (entry, begin, end) in enumerate(key_spans(inputs)):
        pages: slice | Tensor = slice(entry, entry + 1)
        if inputs.page_table is not None:
            slot = begin // page_size
            pages = inputs.page_table[entry, slot : -(-end // page_size) if end > begin else slot].long()
            begin, end = begin - slot * page_size, end - slot * page_size
        k, v = (_rows(cache, pages).flatten(0, 1)[begin:end] for cache in inputs[1:3])
        if descales:
            k, v = (x.to(wide) * descale[i, :, None] for x, descale in zip((k, v), descales, strict=True))
        yield k, v


def _rows(cache: Tensor, pages: slice | Tensor) -> Tensor:
    """Some pages of a cache; torch does not index elements of 8-bit floats by a tensor."""
    if cache.element_size() > 1:
        return cache[pages]
    return cache.view(torch.uint8)[pages].view(cache.dtype)


def _not_differentiable(name: str, implementation: Callable[..., Any], *arguments: Any) -> NoReturn:
    needs_one = next(n for n, x in zip(TENSORS, arguments, strict=False) if x is not None and x.requires_grad)
    raise NotImplementedError(f"{needs_one}.requires_grad is True; {NO_GRADIENT.format(name)}")


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast, the count of operations, and vmap: one call after the other."""
    register_one_by_one(library, op)
    register_autocast(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def count_flops(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any, out_val: Any = None, **named: Any) -> int:
    """Floating-point operations: two for each product of Q K^T and of P V, with whole cache entries, without a mask."""
    given = dict(zip(TENSORS[3:], others, strict=False)) | {name: named[name] for name in TENSORS if name in named}
    inputs = KvCacheInputs(q, k_cache, v_cache, **given)
    rows = q.numel() // max(q.shape[-1], 1)
    return 2 * rows * inputs.capacity * (q.shape[-1] + v_cache.shape[3])


def _forward(name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=TENSORS[:3],
        optional=TENSORS[3:],
        options=FwdOptions,
        returns=returns,
        check=_check,
        cuda=cuda,
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        differentiable=functools.partial(_not_differentiable, name),
        transforms=_register_transforms,
    )


kvcache_fwd_cuda, kvcache_fwd_lse_cuda = CudaForward(has_lse=False), CudaForward(has_lse=True)
KVCACHE_FWD_LSE = _forward("kvcache_fwd_lse", tuple[Tensor, Tensor], kvcache_fwd_lse_cuda, has_lse=True)
KVCACHE_FWD = _forward("kvcache_fwd", Tensor, kvcache_fwd_cuda, has_lse=False)
kvcache_fwd_lse, kvcache_fwd = define(KVCACHE_FWD_LSE), define(KVCACHE_FWD)
