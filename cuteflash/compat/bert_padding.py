"""The functions of `flash_attn.bert_padding` that models import: same names, arguments, order and results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash import packing
from cuteflash.limits import is_free_to_read

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input`, (rows, ...), that `indices`, int64 or int32 (selected,), names: (selected, ...).

    Raises:
        TypeError, ValueError, NotImplementedError: an argument of another type, shape, dtype, device or kind. Whether
            the indices are rows of `input` is only checked on a CPU.
    """
    packing.check_indices(indices, "input", input)
    packing.check_places(indices, input.shape[0], "input.shape[0]")
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: (first_axis_dim, ...), with zeros in the rows that `indices` does not name.

    Raises:
        TypeError, ValueError, NotImplementedError: as `index_first_axis`, for rows of the result.
    """
    packing.check_sizes(first_axis_dim=first_axis_dim)
    packing.check_indices(indices, "values", values)
    packing.check_one_each(indices, "values", values)
    packing.check_places(indices, first_axis_dim, "first_axis_dim")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """`cuteflash.unpad_input`: packed rows, their indices, cu_seqlens, the longest length, the used lengths."""
    return packing.unpad_input(hidden_states, attention_mask, unused_mask)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences, one after the other, and padding after the last.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: int (batch, seqlen), the lengths of a row's sequences, then zeros.

    Returns:
        Packed rows, their indices, cu_seqlens of all sequences, the longest length.

    Raises:
        TypeError, ValueError, NotImplementedError: as `cuteflash.unpad_input`. Whether lengths are negative, or more
            than a row holds, is only checked on a CPU.
    """
    packing.check_padded(hidden_states, attention_mask_in_length=attention_mask_in_length)
    _check_lengths(attention_mask_in_length)
    seqlen = attention_mask_in_length.shape[-1]
    ends = attention_mask_in_length.sum(dim=-1, keepdim=True)
    mask = torch.arange(seqlen, device=ends.device) < ends
    rows, indices, *_ = packing.unpad_input(hidden_states, mask)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`cuteflash.pad_input`: the rows at `indices` of (batch, seqlen, ...), zeros elsewhere."""
    return packing.pad_input(hidden_states, indices, batch, seqlen)


def _check_lengths(lengths: Tensor) -> None:
    """Raise ValueError if lengths are negative, or more than a row holds: on a CPU, where that is known."""
    if not is_free_to_read(lengths):
        return
    if lengths.min() < 0:
        raise ValueError(f"attention_mask_in_length has a length of {lengths.min()}; allowed: 0 or more")
    seqlen, sums = lengths.shape[1], lengths.sum(dim=-1)
    if sums.max() > seqlen:
        row = int(sums.argmax())
        raise ValueError(
            f"attention_mask_in_length[{row}] has {sums[row]} tokens; allowed: up to {seqlen}, seqlen of hidden_states"
        )
