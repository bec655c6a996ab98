"""Input checks of what appends to a KV cache and of what rotates: shapes first, and, apart as it reads them, values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.append_problem import ROTARY_STEP, AppendOptions, RotaryOptions
from cuteflash.validate import (
    DIMS,
    HALF_DTYPES,
    PACKED_DIMS,
    REFERENCE_DTYPES,
    Dims,
    check_head_dim,
    check_kind,
    check_strided,
    check_strides,
    holds,
)
from cuteflash.validate_packed import check_vector

FP8 = torch.float8_e4m3fn
CACHE_DIMS: Dims = ("batch_cache", "seqlen_cache", "kv_heads", "head_dim")
PAGED_DIMS: Dims = ("num_pages", "page_size", "kv_heads", "head_dim")


class AppendInputs(NamedTuple):
    """The tensors of the operator that appends."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q: Tensor | None = None
    cu_seqlens_q: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.cache_seqlens.shape[0]

    @property
    def capacity(self) -> int:
        """Positions that a sequence has in the cache."""
        return self.k_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


class RotaryInputs(NamedTuple):
    """The tensors of the operator that rotates."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    seqlen_offsets: Tensor | None = None
    cu_seqlens: Tensor | None = None


def check_append(inputs: AppendInputs, options: AppendOptions) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError: an element type that is not supported, or two that do not belong together.
        ValueError: a shape, stride, or device, or a combination of arguments that is not allowed.
        NotImplementedError: a device or memory layout that is not supported.
    """
    _check_caches(inputs)
    _check_new(inputs)
    _check_where(inputs)
    _check_descales(inputs)
    cos, sin = inputs.rotary_cos, inputs.rotary_sin
    if cos is None or sin is None:
        if cos is not sin:
            name = "rotary_cos" if cos is None else "rotary_sin"
            raise ValueError(
                f"{name} is None; allowed: a tensor, as the other one of rotary_cos and rotary_sin is given"
            )
        for name in ("rotary_seqlens", "q"):
            if getattr(inputs, name) is not None:
                raise ValueError(f"{name} is given without rotary_cos and rotary_sin; allowed: None")
    else:
        longest = 1 if inputs.cu_seqlens_k_new is not None else inputs.k.shape[1]
        _check_tables({"rotary_cos": cos, "rotary_sin": sin}, "k", inputs.k, longest)
        if inputs.rotary_seqlens is not None:
            _check_vector("rotary_seqlens", inputs.rotary_seqlens, inputs.batch, "k_cache", inputs.k_cache)
    _check_q(inputs, options)


def check_rotary(inputs: RotaryInputs, options: RotaryOptions) -> None:
    """Likewise, of the operator that rotates."""
    x, cos, sin, offsets, ends = inputs
    check_kind("x", x, DIMS if ends is None else PACKED_DIMS)
    check_head_dim("x", x, x.dim() - 1)
    check_strides("x", x)
    if options.offset < 0 or options.offset >= 2**31:
        raise ValueError(f"seqlen_offsets is {options.offset}; allowed: 0 or more, below 2**31, or a tensor")
    batch = x.shape[0]
    if ends is not None:
        batch = _check_ends("cu_seqlens", ends, "x", x)
    if offsets is not None:
        _check_vector("seqlen_offsets", offsets, batch, "x", x)
    tokens = 1 if ends is not None or options.fixed else x.shape[1]
    _check_tables({"cos": cos, "sin": sin}, "x", x, options.offset + tokens)


def _check_caches(inputs: AppendInputs) -> None:
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    dims = CACHE_DIMS if inputs.page_table is None else PAGED_DIMS
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_strided(name, cache)
        dtypes = HALF_DTYPES if cache.device.type == "cuda" else REFERENCE_DTYPES
        check_kind(name, cache, dims, (*dtypes, FP8))
        check_head_dim(name, cache, 3)
        check_strides(name, cache)
        for axis in range(3):
            if holds(cache.stride(axis) == 0) and holds(cache.shape[axis] > 1):
                raise ValueError(f"{name}.stride({axis}) is 0; allowed: a cache whose elements do not overlap")
    _check_dtype("v_cache", v_cache, k_cache.dtype, "k_cache")
    _check_device("v_cache", v_cache, "k_cache", k_cache)
    for axis in range(3):
        _check_size("v_cache", v_cache, axis, k_cache.shape[axis], f"that of k_cache ({dims[axis]})")
    if inputs.page_table is not None and holds(k_cache.shape[1] == 0):
        raise ValueError("k_cache.shape[1] (page_size) is 0; allowed: 1 or more")


def _check_new(inputs: AppendInputs) -> None:
    k_cache, ends = inputs.k_cache, inputs.cu_seqlens_k_new
    dims = DIMS if ends is None else PACKED_DIMS
    for name, new, cache in (("k", inputs.k, k_cache), ("v", inputs.v, inputs.v_cache)):
        check_kind(name, new, dims)
        if cache.dtype == FP8:
            _check_dtype(name, new, inputs.k.dtype, "k")
        else:
            _check_dtype(name, new, cache.dtype, f"{name}_cache")
        _check_device(name, new, "k_cache", k_cache)
        check_strides(name, new)
        for axis in (1, 2):
            there = cache.shape[axis + 1]
            _check_size(name, new, len(dims) - 3 + axis, there, f"that of {name}_cache")
    for axis in range(len(dims) - 2):
        _check_size("v", inputs.v, axis, inputs.k.shape[axis], f"that of k ({dims[axis]})")
    batch = inputs.k.shape[0] if ends is None else _check_ends("cu_seqlens_k_new", ends, "k_cache", k_cache)
    _check_vector("cache_seqlens", inputs.cache_seqlens, batch, "k_cache", k_cache)


def _check_where(inputs: AppendInputs) -> None:
    k_cache, batch = inputs.k_cache, inputs.batch
    if inputs.cache_batch_idx is not None:
        if inputs.page_table is not None:
            raise ValueError("cache_batch_idx is given with page_table; allowed: one of the two")
        _check_vector("cache_batch_idx", inputs.cache_batch_idx, batch, "k_cache", k_cache)
    if inputs.page_table is not None:
        check_page_table(inputs.page_table, batch, k_cache)
    elif inputs.cache_batch_idx is None and holds(k_cache.shape[0] < batch):
        raise ValueError(f"k_cache.shape[0] (batch_cache) is {k_cache.shape[0]}; allowed: {batch} or more, the batch")
    rows = inputs.k.shape[0 if inputs.cu_seqlens_k_new is not None else 1]
    room = inputs.capacity * (batch if inputs.cu_seqlens_k_new is not None else 1)
    if holds(rows > room):
        what = "the cache has that many positions" if inputs.cu_seqlens_k_new is None else "so many fit in the caches"
        raise ValueError(f"k has {rows} tokens; allowed: up to {room}, as {what}")


def check_page_table(page_table: Tensor, batch: int, cache: Tensor) -> None:
    """Raise if a table does not have a row of page numbers for each sequence."""
    check_strided("page_table", page_table)
    if page_table.dtype != torch.int32:
        raise TypeError(f"page_table.dtype is {page_table.dtype}; allowed: torch.int32")
    _check_device("page_table", page_table, "k_cache", cache)
    if page_table.dim() != 2 or holds(page_table.shape[0] != batch):
        raise ValueError(f"page_table.shape is {tuple(page_table.shape)}; allowed: ({batch}, pages of a sequence)")
    if holds(page_table.shape[1] > 1) and holds(page_table.stride(1) != 1):
        raise ValueError(f"page_table.stride(1) is {page_table.stride(1)}; allowed: 1 (contiguous)")


def _check_descales(inputs: AppendInputs) -> None:
    quantises = inputs.k_cache.dtype == FP8
    for name, descale in (("k_descale", inputs.k_descale), ("v_descale", inputs.v_descale)):
        if descale is None:
            if quantises:
                raise ValueError(f"{name} is None; allowed with caches of {FP8}: a tensor")
            continue
        if not quantises:
            raise ValueError(f"{name} is given with caches of {inputs.k_cache.dtype}; allowed with {FP8} only")
        check_strided(name, descale)
        if descale.dtype != torch.float32:
            raise TypeError(f"{name}.dtype is {descale.dtype}; allowed: torch.float32")
        _check_device(name, descale, "k_cache", inputs.k_cache)
        heads = inputs.k_cache.shape[2]
        fits = descale.dim() in (1, 2) and not (
            holds(descale.shape[-1] != heads) or (descale.dim() == 2 and holds(descale.shape[0] != inputs.batch))
        )
        if not fits:
            raise ValueError(
                f"{name}.shape is {tuple(descale.shape)}; allowed: ({inputs.batch}, {heads}), (batch, kv_heads), or "
                f"({heads},)"
            )


def _check_q(inputs: AppendInputs, options: AppendOptions) -> None:
    q, ends = inputs.q, inputs.cu_seqlens_q
    if q is None:
        if ends is not None:
            raise ValueError("cu_seqlens_q is given without q; allowed: None")
        return
    check_kind("q", q, DIMS if ends is None else PACKED_DIMS)
    _check_dtype("q", q, inputs.k.dtype, "k")
    _check_device("q", q, "k_cache", inputs.k_cache)
    check_strides("q", q)
    _check_size("q", q, q.dim() - 1, inputs.k.shape[-1], "that of k (head_dim)")
    batch = q.shape[0] if ends is None else _check_ends("cu_seqlens_q", ends, "k_cache", inputs.k_cache)
    if holds(batch != inputs.batch):
        raise ValueError(f"q has a batch of {batch}; allowed: {inputs.batch}, that of cache_seqlens")
    assert inputs.rotary_cos is not None
    if ends is None and not options.fixed_q and holds(q.shape[1] > inputs.rotary_cos.shape[0]):
        raise ValueError(
            f"rotary_cos.shape[0] is {inputs.rotary_cos.shape[0]}; allowed: {q.shape[1]} or more, the positions of q"
        )


def _check_tables(tables: dict[str, Tensor], owner: str, x: Tensor, positions: int) -> None:
    first, cos = next(iter(tables.items()))
    dtypes = (x.dtype,) if x.dtype == torch.float32 else (torch.float32, x.dtype)
    for name, table in tables.items():
        check_strided(name, table)
        if table.dtype not in dtypes:
            raise TypeError(f"{name}.dtype is {table.dtype}; allowed: {', '.join(map(str, dtypes))}")
        if table.dtype != cos.dtype:
            raise TypeError(f"{name}.dtype is {table.dtype}; allowed: {cos.dtype}, that of {first}")
        _check_device(name, table, owner, x)
        shape, head_dim = tuple(table.shape), x.shape[-1]
        fits = len(shape) == 2 and not (
            holds(shape[1] == 0)
            or holds(2 * shape[1] % ROTARY_STEP != 0)
            or holds(2 * shape[1] > head_dim)
            or any(holds(a != b) for a, b in zip(shape, cos.shape, strict=True))
        )
        if not fits:
            raise ValueError(
                f"{name}.shape is {shape}; allowed: (positions, rotary_dim / 2), the same for both, rotary_dim a "
                f"multiple of {ROTARY_STEP} up to {head_dim}"
            )
        if holds(shape[0] < positions):
            raise ValueError(f"{name}.shape[0] is {shape[0]}; allowed: {positions} or more, the positions of {owner}")


def _check_ends(name: str, ends: Tensor, owner: str, x: Tensor) -> int:
    """The batch that the ends of packed sequences say."""
    check_strided(name, ends)
    _check_device(name, ends, owner, x)
    check_vector(name, ends, x.device)
    if holds(ends.shape[0] < 1):
        raise ValueError(f"{name}.shape is (0,); allowed: (batch + 1,)")
    return ends.shape[0] - 1


def _check_vector(name: str, vector: Tensor, batch: int, owner: str, x: Tensor) -> None:
    check_strided(name, vector)
    _check_device(name, vector, owner, x)
    check_vector(name, vector, x.device)
    if holds(vector.shape[0] != batch):
        raise ValueError(f"{name}.shape is {tuple(vector.shape)}; allowed: ({batch},), one for each sequence")


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype, owner: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {dtype}, that of {owner}")


def _check_device(name: str, tensor: Tensor, owner: str, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name}.device is {tensor.device}; allowed: {x.device}, that of {owner}")


def _check_size(name: str, tensor: Tensor, axis: int, expected: int, owner: str) -> None:
    if holds(tensor.shape[axis] != expected):
        raise ValueError(f"{name}.shape[{axis}] is {tensor.shape[axis]}; allowed: {expected}, {owner}")
