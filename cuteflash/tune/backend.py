"""What the funnel asks of a compiler and of a GPU. `cuda_backend` answers with the real ones, tests with their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cuteflash.compile import BuildReport
from cuteflash.mla_problem import AnyOperation, AnyProblem
from cuteflash.tune.worker import Tool

PEER = "peer:"  # before the name of a peer, in place of a candidate's id
GATE = 3  # number of what `TorchBench.check` asks; raised when that changes, so that all are checked again


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What times were measured on."""

    gpu: str  # as the driver names it
    driver: str  # its version
    target: str  # compile target of the GPU
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # distribution → version


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One compile target's compiler, disk cache and GPU."""

    target: str  # compile target
    source: Callable[[AnyOperation], str]  # fingerprint of the sources of an operation's kernels
    key: Callable[[Any, AnyProblem], str]  # (traits, problem) → digest of the compile cache's key
    # (traits, problem) → what the disk cache knows about the kernel, None if it is not there
    report: Callable[[Any, AnyProblem], BuildReport | None]
    # makes a `CacheBuilder`, or what stands in for one; picklable, called in a child process
    builder: Callable[[], Tool]
    bench: Callable[[], Tool]  # makes a `TorchBench`, likewise
