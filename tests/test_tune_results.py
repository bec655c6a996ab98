"""Races without the clock's drift: true ratios, honest intervals, nobody's noise taken for the clock's."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuteflash.tune.results import Run, Slot, lead, remove_drift, round_factors, runners
from cuteflash.tune.store import Timing
from cuteflash.tune.timing import interval

SLOT = Slot("full", "bf16", "long")
NOISE, DRIFT = 0.004, 0.03  # standard deviations of one sample, and of a round of a GPU near its power limit
factors_of_rounds = st.lists(st.floats(0.8, 1.25), min_size=1, max_size=9)


def timing(name: str, samples: Sequence[float], race: str = "sm90 1") -> Timing:
    low, high = interval(samples)
    ms = statistics.median(samples)
    return Timing(name, "cell", "sm_90a", "g", "d", "k", race, tuple(samples), ms, low, high, 600 / ms)


def run(one: Timing) -> dict[str, Run]:
    assert one.ms is not None and one.low is not None and one.high is not None and one.tflops is not None
    return {one.cell: Run(one.candidate, one.cell, SLOT, one.ms, one.low, one.high, one.tflops)}


def make_race(seed: int, lengths: Sequence[int], drift: float = DRIFT) -> list[Timing]:
    """A race whose runner `i` takes 1 + i/50 ms in each of `lengths[i]` rounds, times the round's factor and noise."""
    choose = random.Random(seed)
    clock = [math.exp(choose.gauss(0, drift)) for _ in range(max(lengths))]
    return [
        timing(str(i), [(1 + i / 50) * clock[at] * math.exp(choose.gauss(0, NOISE)) for at in range(length)])
        for i, length in enumerate(lengths)
    ]


@given(factors_of_rounds, st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 9)), min_size=2, max_size=6))
def test_without_noise_the_factors_and_every_ratio_are_found(
    clock: list[float], field: list[tuple[float, int]]
) -> None:
    """Early leavers' too, as long as two run to the end."""
    lengths = [len(clock) if place < 2 else min(rounds, len(clock)) for place, (_, rounds) in enumerate(field)]
    race = [
        timing(str(place), [ms * factor for factor in clock[:length]])
        for place, ((ms, _), length) in enumerate(zip(field, lengths, strict=True))
    ]
    middle = math.exp(statistics.median(map(math.log, clock)))
    assert round_factors([one.samples for one in race]) == pytest.approx([factor / middle for factor in clock])
    for one, (ms, _), length in zip(remove_drift(race), field, lengths, strict=True):
        assert one.samples == pytest.approx([ms * middle] * length)
        assert one.ms is not None and one.tflops == pytest.approx(600 / one.ms)


@pytest.mark.parametrize("lengths", [[9] * 2, [9] * 3, [9] * 12, [9, 9, 9, *[3] * 9], [9, 9, *[3] * 10], [3] * 6])
def test_with_noise_intervals_are_tighter_and_still_hold_the_true_ratio(lengths: list[int]) -> None:
    holding, tighter, closer = 0, 0, 0.0
    seeds = range(200)
    for seed in seeds:
        race = make_race(seed, lengths)
        steady = remove_drift(race)
        last = len(lengths) - 1
        raw, (middle, least, most) = (lead(run(some[0]), run(some[last])) for some in (race, steady))
        holding += least <= last / 50 <= most
        tighter += most - least < raw[2] - raw[1]
        closer += abs(raw[0] - last / 50) - abs(middle - last / 50)
    assert holding >= 0.93 * len(seeds)
    assert tighter >= 0.93 * len(seeds)
    assert closer > 0


@pytest.mark.parametrize("lengths", [[9] * 2, [9] * 3, [9] * 12, [9, 3, 3, 3]])
def test_noise_without_drift_is_not_taken_for_the_clocks(lengths: list[int]) -> None:
    """A factor follows the noise of those it is found from; an interval from what is left would be too short."""
    widths = []
    for seed in range(200):
        race = make_race(seed, lengths, drift=0.0)
        (_, low, high), (_, least, most) = (lead(run(some[0]), run(some[1])) for some in (race, remove_drift(race)))
        widths.append((most - least) / (high - low))
    assert 0.9 < statistics.mean(widths) < 1.15


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(1, 9))
def test_a_race_of_equal_factors_is_unchanged(times: list[float], rounds: int) -> None:
    race = [timing(str(place), [ms] * rounds) for place, ms in enumerate(times)]
    assert remove_drift(race) == race


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_who_runs_alone_keeps_his_samples(samples: list[float]) -> None:
    race = [timing("alone", samples)]
    assert remove_drift(race) == race
    with_leaver = round_factors([samples, samples[:1]])
    assert with_leaver[1:] == [1.0] * (len(samples) - 1)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_a_single_sample_is_unchanged_and_its_interval_unknown(times: list[float]) -> None:
    race = [timing(str(place), [ms]) for place, ms in enumerate(times)]
    found = remove_drift(race)
    assert [one.ms for one in found] == pytest.approx(times)
    assert all((one.low, one.high) == (0.0, math.inf) for one in found)


def test_who_left_in_the_fast_rounds_is_not_the_faster_for_it() -> None:
    clock = [1.0, 1.0, 1.0, *[1.1] * 6]
    stay = [timing(name, [ms * factor for factor in clock]) for name, ms in (("a", 1.0), ("b", 1.01), ("c", 1.02))]
    left = timing("left", [1.05] * 3)
    raw = lead(run(stay[0]), run(left))[0]
    found = remove_drift([*stay, left])
    assert raw < 0 < lead(run(found[0]), run(found[3]))[0] == pytest.approx(0.05)


def test_each_race_has_its_own_factors_and_its_own_clock() -> None:
    first = [timing(name, [ms, 2 * ms, ms]) for name, ms in (("a", 1.0), ("b", 2.0))]
    second = [timing(name, [3 * ms, ms, ms], "sm90 2") for name, ms in (("a", 1.5), ("b", 3.0))]
    found = remove_drift([first[0], second[0], first[1], second[1]])
    assert [one.ms for one in found] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert [one.samples for one in found] == [pytest.approx([ms] * 3) for ms in (1.0, 1.5, 2.0, 3.0)]


def test_failures_pass_through() -> None:
    failed = Timing("f", "cell", "sm_90a", "g", "d", "k", "sm90 1", error="hangs")
    race = [timing("a", [1.0, 1.2]), failed, timing("b", [1.0, 1.2])]
    assert remove_drift(race)[1] is failed
    assert remove_drift([failed]) == [failed] and remove_drift([]) == []


def test_runners_are_counted_round_by_round() -> None:
    assert runners([[1.0] * 4, [1.0] * 2, []]) == [2, 2, 1, 1]
    assert runners([]) == runners([[]]) == round_factors([]) == []


numbers = st.tuples(st.floats(0.5, 2), st.floats(0, 0.3), st.floats(0, 0.3))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
def test_a_lead_turned_around_is_the_other_ones(cells: list[tuple[tuple[float, float, float], ...]]) -> None:
    one, other = (
        {
            str(place): Run("x", str(place), SLOT, ms, ms * (1 - below), ms * (1 + above), 1 / ms)
            for place, (ms, below, above) in enumerate(own)
        }
        for own in zip(*cells, strict=True)
    )
    ahead, behind = lead(one, other), lead(other, one)
    assert ahead[1] <= ahead[0] <= ahead[2]
    for mine, theirs in zip(ahead, (behind[0], behind[2], behind[1]), strict=True):
        assert (1 + mine) * (1 + theirs) == pytest.approx(1)
    sides = [math.log(ms / (ms * (1 - below))) for (_, _, _), (ms, below, _) in cells]
    assert math.log((1 + ahead[0]) / (1 + ahead[1])) >= max(sides) / len(cells) - 1e-12
    assert lead(one, one)[0] == 0


def test_an_unknown_end_is_unknown_in_the_lead() -> None:
    known = {"cell": Run("a", "cell", SLOT, 1.0, 0.99, 1.01, 1.0)}
    single = {"cell": Run("b", "cell", SLOT, 1.1, 0.0, math.inf, 1.0)}
    assert lead(known, single) == (pytest.approx(0.1), -1.0, math.inf)
