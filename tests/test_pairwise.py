"""Pairwise choices of the GPU tests' options miss no pair and are few."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.pairwise import combinations


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_every_pair_of_values_meets(sizes: list[int]) -> None:
    chosen = combinations(*(range(size) for size in sizes))
    for (i, first), (j, second) in itertools.combinations(enumerate(sizes), 2):
        met = {(values[i], values[j]) for values in chosen}
        assert met == set(itertools.product(range(first), range(second)))


def test_few_combinations_suffice() -> None:
    assert len(combinations(range(4), range(5), range(3))) <= 22
    assert len(combinations(range(2), range(3), range(3), range(2))) <= 11
