"""What the funnel asks of a compiler and of a GPU. `cuda_backend` answers with the real ones, tests with their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cuteflash.compile import BuildReport
from cuteflash.traits.base import FwdTraits
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import Problem
from cuteflash.tune.worker import Tool

PEER = "peer:"  # before the name of a peer, where a candidate's id would stand
GATE = 2  # number of what `Bench.check` asks; raised when it asks more, so that who passed before is checked again


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


class Builder(Tool, Protocol):
    """A compiler in a process of its own, which never touches a GPU."""

    def build(self, traits: FwdTraits, problem: Problem) -> BuildReport:
        """Compiles into the disk cache; raises where it does not compile or cannot be kept."""
        ...


class Bench(Tool, Protocol):
    """A GPU in a process of its own. Nothing is compiled there: what is not in the disk cache is an error."""

    def machine(self) -> Machine:
        """Which GPU this is; does no work on it."""
        ...

    def matmul_tflops(self) -> float:
        """Rate of the 8192³ bf16 matrix product: what this GPU reaches now."""
        ...

    def check(self, traits: FwdTraits, problem: Problem) -> dict[str, Any]:
        """Runs the kernel on small ragged problems, plain and with sinks, rising and peaked scores.

        Its errors as JSON values. Raises if an output is wrong.
        """
        ...

    def sample(self, subject: FwdTraits | str, cell: Cell) -> float:
        """Milliseconds per call of one short batch of a candidate or peer. A cell's first one is checked, too."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One compile target's compiler, disk cache and GPU.

    Attributes:
        target: compile target.
        source: fingerprint of the kernels' sources.
        key: (traits, problem) → digest of the compile cache's key.
        report: (traits, problem) → what the disk cache knows about the kernel, None where it is not there.
        builder, bench: picklable; called in a child process.
    """

    target: str
    source: str
    key: Callable[[Any, Problem], str]
    report: Callable[[Any, Problem], BuildReport | None]
    builder: Callable[[], Builder]
    bench: Callable[[], Bench]
