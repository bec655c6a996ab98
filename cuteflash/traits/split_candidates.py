"""Which traits a sweep considers for rows that split keys: as `cuteflash.traits.candidates`, of tiles with 64 rows.

Such a row's time is that of reading K and V: what differs is how much of them is in flight, in how many pieces, and
whether a block's own work keeps up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.candidates import changed, runs_somewhere
from cuteflash.traits.few_sm90 import MMA_KEYS, WARPS, FwdTraitsFewSm90
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

ROWS = 64  # of a tile
TILE_N = (32, 48, 64, 80, 96, 112, 128, 160, 192)
STAGES = range(2, 9)  # of tiles in flight
BLOCKS = (1, 2)  # resident on a multiprocessor
PLACES: tuple[dict[str, Any], ...] = ({}, {"q_in_regs": True}, {"share_q_o": True})
SWITCHES: tuple[dict[str, Any], ...] = (
    {"exp_rows_before_wait": 0},
    {"overlap": False, "exp_rows_before_wait": 0},
    {"rescale_in_product": True},
)
SM80_TILE_N = (16, 32, 48, 64, 80, 96, 128)
SM80_STAGES = (2, 3, 4, 5, 6, 8)
SM80_WARPS = 4
# Of an e4m3 cache: keys that are whole units for the warps that convert them, and tiles of fp16 beside those in flight.
CACHE_TILE_N = (32, 64, 96, 128)
CACHE_STAGES = (2, 3)
# Of few query rows, whose warps share the keys of a block: one or two instructions' keys each.
FEW_TILE_M = (8, 16, 32)
FEW_TILE_N = (WARPS * MMA_KEYS, 2 * WARPS * MMA_KEYS)
# Consumer warpgroups that share a tile's rows, and keep Q in registers; two warpgroups that convert have fewer.
PAIR: dict[str, Any] = {"key_warpgroups": 2, "q_in_regs": True, "exp_rows_before_wait": 0}
CACHE_PLACES: tuple[dict[str, Any], ...] = (
    *PLACES,
    PAIR,
    *(place | {"converting_warpgroups": 2} for place in PLACES),
)


def split_candidates_sm90(head_dim: int, head_dim_v: int) -> Iterator[FwdTraitsSm90]:
    """Candidates of the sm90 family for padded head dims; some come twice."""
    sizes = itertools.product(TILE_N, STAGES, BLOCKS, PLACES)
    for tile_n, stages, blocks, place in sizes:
        base = FwdTraitsSm90(
            ROWS,
            tile_n,
            head_dim,
            head_dim_v,
            kv_stage=stages,
            blocks_per_sm=blocks,
            pingpong=False,
            splits=True,
            exp_rows_before_wait=1,
            **place,
        )
        yield base
        if runs_somewhere(base):
            yield from changed(base, SWITCHES)


def split_candidates_sm80(head_dim: int, head_dim_v: int) -> Iterator[FwdTraitsSm80]:
    """Candidates of the sm80 family for padded head dims."""
    sizes = itertools.product(SM80_TILE_N, SM80_STAGES, (1, 2, 3), (False, True))
    for tile_n, stages, blocks, in_regs in sizes:
        base = FwdTraitsSm80(
            ROWS,
            tile_n,
            head_dim,
            head_dim_v,
            num_warps=SM80_WARPS,
            kv_stage=stages,
            blocks_per_sm=blocks,
            q_in_regs=in_regs,
            splits=True,
        )
        yield base
        if runs_somewhere(base):
            yield dataclasses.replace(base, double_buffer=False)
            if in_regs:
                yield dataclasses.replace(base, late_addresses=True)


def cache_candidates_sm90(head_dim: int, head_dim_v: int) -> Iterator[FwdTraitsCacheSm90 | FwdTraitsFewSm90]:
    """Candidates of the sm90 family for e4m3 caches, with split keys; some come twice."""
    for tile_m, tile_n, stages in itertools.product(FEW_TILE_M, FEW_TILE_N, STAGES):
        yield FwdTraitsFewSm90(tile_m, tile_n, head_dim, head_dim_v, kv_stage=stages)
    sizes = itertools.product(CACHE_TILE_N, STAGES, CACHE_STAGES, CACHE_PLACES)
    for tile_n, stored, stages, place in sizes:
        base = FwdTraitsCacheSm90(
            ROWS,
            tile_n,
            head_dim,
            head_dim_v,
            kv_stage=stages,
            stored_stage=stored,
            pingpong=False,
            splits=True,
            **{"exp_rows_before_wait": 1} | place,
        )
        yield base
        if runs_somewhere(base) and stages == CACHE_STAGES[0]:
            yield from changed(base, SWITCHES[:1])
