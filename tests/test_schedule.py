"""The order of tiles, by the kernels' own arithmetic on host integers: each tile once, and blocks end together."""

from __future__ import annotations

import dataclasses
import heapq
import importlib.util
import inspect
import itertools
import math
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cuteflash.core.mask import IntervalMask
from cuteflash.dispatch import choose
from cuteflash.problem import LENGTH_MAX, UNBOUNDED, FwdProblem
from cuteflash.tune.cells import Cell, grid
from tests.int32 import Int32

pytestmark = pytest.mark.usefixtures("integers_of_python")

NUM_SMS = 132  # an H100 SXM
# The work of a tile beside its key blocks (loading Q, filling the pipeline, storing O), in key blocks.
TILE_OVERHEAD = 1.5
# Largest makespans of the benchmark grid: of an even split (16k tokens are 7.8 waves at head dim 256, 3 % short of 8),
# and of handing out tiles on demand, which would cost an atomic and a broadcast a tile.
MAKESPAN_OF_IDEAL, MAKESPAN_OF_ON_DEMAND = 1.05, 1.04


def untraced(name: str) -> types.ModuleType:
    """A module's own copy, whose functions are plain Python still: compiling a kernel rewrites those it traces."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"untraced {name}", found.origin)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


schedule = untraced("cuteflash.core.schedule")
TileOrder = schedule.TileOrder
RaggedOrder = schedule.RaggedOrder
schedule.greatest_common_divisor = inspect.unwrap(schedule.greatest_common_divisor)
tile_of = inspect.unwrap(TileOrder.tile)
index_of = inspect.unwrap(TileOrder.index)
schedule.owner_of = inspect.unwrap(schedule.owner_of)
for method in ("tile", "sequence_near", "sequence_end", "first", "draw", "close"):
    setattr(RaggedOrder, method, inspect.unwrap(getattr(RaggedOrder, method)))


@pytest.fixture
def tiles_of_block(monkeypatch: pytest.MonkeyPatch):
    """The tiles that a persistent block works on, in order, each as (query tile, head, batch entry)."""

    def walk(order: TileOrder, block: int, blocks: int) -> Iterator[tuple[int, int, int]]:
        monkeypatch.setattr(schedule.cute.arch, "block_idx", lambda: (block, 0, 0))
        monkeypatch.setattr(schedule.cute.arch, "grid_dim", lambda: (blocks, 1, 1))
        indices = (index_of(order, wave) for wave in itertools.count())
        return (tile_of(order, i) for i in itertools.takewhile(lambda i: i < order.size(), indices))

    return walk


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("m_blocks", [1, 2, 7])
@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (3, 1), (2, 5), (8, 4)])
def test_every_tile_is_visited_once(tiles_of_block, m_blocks: int, heads: int, batch: int, longest_first: bool) -> None:
    every = sorted(itertools.product(range(m_blocks), range(heads), range(batch)))
    for group in {1, 2, 3, heads, heads * batch} & set(range(heads * batch + 1)):
        order = TileOrder(m_blocks, heads, batch, group, longest_first, zigzag=longest_first)
        assert order.size() == len(every)
        assert sorted(tile_of(order, i) for i in range(order.size())) == every
        for blocks in {1, 2, 5, 8, len(every)} & set(range(len(every) + 1)):
            visits = [tile for b in range(blocks) for tile in tiles_of_block(order, b, blocks)]
            assert sorted(visits) == every, (order, blocks)


def test_longest_first_takes_the_last_query_tiles_of_a_group_of_heads_first() -> None:
    order = TileOrder(m_blocks=3, heads=2, batch=2, group=3, longest_first=True)
    assert [tile_of(order, i)[0] for i in range(12)] == [2, 2, 2, 1, 1, 1, 0, 0, 0, 2, 1, 0]
    assert [tile_of(order, i)[1:] for i in (0, 1, 2, 9)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_otherwise_the_tiles_of_a_head_are_neighbours() -> None:
    order = TileOrder(m_blocks=2, heads=2, batch=2, group=1, longest_first=False)
    assert [tile_of(order, i) for i in range(5)] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1)]


def test_heads_of_a_group_share_the_cache() -> None:
    assert TileOrder.head_group(16384, 1, 512) == 3  # K and V of 8 MiB a head, of 24
    assert TileOrder.head_group(16384, 4, 512) == 12  # four query heads share each
    assert TileOrder.head_group(1 << 20, 1, 512) == 1
    assert TileOrder.head_group(0, 1, 512) > 1000


@pytest.mark.parametrize("num_sms", [NUM_SMS, 114, 108, 78])  # H100 SXM and PCIe, A100, H20
@pytest.mark.parametrize("m_blocks", [1, 3, 4, 8, 11, 16, 43, 128, 132])
@pytest.mark.parametrize("heads", [1, 24, 100, 5000])
def test_the_tiles_of_a_group_fill_whole_waves(m_blocks: int, heads: int, num_sms: int) -> None:
    group = TileOrder.even_group(heads, m_blocks, num_sms)
    assert group * m_blocks % num_sms == 0
    assert group <= max(heads, num_sms)
    unit = num_sms // math.gcd(m_blocks, num_sms)  # fewer heads fill no whole waves
    assert group == max(heads // unit, 1) * unit


@pytest.mark.parametrize("seqlen_k", [1, 64, LENGTH_MAX])
@pytest.mark.parametrize(("seqlen_q", "heads"), [(LENGTH_MAX, 1), (1 << 20, 1 << 10), (1, 1 << 30)])
def test_the_order_of_many_tiles_stays_in_32_bits(seqlen_q: int, heads: int, seqlen_k: int) -> None:
    m_blocks = -(-seqlen_q // 64)
    heads = Int32(heads)
    group = min(
        TileOrder.even_group(TileOrder.head_group(Int32(seqlen_k), Int32(1), 32), Int32(m_blocks), Int32(NUM_SMS)),
        heads,
    )
    plain, longest_first = (TileOrder(Int32(m_blocks), heads, Int32(1), group, first) for first in (False, True))
    last = plain.size() - 1
    assert tile_of(plain, last) == (m_blocks - 1, heads - 1, 0)
    assert tile_of(longest_first, last) == (0, heads - 1, 0)
    assert tile_of(longest_first, Int32(0)) == (m_blocks - 1, 0, 0)


def work_of(cell: Cell, order: TileOrder, tile_m: int, tile_n: int) -> list[float]:
    """What the query tiles of a head cost, in key blocks."""
    mask = IntervalMask("causal", cell.seqlen, cell.seqlen, UNBOUNDED, 0)
    ranges = ((m * tile_m, min((m + 1) * tile_m, cell.seqlen) - 1) for m in range(order.m_blocks))
    return [TILE_OVERHEAD + hi - lo for lo, hi in (mask.n_blocks(first, last, tile_n) for first, last in ranges)]


def on_demand(works: list[float], workers: int) -> float:
    """When the last of `workers` ends if each takes the next work as soon as it is free."""
    ends = [0.0] * workers
    for work in works:
        heapq.heapreplace(ends, ends[0] + work)
    return max(ends)


@pytest.mark.parametrize("cell", grid(masks=["causal"]), ids=lambda cell: cell.label)
def test_blocks_of_causal_problems_end_together(tiles_of_block, cell: Cell) -> None:
    traits = choose(FwdProblem.dense("bf16", cell.head_dim, cell.head_dim, "causal"), "sm_90a").traits
    kv_row_bytes = 2 * 2 * cell.head_dim
    m_blocks = -(-cell.seqlen // traits.tile_m)
    group = TileOrder.even_group(TileOrder.head_group(cell.seqlen, 1, kv_row_bytes), m_blocks, NUM_SMS)
    order = TileOrder(m_blocks, cell.heads, cell.batch, min(group, cell.heads * cell.batch), True, zigzag=True)
    work = work_of(cell, order, traits.tile_m, traits.tile_n)
    ends = [sum(work[m_block] for m_block, _, _ in tiles_of_block(order, block, NUM_SMS)) for block in range(NUM_SMS)]
    queue = [work[tile_of(order, i)[0]] for i in range(order.size())]
    ideal = max(sum(queue) / NUM_SMS, max(work))
    assert max(ends) <= MAKESPAN_OF_IDEAL * ideal
    assert max(ends) <= MAKESPAN_OF_ON_DEMAND * on_demand(queue, NUM_SMS)


class Ballot(Exception):
    """A lane asks for the votes of its warp."""


class Warp:
    """Runs a function as 32 lanes in step: from the start up to each vote, until all of them are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lane, self.known = 0, iter(())
        monkeypatch.setattr(schedule, "Int32", int)
        monkeypatch.setattr(schedule, "Float32", float)
        monkeypatch.setattr(schedule, "Boolean", bool)
        arch = schedule.cute.arch
        monkeypatch.setattr(arch, "lane_idx", lambda: self.lane)
        monkeypatch.setattr(arch, "popc", int.bit_count)
        monkeypatch.setattr(arch, "vote_ballot_sync", self._vote)

    def _vote(self, vote: bool) -> int:
        for votes in self.known:
            return votes
        raise Ballot(vote)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What all lanes return; the number of votes is then `self.votes`."""
        known: list[int] = []
        while True:
            results, votes = set(), 0
            for self.lane in range(32):
                self.known = iter(known)
                try:
                    results.add(function(*arguments))
                except Ballot as ballot:
                    votes |= ballot.args[0] << self.lane
                    results.add(None)
            (result,) = results  # no lane leaves the loop before the others
            if result is not None:
                self.votes = len(known)
                return result
            known.append(votes)


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> Warp:
    return Warp(monkeypatch)


def ragged(lengths: list[int], rest: int = 0, heads: int = 1, group: int = 1, tokens: int = 4, **more: Any) -> Any:
    cu = [0, *itertools.accumulate(lengths)]
    more = {"counter": [0], "longest_first": False, "passes": 1} | more
    return RaggedOrder(cu, rows=cu[-1] + rest, heads=heads, batch=len(lengths), group=group, tile_tokens=tokens, **more)


@pytest.mark.parametrize(("longest_first", "passes"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("lengths", [[4, 8], [0, 9, 0], [1] * 5, [17, 0, 3, 4]], ids=str)
def test_every_tile_of_packed_sequences_has_one_number(
    warp: Warp, lengths: list[int], heads: int, group: int, longest_first: bool, passes: int
) -> None:
    for rest in (0, 6):
        order = ragged(lengths, rest, heads, group, longest_first=longest_first, passes=passes)
        found = [warp(order.tile, index) for index in range(order.size())]
        rows = [*lengths, rest]
        every = itertools.product(range(heads), [(m, b) for b, n in enumerate(rows) for m in range(-(-n // 4))])
        real = [(m, head, b) for m, head, b in found if m * 4 < rows[b]]
        assert sorted(real) == sorted((m, head, b) for head, (m, b) in every)
        assert all(m >= 0 for m, _, _ in found)


def test_a_search_takes_one_step_for_each_power_of_97(warp: Warp) -> None:
    for batch, steps in ((1, 1), (96, 1), (97, 2), (9408, 2), (9409, 3)):
        lengths = [n % 7 for n in range(batch)]
        order = ragged(lengths, rest=3)
        begins = [number for n, row in enumerate(order.cu_q) for number in [row // 4 + n]]
        votes = []
        for number in {0, 1, begins[batch // 2], begins[-1] - 1, begins[-1], order.head_size() - 1}:
            owner = max(n for n, begin in enumerate(begins) if begin <= number)
            assert warp(order.sequence_of, number) == owner
            votes.append(warp.votes)
        assert max(votes) == steps * schedule.PROBES


def test_near_a_hint_a_sequence_is_found_in_one_vote(warp: Warp) -> None:
    lengths = [n % 7 for n in range(1089)]
    order = ragged(lengths, rest=3)
    begins = [row // 4 + n for n, row in enumerate(order.cu_q)]
    for hint in (0, 500, 1060, 1089):
        for ahead in (0, 1, 30, 31, 200, -1, -hint):
            owner = min(max(hint + ahead, 0), len(lengths))
            for number in (begins[owner], order.sequence_end(owner) - 1):
                assert warp(order.sequence_near, number, hint) == owner
                assert (warp.votes == 1) == (hint <= owner < hint + 31)


def test_tiles_are_the_same_with_and_without_a_hint(warp: Warp) -> None:
    order = ragged([9, 0, 30, 2, 0, 0, 5], heads=3, group=2, longest_first=True, passes=2)
    hint = 0
    for index in range(order.size()):  # as a block draws them; a group and a pass begin with the first sequence again
        expected = warp(order.tile, index)
        assert warp(order.tile, index, hint) == expected
        hint = expected[-1]


@pytest.mark.parametrize("lengths", [[16] * 4096, [1, 16, 5, 9] * 300, [16]], ids=len)
def test_sequences_that_are_alike_are_found_in_one_vote(warp: Warp, lengths: list[int]) -> None:
    order = ragged(lengths, rest=3, tokens=32, alike=True)
    last = order.head_size() - 1
    for number in (0, 1, last // 3, last // 2, last - 1, last):
        found = warp(order.tile, number)
        assert warp.votes == 1
        assert found == warp(dataclasses.replace(order, alike=False).tile, number)


def test_sequences_that_are_not_alike_are_found_too(warp: Warp) -> None:
    order = ragged([1] * 200 + [1000] + [1] * 300, rest=40, alike=True)
    for number in range(0, order.head_size(), 89):
        assert warp(order.tile, number) == warp(dataclasses.replace(order, alike=False).tile, number)


def test_longest_first_takes_the_last_tiles_of_a_sequence_first(warp: Warp) -> None:
    order = ragged([12, 5], heads=2, group=2, longest_first=True)
    found = [warp(order.tile, index) for index in range(order.size())]
    real = [(m, head, b) for m, head, b in found if m * 4 < [12, 5, 0][b]]
    assert real == [(m, h, b) for m, b in ((2, 0), (1, 0), (0, 0), (1, 1), (0, 1)) for h in (0, 1)]


def test_in_two_passes_the_upper_halves_of_all_sequences_come_first(warp: Warp) -> None:
    order = ragged([12, 14], heads=3, group=2, longest_first=True, passes=2)
    found = [warp(order.tile, index) for index in range(order.size())]
    real = [(m, head, b) for m, head, b in found if m * 4 < [12, 14, 0][b]]
    halves = [[(2, 0), (3, 1), (2, 1)], [(1, 0), (0, 0), (1, 1), (0, 1)]]
    groups = ((0, 1), (2,))
    assert real == [(m, head, b) for heads in groups for half in halves for m, b in half for head in heads]


def test_sequences_of_a_few_tiles_get_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "Int32", int)
    passes = inspect.unwrap(RaggedOrder.best_passes)
    assert [passes(mean, 128) for mean in (16, 255, 256, 1024, 1025, 8192)] == [1, 1, 2, 2, 1, 1]


def test_a_group_of_packed_heads_is_wide_and_whole() -> None:
    assert [RaggedOrder.wide_group(1, 1), RaggedOrder.wide_group(40, 4)] == [32, 40]
    assert [RaggedOrder.wide_group(5, 5), RaggedOrder.wide_group(1, 64)] == [35, 64]


@pytest.mark.parametrize("draws_first", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_each_tile_is_drawn_once_and_the_counter_is_left_at_zero(
    warp: Warp, monkeypatch: pytest.MonkeyPatch, blocks: int, draws_first: bool
) -> None:
    counter = Counter()
    order = ragged([9, 0, 30, 2], heads=2, counter=counter, draws_first=draws_first)
    arch = schedule.cute.arch
    monkeypatch.setattr(arch, "grid_dim", lambda: (blocks, 1, 1))
    monkeypatch.setattr(arch, "atomic_add", Counter.add)
    monkeypatch.setattr(arch, "thread_idx", lambda: (96, 0, 0))
    monkeypatch.setattr(arch, "make_warp_uniform", lambda value: value)
    warp.lane = 0  # the one that draws
    for launch in range(3):
        seen = []
        pick = random.Random(launch)
        waiting, at = set(range(blocks)), {}
        while waiting or at:
            block = pick.choice([*waiting, *at])
            if block in waiting:
                waiting.remove(block)
                monkeypatch.setattr(arch, "block_idx", lambda block=block: (block, 0, 0))
                at[block] = order.first()
            elif at[block] < order.size():
                seen.append(at[block])
                at[block] = order.drawn(order.draw())
            else:
                order.close(at.pop(block))
            if draws_first:  # blocks that run have drawn all before it, whichever blocks wait
                drawn = sorted(x for x in (*seen, *at.values()) if x < order.size())
                assert drawn == list(range(len(drawn)))
        assert sorted(seen) == list(range(order.size()))
        assert counter.value == 0


class Counter:
    """An integer in memory."""

    value = 0

    @property
    def iterator(self) -> Counter:
        return self

    def add(self, value: int) -> int:
        self.value += value
        return self.value - value

    def __setitem__(self, index: int, value: int) -> None:
        self.value = value
