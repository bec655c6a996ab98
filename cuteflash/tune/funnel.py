"""The sweep as a funnel: enumerate → prune → compile → gate → time. Each stage keeps what it finds and passes on less.

    enumerate  every candidate of a kernel family for the padded head dims
    prune      `traits.check(arch)`; then, under a limit, the most promising by `rank`; nothing is compiled
    compile    in processes without a GPU, into the disk cache; what spills or draws a warning from ptxas leaves
    gate       small ragged problems on the GPU against fp32; what is wrong, crashes or hangs leaves
    time       cell by cell, interleaved, clear losers leave early

Whatever the store holds is not done again, so a sweep that was stopped at any point goes on where it was. The traits
that dispatch has for the cells, and every shipped row's for these head dims, always take part: they are what a winner
has to beat. Compiling is in `building`, the GPU's stages in `racing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from cuteflash.mla_problem import AnyProblem
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.row import TableKey, Traits, holds
from cuteflash.tune.backend import Backend
from cuteflash.tune.building import compile_all
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import SPECS, Task, enumerate_traits, made_for, shipped_rows
from cuteflash.tune.plan import Candidate, Group, Plan, Space, default_traits, padded
from cuteflash.tune.progress import Display
from cuteflash.tune.racing import Racing
from cuteflash.tune.rank import beyond, shortlist
from cuteflash.tune.store import Store, Verdict, candidate_id

Until = Literal["prune", "compile", "time"]


class Funnel:
    """One sweep.

    Args:
        plan: what to do.
        store: what is known, and what findings go into.
        watch: told of every step.
        backend: compiler, disk cache and GPU.

    Attributes:
        spaces: what was enumerated, once `run` has come so far.
        groups: what is left of it after compiling.
        gpu: what it was timed on.
    """

    def __init__(self, plan: Plan, store: Store, watch: Display, backend: Backend):
        self.plan, self.store, self.watch, self.backend = plan, store, watch, backend
        self.spaces: list[Space] = []
        self.groups: list[Group] = []
        self.gpu = ""

    def run(self, until: Until = "time") -> None:
        """All stages up to `until`.

        Raises:
            StoreError: the database cannot be written.
            StartFailed: a worker process cannot be set up, for want of the right GPU for one.
            OSError: compiled kernels cannot be kept.
        """
        with Racing(self.plan, self.store, self.watch, self.backend) as racing:
            if until == "time":
                self.gpu = racing.machine.gpu  # before anything is compiled for a GPU that is not there
            self._prune()
            if until == "prune":
                return
            groups = [group for space in self.spaces for group in self._groups(space)]
            self.groups = compile_all(self.plan, groups, self.store, self.watch, self.backend)
            if until == "time":
                racing.measure(self.groups)

    def _prune(self) -> None:
        self.watch.begin("prune", None)
        pairs = dict.fromkeys((cell.task, padded(cell)) for cell in self.plan.cells)
        for family, (task, head_dims) in itertools.product(self.plan.families, pairs):
            space = make_space(self.plan, family, task, head_dims)
            self._keep(space)
            self.spaces.append(space)
            self.watch.step("prune", "kept", len(space.chosen))
            self.watch.step("prune", "rejected", len(space.refused))
        self.watch.end("prune")

    def _keep(self, space: Space) -> None:
        """Records every candidate with its verdict; one that an earlier, wider sweep let through keeps that."""
        target = self.plan.target
        passed = {verdict.candidate for verdict in self.store.verdicts(target=target, stage="prune", ok=1)}
        refused = self.store.add_candidates(traits for traits, _ in space.refused)
        reasons = dict(zip(refused, (reason for _, reason in space.refused), strict=True))
        found: dict[str, str | None] = {name: reason for name, reason in reasons.items() if name not in passed}
        found |= dict.fromkeys(self.store.add_candidates(space.chosen))
        self.store.record(*(Verdict(n, target, "", "prune", "", why is None, why) for n, why in found.items()))

    def _groups(self, space: Space) -> Iterator[Group]:
        """A space's candidates on each of its problems, those that hold the query rows of one of its cells."""
        problems: dict[AnyProblem, list[Cell]] = {}
        for cell in self.plan.cells:
            if (cell.task, padded(cell)) == (space.task, space.head_dims):
                problems.setdefault(cell.problem, []).append(cell)
        for problem, cells in problems.items():
            candidates = tuple(
                Candidate(
                    traits, problem, candidate_id(traits), self.backend.key(traits, problem), traits in space.always
                )
                for traits in space.chosen
                if any(holds(traits, cell.query_rows) for cell in cells)
            )
            yield Group(space.table.family, problem, tuple(cells), candidates)


def make_space(plan: Plan, family: Family, task: Task, head_dims: tuple[int, int]) -> Space:
    """Enumerates, prunes and ranks a task's candidates of a family for padded (head_dim, head_dim_v)."""
    table = TableKey(SPECS[task].operation, plan.target, family)
    arch = get_arch(table.target)
    always = list(dict.fromkeys(defaults(plan.cells, table, task, head_dims)))
    found: Iterable[Traits] = enumerate_traits(task, family, *head_dims)
    if plan.traits is not None:
        found = (one for one in plan.traits if made_for(one) == (task, family, head_dims))
    judged = [(traits, traits.check(arch)) for traits in dict.fromkeys([*found, *always])]
    refused = [(traits, reason) for traits, reason in judged if reason is not None]
    order = shortlist([traits for traits, reason in judged if reason is None], arch, always)
    count = len(order) if plan.limit is None else len(always) + plan.limit
    for position, traits in enumerate(order[count:], count + 1):
        refused.append((traits, beyond(position, len(order))))
    return Space(table, task, head_dims, tuple(refused), tuple(order[:count]), frozenset(always))


def defaults(cells: Iterable[Cell], table: TableKey, task: Task, head_dims: tuple[int, int]) -> Iterator[Traits]:
    """What dispatch runs a task's cells of these padded head dims with, then every shipped row made for them."""
    for cell in cells:
        if (cell.task, padded(cell)) == (task, head_dims):
            yield from default_traits(cell, table.target, table.family)
    for row in shipped_rows(task, table):
        if made_for(row.traits) == (task, table.family, head_dims) and not row.traits.check(get_arch(table.target)):
            yield row.traits
