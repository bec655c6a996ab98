"""Calls of FlashAttention-3 with `qv`: latent attention, given as rotated and latent columns apart.

Scores are ``q k^T + qv v^T``. With q and k of 64 columns, qv and v of 512 and one KV head that is `flash_mla_decode`
of ``[qv, q]`` and the rows ``[v, k]``, provided that v and k are columns of one cache, as engines that make such calls
have them: a cache is never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuteflash import mla
from cuteflash.coerce import flag, is_int, not_tensors
from cuteflash.compat.common import window_of_others
from cuteflash.renaming import NAMING, rename
from cuteflash.unsupported import ZERO, refuse
from cuteflash.validate import check_same_device, check_strided, holds, reads_values, shown
from cuteflash.validate_mla import LATENT_DIM, ROPE_DIM
from cuteflash.validate_packed import check_ends, check_vector, differences


class Queries(NamedTuple):
    """Which rows of q are whose.

    Attributes:
        cu_seqlens: int32 (batch + 1,), q being packed (total, heads, 64); None is (batch, seqlen_q, heads, 64).
        max_seqlen: the longest sequence of packed ones.
    """

    cu_seqlens: Any = None
    max_seqlen: Any = None


def attend_latent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    queries: Queries,
    *,
    names: Mapping[str, str],
    **options: Any,
) -> Any:
    """O, (batch, seqlen_q, heads, 512) or (total, heads, 512), and with `return_lse` LSE, of a call with `qv`.

    Args:
        q, k, v, qv: (.., 64), (.., 1, 64), (.., 1, 512), (.., 512); k and v of a cache.
        queries: of q and qv.
        names: of `k`, `v` and options that have others in the function that was called; errors have these.
        options: of `_attend` and of `flash_mla_decode`.

    Raises:
        TypeError, ValueError: as `flash_mla_decode`; v and k that are not the columns of one cache.
        NotImplementedError: other widths, or a mask or softcap that latent attention does not have.
    """
    try:
        return _attend(q, k, v, qv, queries, **options)
    except NAMING as error:
        rename(error, {"kv_cache": "(v, k)"})
        rename(error, names)
        raise


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    queries: Queries,
    *,
    window_size: Any,
    causal: bool,
    attention_chunk: int,
    softcap: float,
    return_lse: bool,
    **options: Any,
) -> Any:
    """The results of `attend_latent`.

    Args:
        q, k, v, qv, queries: its own.
        window_size: (-1, -1), or (-1, 0), which is causal.
        causal, attention_chunk, softcap, return_lse: of the call; there are no chunks and no softcap.
        options: of `flash_mla_decode`.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        if not isinstance(x, Tensor):
            raise not_tensors(**{name: x})
        check_strided(name, x)
    widths = [x.shape[-1] if x.dim() else 0 for x in (q, k, v, qv)]
    if widths != [ROPE_DIM, ROPE_DIM, LATENT_DIM, LATENT_DIM]:
        raise NotImplementedError(
            f"qv is a tensor of {widths[3]} columns with q, k and v of {widths[0]}, {widths[1]} and {widths[2]}; "
            f"cuteflash supports qv and v of {LATENT_DIM} columns with q and k of {ROPE_DIM}, latent attention"
        )
    if qv.dtype != q.dtype:
        raise TypeError(f"qv.dtype is {qv.dtype}; allowed: {q.dtype}, that of q")
    check_same_device("qv", qv, q)
    if qv.dim() != q.dim() or any(holds(a != b) for a, b in zip(qv.shape[:-1], q.shape[:-1], strict=True)):
        allowed = (*q.shape[:-1], LATENT_DIM)
        raise ValueError(f"qv.shape is {tuple(qv.shape)}; allowed: {allowed}, the rows and heads of q")
    is_causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    refuse(attention_chunk=(attention_chunk, ZERO), softcap=(softcap, ZERO))
    window = window_of_others(window_size)
    refuse(window_size=(window, ((-1, -1), (-1, 0))))
    is_causal = is_causal or window == (-1, 0)
    cache = neighbours(v, k)
    if cache is None:
        raise ValueError(
            f"k and v, of shapes {tuple(k.shape)} and {tuple(v.shape)}, are not columns of one tensor; allowed with "
            f"qv: v = cache[..., :{LATENT_DIM}] and k = cache[..., {LATENT_DIM}:]"
        )
    rows = neighbours(qv, q)
    rows = torch.cat((qv, q), dim=-1) if rows is None else rows
    if queries.cu_seqlens is None:
        return mla.flash_mla_decode(rows, cache, causal=is_causal, return_lse=return_lse, **options)
    places, padded = _padded(rows, queries)
    out, lse = mla.flash_mla_decode(padded, cache, causal=is_causal, return_lse=True, **options)
    out, lse = _unpadded(out, lse, places)
    return (out, lse) if return_lse else out


def neighbours(first: Tensor, second: Tensor) -> Tensor | None:
    """One view of two tensors, the columns of the second right after those of the first; None if there is none."""
    if first.dtype != second.dtype or first.device != second.device or first.shape[:-1] != second.shape[:-1]:
        return None
    used = [i for i, size in enumerate(first.shape) if size > 1]
    if any(first.stride(i) != second.stride(i) for i in used) or first.stride(-1) != 1:
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    if second.storage_offset() != first.storage_offset() + first.shape[-1]:
        return None
    return first.as_strided((*first.shape[:-1], first.shape[-1] + second.shape[-1]), first.stride())


def _padded(rows: Tensor, queries: Queries) -> tuple[Tensor, Tensor]:
    """Packed queries as a batch of `max_seqlen` each, and before it the place of each packed row in it, flat.

    Those of a shorter sequence are the last ones, as the causal mask aligns them.
    """
    ends, longest = queries
    if not isinstance(ends, Tensor):
        raise not_tensors(cu_seqlens_q=ends)
    check_vector("cu_seqlens_q", ends, rows.device)
    if ends.shape[0] < 1:
        raise ValueError("cu_seqlens_q.shape is (0,); allowed: (batch + 1,)")
    if not is_int(longest) or longest < 0:
        raise TypeError(f"max_seqlen_q is {shown(longest)}; allowed with qv: an int of 0 or more")
    total, batch = rows.shape[0], ends.shape[0] - 1
    if ends.device.type == "cpu" or reads_values():
        _check_ends(ends.tolist(), total, int(longest))
    tokens = torch.arange(total, device=ends.device, dtype=torch.int32)
    sequences = torch.bucketize(tokens, ends[1:], right=True)  # `batch` for rows after the last sequence
    last = (sequences + 1).clamp(max=batch)
    places = torch.where(sequences < batch, sequences * longest + longest - (ends[last] - tokens), batch * longest)
    padded = rows.new_zeros(batch * longest + 1, *rows.shape[1:])
    padded[places] = rows
    return places, padded[:-1].view(batch, longest, *rows.shape[1:])


def _check_ends(ends: list[int], total: int, longest: int) -> None:
    """Raise ValueError if packed queries do not end as these say, or one sequence is longer than `longest`."""
    check_ends("cu_seqlens_q", ends, "q", total, complete=False)
    lengths = differences(ends)
    if max(lengths, default=0) > longest:
        at = lengths.index(max(lengths))
        raise ValueError(f"max_seqlen_q is {longest}; allowed: {lengths[at]} or more, the length of sequence {at}")


def _unpadded(out: Tensor, lse: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """O (total, heads, 512) and LSE (heads, total); 0 and -inf for rows after the last sequence."""
    rows = torch.cat((out.flatten(0, 1), out.new_zeros(1, *out.shape[2:])))
    sums = lse.transpose(1, 2).flatten(0, 1)
    sums = torch.cat((sums, sums.new_full((1, sums.shape[1]), float("-inf"))))
    return rows[places], sums[places].transpose(0, 1).contiguous()
