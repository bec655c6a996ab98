"""Interval masks against their definition: every element of small problems, the block ranges of 2**30-long ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuteflash.arguments import mask_of_window
from cuteflash.core.mask import IntervalMask
from cuteflash.core.tile import KeyTile
from cuteflash.problem import LENGTH_MAX, UNBOUNDED, has_left_edge
from tests.int32 import Int32

pytestmark = pytest.mark.usefixtures("integers_of_python")

LENGTHS_Q, LENGTHS_K, SIDES = (1, 2, 5), (0, 1, 3, 7), (-1, 0, 1, 2, 5, 9)
CHUNKS, CHUNKED_SIDES = (1, 2, 3, 7, UNBOUNDED), (-1, 0, 2)
TILES = (1, 2, 3, 4, 16)
OVERHANG = 192  # rows of the last tile that lie beyond the queries; the kernels compute their bounds too


def small_masks() -> list[tuple[IntervalMask, int, int]]:
    """Masks of every kind, each with the window (-1 is unbounded) that defines it."""
    masks = []
    for s_q, s_k, left, right in itertools.product(LENGTHS_Q, LENGTHS_K, SIDES, SIDES):
        kind, *sides = mask_of_window(left, right, s_q)
        masks.append((IntervalMask(kind, s_q, s_k, *sides), left, right))
        if kind != "window":  # the kernels with both edges compute the same
            masks.append((IntervalMask("window", s_q, s_k, *sides), left, right))
    for s_q, s_k, left, right in itertools.product(LENGTHS_Q, LENGTHS_K, CHUNKED_SIDES, CHUNKED_SIDES):
        for chunk in CHUNKS:
            kind, *sides = mask_of_window(left, right, s_q, chunk)
            masks.append((IntervalMask(kind, s_q, s_k, *sides, chunk), left, right))
    return masks


def sees(mask: IntervalMask, left: int, right: int, query: int, key: int) -> bool:
    """The definition."""
    position = query + mask.seqlen_k - mask.seqlen_q
    distance = key - position
    if mask.chunk is not None and key // mask.chunk != position // mask.chunk:
        return False
    return (left < 0 or distance >= -left) and (right < 0 or distance <= right)


def test_bounds_are_the_definition() -> None:
    for mask, left, right in small_masks():
        for query in range(mask.seqlen_q):
            lo, hi = mask.kv_bounds(query)
            visible = [key for key in range(mask.seqlen_k) if sees(mask, left, right, query, key)]
            assert list(range(max(lo, 0), min(hi, mask.seqlen_k))) == visible == list(range(lo, hi)), (mask, query)


@pytest.mark.parametrize("tile_n", TILES)
def test_visited_blocks_are_those_with_a_visible_key(tile_n: int) -> None:
    for mask, left, right in small_masks():
        for first, last in itertools.combinations_with_replacement(range(mask.seqlen_q), 2):
            pairs = itertools.product(range(first, last + 1), range(mask.seqlen_k))
            keys = {key for query, key in pairs if sees(mask, left, right, query, key)}
            n_lo, n_hi = mask.n_blocks(first, last, tile_n)
            assert 0 <= n_lo <= n_hi
            assert set(range(n_lo, n_hi)) == {key // tile_n for key in keys}, (mask, first, last)


@pytest.mark.parametrize("tile_n", TILES)
def test_blocks_without_an_element_mask_are_those_seen_whole(tile_n: int) -> None:
    for mask, left, right in small_masks():
        blocks = range(mask.seqlen_k // tile_n + 1)
        for first, last in itertools.combinations_with_replacement(range(mask.seqlen_q), 2):
            pairs = {
                block: itertools.product(range(first, last + 1), range(block * tile_n, (block + 1) * tile_n))
                for block in blocks
            }
            whole = {
                block
                for block in blocks
                if all(key < mask.seqlen_k and sees(mask, left, right, i, key) for i, key in pairs[block])
            }
            assert set(range(*mask.full_n_blocks(first, last, tile_n))) == whole, (mask, first, last)


def test_query_bounds_are_the_definition() -> None:
    for mask, left, right in small_masks():
        for key in range(mask.seqlen_k):
            lo, hi = mask.q_bounds(key)
            visible = [query for query in range(mask.seqlen_q) if sees(mask, left, right, query, key)]
            assert list(range(lo, hi)) == visible, (mask, key)


def test_query_blocks_of_keys_are_those_that_see_one_and_those_that_see_all() -> None:
    for mask, left, right in small_masks():
        seen = [[sees(mask, left, right, query, key) for key in range(mask.seqlen_k)] for query in range(mask.seqlen_q)]
        for first, last in itertools.combinations_with_replacement(range(mask.seqlen_k), 2):
            some = [any(row[first : last + 1]) for row in seen]
            each = [all(row[first : last + 1]) for row in seen]
            for tile_m in TILES:
                m_lo, m_hi = mask.m_blocks(first, last, tile_m)
                assert 0 <= m_lo <= m_hi
                visited = {query // tile_m for query, sees_one in enumerate(some) if sees_one}
                assert set(range(m_lo, m_hi)) == visited, (mask, first, last, tile_m)
                blocks = range(mask.seqlen_q // tile_m)
                whole = {block for block in blocks if all(each[block * tile_m : (block + 1) * tile_m])}
                assert set(range(*mask.full_m_blocks(first, last, tile_m))) == whole, (mask, first, last, tile_m)


@pytest.mark.usefixtures("selects_now")
@pytest.mark.parametrize(("is_descending", "is_spread"), [(False, False), (True, False), (False, True)])
def test_each_query_block_of_a_key_tile_is_visited_once(is_descending: bool, is_spread: bool) -> None:
    for mask, _, _ in small_masks():
        for n_block in range(-(-mask.seqlen_k // 3)):
            tile = KeyTile(n_block, 0, 0, 0, 0, 0, 3 * n_block, mask, tile_m=2, tile_n=3)
            blocks = tile.query_blocks(is_descending, is_spread)
            visited, m_block = [], blocks.first
            for _ in range(blocks.count):
                visited.append(m_block)
                m_block = blocks.following(m_block)
            assert sorted(visited) == list(range(blocks.lo, blocks.hi))
            assert m_block == blocks.first or not visited  # the next head's begin as this one's did
            if not is_spread:
                assert visited == sorted(visited, reverse=is_descending)


@pytest.mark.usefixtures("selects_now")
def test_key_tiles_that_see_the_same_queries_begin_far_from_each_other() -> None:
    mask = IntervalMask("full", 512, 512, UNBOUNDED, UNBOUNDED)
    tiles = (KeyTile(n, 0, 0, 0, 0, 0, 128 * n, mask, tile_m=64, tile_n=128) for n in range(4))
    assert [tile.query_blocks(is_spread=True).first for tile in tiles] == [0, 2, 4, 6]


lengths = st.integers(1, 5000) | st.integers(LENGTH_MAX - 5000, LENGTH_MAX) | st.integers(1, LENGTH_MAX)
chunks = st.integers(1, 600) | st.integers(1, UNBOUNDED) | st.just(UNBOUNDED)
sides = st.integers(0, 600) | st.integers(0, UNBOUNDED) | st.just(UNBOUNDED)


@st.composite
def large_masks(draw: st.DrawFn) -> IntervalMask:
    kind = draw(st.sampled_from(["full", "causal", "window"]))
    chunk = Int32(draw(chunks)) if kind == "window" and draw(st.booleans()) else None
    return IntervalMask(kind, *(Int32(draw(side)) for side in (lengths, lengths, sides, sides)), chunk)


@given(large_masks(), st.data())
def test_bounds_of_long_sequences_stay_in_32_bits(mask: IntervalMask, data: st.DataObject) -> None:
    mask.kv_bounds(mask.seqlen_q + data.draw(st.integers(0, OVERHANG)))  # no result, but no overflow either
    query = data.draw(st.integers(0, mask.seqlen_q - 1) | st.just(0) | st.just(mask.seqlen_q - 1))
    lo, hi = mask.kv_bounds(Int32(query))
    s_q, s_k = int(mask.seqlen_q), int(mask.seqlen_k)
    left = mask.window_left if mask.kind == "window" else UNBOUNDED
    right = {"full": UNBOUNDED, "causal": 0, "window": mask.window_right}[mask.kind]
    position = query + s_k - s_q
    first, last = 0, s_k
    if mask.chunk is not None:
        first = position // int(mask.chunk) * int(mask.chunk)
        last = first + int(mask.chunk)
    expected_lo = max(0 if left == UNBOUNDED else max(position - int(left), 0), first)
    expected_hi = min(s_k if right == UNBOUNDED else min(position + int(right) + 1, s_k), last)
    if mask.chunk is None or position >= 0:
        assert (lo, hi) == (expected_lo, expected_hi)
    else:
        assert lo >= 0 >= hi


@given(large_masks(), st.sampled_from([16, 48, 64, 80, 112, 128, 192]), st.integers(1, 192), st.data())
def test_block_ranges_of_long_sequences_are_tight(mask: IntervalMask, tile_n: int, tile_m: int, data: st.DataObject):
    first = Int32(data.draw(st.integers(0, mask.seqlen_q - 1)))
    last = min(first + tile_m, mask.seqlen_q) - 1
    n_lo, n_hi = map(int, mask.n_blocks(first, last, tile_n))
    full_lo, full_hi = map(int, mask.full_n_blocks(first, last, tile_n))
    (lo_first, hi_first), (lo_last, hi_last) = mask.kv_bounds(first), mask.kv_bounds(last)
    assert n_lo <= n_hi
    if n_lo < n_hi:  # both edges move to the right with the query, so the outermost rows hold the extremes
        assert n_lo * tile_n <= lo_first < (n_lo + 1) * tile_n
        assert (n_hi - 1) * tile_n < hi_last <= n_hi * tile_n
    else:
        assert hi_last <= lo_last
    if full_lo < full_hi:
        assert n_lo <= full_lo and full_hi <= n_hi
        assert lo_last <= full_lo * tile_n and full_hi * tile_n <= hi_first
    assert full_lo * tile_n - tile_n < lo_last or not has_left_edge(mask.kind)
    assert (full_hi + 1) * tile_n > hi_first


@given(large_masks(), st.data())
def test_query_bounds_of_long_sequences_stay_in_32_bits(mask: IntervalMask, data: st.DataObject) -> None:
    mask.q_bounds(mask.seqlen_k + data.draw(st.integers(0, OVERHANG)))  # no result, but no overflow either
    key = Int32(data.draw(st.integers(0, mask.seqlen_k - 1) | st.just(0) | st.just(mask.seqlen_k - 1)))
    lo, hi = mask.q_bounds(key)
    for query in {int(lo) - 1, int(lo), int(hi) - 1, int(hi)}:
        if 0 <= query < mask.seqlen_q:
            first, last = mask.kv_bounds(Int32(query))
            assert (first <= key < last) == (lo <= query < hi), query
