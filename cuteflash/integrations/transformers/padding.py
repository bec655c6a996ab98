"""Padded batches on an operator without padding: rows with the same mask are computed together.

A padding mask says which key positions of a row hold tokens. Rows with the same mask become one smaller, unpadded
problem: their keys are sliced (a contiguous span) or gathered (a span with holes), so the result is exact. One operator
call is made for every distinct mask of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Rows of the batch that share one padding mask.

    Attributes:
        rows: which rows; `slice(None)` for all of them.
        keys: which key positions hold tokens, ascending; a slice if they are contiguous.
        first: the first of these positions.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    first: int

    def to(self, device: torch.device) -> Group:
        rows, keys = (part.to(device) if isinstance(part, Tensor) else part for part in (self.rows, self.keys))
        return Group(rows, keys, self.first)


def groups(mask: Tensor) -> list[Group]:
    """The distinct rows of a padding mask, bool (batch, positions). Rows without a token are in no group.

    Reads the mask on the host: on a GPU it waits for the device.
    """
    patterns, row_pattern = torch.unique(mask.cpu(), dim=0, return_inverse=True)
    result = []
    for index, pattern in enumerate(patterns):
        positions = pattern.nonzero()[:, 0]
        if len(positions) == 0:
            continue
        first, last = int(positions[0]), int(positions[-1])
        contiguous = last - first + 1 == len(positions)
        keys = slice(first, last + 1) if contiguous else positions.to(mask.device)
        members = (row_pattern == index).nonzero()[:, 0].to(mask.device)
        result.append(Group(slice(None) if len(patterns) == 1 else members, keys, first))
    return result


def attend_groups(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: list[Group],
    query_offset: int | None,
) -> Tensor:
    """Attention over the tokens of each group.

    Args:
        attend: unpadded attention, (q, k, v) to O, bottom-right aligned.
        q, k, v: (b, s_q, h_q, d), (b, s_k, h_k, d), (b, s_k, h_k, d_v).
        found: the mask's `groups`.
        query_offset: key position of query 0, if the attention depends on positions (causal, window): a query at a
            padding position is left out. None if it does not: every query sees every token.

    Returns:
        O (b, s_q, h_q, d_v); 0 for queries left out and rows without a token.
    """
    o = q.new_zeros(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    for group in found:
        queries = slice(None) if query_offset is None else _queries_on_tokens(group, query_offset)
        if queries is not None:
            o_rows = attend(
                q[group.rows][:, queries],
                k[group.rows][:, group.keys],
                v[group.rows][:, group.keys],
            )
            _store(o, group.rows, queries, o_rows)
    return o


def _queries_on_tokens(group: Group, offset: int) -> slice | Tensor | None:
    """Queries at positions of tokens; the last is at the group's last key. None if there are no such queries."""
    if isinstance(group.keys, slice):
        start, stop = max(group.first - offset, 0), group.keys.stop - offset
        return slice(start, stop) if stop > start else None
    positions = group.keys[group.keys >= offset] - offset
    return positions if len(positions) else None


def _store(o: Tensor, rows: slice | Tensor, queries: slice | Tensor, value: Tensor) -> None:
    if isinstance(rows, Tensor) and isinstance(queries, Tensor):
        o[rows[:, None], queries] = value  # two index tensors pair up unless one is made a column
    else:
        o[rows, queries] = value
