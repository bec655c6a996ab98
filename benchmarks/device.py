"""The GPU's name, its peak rates measured in the same run, and the host time of a call."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import time
from collections.abc import Iterable
from typing import Any

import torch

from cuteflash.problem import Dtype
from cuteflash.tune import machine
from cuteflash.tune.cells import Cell, make_inputs
from cuteflash.tune.timing import clock_for, first_call, median

from .implementations import runner

COPY_BYTES = 2 << 30
TINY = Cell(64, "full", 128, tokens=128, hidden=512)


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


def host_microseconds(
    names: Iterable[str], device: torch.device, dtype: Dtype, calls: int = 200, rounds: int = 15
) -> dict[str, float]:
    """Host time of one public call without gradients on a tiny problem, microseconds, for each implementation.

    Medians of interleaved rounds: a host's speed changes by half within seconds. `calls` is fewer than the launch queue
    holds, so that the host never waits for the device.
    """
    inputs = make_inputs(dataclasses.replace(TINY, dtype=dtype), device)
    runners = {name: runner(name, inputs) for name in names}
    for run in runners.values():
        first_call(run, device)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            run(calls)
            samples[name].append((time.perf_counter() - started) * 1e6 / calls)
    return {name: median(own) for name, own in samples.items()}
