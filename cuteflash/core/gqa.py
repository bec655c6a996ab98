"""Rows of a query tile: tokens, or (packed head, token) if the query heads of one KV head share a tile."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

Index = Any  # a Python int or a traced cutlass.Int32


def row_coord(row: Int32, packed_heads: int) -> Any:
    """Where row `row` of a query view lies: the token, or (packed head, token), the head running fastest."""
    return row if packed_heads == 1 else (row % packed_heads, row // packed_heads)


def row_token(row: Index, packed_heads: int) -> tuple[Index, Index]:
    """(token, packed head) of a row."""
    return (row, Int32(0)) if packed_heads == 1 else (row // packed_heads, row % packed_heads)


def output_row(view: cute.Tensor, tile: Any, row: Int32) -> cute.Tensor:
    """(head_dim,) of a tile's row, in a `query_view` of O."""
    return output_rows(view, tile)[row_coord(row, tile.packed_heads), None]


def output_rows(view: cute.Tensor, tile: Any) -> cute.Tensor:
    """(rows, head_dim) from a tile's first row on, likewise; of packed sequences O has no batch, but one entry."""
    origin = tile.first_row if tile.packed_heads == 1 else (0, tile.first_row)
    return cute.domain_offset((origin, 0), view[None, None, tile.head, tile.batch])


def query_view(tensor: cute.Tensor, packed_heads: int) -> cute.Tensor:
    """A (batch, seqlen, heads, head_dim) tensor as (rows, head_dim, heads / packed_heads, batch).

    Packed, a row is (packed head, token) and the heads are KV heads.
    """
    b, s, h, d = tensor.shape
    db, ds, dh, dd = tensor.stride
    if packed_heads == 1:
        layout = cute.make_layout((s, d, h, b), stride=(ds, dd, dh, db))
    else:
        layout = cute.make_layout(
            ((packed_heads, s), d, h // packed_heads, b), stride=((dh, ds), dd, dh * packed_heads, db)
        )
    return cute.make_tensor(tensor.iterator, layout)
