"""Attention over a paged K/V cache, as an entry of transformers' attention interface.

A model with ``attn_implementation=NAME`` is called with all tokens of a step in one row, and with the keyword
argument `step`, which the decoder passes on to every layer. A layer appends its keys and values, which have their
rotary embedding by then, to the pages and attends to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cuteflash import append_kv, flash_attn_varlen_func

NAME = "paged_cache"  # transformers makes no mask for a name that has none registered

# What some models pass that changes scores in a way that attention over pages does not know.
_REFUSED = ("position_bias", "head_mask", "indices", "block_indices", "attention_chunk_size")


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer's keys and values: heads, and columns of a key and of a value."""

    heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.head_dim + self.head_dim_v) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One layer's attention.

    Attributes:
        layer: its index.
        q: (tokens, heads, head_dim).
        k, v: (tokens, kv heads, head_dim), and head_dim_v; the new tokens'.
        options: of `flash_attn_varlen_func`.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


class Attends(Protocol):
    """What a model's layers are given as `step`."""

    def attend(self, call: Call) -> Tensor:
        """O, (tokens, heads, head_dim_v)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What the layers share in a step; the vectors lie on the model's device and are int32.

    Attributes:
        cu_seqlens: (rows + 1,), where each row's new tokens begin.
        cached: (rows,), tokens in the pages before the step.
        used: (rows,), tokens in the pages after the layer has appended its own.
        page_table: (rows, pages), the pages of each row; entries beyond `used` do not count.
        longest_q, longest_k: no row has more new tokens, or more tokens.
        caches: of each layer, the keys (pages, page_size, kv heads, head_dim), and the values.
    """

    cu_seqlens: Tensor
    cached: Tensor
    used: Tensor
    page_table: Tensor
    longest_q: int
    longest_k: int
    caches: Sequence[tuple[Tensor, Tensor]]

    def attend(self, call: Call) -> Tensor:
        k_pages, v_pages = self.caches[call.layer]
        append_kv(
            k_pages,
            v_pages,
            call.k,
            call.v,
            self.cached,
            page_table=self.page_table,
            cu_seqlens_k_new=self.cu_seqlens,
        )
        o: Tensor = flash_attn_varlen_func(
            call.q,
            k_pages,
            v_pages,
            self.cu_seqlens,
            max_seqlen_q=self.longest_q,
            max_seqlen_k=self.longest_k,
            seqused_k=self.used,
            page_table=self.page_table,
            causal=True,
            num_splits=0 if self.longest_q == 1 else 1,  # few rows of one token do not fill a GPU
            **call.options,
        )
        return o


class Probe:
    """Notes the sizes of the layers, and attends to nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def attend(self, call: Call) -> Tensor:
        heads, head_dim = call.k.shape[1:]
        self.layers[call.layer] = Layer(heads, head_dim, call.v.shape[2], call.k.dtype)
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    step: Attends | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An entry of transformers' `AttentionInterface`: causal, over the pages of `step`.

    Args:
        module: the layer; its `layer_idx` counts.
        query, key, value: (1, heads, tokens, head_dim).
        attention_mask: None.
        dropout: 0.
        scaling: of the scores.
        sliding_window: how many keys a query sees, itself among them; None is all.
        softcap: None is none.
        s_aux: attention sinks, (heads,).

    Raises:
        ValueError: there is no step, or an argument that attention over pages does not know.
    """
    if step is None:
        raise ValueError(f"{type(module).__name__} does not pass the argument `step` of the model on to its attention")
    known = {"attention_mask": attention_mask, "dropout": dropout or None}
    for name, given in known.items() | {(name, kwargs.get(name)) for name in _REFUSED}:
        if given is not None:
            raise ValueError(f"{type(module).__name__} gives {name}, which attention over a paged cache does not know")
    options: dict[str, Any] = {"softmax_scale": scaling}
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0)
    if softcap:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(Call(int(module.layer_idx), q, k, v, options))[None], None  # type: ignore[arg-type]


def register() -> None:
    """Make `NAME` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
