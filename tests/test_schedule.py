"""The order of tiles, by the kernels' own arithmetic on host integers: each tile once, and blocks end together."""

from __future__ import annotations

import heapq
import importlib.util
import inspect
import itertools
import math
import sys
import types
from collections.abc import Iterator

import pytest

from cuteflash.core.mask import IntervalMask
from cuteflash.dispatch import choose
from cuteflash.problem import LENGTH_MAX, UNBOUNDED, FwdProblem
from cuteflash.tune.cells import Cell, grid
from tests.int32 import Int32

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
schedule.greatest_common_divisor = inspect.unwrap(schedule.greatest_common_divisor)
tile_of = inspect.unwrap(TileOrder.tile)
index_of = inspect.unwrap(TileOrder.index)


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
        order = TileOrder(m_blocks, heads, batch, group, longest_first)
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
    order = TileOrder(m_blocks, cell.heads, cell.batch, min(group, cell.heads * cell.batch), True)
    work = work_of(cell, order, traits.tile_m, traits.tile_n)
    ends = [sum(work[m_block] for m_block, _, _ in tiles_of_block(order, block, NUM_SMS)) for block in range(NUM_SMS)]
    queue = [work[tile_of(order, i)[0]] for i in range(order.size())]
    ideal = max(sum(queue) / NUM_SMS, max(work))
    assert max(ends) <= MAKESPAN_OF_IDEAL * ideal
    assert max(ends) <= MAKESPAN_OF_ON_DEMAND * on_demand(queue, NUM_SMS)
