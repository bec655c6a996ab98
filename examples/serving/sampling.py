"""The choice of the next tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """The next token of each row, (rows,) int64.

    A row's choice depends on nothing but its own values, and waits for nothing: the most probable tokens whose
    probabilities sum up to `top_p` lie on a line, each as long as it is probable, and `uniform` is a place on it.

    Args:
        logits: (rows, vocabulary), fp32.
        temperature: (rows,); 0 takes the largest logit.
        top_p: (rows,), above 0, at most 1.
        uniform: (rows,), in [0, 1).
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    ordered, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    ends = ordered.cumsum(dim=-1)
    kept = (ends - ordered < top_p[:, None]).sum(dim=-1, keepdim=True)
    place = uniform[:, None] * ends.gather(1, kept - 1)
    rank = torch.minimum((ends <= place).sum(dim=-1, keepdim=True), kept - 1)
    drawn = order.gather(1, rank)[:, 0]
    return torch.where(temperature > 0, drawn, logits.argmax(dim=-1))
