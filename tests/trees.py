"""Trees of new tokens, and attention under them by definition."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


def branches(parents: Sequence[int]) -> Tensor:
    """The masks of a tree, (tokens,) int64, from each token's parent, which comes before it; -1 is none."""
    masks: list[int] = []
    for token, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << token)
    return torch.tensor([mask - (1 << 64) if mask >> 63 else mask for mask in masks], dtype=torch.int64)


def chain(tokens: int) -> Tensor:
    """The tree whose tokens all follow each other."""
    return branches(range(-1, tokens - 1))


def some_tree(rng: random.Random, tokens: int) -> Tensor:
    """A random forest, or masks of no tree at all, which are as good."""
    if rng.random() < 0.3:
        return torch.tensor([rng.getrandbits(64) - (1 << 63) for _ in range(tokens)], dtype=torch.int64)
    return branches([rng.randrange(-1, token) for token in range(tokens)])


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, tree: Tensor, window_left: int = -1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """O (tokens, heads, columns) and LSE (heads, tokens), fp32, of one sequence, computed in `dtype`."""
    (tokens, heads, head_dim), (length, kv_heads, _) = q.shape, k.shape
    masks = tree.tolist()
    visible = torch.ones(tokens, length, dtype=torch.bool)
    new = range(max(length - tokens, 0), length)
    for i in range(tokens):
        position = i + length - tokens
        seen = [j <= position and bool(masks[i] >> (j - (length - tokens)) & 1) for j in new]
        visible[i, new.start :] = torch.tensor(seen, dtype=torch.bool)
        if window_left >= 0:
            visible[i, : max(position - window_left, 0)] = False
    visible = visible.to(q.device)
    keys, values = (x.to(dtype).repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (k, v))
    s = (q.to(dtype).transpose(0, 1) @ keys.mT).float() * head_dim**-0.5
    s = s.masked_fill(~visible, float("-inf"))
    lse = s.logsumexp(dim=-1)
    p = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]).to(dtype)
    return (p @ values).float().transpose(0, 1), lse
