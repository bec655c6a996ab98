"""Which traits a sweep of the backward considers, as `cuteflash.traits.candidates` does for the forward."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any

from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90, DqShare
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.candidates import AMPERE, changed, runs_somewhere

SM80_TILE_M, SM80_TILE_N = (32, 64, 128), (32, 64, 128)
SM80_WARPS = (4, 8)
SM80_STAGES = (1, 2)
SM80_MAX_BLOCKS = 3
# Blocks that may be lone, small ones, as many resident ones as possible: (tile_m, tile_n, warps), with the numbers of
# blocks that each have a register limit of their own. In a short loop what depends on the thread, and on the mask, may
# be computed again rather than kept, so that more fit.
SM80_LONE: dict[tuple[int, int, int], tuple[int, ...]] = {
    (32, 32, 4): (2, 3, 4, 5, 6),
    (32, 64, 4): (2, 3, 4),
    (32, 64, 8): (1, 2),
    (64, 64, 4): (3,),
    (64, 64, 8): (1,),
}
SM80_LONE_SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"fresh_addresses": True},
    {"fresh_addresses": True, "fresh_bounds": True},
    {"fresh_addresses": True, "fresh_loops": True},  # of the smallest
)
# Of heads wider than this, whose gradients leave few registers.
SM80_WIDE = 160
SM80_LONE_WIDE: tuple[dict[str, Any], ...] = (
    {"double_buffer": True, "fresh_bounds": True},
    {"double_buffer": True, "fresh_bounds": True, "fresh_addresses": True},
)
# How dQ is added. What sweeps time does not take turns: the best form of turns by warps comes with the wide additions.
SM80_ADDS: tuple[dict[str, Any], ...] = ({}, {"vector_add": True})
SM80_TURNS: dict[int, dict[str, Any]] = {
    4: {"vector_add": True, "turn_steps": 4},
    8: {"vector_add": True, "turn_warpgroup": True},
}
# For what is short of registers in calls without turns, too.
SM80_IDLE: dict[str, Any] = SM80_TURNS[8] | {"idle_warpgroup": True, "double_buffer": False}
SM80_SWITCHES: tuple[dict[str, Any], ...] = ({}, {"double_buffer": False}, {"fresh_addresses": True})
SM80_FULL = 160  # registers of accumulators, beside which those of bounds may be spilled

SM90_TILE_M = range(48, 145, 16)
SM90_TILE_N = (64, 128, 192)
SM90_STAGES = (2, 3, 1)  # the first comes first among candidates with the same estimate
SM90_KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"k_in_regs": True},
    {"v_in_regs": True},
    {"k_in_regs": True, "v_in_regs": True},
)
IN_TURN: dict[str, Any] = {"in_turn": True}  # for some of those with dQ apart
LONE: dict[str, Any] = {"lone_tiles": True}
LAST: dict[str, Any] = {"last_rounds": True}
KEYS_AHEAD: dict[str, Any] = {"persistent": True, "kv_stage": 2, **SM90_KEYS[-1]}
# With dQ apart: what leaves registers or time to a block that brings sums back.
LAST_APART: tuple[dict[str, Any], ...] = (
    {},
    {"keep_thread": True},
    {"keep_thread": True, "delta_early": False},
    KEYS_AHEAD,
    KEYS_AHEAD | {"keep_thread": True},
)
SHORT_TILE = 64, 128  # of the sm90 family for short sequences: most of a larger one is empty
NARROW = 32  # columns of dQ, of which shared memory holds more query tiles
HELD_DQ, HELD_DQ_NARROW = 4, 8
HELD_DQ_IN_PARTS = 64  # in memory, so that none is left over at the lengths that are swept

TWO_PASS_TILE_M = range(16, 129, 16)
TWO_PASS_TILE_N = (64, 128)
DQ_TILE_N = range(32, 129, 16)
DQ_STAGES = (1, 2, 3, 4)
# The passes of a candidate are launched one after the other, so that the best of each make the best pair. All forms of
# one pass are therefore combined with a few of the other, of which one or the other runs at every head dim.
DKV_FORMS: tuple[dict[str, Any], ...] = ({"tile_m": 64}, {"tile_m": 48})
DQ_FORMS: tuple[dict[str, Any], ...] = ({"k_stage": 2, "v_stage": 2}, {"k_stage": 2, "v_stage": 1})


def bwd_candidates_sm80(head_dim: int, head_dim_v: int) -> Iterator[BwdTraitsSm80]:
    """Backward candidates of the sm80 family for padded head dims; some come twice."""
    for tile_m, tile_n, warps, stages in itertools.product(SM80_TILE_M, SM80_TILE_N, SM80_WARPS, SM80_STAGES):
        plain = BwdTraitsSm80(tile_m, tile_n, head_dim, head_dim_v, num_warps=warps, stages=stages)
        for division in _divisions(warps):
            yield from _variants(dataclasses.replace(plain, **division))
    yield from _lone(head_dim, head_dim_v)


def _divisions(warps: int) -> Iterator[dict[str, Any]]:
    """How the warps of a block divide the products.

    S, dP, dV and dK have keys as rows, most of a block's, so that few warps lie along their columns.
    """
    along_keys = (warps // 4, warps // 2, warps)
    for s_warps, dkv_warps, dq_warps in itertools.product(along_keys, along_keys, (1, 2, 4)):
        yield {"s_warps": s_warps, "dkv_warps": dkv_warps, "dq_warps": dq_warps}


def _variants(base: BwdTraitsSm80) -> Iterator[BwdTraitsSm80]:
    """A division, the ways to add dQ; more resident blocks if that changes code, and switches of the plain form."""
    yield base
    if not runs_somewhere(base):
        return
    limits = set()
    deeper = dataclasses.replace(base, stages=SM80_STAGES[-1])
    deepest = base == deeper or deeper.check(AMPERE) is not None
    for blocks in range(1, SM80_MAX_BLOCKS + 1):
        traits = dataclasses.replace(base, blocks_per_sm=blocks)
        limit = traits.register_limit(AMPERE)
        if limit in limits:
            continue
        limits.add(limit)
        if not runs_somewhere(traits):
            yield traits
            return
        plainest = deepest and blocks == 1
        for adds in (*SM80_ADDS, SM80_TURNS[base.num_warps]) if plainest else SM80_ADDS:
            added = dataclasses.replace(traits, **adds)
            yield from changed(added, SM80_SWITCHES if plainest else SM80_SWITCHES[:1])
            alike = added.s_warps == added.dkv_warps == added.dq_warps
            if plainest and alike and added.vector_add and added.accumulator_regs >= SM80_FULL:
                yield dataclasses.replace(added, double_buffer=False, fresh_bounds=True)
        if plainest and base.num_warps == max(SM80_TURNS):
            yield dataclasses.replace(traits, **SM80_IDLE)


def _lone(head_dim: int, head_dim_v: int) -> Iterator[BwdTraitsSm80]:
    """Small blocks for sequences of one tile of keys."""
    common: dict[str, Any] = {"stages": 1, "double_buffer": False, "vector_add": True, **LONE}
    for (tile_m, tile_n, warps), residents in SM80_LONE.items():
        for division, blocks in itertools.product(_divisions(warps), residents):
            tile = BwdTraitsSm80(tile_m, tile_n, head_dim, head_dim_v, num_warps=warps, blocks_per_sm=blocks, **common)
            traits = dataclasses.replace(tile, **division)
            if traits.s_warps > warps // 4 and traits.dq_warps < warps:  # so that a warp has few columns of S
                count = (4 if tile_n == min(SM80_TILE_N) else 3) if runs_somewhere(traits) else 1
                yield from changed(traits, SM80_LONE_SWITCHES[:count])
                if max(head_dim, head_dim_v) > SM80_WIDE:
                    yield from changed(traits, SM80_LONE_WIDE)


def bwd_candidates_sm90(head_dim: int, head_dim_v: int) -> Iterator[BwdTraitsSm90 | BwdTwoPassTraitsSm90]:
    """Backward candidates of the sm90 family for padded head dims, in one pass and in two; some come twice."""
    yield from _one_pass(head_dim, head_dim_v)
    yield from _two_passes(head_dim, head_dim_v)


def _one_pass(head_dim: int, head_dim_v: int) -> Iterator[BwdTraitsSm90]:
    shares: tuple[DqShare, ...] = typing.get_args(DqShare)
    for tile_m, tile_n, dq in itertools.product(SM90_TILE_M, SM90_TILE_N, shares):
        shallow = BwdTraitsSm90(tile_m, tile_n, head_dim, head_dim_v, q_stage=1, do_stage=1, dq=dq)
        yield shallow
        if runs_somewhere(shallow):
            for q_stage, do_stage in itertools.product(SM90_STAGES, SM90_STAGES):
                staged = dataclasses.replace(shallow, q_stage=q_stage, do_stage=do_stage)
                for base in _switched(staged, most=None if q_stage == do_stage else 1):
                    yield from changed(base, SM90_KEYS) if runs_somewhere(base) else (base,)
                if q_stage == do_stage and (tile_m, tile_n) == SHORT_TILE:
                    yield from _lone_sm90(staged)
                    if q_stage > 1:  # with one Q a block that waits for others has nothing else to do
                        yield from _last_sm90(staged)
                if dq == "apart" and q_stage == do_stage:  # a warpgroup that has time to wait for its turn
                    alone = (base for base in _switched(staged, most=2) if not (base.persistent or base.pingpong))
                    yield from (dataclasses.replace(base, **IN_TURN) for base in alone)


def _lone_sm90(staged: BwdTraitsSm90) -> Iterator[BwdTraitsSm90]:
    """Those that store dQ, as a block that has all keys of a head can."""
    lone = dataclasses.replace(staged, **LONE)
    yield from _switched(lone, most=1)
    if lone.is_dq_apart:
        for base in _switched(dataclasses.replace(lone, persistent=True), most=None):
            held = HELD_DQ_NARROW if lone.head_dim <= NARROW else HELD_DQ
            for keys, tiles in itertools.product((SM90_KEYS[0], SM90_KEYS[-1]), (0, held)):
                yield dataclasses.replace(base, held_dq=tiles, **keys)
    elif lone.dq != "turns":
        for base in _switched(dataclasses.replace(lone, persistent=True), most=2):
            yield dataclasses.replace(base, held_dq=HELD_DQ_IN_PARTS)


def _last_sm90(staged: BwdTraitsSm90) -> Iterator[BwdTraitsSm90]:
    """Those whose last block at a tile of dQ rounds it, by chance and in turn."""
    last = dataclasses.replace(staged, **LAST)
    if last.is_dq_apart:
        for form in LAST_APART:
            yield from changed(dataclasses.replace(last, pingpong=False, **form), ({}, IN_TURN))
    elif last.dq == "columns":  # transposed is as fast with so few rows
        yield from _switched(last, most=1)
        yield dataclasses.replace(last, **IN_TURN)


def _switched(plain: BwdTraitsSm90, most: int | None) -> list[BwdTraitsSm90]:
    """Traits as they are, and with up to so many things otherwise, None is all: a switch turned, or one more tile in
    flight of what is not multiplied out."""
    others: dict[str, Any] = {}
    for field in dataclasses.fields(plain):
        if isinstance(field.default, bool) and not any(
            field.name in keys for keys in (*SM90_KEYS, IN_TURN, LONE, LAST)
        ):
            others[field.name] = not field.default
        elif field.name.endswith("_stage") and field.name not in ("q_stage", "do_stage"):
            others[field.name] = getattr(plain, field.name) + 1
    counts = range(1 + (len(others) if most is None else most))
    chosen = [some for count in counts for some in itertools.combinations(others.items(), count)]
    return [dataclasses.replace(plain, **dict(some)) for some in chosen]


def _two_passes(head_dim: int, head_dim_v: int) -> Iterator[BwdTwoPassTraitsSm90]:
    for tile_m, tile_n in itertools.product(TWO_PASS_TILE_M, TWO_PASS_TILE_N):
        shallow = BwdTwoPassTraitsSm90(tile_m, tile_n, head_dim, head_dim_v, q_stage=2, do_stage=2, **DQ_FORMS[-1])
        yield shallow
        if runs_somewhere(shallow):
            for q_stage, do_stage in itertools.product(SM90_STAGES, SM90_STAGES):
                base = dataclasses.replace(shallow, q_stage=q_stage, do_stage=do_stage)
                yield from changed(base, DQ_FORMS)
    base = BwdTwoPassTraitsSm90(64, 64, head_dim, head_dim_v)
    for dq_tile_n, k_stage, v_stage in itertools.product(DQ_TILE_N, DQ_STAGES, DQ_STAGES):
        form = dataclasses.replace(base, dq_tile_n=dq_tile_n, k_stage=k_stage, v_stage=v_stage)
        for traits in changed(form, DKV_FORMS):
            yield traits
            if runs_somewhere(traits):
                yield dataclasses.replace(traits, pingpong=False)
