"""What calls with a KV cache and the same lengths compute once for all of them: the layers of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.coerce import UNBOUNDED_WINDOW, Window, chunk_of, is_int, options_of, splits_of
from cuteflash.limits import can_read
from cuteflash.planning import DTYPE_NAMES
from cuteflash.problem import HEAD_DIM_MAX, HEAD_DIM_STEP, LENGTH_MAX
from cuteflash.schedule_ops import split_schedule
from cuteflash.schedule_problem import ScheduleOptions
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass, length_class_of_packed
from cuteflash.validate import HALF_DTYPES, REFERENCE_DTYPES, holds, shown
from cuteflash.validate_packed import check_ends, check_vector


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window | None = UNBOUNDED_WINDOW,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    family: Family | None = None,
    total_q: int | None = None,
) -> Tensor:
    """How the blocks of a GPU share the keys of a batch, for all calls of `flash_attn_with_kvcache` of one step.

    If keys are split, each block of each call otherwise reads the lengths of all sequences to find its share. The host
    reads no length: captured into a CUDA graph, this is computed again at each replay. Sizes and options are those of
    the calls. Names and order are FlashAttention-3's.

    Args:
        batch_size: sequences.
        max_seqlen_q: queries of a sequence, with `cu_seqlens_q` a number that no sequence exceeds.
        max_seqlen_k: rows of a cache entry: the cache's, or those of all pages of a row of the page table.
        num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype: of q and of the caches; `headdim_v` None is `headdim`.
        cache_seqlens: (batch_size,) int32, tokens that the caches hold before the calls.
        cu_seqlens_q: (batch_size + 1,) int32, of packed queries.
        cu_seqlens_k_new: (batch_size + 1,) int32, of packed new tokens.
        cache_leftpad: (batch_size,) int32.
        max_seqlen_k_new: new tokens of each sequence that the calls append, if they are not packed.
        causal, window_size, attention_chunk, num_splits, pack_gqa, family: as of the calls.
        total_q: rows of packed queries; None is ``batch_size * max_seqlen_q``.

    Returns:
        (n,) int32 on `cache_seqlens`' device, for `scheduler_metadata` of the calls; empty if they do not split keys.
        Calls that share it follow each other on a stream: they count in it, and leave it as it was.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a size, shape, device or option that is not allowed. On a CPU, and under ``CUTEFLASH_CHECK=1``, also
            lengths beyond the caches.
        NotImplementedError: a device or family that is not supported.
    """
    numbers = {
        "batch_size": batch_size, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "max_seqlen_k_new": max_seqlen_k_new,
        "headdim": headdim, "headdim_v": headdim if headdim_v is None else headdim_v,
    }  # fmt: skip
    for name, value in (numbers if total_q is None else numbers | {"total_q": total_q}).items():
        _check_number(name, value)
    if holds(num_heads_q % num_heads_kv != 0) if num_heads_kv else num_heads_q:
        raise ValueError(f"num_heads_q is {num_heads_q}; allowed: multiples of num_heads_kv, which is {num_heads_kv}")
    _check_vectors(batch_size, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad)
    allowed = HALF_DTYPES if cache_seqlens.device.type == "cuda" else REFERENCE_DTYPES
    if qkv_dtype not in allowed:
        raise TypeError(f"qkv_dtype is {shown(qkv_dtype)}; allowed: {', '.join(map(str, allowed))}")
    rows = max_seqlen_q
    if cu_seqlens_q is not None:
        rows = batch_size * max_seqlen_q if total_q is None else total_q
    elif total_q is not None:
        raise ValueError(f"total_q is {total_q}; allowed without cu_seqlens_q: None")
    lengths: LengthClass | None = None
    if cu_seqlens_q is not None and batch_size:
        lengths = length_class_of_packed(rows, batch_size * max_seqlen_k, batch_size, max_seqlen_q, max_seqlen_k)
    common = options_of(None, causal, window_size, 0.0, pack_gqa, family, False, lengths)
    options = ScheduleOptions(
        rows=rows, capacity=max_seqlen_k, heads=num_heads_q, kv_heads=num_heads_kv, head_dim=headdim,
        head_dim_v=numbers["headdim_v"], dtype=DTYPE_NAMES.get(qkv_dtype, DTYPE_NAMES[torch.bfloat16]),
        window_left=common.window_left, window_right=common.window_right, attention_chunk=chunk_of(attention_chunk),
        num_splits=splits_of(num_splits), pack_gqa=common.pack_gqa, family=common.family, lengths=lengths,
    )  # fmt: skip
    seqused_k = cache_seqlens
    if cu_seqlens_k_new is not None:
        seqused_k = cache_seqlens + cu_seqlens_k_new.diff()
    elif max_seqlen_k_new:
        seqused_k = cache_seqlens + max_seqlen_k_new
    if can_read(seqused_k):
        _check_values(seqused_k, cu_seqlens_q, options)
    metadata: Tensor = split_schedule(seqused_k, cu_seqlens_q, cache_leftpad, *options)
    return metadata


def _check_number(name: str, value: object) -> None:
    if name.startswith("headdim"):
        allowed = f"multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        is_right = is_int(value) and HEAD_DIM_STEP <= value <= HEAD_DIM_MAX and value % HEAD_DIM_STEP == 0  # type: ignore[operator]
    else:
        allowed, is_right = f"an int, 0 to {LENGTH_MAX}", is_int(value) and 0 <= value <= LENGTH_MAX  # type: ignore[operator]
    if not is_right:
        raise (ValueError if is_int(value) else TypeError)(f"{name} is {shown(value)}; allowed: {allowed}")


def _check_vectors(batch: int, cache_seqlens: object, *others: object) -> None:
    """Types, dtypes, devices and sizes of the vectors."""
    sizes = {"cache_seqlens": batch, "cu_seqlens_q": batch + 1, "cu_seqlens_k_new": batch + 1, "cache_leftpad": batch}
    for (name, size), vector in zip(sizes.items(), (cache_seqlens, *others), strict=True):
        if vector is None and name != "cache_seqlens":
            continue
        if not isinstance(vector, Tensor) or not isinstance(cache_seqlens, Tensor):
            raise TypeError(f"{name} is a {type(vector).__name__}; allowed: a torch.Tensor")
        check_vector(name, vector, cache_seqlens.device)
        if holds(vector.shape[0] != size):
            raise ValueError(f"{name}.shape is {tuple(vector.shape)}; allowed: ({size},), by batch_size")


def _check_values(seqused_k: Tensor, cu_seqlens_q: Tensor | None, options: ScheduleOptions) -> None:
    """Raise ValueError if lengths are not those of calls with such caches. Reads them."""
    if cu_seqlens_q is not None:
        check_ends("cu_seqlens_q", cu_seqlens_q.tolist(), "q", options.rows, complete=False)
    for i, length in enumerate(seqused_k.tolist()):
        if not 0 <= length <= options.capacity:
            raise ValueError(
                f"cache_seqlens[{i}] is {length} with the new tokens; allowed: 0 to {options.capacity}, max_seqlen_k"
            )
