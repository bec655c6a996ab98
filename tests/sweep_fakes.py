"""A compiler and a GPU that only pretend, for tests of the sweep: each request leaves a line in a journal."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import signal
import time
from typing import Any

from cuteflash.compile import BuildReport, Resources
from cuteflash.problem import Problem
from cuteflash.problem_names import problem_id
from cuteflash.traits.row import Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.tune.backend import Backend, Machine
from cuteflash.tune.cells import Cell
from cuteflash.tune.funnel import Funnel
from cuteflash.tune.plan import Limits, Plan
from cuteflash.tune.progress import Display
from cuteflash.tune.store import Store
from cuteflash.tune.timing import Rules
from tests.patience import PATIENCE

TARGET = "sm_80"
HELD_SECONDS = 2 * PATIENCE  # beyond every limit
CELLS = (Cell(128, "full", 512, tokens=1024), Cell(128, "full", 4096, tokens=4096))
TRAITS = tuple(FwdTraitsSm80(64, 16 * n, 128, 128) for n in range(1, 7))


@dataclasses.dataclass(frozen=True)
class World:
    """What the fakes do.

    Attributes:
        folder: where the journal, the disk cache and the database are.
        wrong, crashing, hanging, unusable, spilling, uncompilable: tile_n of candidates that behave so.
        spilling_on, uncompilable_on: `problem_id` of problems on which all candidates behave so.
        crashing_in_build, crashing_in_race: tile_n of candidates that take the process down when they are compiled or
            timed.
        pause: seconds that each request takes.
        hold: how many requests there are at most; the last one takes `HELD_SECONDS`. None is all.
        full_disk: tile_n of candidates whose compiled kernel the disk has no room for.
        changed: tile_n of candidates whose sources are other ones now.
        fast: tile_m of candidates that are twice as fast.
        target: what kernels are compiled for.
        gpu_target: what the GPU is.
    """

    folder: pathlib.Path
    wrong: tuple[int, ...] = ()
    crashing: tuple[int, ...] = ()
    hanging: tuple[int, ...] = ()
    unusable: tuple[int, ...] = ()
    spilling: tuple[int, ...] = ()
    uncompilable: tuple[int, ...] = ()
    spilling_on: tuple[str, ...] = ()
    uncompilable_on: tuple[str, ...] = ()
    crashing_in_build: tuple[int, ...] = ()
    crashing_in_race: tuple[int, ...] = ()
    pause: float = 0.0
    hold: int | None = None
    full_disk: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    fast: tuple[int, ...] = ()
    target: str = TARGET
    gpu_target: str = TARGET

    @property
    def journal(self) -> pathlib.Path:
        return self.folder / "journal"

    def note(self, *words: object) -> None:
        with self.journal.open("a") as stream:
            stream.write(json.dumps([str(word) for word in words]) + "\n")
        if self.hold is not None and self.requests() >= self.hold:
            time.sleep(HELD_SECONDS)
        time.sleep(self.pause)

    def requests(self) -> int:
        """Lines of the journal."""
        return self.journal.read_text().count("\n") if self.journal.exists() else 0

    def journaled(self, kind: str) -> list[tuple[str, ...]]:
        """The rest of the words of each line that begins with `kind`."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [tuple(words[1:]) for line in lines for words in [json.loads(line)] if words[0] == kind]

    def key(self, traits: Any, problem: Problem) -> str:
        return hashlib.sha256(f"{traits} {problem} {traits.tile_n in self.changed}".encode()).hexdigest()[:32]

    def object_path(self, traits: Any, problem: Problem) -> pathlib.Path:
        return self.folder / f"{self.key(traits, problem)}.o"

    def report(self, traits: Any, problem: Problem) -> BuildReport | None:
        if not self.object_path(traits, problem).exists():
            return None
        spilled = 8 if traits.tile_n in self.spilling or problem_id(problem) in self.spilling_on else 0
        resources = Resources(168, 0, spilled, spilled)
        return BuildReport("k.K", self.target, traits, problem, 1.0, resources, traits.smem_bytes, cached=True)

    @property
    def backend(self) -> Backend:
        builder, bench = functools.partial(FakeBuilder, self), functools.partial(FakeBench, self)
        return Backend(self.target, lambda operation: "source", self.key, self.report, builder, bench)


class FakeBuilder:
    """A compiler of empty objects."""

    def __init__(self, world: World):
        self.world = world

    def build(self, traits: Traits, problem: Problem) -> BuildReport | None:
        self.world.note("build", traits.tile_n)
        if traits.tile_n in self.world.uncompilable or problem_id(problem) in self.world.uncompilable_on:
            raise ValueError("no such instruction")
        if traits.tile_n in self.world.crashing_in_build:
            os.kill(os.getpid(), signal.SIGSEGV)
        if traits.tile_n in self.world.full_disk:
            raise OSError(28, "No space left on device")
        self.world.object_path(traits, problem).touch()
        return self.world.report(traits, problem)

    def usable(self) -> bool:
        return True


class FakeBench:
    """A GPU on which wider tiles are faster."""

    def __init__(self, world: World):
        self.world, self.lost, self.count = world, False, 0
        world.note("start", os.getpid())

    def machine(self) -> Machine:
        return Machine("a GPU", "1.0", self.world.gpu_target, {"torch": "2"})

    def matmul_tflops(self) -> float:
        return 700.0

    def usable(self) -> bool:
        return not self.lost

    def check(self, traits: Traits, problem: Problem) -> dict[str, Any]:
        self.world.note("check", traits.tile_n)
        if traits.tile_n in self.world.wrong:
            raise RuntimeError("error 1 over 0.1")
        if traits.tile_n in self.world.crashing:
            os.kill(os.getpid(), signal.SIGSEGV)
        if traits.tile_n in self.world.hanging:
            time.sleep(HELD_SECONDS)
        if traits.tile_n in self.world.unusable:
            self.lost = True
            raise RuntimeError("an illegal memory access was encountered")
        return {"errors": {}}

    def sample(self, subject: Traits | str, cell: Cell) -> float:
        if isinstance(subject, str):
            self.world.note("sample", subject, cell.id)
            return 1e-3
        self.world.note("sample", subject.tile_n, cell.id)
        if subject.tile_n in self.world.crashing_in_race:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        return (200 - subject.tile_n + 0.001 * (self.count % 3)) / (200 if subject.tile_m in self.world.fast else 100)


def make_plan(**changes: Any) -> Plan:
    """A small plan over `TRAITS` and two cells of different length classes."""
    limits = Limits(compile=PATIENCE, gate=PATIENCE, sample=PATIENCE)
    plan = Plan(TARGET, ("sm80",), CELLS, traits=TRAITS, jobs=1, rules=Rules(rounds=5), limits=limits)
    return dataclasses.replace(plan, **changes)


def sweep(world: World, plan: Plan | None = None, until: Any = "time") -> tuple[Funnel, Display]:
    """One sweep into the world's database."""
    with Store(world.folder / "sweep.sqlite") as store, Display() as display:
        funnel = Funnel(plan or make_plan(), store, display, world.backend)
        funnel.run(until)
    return funnel, display
