"""The GPU's name, its peak rates measured in the same run, and the host time of a call."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from cuteflash.problem import Dtype
from cuteflash.tune import machine
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.timing import Runner, clock_for, first_call, median

from .implementations import runner

COPY_BYTES = 2 << 30
TINY = Cell(64, "full", 128, tokens=128, hidden=512)
HOST_ROUNDS = 15
LEAST_LENGTH = 20  # of the shapes that are new: below, calls are of another length class


def environment(device: torch.device) -> dict[str, Any]:
    """Date, device and versions, to be stored with the numbers."""
    versions = {"python": platform.python_version()} | machine.versions()
    found: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), "versions": versions}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "sms": properties.multi_processor_count}
    else:
        found["gpu"] = "none (CPU)"
    return found


def copy_gbps(device: torch.device, size: int = COPY_BYTES, rounds: int = 5) -> float:
    """Bandwidth of a device-to-device copy, GB/s, bytes read plus bytes written."""
    source = torch.empty(size // 4, device=device, dtype=torch.float32).normal_()
    target = torch.empty_like(source)
    return 2 * size / (_median_ms(lambda: target.copy_(source), device, rounds) * 1e6)


def _median_ms(call: Any, device: torch.device, rounds: int) -> float:
    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            out: torch.Tensor = call()
        return out

    clock = clock_for(device)
    clock.batch_ms(run, 2, 0.0)
    return median([clock.batch_ms(run, 3, 0.1) / 3 for _ in range(rounds)])


@dataclasses.dataclass(frozen=True, slots=True)
class HostTimes:
    """Host time of one public call without gradients, microseconds, by implementation.

    Attributes:
        known: of a shape that was called before.
        new: of one that was not, though the kernel is there: a server sees ever new lengths.
    """

    known: dict[str, float]
    new: dict[str, float]


def host_microseconds(
    names: Iterable[str], device: torch.device, dtype: Dtype, calls: int = 0, rounds: int = HOST_ROUNDS
) -> HostTimes:
    """What a call on a tiny problem costs the host.

    Medians of interleaved rounds: a host's speed changes by half within seconds. What a new shape costs more is the
    difference between single calls of shapes that are new and single calls of the same shapes once they are known, so
    that it holds nothing of what a runner does once for all its calls.

    Args:
        calls: of a known shape in a round; 0 is 200 on a GPU, which the launch queue holds, so that the host never
            waits for the device, and 5 on a CPU.
    """
    calls = calls or (200 if device.type == "cuda" else 5)
    inputs = make_inputs(dataclasses.replace(TINY, dtype=dtype), device)
    runners = {name: runner(name, inputs) for name in names}
    usual = known_microseconds(runners, device, calls, rounds)
    more: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(rounds):  # apart: what new shapes leave in the host's caches would slow the calls above
        lengths = range(TINY.seqlen - 1 - index, LEAST_LENGTH, -rounds)
        for name, run in runners.items():
            news, olds = ([runner(name, _shortened(inputs, n)) for n in lengths] for _ in range(2))
            run(calls)  # as in a server, its own code is in the host's caches, not another implementation's planning
            new = _host_us(news, device)
            more[name].append(new - _host_us(olds, device))
    return HostTimes(usual, {name: usual[name] + median(own) for name, own in more.items()})


def known_microseconds(
    runners: Mapping[str, Runner], device: torch.device, calls: int, rounds: int = HOST_ROUNDS
) -> dict[str, float]:
    """What a call of each runner costs the host after its first: medians of interleaved rounds."""
    for run in runners.values():
        first_call(run, device)
    known: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            known[name].append(_host_us([run], device, calls))
    return {name: median(own) for name, own in known.items()}


def _host_us(runners: Sequence[Runner], device: torch.device, calls: int = 1) -> float:
    """Microseconds that the host is busy with one call, if each of the runners makes `calls` of them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for run in runners:
        run(calls)
    return (time.perf_counter() - started) * 1e6 / (calls * len(runners))


def _shortened(inputs: Inputs, length: int) -> Inputs:
    """The first `length` tokens of one sequence."""
    cell = dataclasses.replace(inputs.cell, seqlen=length, seqlen_q=length, tokens=length)
    q, k, v = (x[:, :length] for x in (inputs.q, inputs.k, inputs.v))
    return Inputs(cell, q, k, v)
