"""The lesson on split keys: how the key blocks of all tiles are dealt to the blocks of a launch.

`share_size` and `share_of_tile` of `cuteflash/core/split.py` run here on Python integers, `grid_of` of
`cuteflash/split_planning.py` says how many blocks there are, and in how many lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cuteflash.core.split import share_of_tile, share_size
from cuteflash.core.split_slots import LEAST_KEYS
from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.problem import FwdProblem
from cuteflash.split_planning import MOST_PARTS, Tiles, grid_of

HEAD_DIM = 128
TARGET = "sm_90a"
SMS = 12  # of the small GPU of the lesson


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A launch of single queries: KV heads, whose query heads are packed, and the key blocks of each sequence."""

    title: str
    heads: int
    widths: tuple[int, ...]


EXAMPLES = (
    Example("one sequence", 1, (30,)),
    Example("four heads", 4, (14,)),
    Example("equal lengths", 2, (9, 9, 9)),
    Example("a long one", 2, (21, 3, 5, 2)),
)


def split_row() -> tuple[FwdProblem, str, Choice]:
    """The shipped row that splits keys."""
    return _row("split")


def cache_row() -> tuple[FwdProblem, str, Choice]:
    """The shipped row that splits the keys of an e4m3 cache."""
    return _row("split", "e4m3_cache")


def _row(*features: Any) -> tuple[FwdProblem, str, Choice]:
    problem = FwdProblem.dense("bf16", HEAD_DIM, HEAD_DIM).asking(features)
    return problem, TARGET, choose_shipped(problem, TARGET, "sm90", "decode")


def shares_of_line(widths: Sequence[int], shares: int, tile_n: int) -> list[list[dict[str, int]]]:
    """By share of one line its parts of tiles: each tile's number, its units of the line, the seats of its parts.

    A block's walk through its share, as `cuteflash.core.split.each_part` has it.
    """
    total, least = sum(widths), max(LEAST_KEYS // tile_n, 1)
    share = share_size(total, shares, max(widths), MOST_PARTS, least)
    found: list[list[dict[str, int]]] = []
    for number in range(shares):
        at, end, parts = number * share, min((number + 1) * share, total), []
        while at < end:
            begins = [sum(widths[:i]) for i in range(len(widths))]
            tile = max(i for i, begin in enumerate(begins) if begin <= at)
            part = share_of_tile(at, end, at - begins[tile], widths[tile], share, number)
            parts.append({"tile": tile, "begin": at, "first": part.first, "last": part.last, "owner": part.owner,
                          "last_owner": part.last_owner})  # fmt: skip
            at += part.last - part.first
        found.append(parts)
    return found


def share_data() -> dict[str, Any]:
    """The row's numbers, and each example's lines with their shares."""
    _, _, choice = split_row()
    traits: Any = choice.traits
    examples = []
    for example in EXAMPLES:
        batch, longest = len(example.widths), max(example.widths) * traits.tile_n
        blocks, lanes = grid_of(traits, Tiles(batch, example.heads, 1, 1, longest), 1, SMS)
        of_line = [width for width in example.widths for _ in range(example.heads // lanes)]
        examples.append(
            {
                "title": example.title,
                "heads": example.heads,
                "blocks": blocks,
                "lanes": lanes,
                "tiles": [{"sequence": i, "width": width} for i, width in enumerate(example.widths)
                          for _ in range(example.heads // lanes)],
                "shares": shares_of_line(of_line, blocks // lanes, traits.tile_n),
            }
        )  # fmt: skip
    in_flight = traits.kv_stage * traits.tile_n * (traits.head_dim + traits.head_dim_v) * traits.element_bytes
    return {"multiprocessors": SMS, "in_flight": in_flight * traits.blocks_per_sm, "examples": examples}
