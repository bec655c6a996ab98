"""Races: interleaved rounds, honest intervals, losers that leave early, and going on where one was interrupted."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from cuteflash.tune.timing import Roles, Rules, Sampler, interval, losers, race, visits

RULES = Rules(rounds=6, first=3, margin=0.03)


def steady(times: dict[str, float], journal: list[str]) -> Callable[[str], float]:
    """Samples that vary by a thousandth."""

    def sample(name: str) -> float:
        journal.append(name)
        return times[name] * (1 + 1e-3 * (len(journal) % 3 - 1))

    return sample


def run_race(times: dict[str, float], roles: Roles | None = None, rules: Rules = RULES) -> dict[str, int]:
    samples: dict[str, list[float]] = {name: [] for name in times}
    race(samples, steady(times, []), rules, roles or Roles())
    return {name: len(values) for name, values in samples.items()}


def test_clear_losers_leave_after_the_first_rounds_and_the_others_stay() -> None:
    assert run_race({"best": 1.0, "near": 1.01, "slow": 1.2}) == {"best": 6, "near": 6, "slow": 3}


def test_a_default_stays_however_slow_and_a_guest_sends_nobody_home() -> None:
    times = {"mine": 1.0, "default": 2.0, "peer": 0.5}
    assert run_race(times, Roles(stays=["default"], guests=["peer"])) == {"mine": 6, "default": 6, "peer": 6}


def test_without_a_margin_everybody_stays() -> None:
    assert run_race({"best": 1.0, "slow": 9.0}, rules=Rules(rounds=4, margin=math.inf)) == {"best": 4, "slow": 4}


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd", "abcde", "abcdef", "abcdefg"])
def test_each_runs_right_after_every_other_equally_often(names: str) -> None:
    rounds = len(names) * (1 + len(names) % 2)
    orders = [visits(names, index) for index in range(rounds)]
    assert all(sorted(order) == list(names) for order in orders)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, rounds // len(names))
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), rounds // len(names))


def test_a_race_visits_in_that_order() -> None:
    journal: list[str] = []
    race({name: [] for name in "abc"}, steady(dict.fromkeys("abc", 1.0), journal), Rules(rounds=2))
    assert journal == visits("abc", 0) + visits("abc", 1)


@pytest.mark.parametrize("stop", range(1, 19))
def test_an_interrupted_race_measures_nothing_twice_and_ends_the_same(stop: int) -> None:
    times = {"a": 1.0, "b": 1.01, "c": 1.3, "d": 1.5}
    whole: dict[str, list[float]] = {name: [] for name in times}
    race(whole, lambda name: times[name] + 1e-4 * len(whole[name]), RULES)
    samples: dict[str, list[float]] = {name: [] for name in times}
    count = 0

    class Killed(Exception):
        pass

    def sample(name: str) -> float:
        nonlocal count
        count += 1
        if count == stop:
            raise Killed
        return times[name] + 1e-4 * len(samples[name])

    with pytest.raises(Killed):
        race(samples, sample, RULES)
    race(samples, sample, RULES)
    assert samples == whole
    assert count == sum(map(len, whole.values())) + 1  # the one that was interrupted


def test_who_fails_is_out_and_the_others_go_on() -> None:
    samples: dict[str, list[float]] = {"good": [], "bad": []}
    race(samples, lambda name: None if name == "bad" and samples["bad"] else 1.0, RULES)
    assert (len(samples["good"]), len(samples["bad"])) == (6, 1)


def test_interval_of_the_median_covers_it_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(2000):
        low, high = interval([rng.gauss(10.0, 0.1) for _ in range(7)])
        covered += low <= 10.0 <= high
    assert 0.93 <= covered / 2000 <= 0.99


def test_one_sample_says_nothing() -> None:
    assert interval([1.0]) == (0.0, math.inf)
    assert losers({"a": [1.0], "b": [100.0]}, 0.03) == set()
    assert losers({}, 0.03) == set()


def test_noise_keeps_a_slower_candidate_in_the_race() -> None:
    noisy = [1.0, 1.3, 1.1]
    assert statistics.median(noisy) > 1.03
    assert losers({"best": [1.0, 1.0, 1.0], "noisy": noisy}, 0.03) == set()
    assert losers({"best": [1.0, 1.0, 1.0], "slow": [1.1, 1.1, 1.1]}, 0.03) == {"slow"}


def test_a_sampler_fills_its_batches_and_charges_no_host_time() -> None:
    asked: list[tuple[int, float]] = []

    class Clock:
        def batch_ms(self, runner: object, calls: int, host_ms: float) -> float:
            asked.append((calls, host_ms))
            return 0.5 * calls

        def host_ms(self, runner: object, calls: int) -> float:
            return 0.01

    def runner(calls: int) -> torch.Tensor:
        return torch.zeros(())

    sampler = Sampler(Clock(), batch_ms=5.0)
    assert [sampler(runner), sampler(runner)] == [0.5, 0.5]
    assert asked == [(2, 1.0), (10, pytest.approx(0.1)), (10, pytest.approx(0.1))]
