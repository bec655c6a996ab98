"""Which traits a sweep considers: one generator a kernel family, over everything that may differ.

A candidate that no architecture runs stands for all its variants: what does not fit with one block a multiprocessor
and plain switches does not fit otherwise. So generators stay short if the products would be hopeless, and every
refusal still has a candidate whose `check` says why. Switches that were measured to interact are multiplied out; the
others are turned one at a time, on a tile's plain form.

Not part of the compile key: widening the space invalidates no measurements.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from cuteflash.traits.arch import ARCHS
from cuteflash.traits.base import FwdTraits
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import WGMMA_M, FwdTraitsSm90

AnyTraits = TypeVar("AnyTraits")

# (tile_m, warps): 16 rows a warp is the instruction's own height, 32 halve the reads of K and V from shared memory.
SM80_WARPS = ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8))
SM80_TILE_N = (32, 48, 64, 80, 96, 112, 128, 160, 192)
SM80_STAGES = (1, 2, 3)
SM80_TALL = 32
SM80_MAX_BLOCKS = 4
AMPERE = ARCHS["sm_80"]  # for its register file, which all architectures have

SM90_TILE_M = (64, 128, 192)
SM90_TILE_N = range(32, 257, 16)
SM90_STAGES = (2, 3, 4)
# Where Q, P and O live. Sharing Q's memory with O needs Q there to the end, so neither in registers nor twice.
SM90_PLACES: tuple[dict[str, Any], ...] = (
    *(q | p for q in ({}, {"q_in_regs": True}, {"share_q_o": True}) for p in ({}, {"p_in_regs": False})),
    {"q_stage": 2},
)
# How maxima, rescaling and waits lie between the products; these interact (docs/performance.md, 4, 6 and 27).
FIXED_MAX = {"fixed_max": True, "repair_apart": True}
SM90_ORDERS: tuple[dict[str, Any], ...] = (
    {"rescale_in_product": True},
    {"exp_rows_before_wait": 0},
    {"rescale_in_product": True, "exp_rows_before_wait": 0},
    {"exp_rows_before_wait": 2},
    {"fixed_max": True},
    {"fixed_max": True, "exp_rows_before_wait": 0},
    FIXED_MAX | {"exp_rows_before_wait": 0},
)
SM90_SWITCHES: tuple[dict[str, Any], ...] = (
    {"pingpong": False},
    {"overlap": False, "exp_rows_before_wait": 0},  # no product runs beside the softmax, so there is no wait to place
    {"persistent": False},
    {"longest_first": False},
    {"warp_specialized": False, "pingpong": False, "overlap": False, "exp_rows_before_wait": 0},
)
# Several blocks of one consumer warpgroup each, for loops of few steps (docs/performance.md, 37).
SM90_RESIDENT: tuple[dict[str, Any], ...] = tuple(
    FIXED_MAX | {"blocks_per_sm": blocks, "exp_rows_before_wait": 0} for blocks in (2, 3, 4)
)
# Of 8-bit operands: an instruction takes 32 keys, and P and O have one place each.
FP8_TILE_N = range(32, 257, 32)
FP8_PLACES: tuple[dict[str, Any], ...] = ({}, {"q_stage": 2}, {"q_in_regs": True})
FP8_ORDERS: tuple[dict[str, Any], ...] = (
    {"exp_rows_before_wait": 0},
    {"exp_rows_before_wait": 2},
    {"fixed_max": True},
    FIXED_MAX | {"exp_rows_before_wait": 0, "pingpong": False},
    *(FIXED_MAX | {"exp_rows_before_wait": rows, "masked_by_fixed_max": True} for rows in (0, 1)),
    *(FIXED_MAX | {"exp_rows_before_wait": rows} for rows in (0, 1, 2)),
)
FP8_RESIDENT: tuple[dict[str, Any], ...] = tuple(
    order | {"blocks_per_sm": blocks} for blocks in (2, 3, 4) for order in FP8_ORDERS[-5:-1]
)
FP8_SWITCHES = ({"pingpong": False}, {"persistent": False}, {"longest_first": False})


def fwd_candidates_sm80(head_dim: int, head_dim_v: int) -> Iterator[FwdTraitsSm80]:
    """Forward candidates of the sm80 family for padded head dims; some come twice."""
    widest = swizzle_width(head_dim) // CHUNK  # 16-byte chunks of a swizzled row: 8, 4 or 2
    switches: tuple[dict[str, Any], ...] = (
        {"double_buffer": False},
        {"longest_first": False},
        {"swizzle_bits": widest.bit_length() - 2},  # one bit short of what is free of conflicts
    )
    for (tile_m, warps), tile_n, stages in itertools.product(SM80_WARPS, SM80_TILE_N, SM80_STAGES):
        plain = FwdTraitsSm80(tile_m, tile_n, head_dim, head_dim_v, num_warps=warps, kv_stage=stages)
        yield from _resident(plain)
        in_regs = dataclasses.replace(plain, q_in_regs=True)
        yield from _resident(in_regs)
        if stages == 1 and runs_somewhere(plain):
            yield from changed(plain, switches)


def _resident(base: FwdTraitsSm80) -> Iterator[FwdTraitsSm80]:
    """A base with 1, 2, .. resident blocks, up to and with the first number that fits nowhere, scheduled both ways.

    Numbers that leave a thread as many registers as a smaller one compile to the same code, byte for byte.
    """
    limits = set()
    for blocks in range(1, SM80_MAX_BLOCKS + 1):
        traits = dataclasses.replace(base, blocks_per_sm=blocks)
        limit = traits.register_limit(AMPERE)
        if limit not in limits:
            limits.add(limit)
            yield traits
            if not runs_somewhere(traits):
                return
            yield dataclasses.replace(traits, cutlass_symbol=True)
            if base.tile_m == SM80_TALL * base.num_warps:  # the most accumulators, beside which others are spilled
                yield dataclasses.replace(traits, late_addresses=True)


def fwd_candidates_sm90(head_dim: int, head_dim_v: int) -> Iterator[FwdTraitsSm90]:
    """Forward candidates of the sm90 family for padded head dims; some come twice."""
    for tile_m, tile_n, stages in itertools.product(SM90_TILE_M, SM90_TILE_N, SM90_STAGES):
        for places in SM90_PLACES:
            base = FwdTraitsSm90(
                tile_m,
                tile_n,
                head_dim,
                head_dim_v,
                kv_stage=stages,
                pingpong=tile_m > WGMMA_M,  # one consumer warpgroup has no other to take turns with
                exp_rows_before_wait=1,
                **places,
            )
            yield base
            if not runs_somewhere(base):
                continue
            if base.p_in_regs:
                yield from changed(base, (FIXED_MAX,))
            if stages == SM90_STAGES[0]:
                yield from changed(base, SM90_ORDERS if base.p_in_regs else ())
                yield from changed(base, () if places else SM90_SWITCHES)
                if tile_m == WGMMA_M:
                    yield from filter(runs_somewhere, changed(base, SM90_RESIDENT))


def fwd_candidates_fp8_sm90(head_dim: int, head_dim_v: int, *, turns_v: bool) -> Iterator[FwdTraitsFp8Sm90]:
    """Forward candidates of the sm90 family for 8-bit operands, which turn V or are given V^T; some come twice."""
    tiles = itertools.product(SM90_TILE_M, FP8_TILE_N, SM90_STAGES, FP8_PLACES, (True, False))
    for tile_m, tile_n, stages, place, two_level in tiles:
        base = FwdTraitsFp8Sm90(
            tile_m,
            tile_n,
            head_dim,
            head_dim_v,
            kv_stage=stages,
            pingpong=tile_m > WGMMA_M,
            exp_rows_before_wait=1,
            two_level=two_level,
            turns_v=turns_v,
            **place,
        )
        if turns_v and not runs_somewhere(base):  # perhaps for want of memory
            base = dataclasses.replace(base, stages_o=False)
        yield base
        if runs_somewhere(base):
            yield from changed(base, FP8_ORDERS if stages == SM90_STAGES[0] else FP8_ORDERS[-3:-1])
            if turns_v:
                yield dataclasses.replace(base, **FP8_ORDERS[-2], stored_v_stage=1)
            if stages == SM90_STAGES[0] and not place:
                yield from changed(base, FP8_SWITCHES if two_level else ({"rescale_in_product": True}, *FP8_SWITCHES))
            if stages == SM90_STAGES[0] and tile_m == WGMMA_M:
                yield from filter(runs_somewhere, changed(base, FP8_RESIDENT))


def changed(base: AnyTraits, changes: tuple[dict[str, Any], ...]) -> Iterator[AnyTraits]:
    """Traits with each of these changes."""
    return (dataclasses.replace(base, **change) for change in changes)  # type: ignore[type-var]


def runs_somewhere(traits: FwdTraits) -> bool:
    """Whether an architecture runs traits."""
    return any(traits.check(arch) is None for arch in ARCHS.values())
