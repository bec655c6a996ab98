"""The GPU's stages: each candidate is checked once a problem, then raced against the others cell by cell.

A race is the rounds of one cell in which one family's candidates take part interleaved (`timing.race`). Every sample is
recorded: if a sweep was killed, its race goes on under its name with those it had. Candidates that come later, of a
wider limit or with changed sources, run a race of their own, in which the cell's default and the fastest so far run
again: what took part in both tells their clocks apart.

Under a budget every problem gets the same share of the time that is left, and its most promising candidates use it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

from cuteflash.mla_problem import AnyProblem
from cuteflash.problem_names import problem_id
from cuteflash.traits.row import holds
from cuteflash.tune.backend import GATE, PEER, Backend, Machine
from cuteflash.tune.cells import Cell
from cuteflash.tune.plan import Candidate, Group, Plan, default_traits
from cuteflash.tune.progress import Display
from cuteflash.tune.race_plan import Field, Past, Race, arrange, past_of
from cuteflash.tune.store import Stage, Store, Timing, Verdict, now
from cuteflash.tune.timing import Roles, interval, median, race
from cuteflash.tune.worker import RequestFailed, StartFailed, Worker

HOPELESS = 0.10  # so far behind in one cell, a candidate is not timed in the others of that length class
MATMUL_SECONDS = 60.0
GATE_GUESS, RACE_GUESS = 0.2, 0.06  # seconds that a candidate takes, until that has been measured
NEWEST = 0.1  # weight of the newest measurement of these


class Racing:
    """The GPU's part of a sweep; a context manager that ends the worker process."""

    def __init__(self, plan: Plan, store: Store, watch: Display, backend: Backend):
        self.plan, self.store, self.watch, self.backend = plan, store, watch, backend
        self.worker = Worker(backend.bench)
        self._gate_seconds, self._race_seconds = GATE_GUESS, RACE_GUESS

    def __enter__(self) -> Racing:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()

    @functools.cached_property
    def machine(self) -> Machine:
        """The GPU, which a worker process names. StartFailed: there is none, or it is not the plan's target."""
        machine: Machine = self.worker.call("machine", seconds=MATMUL_SECONDS)
        if machine.target != self.plan.target:
            raise StartFailed(
                f"arch is {self.plan.target}; the GPU here is a {machine.gpu}, which is {machine.target}; "
                "--dry-run and --compile-only work for any arch"
            )
        return machine

    def measure(self, groups: Sequence[Group]) -> None:
        """Checks and times what the store does not know yet.

        Raises:
            StoreError: the database cannot be written.
            StartFailed: the GPU is gone.
        """
        self._record_run()
        self.watch.begin("gate", sum(len(group.candidates) for group in groups))
        self.watch.begin("time", sum(len(group.candidates) * len(group.cells) for group in groups))
        deadline = time.monotonic() + self.plan.budget if self.plan.budget is not None else math.inf
        problems: dict[AnyProblem, list[Group]] = {}
        for group in groups:
            problems.setdefault(group.problem, []).append(group)
        for done, own in enumerate(problems.values()):
            share = max(0.0, deadline - time.monotonic()) / (len(problems) - done) / len(own)
            passed = [self._gate(group, share) for group in own]
            for cell in own[0].cells:  # the families one after the other, so that they share the cell's inputs
                for group in passed:
                    self._time(group, cell)
        self.watch.end("gate")
        self.watch.end("time")

    def _record_run(self) -> None:
        """Keeps which machine this is and how fast it is now."""
        machine = self.machine
        rate = self.worker.call("matmul_tflops", seconds=MATMUL_SECONDS)
        self.store.add_run(now(), {**dataclasses.asdict(machine), "matmul_tflops": rate})
        self.watch.say(f"{machine.gpu}, driver {machine.driver}: 8192³ bf16 matrix product {rate:.0f} TFLOP/s")

    def _gate(self, group: Group, share: float) -> Group:
        """The group with those of its candidates that fit into `share` seconds and are right."""
        costs = itertools.accumulate(self._cost(candidate, group.cells) for candidate in group.candidates)
        fitting = zip(group.candidates, costs, strict=True)
        entered = [candidate for candidate, cost in fitting if cost <= share or candidate.always]
        passed = tuple(candidate for candidate in entered if self._passes(candidate))
        left = len(group.candidates) - len(entered)
        if left:
            self.watch.step("gate", "left for later", left)
        self.watch.step("time", "not reached", (len(group.candidates) - len(passed)) * len(group.cells))
        return dataclasses.replace(group, candidates=passed)

    def _cost(self, candidate: Candidate, cells: Sequence[Cell]) -> float:
        """Seconds that it takes to find out what is not known of a candidate yet, about."""
        machine = self.machine
        names = (machine.gpu, machine.driver, candidate.key)
        own = [cell for cell in cells if holds(candidate.traits, cell.query_rows)]
        open_cells = sum(not self.store.have_timing(candidate.id, cell.id, *names) for cell in own)
        gate = self._gate_seconds if self._gated(candidate) is None else 0.0
        return open_cells * self._race_seconds + gate

    def _passes(self, candidate: Candidate) -> bool:
        """Whether a candidate is right, and has not failed while it was timed."""
        verdict = self._gated(candidate)
        if verdict is None:
            tile = f"{candidate.traits.tile_m}x{candidate.traits.tile_n}"
            self.watch.doing("gate", f"{problem_id(candidate.problem)}, {tile}")
            started = time.monotonic()
            try:
                details = self.worker.call("check", candidate.traits, candidate.problem, seconds=self.plan.limits.gate)
                verdict = Verdict(*self._names(candidate, "gate"), ok=True, details={**details, "gate": GATE})
            except RequestFailed as failure:
                verdict = Verdict(*self._names(candidate, "gate"), ok=False, reason=str(failure))
            self.store.record(verdict)
            self._gate_seconds += NEWEST * (time.monotonic() - started - self._gate_seconds)
        ok = verdict.ok and self._stands(candidate)
        self.watch.step("gate", "kept" if ok else "rejected")
        return ok

    def _gated(self, candidate: Candidate) -> Verdict | None:
        """The gate's verdict; None if it has still to be asked, or asked less when the candidate passed."""
        verdict = self._verdict(candidate, "gate")
        return None if verdict is not None and verdict.ok and verdict.details.get("gate") != GATE else verdict

    def _stands(self, candidate: Candidate) -> bool:
        """Whether a candidate has not failed while it was timed."""
        later = self._verdict(candidate, "time")
        return later is None or later.ok

    def _verdict(self, candidate: Candidate, stage: Stage) -> Verdict | None:
        return self.store.verdict(*self._names(candidate, stage))

    def _names(self, candidate: Candidate, stage: Stage) -> tuple[str, str, str, Stage, str]:
        return candidate.id, self.plan.target, problem_id(candidate.problem), stage, candidate.key

    def _time(self, group: Group, cell: Cell) -> None:
        """Runs all races of a group on a cell that are not over, or have not begun."""
        self.store.add_cell(cell.id, dataclasses.asdict(cell))
        holding = tuple(one for one in group.candidates if holds(one.traits, cell.query_rows))
        if len(holding) < len(group.candidates):
            self.watch.step("time", "other numbers of query rows", len(group.candidates) - len(holding))
        group = dataclasses.replace(group, candidates=holding)
        field = self._field(group, cell)
        hopeless = self._hopeless(group, cell)
        subjects: dict[str, Candidate | str] = {PEER + name: name for name in self.plan.peers}
        subjects |= {one.id: one for one in group.candidates if one.id not in hopeless}
        while True:
            past = self._past(field)
            wanted = [name for name, one in subjects.items() if isinstance(one, str) or self._stands(one)]
            planned = arrange(field, wanted, past, self.plan.rules)
            if planned is None:
                break
            self._run(field, planned, subjects)
        for candidate in group.candidates:
            self.watch.step("time", self._outcome(candidate, hopeless, past))

    def _outcome(self, candidate: Candidate, hopeless: set[str], past: Past) -> str:
        if candidate.id in hopeless:
            return "far behind elsewhere"
        if candidate.id not in past.raced:
            return "failed"
        rounds = max(len(samples.get(candidate.id, ())) for samples in past.races.values())
        return "to the end" if rounds >= self.plan.rules.rounds else "left early"

    def _field(self, group: Group, cell: Cell) -> Field:
        defaults = set(default_traits(cell, self.plan.target, group.family))
        keys = {candidate.id: candidate.key for candidate in group.candidates}
        guests = [PEER + name for name in self.plan.peers]
        stays = [candidate.id for candidate in group.candidates if candidate.traits in defaults]
        return Field(group.family, cell, keys | dict.fromkeys(guests, ""), Roles(stays, guests))

    def _past(self, field: Field) -> Past:
        machine = self.machine
        return past_of(field, self.store.timings(cell=field.cell.id, gpu=machine.gpu, driver=machine.driver))

    def _hopeless(self, group: Group, cell: Cell) -> set[str]:
        """Candidates that lie far behind in another cell of this one's length class and class of query rows."""
        found: set[str] = set()
        for other in group.cells:
            if other != cell and (other.lengths, other.class_of_rows) == (cell.lengths, cell.class_of_rows):
                field = self._field(group, other)
                found |= self._past(field).far_behind(field, HOPELESS)
        return found - set(self._field(group, cell).roles.stays)

    def _run(self, field: Field, planned: Race, subjects: dict[str, Candidate | str]) -> None:
        """Runs a race to its end, recording every sample."""
        fresh = sum(not values for values in planned.samples.values())
        started = time.monotonic()

        def sample(name: str) -> float | None:
            subject = subjects[name]
            runs = subject.traits if isinstance(subject, Candidate) else subject
            try:
                ms = float(self.worker.call("sample", runs, field.cell, seconds=self.plan.limits.sample))
            except RequestFailed as failure:
                if isinstance(subject, Candidate):
                    reason = f"{field.cell.label}: {failure}"
                    self.store.record(Verdict(*self._names(subject, "time"), ok=False, reason=reason))
                self.store.record(self._timing(field, planned.name, name, error=str(failure)))
                return None
            self.store.record(self._timing(field, planned.name, name, samples=(*planned.samples[name], ms)))
            return ms

        self.watch.doing("time", f"{field.cell.label}, race {planned.name} of {len(planned.samples)}")
        race(planned.samples, sample, self.plan.rules, field.roles)
        if fresh:
            self._race_seconds += NEWEST * ((time.monotonic() - started) / fresh - self._race_seconds)

    def _timing(self, field: Field, planned: str, name: str, **found: Any) -> Timing:
        """What the store keeps of a name's part in a race: its samples, or an error."""
        gpu, driver, versions = self.machine.gpu, self.machine.driver, self.machine.versions
        if "samples" in found:
            ms, (low, high) = median(found["samples"]), interval(found["samples"])
            found |= {"ms": ms, "low": low, "high": high, "tflops": field.cell.flops / (ms * 1e9)}
        key, source = field.keys[name], self.backend.source(field.cell.operation)
        identity = (name, field.cell.id, self.plan.target, gpu, driver, key, planned)
        return Timing(*identity, versions=versions, source=source, **found)
