"""What the funnel asks of a compiler and of a GPU. `cuda_backend` answers with the real ones, tests with their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cuteflash.compile import BuildReport
from cuteflash.tune.operations import Problem
from cuteflash.tune.worker import Tool

PEER = "peer:"  # before the name of a peer, in place of a candidate's id
GATE = 3  # number of what `TorchBench.check` asks; raised when that changes, so that all are checked again


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What times were measured on.

    Attributes:
        gpu, driver: as the driver names them.
        target: compile target of the GPU.
        versions: distribution → version.
    """

    gpu: str
    driver: str
    target: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One compile target's compiler, disk cache and GPU.

    Attributes:
        target: compile target.
        source: fingerprint of the kernels' sources.
        key: (traits, problem) → digest of the compile cache's key.
        report: (traits, problem) → what the disk cache knows about the kernel, None if it is not there.
        builder: makes a `CacheBuilder`, or what stands in for one; picklable, called in a child process.
        bench: makes a `TorchBench`, likewise.
    """

    target: str
    source: str
    key: Callable[[Any, Problem], str]
    report: Callable[[Any, Problem], BuildReport | None]
    builder: Callable[[], Tool]
    bench: Callable[[], Tool]
