"""Input checks of attention to caches: what the tensors look like, and, apart because it reads them, what they say."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.arguments import FwdOptions
from cuteflash.problem import HEAD_DIM_STEP, LENGTH_MAX, PACK_GQA_MAX, TREE_TOKENS_MAX
from cuteflash.validate import (
    DIMS,
    PACKED_DIMS,
    check_alignments,
    check_head_dim,
    check_kind,
    check_options,
    check_same_device,
    check_same_kind,
    check_sinks,
    check_strided,
    check_strides,
    holds,
)
from cuteflash.validate_fp8 import check_descale_values, check_per_head
from cuteflash.validate_packed import check_ends, check_vector, differences

E4M3 = torch.float8_e4m3fn
E4M3_HEAD_DIM_STEP = 16  # columns of 16 bytes
CACHE_DIMS = ("cache_batch", "seqlen_cache", "heads", "head_dim")
PAGED_DIMS = ("num_pages", "page_size", "heads", "head_dim")


class KvCacheInputs(NamedTuple):
    """The tensors of an operator on caches.

    A sequence's cache entry is a row of `page_table` or, without one, of the caches: its number in the batch, or what
    `cache_batch_idx` says. Its keys are the rows from `cache_leftpad` (0) up to `seqused_k` (all) of its entry.
    """

    q: Tensor  # (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q
    k_cache: Tensor  # (num_pages, page_size, kv_heads, head_dim); without a table (cache_batch, seqlen_cache, ..)
    v_cache: Tensor
    cu_seqlens_q: Tensor | None = None  # (batch + 1,)
    seqused_k: Tensor | None = None  # (batch,)
    page_table: Tensor | None = None  # (entries, pages of each)
    cache_batch_idx: Tensor | None = None  # (batch,)
    cache_leftpad: Tensor | None = None  # (batch,)
    sinks: Tensor | None = None  # (heads,)
    k_descale: Tensor | None = None  # (batch, kv_heads) or (kv_heads,) fp32, of e4m3 caches
    v_descale: Tensor | None = None
    scheduler_metadata: Tensor | None = None  # (n,), see `cuteflash.core.split_slots`
    tree_mask: Tensor | None = None  # q.shape[:-2] int64, which of its last keys each query sees

    @property
    def is_e4m3(self) -> bool:
        """Whether the caches have 8 bits."""
        return self.k_cache.dtype == E4M3

    @property
    def descales(self) -> tuple[Tensor, ...]:
        """Those of K and V, (batch, kv_heads); none of 16-bit caches."""
        shape = self.batch, self.k_cache.shape[2]
        return tuple(x.expand(shape) for x in (self.k_descale, self.v_descale) if x is not None)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def entries(self) -> int:
        """Number of cache entries."""
        return (self.k_cache if self.page_table is None else self.page_table).shape[0]

    @property
    def capacity(self) -> int:
        """Rows of a cache entry."""
        page_size = self.k_cache.shape[1]
        return page_size if self.page_table is None else self.page_table.shape[1] * page_size


def check_kvcache(inputs: KvCacheInputs, options: FwdOptions) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError: a dtype that is not supported, not that of q, or of a vector or table that is not int32.
        ValueError: a shape, stride, device mix or option that is not allowed.
        NotImplementedError: a device or memory layout that is not supported.
    """
    check_options(options)
    q, k, v = inputs[:3]
    dims = DIMS if inputs.cu_seqlens_q is None else PACKED_DIMS
    cache_dims = CACHE_DIMS if inputs.page_table is None else PAGED_DIMS
    check_kind("q", q, dims)
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if cache.dtype == E4M3:
            check_kind(name, cache, cache_dims, (E4M3,))
            check_same_device(name, cache, q)
        else:
            check_kind(name, cache, cache_dims)
            check_same_kind(name, cache, q)
    if v.dtype != k.dtype:
        raise TypeError(f"v_cache.dtype is {v.dtype}; allowed: {k.dtype}, that of k_cache")
    step = E4M3_HEAD_DIM_STEP if inputs.is_e4m3 else HEAD_DIM_STEP
    check_head_dim("q", q, len(dims) - 1, step)
    check_head_dim("v_cache", v, 3, step)
    _check_size("k_cache", k, 3, cache_dims, q.shape[-1], "the head_dim of q")
    for axis in range(3):
        _check_size("v_cache", v, axis, cache_dims, k.shape[axis], "that of k_cache")
    _check_heads(q, k, options.pack_gqa)
    for name, tensor in (("q", q), ("k_cache", k), ("v_cache", v)):
        check_strides(name, tensor)
    _check_vectors(inputs)
    check_sinks(q, inputs.sinks)
    _check_descales(inputs)
    if inputs.tree_mask is not None:
        _check_tree(inputs.tree_mask, q, options)
    _check_capacity(inputs, options.pack_gqa)


def _check_descales(inputs: KvCacheInputs) -> None:
    """Types, devices and shapes of the scales, which e4m3 caches have and no others."""
    shape = inputs.batch, inputs.k_cache.shape[2]
    for name in ("k_descale", "v_descale"):
        descale = getattr(inputs, name)
        if descale is None and inputs.is_e4m3:
            raise ValueError(f"{name} is None; allowed with caches of {E4M3}: a tensor")
        if descale is None:
            continue
        if not inputs.is_e4m3:
            raise ValueError(f"{name} is given with caches of {inputs.k_cache.dtype}; allowed with {E4M3} only")
        expected = shape if descale.dim() == 2 else shape[1:]
        check_per_head(name, descale, inputs.q, expected, "(batch, kv_heads) or (kv_heads,)")


def _check_size(name: str, tensor: Tensor, axis: int, dims: tuple[str, ...], size: int, whose: str) -> None:
    if holds(tensor.shape[axis] != size):
        raise ValueError(f"{name}.shape[{axis}] ({dims[axis]}) is {tensor.shape[axis]}; allowed: {size}, {whose}")


def _check_heads(q: Tensor, k: Tensor, pack_gqa: bool | None) -> None:
    heads, kv_heads = q.shape[-2], k.shape[2]
    if (holds(kv_heads == 0) and holds(heads != 0)) or (holds(kv_heads != 0) and holds(heads % kv_heads != 0)):
        raise ValueError(
            f"q.shape[{q.dim() - 2}] (heads) is {heads}; allowed: multiples of k_cache.shape[2], which is {kv_heads}"
        )
    ratio = heads // kv_heads if pack_gqa and holds(kv_heads != 0) else 1
    if holds(ratio > PACK_GQA_MAX):
        raise ValueError(f"pack_gqa is True with {ratio} query heads for each KV head; allowed: up to {PACK_GQA_MAX}")


def _check_vectors(inputs: KvCacheInputs) -> None:
    """Element types, devices, memory layouts and sizes of the vectors and the table."""
    device = inputs.q.device
    if inputs.cu_seqlens_q is not None:
        check_vector("cu_seqlens_q", inputs.cu_seqlens_q, device)
        if holds(inputs.cu_seqlens_q.shape[0] < 1):
            raise ValueError("cu_seqlens_q.shape is (0,); allowed: (batch + 1,)")
    for name in ("seqused_k", "cache_batch_idx", "cache_leftpad"):
        vector = getattr(inputs, name)
        if vector is not None:
            check_vector(name, vector, device)
            if holds(vector.shape[0] != inputs.batch):
                raise ValueError(f"{name}.shape is {tuple(vector.shape)}; allowed: ({inputs.batch},), the batch")
    if inputs.scheduler_metadata is not None:
        check_vector("scheduler_metadata", inputs.scheduler_metadata, device)
        if inputs.seqused_k is None:
            raise ValueError("scheduler_metadata is given without cache_seqlens; allowed: None")
        if inputs.is_e4m3:  # whose tiles are not those that it was computed for
            raise NotImplementedError(f"scheduler_metadata is given with caches of {E4M3}; supported: None")
    table = inputs.page_table
    if table is not None:
        check_table(table, device)
    if inputs.cache_batch_idx is None and holds(inputs.entries != inputs.batch):
        name, tensor = ("k_cache", inputs.k_cache) if table is None else ("page_table", table)
        raise ValueError(
            f"{name}.shape[0] is {tensor.shape[0]}; allowed without cache_batch_idx: {inputs.batch}, the batch"
        )


def check_table(table: Tensor, device: torch.device) -> None:
    """Raise if a page table is not int32, (sequences, pages of each), on a device and with contiguous rows."""
    check_strided("page_table", table)
    if table.dtype != torch.int32:
        raise TypeError(f"page_table.dtype is {table.dtype}; allowed: torch.int32")
    if table.dim() != 2:
        allowed = "2, (batch, pages of a sequence)"
        raise ValueError(f"page_table has {table.dim()} dimensions, shape {tuple(table.shape)}; allowed: {allowed}")
    if table.device != device:
        raise ValueError(f"page_table.device is {table.device}; allowed: {device}, that of q")
    if holds(table.shape[1] > 1) and holds(table.stride(1) != 1):
        raise ValueError(f"page_table.stride(1) is {table.stride(1)}; allowed: 1 (contiguous rows)")


def _check_tree(tree: Tensor, q: Tensor, options: FwdOptions) -> None:
    """Element type, device, shape and memory layout of a tree's masks, and the mask that they belong to."""
    check_strided("tree_mask", tree)
    if tree.dtype != torch.int64:
        raise TypeError(f"tree_mask.dtype is {tree.dtype}; allowed: torch.int64")
    if tree.device != q.device:
        raise ValueError(f"tree_mask.device is {tree.device}; allowed: {q.device}, that of q")
    rows = q.shape[:-2]
    if tree.dim() != len(rows) or holds(any(a != b for a, b in zip(tree.shape, rows, strict=True))):
        raise ValueError(f"tree_mask.shape is {tuple(tree.shape)}; allowed: {tuple(rows)}, the rows of q")
    if not tree.is_contiguous():
        raise ValueError(f"tree_mask.stride() is {tree.stride()}; allowed: that of a contiguous tensor")
    if len(rows) == 2 and holds(rows[1] > TREE_TOKENS_MAX):
        raise ValueError(f"q.shape[1] (seqlen_q) is {rows[1]}; allowed with tree_mask: up to {TREE_TOKENS_MAX}")
    if options.window_right != 0:
        raise ValueError("causal is False; allowed with tree_mask: True, a token sees none that comes after it")


def _check_capacity(inputs: KvCacheInputs, pack_gqa: bool | None) -> None:
    """Sizes that kernels can count; not symbolic ones, whose guards would bound an exported program."""
    page_size, heads, kv_heads = inputs.k_cache.shape[1], inputs.q.shape[-2], inputs.k_cache.shape[2]
    if inputs.page_table is not None and holds(page_size == 0):
        raise ValueError("k_cache.shape[1] (page_size) is 0; allowed: 1 or more")
    rows = inputs.q.shape[-3]
    ratio = heads // kv_heads if pack_gqa and isinstance(kv_heads, int) and kv_heads else 1
    whose = "k_cache.shape[1]" if inputs.page_table is None else "page_table.shape[1] times page_size"
    for name, length in (("the rows of q times packed heads", rows * ratio), (whose, inputs.capacity)):
        if isinstance(length, int) and length > LENGTH_MAX:
            raise ValueError(f"{name} is {length}; allowed: up to {LENGTH_MAX}")


def check_cache_addresses(inputs: KvCacheInputs) -> None:
    """Raise ValueError if a tensor that is read in pieces of 16 bytes does not begin on such a boundary."""
    given = {name: getattr(inputs, name) for name in ("q", "k_cache", "v_cache", "scheduler_metadata")}
    check_alignments({name: x for name, x in given.items() if x is not None})


def check_cache_values(inputs: KvCacheInputs, *, complete: bool, lengths: str = "seqused_k") -> None:
    """Raise ValueError, naming the sequence, if vectors or table do not describe sequences of these caches. Reads them.

    Args:
        complete: the sequences have to reach the end of q; otherwise rows may follow the last one.
        lengths: what the caller calls `seqused_k`.
    """
    if inputs.is_e4m3:
        names = ("k_descale", "v_descale")
        check_descale_values(dict(zip(names, inputs.descales, strict=True)))
    if inputs.cu_seqlens_q is not None:
        check_ends("cu_seqlens_q", inputs.cu_seqlens_q.tolist(), "q", inputs.q.shape[0], complete=complete)
        longest = max(differences(inputs.cu_seqlens_q.tolist()), default=0)
        if inputs.tree_mask is not None and longest > TREE_TOKENS_MAX:
            raise ValueError(
                f"cu_seqlens_q has a sequence of {longest} queries; allowed with tree_mask: up to {TREE_TOKENS_MAX}"
            )
    for i, (entry, begin, end) in enumerate(key_spans(inputs)):
        if not 0 <= entry < inputs.entries:
            raise ValueError(f"cache_batch_idx[{i}] is {entry}; allowed: 0 to {inputs.entries - 1}")
        if not 0 <= end <= inputs.capacity:
            raise ValueError(f"{lengths}[{i}] is {end}; allowed: 0 to {inputs.capacity}, the rows of a cache entry")
        if not 0 <= begin <= end:
            raise ValueError(f"cache_leftpad[{i}] is {begin}; allowed: 0 to {end}, the end of sequence {i}")
        if inputs.page_table is not None:
            page_size, pages = inputs.k_cache.shape[1], inputs.k_cache.shape[0]
            first = begin // page_size
            used = inputs.page_table[entry, first : -(-end // page_size)].tolist() if end > begin else []
            for slot, page in enumerate(used, start=first):
                if not 0 <= page < pages:
                    raise ValueError(
                        f"page_table[{entry}, {slot}] is {page}, a page of sequence {i}; allowed: 0 to {pages - 1}"
                    )


def key_spans(inputs: KvCacheInputs) -> list[tuple[int, int, int]]:
    """(cache entry, first row, end) of each sequence's keys. Reads the vectors."""

    def values(vector: Tensor | None, default: list[int]) -> list[int]:
        return default if vector is None else vector.tolist()

    batch = inputs.batch
    entries = values(inputs.cache_batch_idx, list(range(batch)))
    begins = values(inputs.cache_leftpad, [0] * batch)
    return list(zip(entries, begins, values(inputs.seqused_k, [inputs.capacity] * batch), strict=True))
