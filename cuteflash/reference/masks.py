"""Which keys a query sees, as an interval: the one definition that every step of the ladder uses.

Queries and keys are aligned at their ends (bottom-right): query i of s_q stands at key position
i + s_k - s_q, and sees `left` keys before and `right` keys after it. A negative side is unbounded.
Causal attention is right = 0. With `chunk` above 0 positions are cut into chunks of so many, from key 0 on, and a query
sees only keys of its own chunk. The bounds are plain integers, so they cost nothing and say which blocks to visit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def key_bounds(i: int, s_q: int, s_k: int, left: int, right: int, chunk: int = 0) -> tuple[int, int]:
    """The half-open interval [lo, hi) of keys visible to query `i`; empty (lo == hi) if it sees none."""
    position = i + s_k - s_q
    lo = 0 if left < 0 else min(max(position - left, 0), s_k)
    hi = s_k if right < 0 else min(max(position + right + 1, 0), s_k)
    if chunk > 0:
        first = position // chunk * chunk
        lo, hi = max(lo, min(first, s_k)), min(hi, max(first + chunk, 0))
    return lo, max(lo, hi)


def block_bounds(i0: int, i1: int, s_q: int, s_k: int, left: int, right: int, chunk: int = 0) -> tuple[int, int]:
    """The interval of keys visible to at least one of the queries [i0, i1); both bounds only grow with i."""
    lo, _ = key_bounds(i0, s_q, s_k, left, right, chunk)
    _, hi = key_bounds(i1 - 1, s_q, s_k, left, right, chunk)
    return lo, max(lo, hi)


def visible(
    i0: int,
    i1: int,
    j0: int,
    j1: int,
    offset: int,
    left: int,
    right: int,
    device: torch.device,
    *,
    chunk: int = 0,
) -> Tensor | None:
    """The mask of queries [i0, i1) x keys [j0, j1), or None if all of it is visible.

    Args:
        offset: s_k - s_q, the key position of query 0.
        device: the device of the mask.

    Returns:
        bool (i1 - i0, j1 - j0), True if the key is visible.
    """
    inside_left = left < 0 or i1 - 1 + offset - left <= j0
    inside_right = right < 0 or j1 - 1 <= i0 + offset + right
    if inside_left and inside_right and chunk <= 0:
        return None
    position = torch.arange(i0, i1, device=device)[:, None] + offset
    key = torch.arange(j0, j1, device=device)
    mask = torch.ones(i1 - i0, j1 - j0, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= key >= position - left
    if right >= 0:
        mask &= key <= position + right
    if chunk > 0:
        mask &= key // chunk == position // chunk
    return mask


def on_branch(tree: Tensor, i0: int, i1: int, j0: int, j1: int, offset: int) -> Tensor:
    """Which keys are before the new tokens, or one that a query's bits say.

    Args:
        tree: int64 (s_q,): bit j of query i says whether it sees new token j, which is key offset + j.
        i0, i1, j0, j1, offset: as of `visible`.

    Returns:
        bool (i1 - i0, j1 - j0).
    """
    token = torch.arange(j0, j1, device=tree.device) - offset
    return (token < 0) | (tree[i0:i1, None] >> token.clamp(0, 63) & 1).bool()
