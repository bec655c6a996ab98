"""Attention over a paged K/V cache, as an entry of transformers' attention interface.

A model with ``attn_implementation=NAME`` is called with all tokens of a step in one row, and with the keyword
argument `step`, which the decoder passes on to every layer. A layer appends its keys and values, which have their
rotary embedding by then, to the pages and attends to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serving.caches import Attends
from serving.kv_cache import KvCall

NAME = "paged_cache"  # transformers makes no mask for a name that has none registered

# What some models pass that changes scores in a way that attention over pages does not know.
_REFUSED = ("position_bias", "head_mask", "indices", "block_indices", "attention_chunk_size")


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
    return step.attend(KvCall(int(module.layer_idx), q, k, v, options))[None], None  # type: ignore[arg-type]


def register() -> None:
    """Make `NAME` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
