"""Where the sequences of a batch lie and which tiles they own, on Python integers and lists."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cuteflash.core.lengths import Lengths, Sequence
from cuteflash.core.tile_numbers import count_tiles, first_tile
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.problem import LENGTH_MAX
from tests.int32 import Int32

sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
beyond = st.integers(0, 5)  # rows after the end of the last sequence


def test_all_sequences_of_a_dense_batch_are_alike() -> None:
    assert {Lengths(7, 5).sequence(batch) for batch in range(3)} == {Sequence(0, 7, 0, 5)}


def test_lengths_are_known_to_the_host_if_no_vector_has_them() -> None:
    assert Lengths(7, 5).are_known
    for name in ("cu_q", "cu_k", "used_q", "used_k", "left_k"):
        assert not Lengths(7, 5, **{name: [0, 1]}, batch=1).are_known


@given(sizes, beyond, beyond)
def test_packed_sequences_lie_end_to_end(lengths: list[tuple[int, int]], rest_q: int, rest_k: int) -> None:
    cu_q, cu_k = ([0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True))
    packed = Lengths(cu_q[-1] + rest_q, cu_k[-1] + rest_k, cu_q, cu_k, batch=len(lengths))
    rows_q, rows_k = 0, 0
    for batch, (s_q, s_k) in enumerate(lengths):
        assert packed.sequence(batch) == Sequence(rows_q, s_q, rows_k, s_k)
        rows_q, rows_k = rows_q + s_q, rows_k + s_k


@given(sizes, beyond, st.booleans())
def test_queries_after_the_last_sequence_are_one_without_keys(
    lengths: list[tuple[int, int]], rest: int, used: bool
) -> None:
    cu_q, cu_k = ([0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True))
    counts = [list(side) for side in zip(*lengths, strict=True)] if used else [None, None]
    packed = Lengths(cu_q[-1] + rest, cu_k[-1] + rest, cu_q, cu_k, *counts, batch=len(lengths))
    first_q, seqlen_q, _, seqlen_k = packed.sequence(len(lengths))
    assert (first_q, seqlen_q, seqlen_k) == (cu_q[-1], rest, 0)


@given(sizes, beyond, st.booleans())
def test_keys_after_the_last_sequence_are_one_without_queries(
    lengths: list[tuple[int, int]], rest: int, used: bool
) -> None:
    cu_q, cu_k = ([0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True))
    counts = [list(side) for side in zip(*lengths, strict=True)] if used else [None, None]
    packed = Lengths(cu_q[-1] + rest, cu_k[-1] + rest, cu_q, cu_k, *counts, batch=len(lengths))
    assert all(packed.sequence_of_keys(batch) == packed.sequence(batch) for batch in range(len(lengths)))
    _, seqlen_q, first_k, seqlen_k = packed.sequence_of_keys(len(lengths))
    assert (seqlen_q, first_k, seqlen_k) == (0, cu_k[-1], rest)


@given(sizes, st.data())
def test_of_a_sequence_only_the_rows_in_use_count(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    cu_k = [0, *itertools.accumulate(s_k for _, s_k in lengths)]
    used = [data.draw(st.integers(0, s_k)) for _, s_k in lengths]
    for batch, count in enumerate(used):
        assert Lengths(4, 9, used_k=used).sequence(batch) == Sequence(0, 4, 0, count)  # a cache, filled in part
        assert Lengths(4, 9, None, cu_k, None, used).sequence(batch) == Sequence(0, 4, cu_k[batch], count)


@given(st.lists(st.integers(0, 40), max_size=12), beyond, st.integers(1, 9))
def test_a_sequence_owns_numbers_for_all_of_its_tiles(lengths: list[int], rest: int, tile: int) -> None:
    cu = [0, *itertools.accumulate([*lengths, rest])]  # the rows after the last sequence's end own numbers, too
    begins = [first_tile(row, index, tile) for index, row in enumerate(cu)]
    assert begins[0] == 0
    assert begins[-1] == count_tiles(cu[-1], len(lengths), tile)
    for length, (begin, end) in zip([*lengths, rest], itertools.pairwise(begins), strict=True):
        tiles = -(-length // tile)
        assert tiles <= end - begin <= tiles + 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_padded_to_whole_tiles_no_two_sequences_overlap(lengths: list[int], tile: int) -> None:
    rows = [(i, r) for i, length in enumerate(lengths) for r in range(length)]
    cu = [0, *itertools.accumulate(lengths)]
    places = [first_tile(cu[i], i, tile) * tile + r for i, r in rows]
    assert len(set(places)) == len(rows)
    assert max(places, default=0) < count_tiles(cu[-1], len(lengths), tile) * tile


def test_where_a_sequences_workspace_begins_is_not_loaded_if_its_first_query_is_known() -> None:
    cu_q = [0, 130, 200]
    views: Any = SimpleNamespace(cu_q=cu_q, tile_m=64)
    begins = [WorkspaceTensors.first_tile(views, sequence) for sequence in range(2)]
    views.cu_q = NotImplemented  # cannot be indexed
    assert [WorkspaceTensors.first_tile(views, sequence, cu_q[sequence]) for sequence in range(2)] == begins == [0, 3]


def test_tile_numbers_of_the_longest_tensors_stay_in_32_bits() -> None:
    batch = 1 << 20
    assert count_tiles(Int32(LENGTH_MAX), Int32(batch), 1) == LENGTH_MAX + batch + 1
    assert Lengths(Int32(LENGTH_MAX), Int32(5), [0, LENGTH_MAX], [0, 5], batch=1).sequence(1).seqlen_q == 0
