"""Timing of several implementations side by side: warm-up with a watchdog, interleaved rounds, medians, intervals.

A batch is enough calls to fill `BATCH_MS` of device time, between two events. Before it the device is kept
spinning while the host enqueues the batch, so that an implementation whose host code is slower than its kernel is
not charged for the host (the benchmarks measure that apart). Rounds visit the implementations in an order in which
each comes after every other equally often: what drifts (clocks, temperature) drifts for all, and a power-hungry kernel
lowers the clock of all that follow. In a race the clear losers leave early.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

BATCH_MS = 12.0
MAX_CALLS = 256  # stays below the depth of the launch queue
ROUNDS = 7
HANG_SECONDS = 20.0
SPIN_CYCLES_PER_MS = 2_000_000  # at most: the highest SM clock is just under 2 GHz
SPIN_MARGIN = 1.3

# Student's t, 97.5 % quantile, by degrees of freedom from 1; beyond the table the last entry is a little wide.
T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
MEDIAN_WIDTH = math.sqrt(math.pi / 2)  # standard error of a normal sample's median over that of its mean

Output = TypeVar("Output")
Runner = Callable[[int], Any]  # runs the implementation n times, returns the last output: a tensor or several


class HangError(RuntimeError):
    """The device did not finish a first call in time; the process cannot use it any more."""


class CudaClock:
    """Device time between two events."""

    def batch_ms(self, runner: Runner, calls: int, host_ms: float) -> float:
        """Milliseconds of `calls` calls together; the device spins for `host_ms`, in which the host enqueues them."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(host_ms * SPIN_MARGIN * SPIN_CYCLES_PER_MS))
        start.record()
        runner(calls)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def host_ms(self, runner: Runner, calls: int) -> float:
        """Milliseconds the host is busy with one call; the device's work is not waited for."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        runner(calls)
        elapsed = time.perf_counter() - started
        torch.cuda.synchronize()
        return elapsed * 1e3 / calls


class HostClock:
    """Wall-clock time, for CPU tensors."""

    def batch_ms(self, runner: Runner, calls: int, host_ms: float) -> float:
        started = time.perf_counter()
        runner(calls)
        return (time.perf_counter() - started) * 1e3

    def host_ms(self, runner: Runner, calls: int) -> float:
        return 0.0


Clock = CudaClock | HostClock


def clock_for(device: torch.device) -> Clock:
    """The clock that measures work on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


def first_call(runner: Callable[[int], Output], device: torch.device, seconds: float = HANG_SECONDS) -> Output:
    """The output of one call (compiling included); HangError if the device is not done `seconds` after launch."""
    out = runner(1)
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > deadline:
                raise HangError(f"the kernel did not finish within {seconds:g} s")
            time.sleep(1e-3)
    return out


class Sampler:
    """Times one batch of a runner at a time, each as many calls as fill `batch_ms` by the first one's estimate."""

    def __init__(self, clock: Clock, batch_ms: float = BATCH_MS):
        self.clock, self.batch_ms = clock, batch_ms
        self._sizes: dict[Runner, tuple[int, float]] = {}  # calls of a batch, host time of one

    def __call__(self, runner: Runner) -> float:
        """Milliseconds per call. The runner has been called before."""
        if runner not in self._sizes:
            estimate = self.clock.batch_ms(runner, 2, 1.0) / 2
            calls = max(1, min(MAX_CALLS, round(self.batch_ms / max(estimate, 1e-3))))
            self._sizes[runner] = calls, self.clock.host_ms(runner, min(8, calls))
        calls, host_ms = self._sizes[runner]
        return self.clock.batch_ms(runner, calls, host_ms * calls) / calls


def interleaved(
    runners: Mapping[str, Runner], device: torch.device, rounds: int = ROUNDS, batch_ms: float = BATCH_MS
) -> dict[str, list[float]]:
    """Milliseconds per call of each runner in each round. Every runner has been called before."""
    sampler = Sampler(clock_for(device), batch_ms)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    race(samples, lambda name: sampler(runners[name]), Rules(rounds=rounds, margin=math.inf))
    return samples


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """How a race is run."""

    rounds: int = ROUNDS  # samples of a runner that stays to the end
    first: int = 3  # rounds before any name leaves
    margin: float = 0.03  # a runner leaves once its interval lies above the best one's by more than this share of it


@dataclasses.dataclass(frozen=True, slots=True)
class Roles:
    """What in a race is not an ordinary candidate."""

    stays: Collection[str] = ()  # names that take part in every round and judge the others
    guests: Collection[str] = ()  # names that take part in every round, and by which no other is judged


NO_ROLES = Roles()


def race(
    samples: dict[str, list[float]],
    sample: Callable[[str], float | None],
    rules: Rules,
    roles: Roles = NO_ROLES,
) -> None:
    """Interleaved rounds that clear losers leave early, and that go on where an interrupted race stopped.

    Args:
        samples: of each name what was measured before, which is not measured again; what is measured is appended.
        sample: milliseconds per call of one batch of a name; None takes the name out of the race.
    """
    running = list(samples)
    for index in range(rules.rounds):
        for name in visits(running, index):
            if len(samples[name]) <= index:
                found = sample(name)
                if found is None:
                    running.remove(name)
                else:
                    samples[name].append(found)
        if index + 1 >= rules.first:
            # Judged by what this round knew, so that a race that goes on sends the same ones home.
            judged = {name: samples[name][: index + 1] for name in running if name not in roles.guests}
            slow = losers(judged, rules.margin)
            running = [name for name in running if name not in slow or name in roles.stays]


def visits(names: Sequence[str], index: int) -> list[str]:
    """The names in the order of round `index`: a Williams design.

    Rounds begin with each name in turn. Over len(names) rounds, twice as many if that is odd, each name comes right
    after every other equally often.
    """
    size = len(names)
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(size)]  # 0, 1, -1, 2, -2, ...
    mirrored = size % 2 and index // size % 2
    return [names[(index - offset if mirrored else index + offset) % size] for offset in zigzag]


def losers(samples: Mapping[str, Sequence[float]], margin: float) -> set[str]:
    """Names whose interval lies above that of the best median by more than `margin` of it."""
    if not samples:
        return set()
    _, high = interval(min(samples.values(), key=statistics.median))
    return {name for name, values in samples.items() if interval(values)[0] > (1 + margin) * high}


def median(samples: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(samples)


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by Student's t; of one sample, everything above 0."""
    if len(samples) < 2:
        return 0.0, math.inf
    quantile = T_QUANTILES[min(len(samples) - 1, len(T_QUANTILES)) - 1]
    middle = statistics.median(samples)
    reach = quantile * MEDIAN_WIDTH * statistics.stdev(samples) / math.sqrt(len(samples))
    return max(0.0, middle - reach), middle + reach


def spread(samples: Sequence[float]) -> float:
    """Distance between the quartiles over the median: differences below it are noise."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)
