"""The order of a backward's key tiles: which heads run at the same time, by the kernels' own arithmetic."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

from cuteflash.arguments import BwdScalars, PackedTensors
from cuteflash.core import schedule
from cuteflash.core.bwd_launch import LONE_HEADS, LONE_ROUNDS, key_order, lone_heads
from cuteflash.core.tile_numbers import count_tiles
from cuteflash.problem import BwdProblem, MaskKind, Storage

NUM_SMS = 132
HEAD_DIM = 64  # Q, dO and the fp32 sum of dQ take 512 bytes a row
ROWS_IN_L2 = (24 << 20) // (8 * HEAD_DIM)
SCALARS = BwdScalars(0.1, 0.0, -1, -1, 0, NUM_SMS)
PACKED = Storage("varlen", "varlen")


def tensor(*shape: int) -> Any:
    return SimpleNamespace(shape=shape)


def order_of(
    storage: Storage,
    batch: int,
    seqlen: int,
    heads: tuple[int, int] = (32, 32),
    mask: MaskKind = "causal",
    is_deterministic: bool = False,
    heads_at_once: int | None = None,
    **traits_of: Any,
) -> Any:
    """The order for `batch` sequences of one length."""
    dense = BwdProblem.dense("bf16", HEAD_DIM, HEAD_DIM, mask, deterministic=is_deterministic)
    traits = SimpleNamespace(family="sm90", head_dim=HEAD_DIM, tile_m=64, tile_n=128, turns_at_once=0)
    vars(traits).update(persistent=False, lone_blocks=False, held_dq=0, in_turn=False, first_stores=True)
    vars(traits).update(traits_of)
    kernel = SimpleNamespace(traits=traits, problem=dataclasses.replace(dense, storage=storage))
    entries = (batch, seqlen) if storage.k == "dense" else (1, batch * seqlen)
    q, k = (tensor(*entries, count, HEAD_DIM) for count in heads)
    cu = None if storage.k == "dense" else tensor(batch + 1)
    tensors: Any = SimpleNamespace(q=q, k=k)
    return key_order(kernel, tensors, PackedTensors(cu, cu), SCALARS, heads_at_once)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "seqlen", "group"),
    [(1, ROWS_IN_L2 // 3, 3), (2, 8192, 3), (64, ROWS_IN_L2 // 8, 2), (1, 4 * ROWS_IN_L2, 1), (1024, 16, 32)],
)
def test_heads_of_packed_sequences_that_run_together_share_l2(batch: int, seqlen: int, group: int) -> None:
    assert order_of(PACKED, batch, seqlen).group == group


def test_fewer_heads_run_together_if_long_sequences_add_to_all_of_their_dq() -> None:
    """Under a full mask a packed sequence is reckoned to be up to 12 times the mean long, under others 4 times."""
    assert order_of(PACKED, 64, ROWS_IN_L2 // 48, mask="full").group == 4
    assert order_of(PACKED, 64, ROWS_IN_L2 // 48).group == 12
    assert order_of(PACKED, 64, ROWS_IN_L2 // 48, mask="full", first_stores=False).group == 12  # no sums in memory


@pytest.mark.parametrize(
    ("batch", "heads", "at_once"),
    [(4096, 32, LONE_HEADS), (4096, 3, 3 * 6145 // (4 * NUM_SMS) // LONE_ROUNDS), (64, 12, 1)],
)
def test_a_block_takes_several_heads_of_a_tiny_packed_sequence_if_enough_blocks_are_left(
    batch: int, heads: int, at_once: int
) -> None:
    traits = SimpleNamespace(lone_blocks=True, tile_n=32, blocks_per_sm=4)
    kernel: Any = SimpleNamespace(traits=traits, problem=SimpleNamespace(storage=PACKED))
    tensors: Any = SimpleNamespace(k=tensor(1, batch * 16, heads, HEAD_DIM))
    cu = tensor(batch + 1)
    assert lone_heads(kernel, tensors, PackedTensors(cu, cu), SCALARS) == at_once


def test_heads_that_one_block_takes_have_one_tile() -> None:
    order = order_of(PACKED, 4096, 16, lone_blocks=True, heads_at_once=8)
    assert order.heads == 4 and order.size() == 4 * count_tiles(65536, 4096, 128)


def test_heads_of_a_short_dense_batch_run_side_by_side_if_blocks_take_turns() -> None:
    dense = Storage("dense", "dense")
    alone, in_turn = (order_of(dense, 32, 512, mask="full", in_turn=in_turn) for in_turn in (False, True))
    assert alone.group == 1 and in_turn.group == ROWS_IN_L2 // 512
    assert order_of(PACKED, 32, 512, mask="full", in_turn=True).group == order_of(PACKED, 32, 512, mask="full").group


@pytest.mark.parametrize("storage", [PACKED, Storage("dense", "dense")], ids=["packed", "dense"])
def test_of_a_deterministic_backward_few_tiles_of_a_head_run_together(storage: Storage) -> None:
    assert order_of(storage, 1, 4 * ROWS_IN_L2).group == 1
    assert order_of(storage, 1, 4 * ROWS_IN_L2, (64, 64), is_deterministic=True, turns_at_once=4).group == NUM_SMS // 4
    assert order_of(storage, 1, 4 * ROWS_IN_L2, is_deterministic=True, turns_at_once=4).group == 32  # there are no more
    assert order_of(storage, 1, 4 * ROWS_IN_L2, is_deterministic=True).group == 1  # any number may run together


@pytest.mark.parametrize(
    ("mask", "seqlen", "heads", "group"),
    [
        ("full", 1024, (32, 32), 17),  # 16 steps a tile: 8.25 of 132 blocks begin in each
        ("full", 1024, (64, 32), 9),
        ("full", 4096, (32, 32), 5),
        ("causal", 1024, (64, 64), 33),  # half as many steps on average
        ("causal", 1024, (32, 32), 32),  # there are no more
        ("window", 8192, (32, 32), 5),
    ],
)
def test_packed_blocks_that_take_turns_begin_two_steps_after_those_before_them(
    mask: MaskKind, seqlen: int, heads: tuple[int, int], group: int
) -> None:
    assert order_of(PACKED, 64, seqlen, heads, mask, is_deterministic=True).group == group
    assert order_of(PACKED, 64, seqlen, heads, mask).group < group
    waits_for_none = order_of(PACKED, 64, seqlen, heads, mask, is_deterministic=True, first_stores=False)
    assert waits_for_none.group == order_of(PACKED, 64, seqlen, heads, mask, first_stores=False).group


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_tiles_of_persistent_blocks_that_differ_fill_whole_waves_there_and_back(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "greatest_common_divisor", math.gcd)  # the kernels' own is traced
    dense = Storage("dense", "dense")
    causal = order_of(dense, 64, 2048, is_deterministic=is_deterministic, persistent=True)
    assert causal.group * causal.m_blocks % NUM_SMS == 0 and causal.zigzag
    full = order_of(dense, 64, 2048, mask="full", is_deterministic=is_deterministic, persistent=True)
    assert full.group == ROWS_IN_L2 // 2048 and not full.zigzag


@pytest.mark.parametrize(("seqlen", "group"), [(1024, 1), (2048, ROWS_IN_L2 // 2048), (4 * ROWS_IN_L2, 1)])
def test_heads_of_a_full_mask_run_side_by_side_in_long_loops(seqlen: int, group: int) -> None:
    order = order_of(Storage("dense", "dense"), 8, seqlen, mask="full")
    assert order.group == group and order.longest_first
    assert not order_of(Storage("dense", "dense"), 8, seqlen, mask="full", family="sm80").longest_first


def test_query_heads_of_one_kv_head_are_in_l2_together() -> None:
    assert order_of(PACKED, 2, 8192, (32, 32)).group == 3
    assert order_of(PACKED, 2, 8192, (64, 32)).group == 1
