"""dQ that a block holds while it goes through all keys of a short sequence: when it begins and when it is complete."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from cuteflash.core.mask import IntervalMask
from cuteflash.core.tile import holds_dq
from cuteflash.problem import MASK_KINDS, BwdProblem, MaskKind
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from tests.visits import visits

HOPPER = get_arch("sm_90a")
HELD = BwdTraitsSm90(
    64, 128, 64, 64, kv_stage=2, dq="apart", pingpong=False, persistent=True, lone_tiles=True, held_dq=4
)


@pytest.mark.usefixtures("selects_now")
@pytest.mark.parametrize("is_spread", [False, True])
@pytest.mark.parametrize("mask", MASK_KINDS)
def test_the_first_visit_to_a_query_tile_begins_its_sum_and_the_last_completes_it(
    mask: MaskKind, is_spread: bool
) -> None:
    windows = itertools.product((0, 2, 9), (0, 3, 9)) if mask == "window" else [(0, 0)]
    chunks = (None, 3, 7) if mask == "window" else (None,)
    for (left, right), chunk, seqlen_q, seqlen_k in itertools.product(windows, chunks, (1, 4, 5, 11), (1, 5, 8, 13)):
        interval: Any = IntervalMask(mask, seqlen_q, seqlen_k, left, right, chunk)
        if not holds_dq(seqlen_q, seqlen_k, mask, 1, 2, 8):
            continue
        seen: dict[int, list[tuple[int, int]]] = {}
        for tile, m_block in visits(interval, 2, 4, is_spread=is_spread):
            seen.setdefault(m_block, []).append(tile.turn_at(m_block))
        assert sorted(seen) == list(range(-(-seqlen_q // 2)))
        for turns in seen.values():
            assert turns == [(before, len(turns) - 1 - before) for before in range(len(turns))]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "mask", "heads", "held"),
    [
        (256, 256, "causal", 1, True),
        (257, 257, "causal", 1, False),  # five tiles
        (128, 128, "causal", 2, True),
        (128, 128, "causal", 3, False),
        (256, 4096, "full", 1, True),
        (256, 255, "full", 1, True),
        (256, 255, "causal", 1, False),  # the first query sees no key
        (256, 0, "full", 1, False),
    ],
)
def test_dq_is_held_if_there_is_room_and_every_query_sees_a_key(
    seqlen_q: int, seqlen_k: int, mask: MaskKind, heads: int, held: bool
) -> None:
    assert holds_dq(seqlen_q, seqlen_k, mask, heads, HELD.tile_m, HELD.held_dq) == held


def test_each_query_tile_has_a_part_of_shared_memory_and_barriers() -> None:
    plain = dataclasses.replace(HELD, held_dq=0)
    assert HELD.smem_plan["dq"].stages == 4 and plain.smem_plan["dq"].stages == 2
    barriers = (one.smem_plan["barriers"].nbytes for one in (HELD, plain))
    assert next(barriers) - next(barriers) == 2 * 2 * 8
    assert HELD.check(HOPPER) is None and "shared memory" in str(dataclasses.replace(HELD, held_dq=8).check(HOPPER))


def test_parts_of_dq_go_to_memory_and_take_no_more_of_shared_memory() -> None:
    parts = dataclasses.replace(HELD, head_dim=128, head_dim_v=128, dq="columns", kv_stage=1, held_dq=64)
    assert parts.check(HOPPER) is None
    assert parts.smem_plan["dq"] == dataclasses.replace(parts, held_dq=0).smem_plan["dq"]


@pytest.mark.parametrize("change", [{"persistent": False, "kv_stage": 1}, {"lone_tiles": False}, {"dq": "turns"}])
def test_only_persistent_blocks_that_store_dq_hold_it(change: dict[str, Any]) -> None:
    assert "held_dq 4 needs" in str(dataclasses.replace(HELD, **change).check(HOPPER))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASK_KINDS)
def test_a_kernel_that_holds_dq_does_not_spill(mask: MaskKind, kernels: Any) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.kernels.sm90.bwd import FlashBwdSm90

    traits = dataclasses.replace(HELD, k_in_regs=True, v_in_regs=True)
    compiled = kernels(FlashBwdSm90, traits, BwdProblem.dense("bf16", 64, 64, mask), "sm_90a")
    compiled.assert_clean()
