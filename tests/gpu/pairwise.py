"""Few of many combinations: pairwise testing, as most faults need two options to meet, seldom three."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def combinations(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, so that any two values of different axes meet in one of them."""

    def pairs(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(indices), 2))

    every = list(itertools.product(*(range(len(values)) for values in axes)))
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda indices: len(pairs(indices) & missing))
        missing -= pairs(best)
        chosen.append(tuple(values[i] for values, i in zip(axes, best, strict=True)))
    return chosen


def every_pair(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with `combinations` of `axes` (argument: values). Each costs a compilation, mostly."""
    chosen = combinations(*axes.values())
    return pytest.mark.parametrize(tuple(axes), chosen, ids=["-".join(map(str, values)) for values in chosen])
