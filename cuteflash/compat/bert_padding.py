"""The functions of `flash_attn.bert_padding` that models import: same names, arguments, order and results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash import packing

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input`, (rows, ...), that `indices`, int64 (selected,), names: (selected, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: (first_axis_dim, ...), with zeros in the rows that `indices` does not name."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


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
    """
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
