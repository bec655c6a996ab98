"""The tiles that FlashAttention-1 and -2 visit, in order, and their traffic to and from slow memory.

`tests/layouts/test_lessons.py` compares the orders with the visits of the reference itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuteflash.reference import flash_attention_1, flash_attention_2
from cuteflash.reference.masks import block_bounds

from .sources import source_of

TILE = 128  # rows and keys of a tile in every count: FlashAttention-1's in the reference
MASKS = {"full": (-1, -1), "causal": (-1, 0)}
SHOWN = 8  # blocks of queries and of keys in the animation
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)

Visits = list[tuple[int, int]]


def fa1_visits(s_q: int, s_k: int, tile_m: int, tile_n: int, left: int, right: int) -> Visits:
    """First query and key of each tile in FlashAttention-1's order, all tiles under any mask."""
    del left, right
    return [(i0, j0) for j0 in range(0, s_k, tile_n) for i0 in range(0, s_q, tile_m)]


def fa2_visits(s_q: int, s_k: int, tile_m: int, tile_n: int, left: int, right: int) -> Visits:
    """First query and key of each tile in FlashAttention-2's order: each block of queries visits the keys it sees."""
    found = []
    for i0 in range(0, s_q, tile_m):
        lo, hi = block_bounds(i0, min(i0 + tile_m, s_q), s_q, s_k, left, right)
        found += [(i0, j0) for j0 in range(lo, hi, tile_n)]
    return found


def fa1_traffic(visits: Visits, s_q: int, s_k: int, head_dim: int, tile: int = TILE) -> dict[str, int]:
    """Numbers read and written for one head by FlashAttention-1: K and V once; Q, O, m, l at every visit."""
    kv_rows = sum(min(tile, s_k - j0) for j0 in {j0 for _, j0 in visits})
    rows = sum(min(tile, s_q - i0) for i0, _ in visits)
    state = rows * (head_dim + 2)  # O, m and l of a row
    return {"reads": 2 * head_dim * kv_rows + head_dim * rows + state, "writes": state}


def fa2_traffic(visits: Visits, s_q: int, s_k: int, head_dim: int, tile: int = TILE) -> dict[str, int]:
    """Numbers read and written for one head by FlashAttention-2: Q, O and LSE once; K and V at every visit."""
    kv_rows = sum(min(tile, s_k - j0) for _, j0 in visits)
    return {"reads": head_dim * s_q + 2 * head_dim * kv_rows, "writes": (head_dim + 1) * s_q}


ALGORITHMS: dict[str, tuple[Callable[..., Visits], Callable[..., dict[str, int]]]] = {
    "fa1": (fa1_visits, fa1_traffic),
    "fa2": (fa2_visits, fa2_traffic),
}


def traffic(algorithm: str, mask: str, seqlen: int, head_dim: int) -> dict[str, int]:
    """Tiles visited, numbers read and written for one head of `seqlen` queries and keys."""
    visit, count = ALGORITHMS[algorithm]
    visits = visit(seqlen, seqlen, TILE, TILE, *MASKS[mask])
    return {"tiles": len(visits), **count(visits, seqlen, seqlen, head_dim)}


def loop_data() -> dict[str, Any]:
    """Orders of visits in blocks for the animation, traffic for every size, and the loops of the reference."""
    fa1 = source_of(flash_attention_1, start="for j0 in range(0, s_k, TILE_N)")
    fa2 = source_of(flash_attention_2, start="for i0 in range(0, s_q, TILE_M)")
    shown = {
        name: {mask: visit(SHOWN, SHOWN, 1, 1, *sides) for mask, sides in MASKS.items()}
        for name, (visit, _) in ALGORITHMS.items()
    }
    counted = [
        {"algorithm": name, "mask": mask, "seqlen": seqlen, "head_dim": head_dim}
        | traffic(name, mask, seqlen, head_dim)
        for name in ALGORITHMS
        for mask in MASKS
        for seqlen in SEQLENS
        for head_dim in HEAD_DIMS
    ]
    return {
        "blocks": SHOWN,
        "tile": TILE,
        "visits": {
            name: {mask: [list(at) for at in order] for mask, order in by.items()} for name, by in shown.items()
        },
        "traffic": counted,
        "sources": {"fa1": fa1.as_dict(), "fa2": fa2.as_dict()},
        "lines": {
            "fa1": {
                "outer": fa1.line("for j0 in range("),
                "inner": fa1.line("for i0 in range("),
                "read": fa1.line("o_i, m_i, ell_i = "),
                "write": fa1.line("o_i.copy_("),
            },
            "fa2": {
                "outer": fa2.line("for i0 in range("),
                "inner": fa2.line("for j0 in range("),
                "read": fa2.line("s = scores("),
                "write": fa2.line("o[:, i0:i1] = "),
            },
        },
    }
