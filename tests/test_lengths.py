"""Where the sequences of a batch lie, on Python integers and lists."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cuteflash.core.lengths import Lengths, Sequence

sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


def test_all_sequences_of_a_dense_batch_are_alike() -> None:
    assert {Lengths(7, 5).sequence(batch) for batch in range(3)} == {Sequence(0, 7, 0, 5)}


@given(sizes)
def test_packed_sequences_lie_end_to_end(lengths: list[tuple[int, int]]) -> None:
    cu_q, cu_k = ([0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True))
    packed = Lengths(max(cu_q), max(cu_k), cu_q, cu_k)
    rows_q, rows_k = 0, 0
    for batch, (s_q, s_k) in enumerate(lengths):
        assert packed.sequence(batch) == Sequence(rows_q, s_q, rows_k, s_k)
        rows_q, rows_k = rows_q + s_q, rows_k + s_k


@given(sizes, st.data())
def test_of_a_sequence_only_the_rows_in_use_count(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    cu_k = [0, *itertools.accumulate(s_k for _, s_k in lengths)]
    used = [data.draw(st.integers(0, s_k)) for _, s_k in lengths]
    for batch, count in enumerate(used):
        assert Lengths(4, 9, used_k=used).sequence(batch) == Sequence(0, 4, 0, count)  # a cache, filled in part
        assert Lengths(4, 9, None, cu_k, None, used).sequence(batch) == Sequence(0, 4, cu_k[batch], count)
