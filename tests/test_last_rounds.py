"""Blocks that round dQ once all others have added to it: who is the last one, and what is left for the next kernel."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from cuteflash.core.mask import IntervalMask
from cuteflash.kernels.common.bwd_finish import DqParts
from cuteflash.problem import DENSE, MASK_KINDS, BwdProblem, MaskKind, Storage
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from tests.visits import visits

PACKED = Storage("varlen", "varlen")
HOPPER = get_arch("sm_90a")
PARTS = BwdTraitsSm90(64, 128, 128, 128, last_rounds=True)
APART = BwdTraitsSm90(
    64, 128, 64, 64, kv_stage=2, q_stage=3, do_stage=3, dq="apart", pingpong=False, persistent=True, last_rounds=True
)


@pytest.mark.usefixtures("selects_now")
@pytest.mark.parametrize("tile", [(2, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("mask", MASK_KINDS)
def test_as_many_key_tiles_visit_a_query_tile_as_its_last_one_counts(mask: MaskKind, tile: tuple[int, int]) -> None:
    """Each of them once, and with turns they come in ascending order: a count that is never reached would wait."""
    windows = itertools.product((0, 2, 13), (0, 3)) if mask == "window" else [(0, 0)]
    chunks = (None, 3, 7) if mask == "window" else (None,)
    for (left, right), chunk, seqlen_q, seqlen_k in itertools.product(windows, chunks, (1, 5, 11, 24), (1, 8, 13, 30)):
        interval: Any = IntervalMask(mask, seqlen_q, seqlen_k, left, right, chunk)
        turns: dict[int, list[tuple[int, int]]] = {}
        for key_tile, m_block in visits(interval, *tile, is_descending=True):
            turns.setdefault(m_block, []).append(key_tile.turn_at(m_block))
        for found in turns.values():
            assert found == [(before, len(found) - 1 - before) for before in range(len(found))]


@pytest.mark.usefixtures("selects_now")
@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        (((0, 0),), {(0, 0): 10, (63, 63): 10}),
        (((0, 0), (64, 0)), {(0, 63): 10, (63, 0): 10, (64, 0): 11, (127, 63): 11}),
        (((0, 0), (0, 32)), {(0, 31): 10, (63, 0): 10, (0, 32): 11, (63, 63): 11}),
    ],
)
def test_each_element_belongs_to_the_part_that_holds_it(origins: Any, expected: dict[tuple[int, int], int]) -> None:
    unused: Any = None
    parts = DqParts(unused, 128, (64, 64), origins)
    values: Any = tuple(range(10, 10 + len(origins)))
    assert {place: parts.of_part(*place, values) for place in expected} == expected  # type: ignore[arg-type]


def test_word_of_the_sum_takes_a_few_bytes_of_shared_memory() -> None:
    for traits in (PARTS, APART):
        assert traits.check(HOPPER) is None
        plain = dataclasses.replace(traits, last_rounds=False)
        assert 4 * traits.dq_stages <= traits.smem_bytes - plain.smem_bytes <= 16 * traits.dq_stages


@pytest.mark.parametrize(
    ("change", "words"), [({"lone_tiles": True}, "last_rounds with lone_tiles"), ({"dq": "turns"}, "'turns'")]
)
def test_what_last_rounds_does_not_go_with(change: dict[str, Any], words: str) -> None:
    assert words in str(dataclasses.replace(PARTS, **change).check(HOPPER))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "storage", "in_turn"),
    [("full", DENSE, False), ("causal", DENSE, True), ("causal", PACKED, False)],
    ids=["full", "causal in turn", "packed"],
)
@pytest.mark.parametrize("traits", [PARTS, APART], ids=["parts", "apart"])
def test_a_last_block_that_rounds_does_not_spill(
    traits: BwdTraitsSm90, mask: MaskKind, storage: Storage, in_turn: bool, kernels: Any
) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.kernels.sm90.bwd import FlashBwdSm90

    head_dim = traits.head_dim
    problem = dataclasses.replace(BwdProblem.dense("bf16", head_dim, head_dim, mask), storage=storage)
    compiled = kernels(FlashBwdSm90, dataclasses.replace(traits, in_turn=in_turn), problem, "sm_90a")
    compiled.assert_clean()
