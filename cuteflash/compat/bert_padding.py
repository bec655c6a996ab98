"""The functions of `flash_attn.bert_padding` that models import: same names, arguments, order and results."""

from __future__ import annotations

from torch import Tensor

from cuteflash import packing

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


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


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`cuteflash.pad_input`: the rows at `indices` of (batch, seqlen, ...), zeros elsewhere."""
    return packing.pad_input(hidden_states, indices, batch, seqlen)
