"""Other forms of the inputs: q, k and v in one tensor, and padded batches to packed sequences and back.

The packed forms take views and copy nothing, so their options, results and errors are those of `flash_attn_func` and
`flash_attn_varlen_func`.
"""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash.api import Options, flash_attn_func
from cuteflash.coerce import is_int, not_tensors
from cuteflash.limits import Longest, is_free_to_read
from cuteflash.packed_api import VarlenOptions, flash_attn_varlen_func
from cuteflash.renaming import NAMING, rename
from cuteflash.validate import check_strided, holds, shown

Result = Tensor | tuple[Tensor, Tensor]


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: Tensor, *, return_lse: bool = ..., **options: Unpack[Options]) -> Result: ...
def flash_attn_qkvpacked_func(qkv: Tensor, *, return_lse: bool = False, **options: Unpack[Options]) -> Result:
    """`flash_attn_func` of q, k and v in one tensor, (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
    return flash_attn_func(q, k, v, return_lse=return_lse, **options)


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *, return_lse: bool = ..., **options: Unpack[Options]
) -> Result: ...
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *, return_lse: bool = False, **options: Unpack[Options]) -> Result:
    """`flash_attn_func` of k and v in one tensor, (batch, seqlen_k, 2, kv_heads, head_dim)."""
    k, v = _parts("kv", kv, ("batch", "seqlen", "2", "kv_heads", "head_dim"))
    return flash_attn_func(q, k, v, return_lse=return_lse, **options)


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Longest = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Longest = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Longest = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[VarlenOptions],
) -> Result: ...
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Longest = None,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor, (total, 3, heads, head_dim), with the same `cu_seqlens`."""
    q, k, v = _parts("qkv", qkv, ("total", "3", "heads", "head_dim"))
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, return_lse=return_lse, **options
        )
    except NAMING as error:
        rename(error, {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"})
        raise


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Longest = ...,
    max_seqlen_k: Longest = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Longest = ...,
    max_seqlen_k: Longest = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Longest = ...,
    max_seqlen_k: Longest = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[VarlenOptions],
) -> Result: ...
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Longest = None,
    max_seqlen_k: Longest = None,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Result:
    """`flash_attn_varlen_func` of k and v in one tensor, (total_k, 2, kv_heads, head_dim)."""
    k, v = _parts("kv", kv, ("total", "2", "kv_heads", "head_dim"))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=return_lse, **options
    )


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one sequence after the other. Waits for a GPU, as their number is a size.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int, 1 for the tokens that count.
        unused_mask: likewise, 1 for tokens that do not count but keep their place, after those that count.

    Returns:
        The tokens, (total, ...); the place of each in the flattened batch, (total,) int64; cu_seqlens, (batch + 1,)
        int32; the greatest length, with the tokens that only keep their place; seqused, (batch,) int32, how many of
        each sequence's tokens count.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is no tensor, or of another shape, device or kind.
    """
    masks = {"attention_mask": attention_mask} | ({} if unused_mask is None else {"unused_mask": unused_mask})
    check_padded(hidden_states, **masks)
    counts = attention_mask.bool()
    kept = counts if unused_mask is None else counts | unused_mask.bool()
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    used = counts.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: a batch (batch, seqlen, ...) with tokens (total, ...) at `indices`, else zeros.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument of another type, shape, dtype, device or kind. Whether
            the indices are places of the batch is only checked on a CPU.
    """
    check_sizes(batch=batch, seqlen=seqlen)
    check_indices(indices, "hidden_states", hidden_states)
    check_one_each(indices, "hidden_states", hidden_states)
    check_places(indices, batch * seqlen, "batch * seqlen")
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def check_padded(hidden_states: Tensor, **masks: Tensor) -> None:
    """Raise if `hidden_states` are not (batch, seqlen, ...), or a mask is not of their (batch, seqlen) and device."""
    _check_kind("hidden_states", hidden_states)
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states.shape is {tuple(hidden_states.shape)}; allowed: (batch, seqlen, ...)")
    for name, mask in masks.items():
        _check_kind(name, mask)
        if mask.shape != hidden_states.shape[:2]:
            allowed = tuple(hidden_states.shape[:2])
            raise ValueError(
                f"{name}.shape is {tuple(mask.shape)}; allowed: {allowed}, (batch, seqlen) of hidden_states"
            )
        if mask.device != hidden_states.device:
            raise ValueError(f"{name}.device is {mask.device}; allowed: {hidden_states.device}, that of hidden_states")


def check_sizes(**sizes: object) -> None:
    """Raise if a size is not an int of 0 or more."""
    for name, size in sizes.items():
        if not isinstance(size, torch.SymInt) and not (is_int(size) and size >= 0):  # type: ignore[operator]
            wrong = ValueError if is_int(size) else TypeError
            raise wrong(f"{name} is {shown(size)}; allowed: an int of 0 or more")


def check_indices(indices: Tensor, name: str, rows: Tensor) -> None:
    """Raise if `indices` are no vector of integers on the device of `rows`, the tensor that is called `name`."""
    _check_kind(name, rows)
    _check_kind("indices", indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices.dtype is {indices.dtype}; allowed: torch.int64, torch.int32")
    if not rows.dim():
        raise ValueError(f"{name}.shape is (); allowed: (rows, ...)")
    if indices.dim() != 1:
        raise ValueError(f"indices.shape is {tuple(indices.shape)}; allowed: one dimension")
    if indices.device != rows.device:
        raise ValueError(f"indices.device is {indices.device}; allowed: {rows.device}, that of {name}")


def check_one_each(indices: Tensor, name: str, rows: Tensor) -> None:
    """Raise if there are not as many checked `indices` as `rows`, which are called `name`."""
    if holds(indices.shape[0] != rows.shape[0]):
        allowed = f"({rows.shape[0]},), one for each row of {name}"
        raise ValueError(f"indices.shape is {tuple(indices.shape)}; allowed: {allowed}")


def check_places(indices: Tensor, count: int, what: str) -> None:
    """Raise if checked `indices` are not below `count`, which is called `what`: on a CPU, where that is known."""
    if is_free_to_read(indices):
        first, last = (int(x) for x in indices.aminmax())
        if first < 0 or last >= count:
            raise ValueError(f"indices go from {first} to {last}; allowed: 0 to {count - 1}, {what} - 1")


def _check_kind(name: str, tensor: object) -> None:
    """Raise if an argument is not a plain tensor."""
    if not isinstance(tensor, Tensor):
        raise not_tensors(**{name: tensor})
    check_strided(name, tensor)


def _parts(name: str, tensor: Tensor, dims: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The tensors that are packed along the third dimension from the end."""
    if not isinstance(tensor, Tensor):
        raise not_tensors(**{name: tensor})
    if tensor.dim() != len(dims) or tensor.shape[-3] != int(dims[-3]):
        layout = ", ".join(dims)
        raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; allowed: ({layout})")
    return tensor.unbind(-3)
