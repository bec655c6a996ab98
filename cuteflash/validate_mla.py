"""Input checks of latent attention's decoding: what the tensors look like, and, apart because it reads them, what they
say."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash import mla_problem
from cuteflash.mla_problem import HEADS_MAX
from cuteflash.problem import LENGTH_MAX
from cuteflash.traits.arch import FAMILIES
from cuteflash.validate import (
    DIMS,
    FP8_DTYPES,
    FP32_MAX,
    FP32_TINY,
    SCALES,
    SPLITS,
    check_kind,
    check_same_device,
    check_same_kind,
    check_strided,
    check_strides,
    holds,
)
from cuteflash.validate_fp8 import check_descale_values
from cuteflash.validate_kvcache import check_table
from cuteflash.validate_packed import check_vector

ROW_DIM, LATENT_DIM = mla_problem.LATENT_DIM, mla_problem.LATENT_DIM_V  # columns of a cached row, and of these V's
ROPE_DIM = ROW_DIM - LATENT_DIM  # with rotary positions, the last ones
PAGE_STEP = mla_problem.PAGE_ROWS
CACHE_DIMS = ("batch", "seqlen_cache", "kv_heads", "head_dim")
PAGED_DIMS = ("num_pages", "page_size", "kv_heads", "head_dim")
FP8 = torch.float8_e4m3fn
FLASHMLA_ROW_BYTES = 656  # of FlashMLA's rows: 512 bytes of e4m3, 4 scales of 128 columns each, 64 columns of bf16


class MlaOptions(NamedTuple):
    """The arguments of the operator after its tensors.

    Attributes:
        head_dim_v: columns of a cached row that are its value, the first ones.
        softmax_scale: factor of the scores, positive and finite; None is ``1 / sqrt(head_dim)``.
        causal: the last query is aligned with the last row, and a query sees no row after its own.
        num_splits: into how many parts a sequence's rows are cut at most; 1 is none, 0 leaves it to a heuristic.
        family: kernel family, ``"sm80"`` or ``"sm90"``; None is the best of the GPU. CPU tensors ignore it.
    """

    head_dim_v: int = LATENT_DIM
    softmax_scale: float | None = None
    causal: bool = False
    num_splits: int = 0
    family: str | None = None

    def scale(self, head_dim: int) -> float:
        """The factor of the scores."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


class MlaInputs(NamedTuple):
    """The tensors of the operator."""

    q: Tensor  # (batch, seqlen_q, heads, head_dim)
    kv_cache: Tensor  # (num_pages, page_size, 1, head_dim); without a table (batch, seqlen_cache, 1, head_dim)
    cache_seqlens: Tensor  # (batch,)
    page_table: Tensor | None = None  # (batch, pages of a sequence)
    descale: Tensor | None = None  # of an e4m3 cache, fp32: (), (1,) or (batch,)

    @property
    def capacity(self) -> int:
        """Rows that a sequence can have."""
        page_size = self.kv_cache.shape[1]
        return page_size if self.page_table is None else self.page_table.shape[1] * page_size


def check_mla(inputs: MlaInputs, options: MlaOptions) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError: a dtype that is not supported, not that of q, or of a vector or table that is not int32, or of a
            descale that is not fp32.
        ValueError: a shape, stride, device mix or option that is not allowed.
        NotImplementedError: a device, memory layout or format of rows that is not supported.
    """
    check_mla_options(options)
    q, cache = inputs.q, inputs.kv_cache
    cache_dims = CACHE_DIMS if inputs.page_table is None else PAGED_DIMS
    check_row_format("kv_cache", cache)
    for name, tensor, dims in (("q", q, DIMS), ("kv_cache", cache, cache_dims)):
        is_e4m3 = tensor is cache and tensor.dtype == FP8
        if tensor.dtype in FP8_DTYPES and not is_e4m3:
            also = "" if tensor is q else f", {FP8}"
            raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: torch.float16, torch.bfloat16{also}")
        check_kind(name, tensor, dims, (FP8,) if is_e4m3 else ())
        if holds(tensor.shape[3] != ROW_DIM):
            raise ValueError(
                f"{name}.shape[3] (head_dim) is {tensor.shape[3]}; allowed: {ROW_DIM}, {LATENT_DIM} columns of the "
                f"latent and {ROPE_DIM} with rotary positions"
            )
    (check_same_device if cache.dtype == FP8 else check_same_kind)("kv_cache", cache, q)
    check_descale(inputs.descale, cache, q.shape[0])
    if holds(cache.shape[2] != 1):
        raise ValueError(f"kv_cache.shape[2] (kv_heads) is {cache.shape[2]}; allowed: 1, which all query heads share")
    if holds(q.shape[2] > HEADS_MAX):
        raise ValueError(f"q.shape[2] (heads) is {q.shape[2]}; allowed: up to {HEADS_MAX}")
    for name, tensor in (("q", q), ("kv_cache", cache)):
        check_strides(name, tensor)
    _check_lengths(inputs)


def check_row_format(name: str, cache: Tensor) -> None:
    """Raise NotImplementedError if the rows of a cache look like those of FlashMLA's 8-bit format."""
    if cache.element_size() == 1 and cache.dim() and holds(cache.shape[-1] == FLASHMLA_ROW_BYTES):
        raise NotImplementedError(
            f"{name}.shape[{cache.dim() - 1}] is {FLASHMLA_ROW_BYTES}, FlashMLA's rows with scales for each 128 "
            f"columns and 64 columns of bf16; cuteflash supports {FP8} rows of {ROW_DIM} columns with a descale"
        )


def check_descale(descale: Tensor | None, cache: Tensor, batch: int) -> None:
    """Raise if `descale` does not go with the cache: one of e4m3 has a descale, any other has none.

    Raises:
        TypeError: it is not fp32.
        ValueError: it is missing or must not be there, or its shape or device is not allowed.
    """
    if descale is None:
        if cache.dtype == FP8:
            raise ValueError(f"descale is None; allowed with a kv_cache of {FP8}: a tensor")
        return
    if cache.dtype != FP8:
        raise ValueError(f"descale is given with a kv_cache of {cache.dtype}; allowed with {FP8} only")
    check_strided("descale", descale)
    if descale.dtype != torch.float32:
        raise TypeError(f"descale.dtype is {descale.dtype}; allowed: torch.float32")
    if descale.device != cache.device:
        raise ValueError(f"descale.device is {descale.device}; allowed: {cache.device}, that of kv_cache")
    if descale.dim() > 1 or (descale.dim() == 1 and holds(descale.shape[0] != 1) and holds(descale.shape[0] != batch)):
        raise ValueError(f"descale.shape is {tuple(descale.shape)}; allowed: (), (1,), or ({batch},), the batch")


def check_mla_options(options: MlaOptions) -> None:
    """Raise ValueError if an option is not allowed, whatever the tensors."""
    scale = options.softmax_scale
    if options.head_dim_v != LATENT_DIM:
        raise ValueError(f"head_dim_v is {options.head_dim_v}; allowed: {LATENT_DIM}")
    if scale is not None and not FP32_TINY <= scale <= FP32_MAX:
        raise ValueError(f"softmax_scale is {scale}; allowed: {SCALES}")
    if options.num_splits < 0:
        raise ValueError(f"num_splits is {options.num_splits}; allowed: {SPLITS}")
    if options.family is not None and options.family not in FAMILIES:
        raise ValueError(f"family is {options.family!r}; allowed: None, {', '.join(map(repr, FAMILIES))}")


def _check_lengths(inputs: MlaInputs) -> None:
    """The vector of lengths, the table, and sizes that kernels can count."""
    q, cache, cache_seqlens, table, _ = inputs
    batch = q.shape[0]
    check_vector("cache_seqlens", cache_seqlens, q.device)
    if holds(cache_seqlens.shape[0] != batch):
        raise ValueError(f"cache_seqlens.shape is {tuple(cache_seqlens.shape)}; allowed: ({batch},), the batch")
    if table is not None:
        check_table(table, q.device)
        if holds(cache.shape[1] == 0) or holds(cache.shape[1] % PAGE_STEP != 0):
            raise ValueError(f"kv_cache.shape[1] (page_size) is {cache.shape[1]}; allowed: multiples of {PAGE_STEP}")
    name, entries = ("kv_cache", cache) if table is None else ("page_table", table)
    if holds(entries.shape[0] != batch):
        raise ValueError(f"{name}.shape[0] is {entries.shape[0]}; allowed: {batch}, the batch")
    whose = "kv_cache.shape[1]" if table is None else "page_table.shape[1] times page_size"
    for name, length in (("q.shape[1] times heads", q.shape[1] * q.shape[2]), (whose, inputs.capacity)):
        if isinstance(length, int) and length > LENGTH_MAX:  # not symbolic ones: a guard would bound exported programs
            raise ValueError(f"{name} is {length}; allowed: up to {LENGTH_MAX}")


def check_mla_values(inputs: MlaInputs) -> None:
    """Raise ValueError, naming the sequence, if a length exceeds its cache or a page does not exist. Reads both.

    Also if a descale is not a positive finite number.
    """
    if inputs.descale is not None:
        check_descale_values({"descale": inputs.descale})
    pages, page_size = inputs.kv_cache.shape[:2]
    for i, length in enumerate(inputs.cache_seqlens.tolist()):
        if not 0 <= length <= inputs.capacity:
            raise ValueError(f"cache_seqlens[{i}] is {length}; allowed: 0 to {inputs.capacity}, the rows of its cache")
        if inputs.page_table is None:
            continue
        for slot, page in enumerate(inputs.page_table[i, : -(-length // page_size)].tolist()):
            if not 0 <= page < pages:
                raise ValueError(
                    f"page_table[{i}, {slot}] is {page}, a page of sequence {i}; allowed: 0 to {pages - 1}"
                )
