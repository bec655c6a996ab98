"""Timing of several implementations side by side: warm-up with a watchdog, interleaved rounds, medians.

A batch is enough calls to fill `BATCH_MS` of device time, between two events. Before it the device is kept
spinning while the host enqueues the batch, so that an implementation whose host code is slower than its kernel is
not charged for the host (that is measured apart, see `device.host_microseconds`). Rounds visit the implementations
in rotating order: whatever drifts (clocks, temperature), it drifts for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

BATCH_MS = 12.0
MAX_CALLS = 256  # stays below the depth of the launch queue
ROUNDS = 7
HANG_SECONDS = 20.0
SPIN_CYCLES_PER_MS = 2_000_000  # at most: the highest SM clock is just under 2 GHz
SPIN_MARGIN = 1.3

Runner = Callable[[int], torch.Tensor]  # runs the implementation n times, returns the last output


class HangError(RuntimeError):
    """The device did not finish a first call in time; the process cannot use it any more."""


class Clock(Protocol):
    """Milliseconds that `calls` calls of a runner take, all together."""

    def batch_ms(self, runner: Runner, calls: int, host_ms: float) -> float: ...


class CudaClock:
    """Device time between two events."""

    def batch_ms(self, runner: Runner, calls: int, host_ms: float) -> float:
        """`host_ms`: what the host needs to enqueue the batch; the device spins as long before it starts."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(host_ms * SPIN_MARGIN * SPIN_CYCLES_PER_MS))
        start.record()
        runner(calls)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


class HostClock:
    """Wall-clock time, for CPU tensors."""

    def batch_ms(self, runner: Runner, calls: int, host_ms: float) -> float:
        started = time.perf_counter()
        runner(calls)
        return (time.perf_counter() - started) * 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock that measures work on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


def first_call(runner: Runner, device: torch.device, seconds: float = HANG_SECONDS) -> torch.Tensor:
    """The output of one call (compiling included); HangError where the device is not done `seconds` after launch."""
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


def host_ms_per_call(runner: Runner, device: torch.device, calls: int = 8) -> float:
    """Milliseconds the host is busy with one call; the device's work is not waited for."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    started = time.perf_counter()
    runner(calls)
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed * 1e3 / calls


def interleaved(
    runners: Mapping[str, Runner], device: torch.device, rounds: int = ROUNDS, batch_ms: float = BATCH_MS
) -> dict[str, list[float]]:
    """Milliseconds per call of each runner in each round. Every runner has been called before."""
    clock = clock_for(device)
    calls: dict[str, int] = {}
    host: dict[str, float] = {}
    for name, runner in runners.items():
        estimate = clock.batch_ms(runner, 2, 1.0) / 2
        calls[name] = max(1, min(MAX_CALLS, round(batch_ms / max(estimate, 1e-3))))
        host[name] = host_ms_per_call(runner, device, min(8, calls[name]))
    names = list(runners)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            spin = host[name] * calls[name]
            samples[name].append(clock.batch_ms(runners[name], calls[name], spin) / calls[name])
    return samples


def median(samples: list[float]) -> float:
    """The middle value."""
    return statistics.median(samples)


def spread(samples: list[float]) -> float:
    """Distance between the quartiles over the median: differences below it are noise."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)
