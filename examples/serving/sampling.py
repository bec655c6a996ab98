"""The choice of the next tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor, *, cuts: bool = True) -> Tensor:
    """The next token of each row, (rows,) int64.

    A row's choice depends on nothing but its own values, and waits for nothing. Tokens lie on a line, each as long as
    it is probable, and `uniform` is a place on it. With `top_p` 1 the line has all tokens in their order; below, it has
    the most probable ones that together have `top_p`, ordered by probability.

    Args:
        logits: (rows, vocabulary), fp32.
        temperature: (rows,); 0 takes the largest logit.
        top_p: (rows,), above 0, at most 1.
        uniform: (rows,), in [0, 1).
        cuts: whether a row may have a `top_p` below 1, for which tokens have to be sorted; that takes longer than all
            else.
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    probable = torch.softmax(scaled, dim=-1)
    drawn = _place_of(probable, uniform)
    if cuts:
        drawn = torch.where(top_p < 1, _among_most_probable(probable, top_p, uniform), drawn)
    return torch.where(temperature > 0, drawn, logits.argmax(dim=-1))


def _place_of(probable: Tensor, uniform: Tensor) -> Tensor:
    """The token at a place of the line of all tokens; never one of probability 0."""
    ends = probable.cumsum(dim=-1)
    place = uniform[:, None] * ends[:, -1:]
    # The last token that has a length is where the line ends, however the place was rounded.
    last = (ends < ends[:, -1:]).sum(dim=-1)
    return torch.minimum((ends <= place).sum(dim=-1), last)


def _among_most_probable(probable: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """As `_place_of`, of the most probable tokens that together have `top_p`."""
    ordered, order = probable.sort(dim=-1, descending=True, stable=True)
    ends = ordered.cumsum(dim=-1)
    kept = (ends - ordered < top_p[:, None]).sum(dim=-1, keepdim=True)
    place = uniform[:, None] * ends.gather(1, kept - 1)
    rank = torch.minimum((ends <= place).sum(dim=-1, keepdim=True), kept - 1)
    return order.gather(1, rank)[:, 0]
