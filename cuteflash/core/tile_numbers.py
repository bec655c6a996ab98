"""Numbers for the tiles of packed sequences, which follow from where each begins. For Python ints and traced values."""

from __future__ import annotations

from typing import Any

Index = Any  # a Python int or a traced cutlass.Int32


def first_tile(first_row: Index, index: Index, tile_rows: int) -> Index:
    """The number of the first tile of packed sequence `index`, whose rows begin at `first_row`.

    Each sequence owns as many consecutive numbers as it has tiles of `tile_rows` rows, or one more. So its numbers
    follow from where it begins: nothing is added up over the sequences before it. Times `tile_rows` this is where the
    sequence begins in a buffer that pads each of them to whole tiles.
    """
    return first_row // tile_rows + index


def count_tiles(rows: Index, batch: Index, tile_rows: int) -> Index:
    """How many tile numbers `batch` packed sequences own in a tensor of `rows` rows, with those after the last one."""
    return first_tile(rows, batch + 1, tile_rows)
