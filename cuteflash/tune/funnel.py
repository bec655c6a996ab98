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

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import ArchSpec, Family, get_arch
from cuteflash.traits.row import TableKey, Traits
from cuteflash.traits.tables import TABLES
from cuteflash.tune.backend import Backend
from cuteflash.tune.building import compile_all
from cuteflash.tune.cells import Cell
from cuteflash.tune.plan import Candidate, Group, Plan, Space, default_traits, padded
from cuteflash.tune.progress import Watch
from cuteflash.tune.racing import Racing
from cuteflash.tune.rank import beyond, shortlist
from cuteflash.tune.space import enumerate_fwd, prune
from cuteflash.tune.store import Store, Verdict, candidate_id

Until = Literal["prune", "compile", "time"]
UNTIL: tuple[str, ...] = get_args(Until)


class Funnel:
    """One sweep.

    Args:
        plan: what to do.
        store: what is known, and where findings go.
        watch: told of every step.
        backend: compiler, disk cache and GPU.

    Attributes:
        spaces: what was enumerated, once `run` has come so far.
        groups: what is left of it after compiling.
        gpu: what it was timed on.
    """

    def __init__(self, plan: Plan, store: Store, watch: Watch, backend: Backend):
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
        with contextlib.ExitStack() as stack:
            racing = stack.enter_context(Racing(self.plan, self.store, self.watch, self.backend))
            if until == "time":
                self.gpu = racing.machine.gpu  # before anything is compiled for a GPU that is not there
            self._prune()
            if until == "prune":
                return
            groups = [self._group(space, problem) for space in self.spaces for problem in self._problems(space)]
            self.groups = compile_all(self.plan, groups, self.store, self.watch, self.backend)
            if until == "time":
                racing.measure(self.groups)

    def _prune(self) -> None:
        arch = get_arch(self.plan.target)
        pairs = dict.fromkeys(padded(cell) for cell in self.plan.cells)
        self.watch.begin("prune", None)
        for family, pair in itertools.product(self.plan.families, pairs):
            space = make_space(self.plan, family, pair, arch)
            self._keep(space)
            self.spaces.append(space)
            self.watch.step("prune", "kept", len(space.chosen))
            self.watch.step("prune", "rejected", len(space.refused))
        self.watch.end("prune")

    def _keep(self, space: Space) -> None:
        """Records every candidate with its verdict; one that an earlier, wider sweep let through keeps that."""
        target = self.plan.target
        passed = {verdict.candidate for verdict in self.store.verdicts(target=target, stage="prune", ok=1)}
        refused = self.store.add_candidates(space.family, (traits for traits, _ in space.refused))
        chosen = self.store.add_candidates(space.family, space.chosen)
        self.store.record_verdicts(
            [
                Verdict(name, target, "", "prune", "", ok=False, reason=reason)
                for name, (_, reason) in zip(refused, space.refused, strict=True)
                if name not in passed
            ]
            + [Verdict(name, target, "", "prune", "", ok=True) for name in chosen]
        )

    def _problems(self, space: Space) -> dict[FwdProblem, list[Cell]]:
        found: dict[FwdProblem, list[Cell]] = {}
        for cell in self.plan.cells:
            if padded(cell) == (space.head_dim, space.head_dim_v):
                found.setdefault(cell.problem, []).append(cell)
        return found

    def _group(self, space: Space, problem: FwdProblem) -> Group:
        candidates = tuple(
            Candidate(
                traits,
                problem,
                candidate_id(space.family, traits),
                self.backend.key(traits, problem),
                traits in space.always,
            )
            for traits in space.chosen
        )
        return Group(space.family, problem, tuple(self._problems(space)[problem]), candidates)


def make_space(plan: Plan, family: Family, head_dims: tuple[int, int], arch: ArchSpec) -> Space:
    """Enumerates, prunes and ranks the candidates of a family for padded (head_dim, head_dim_v)."""
    always = list(dict.fromkeys(defaults(plan.cells, family, head_dims, arch)))
    found: Iterable[Traits] = enumerate_fwd(family, *head_dims)
    if plan.traits is not None:
        found = (t for t in plan.traits if (t.family, t.head_dim, t.head_dim_v) == (family, *head_dims))
    judged = prune(dict.fromkeys([*found, *always]), arch)
    refused = [(traits, reason) for traits, reason in judged if reason is not None]
    order = shortlist([traits for traits, reason in judged if reason is None], arch, always)
    count = len(order) if plan.limit is None else len(always) + plan.limit
    for position, traits in enumerate(order[count:], count + 1):
        refused.append((traits, beyond(position, len(order))))
    return Space(family, *head_dims, tuple(refused), tuple(order[:count]), frozenset(always))


def defaults(cells: Iterable[Cell], family: Family, head_dims: tuple[int, int], arch: ArchSpec) -> Iterator[Traits]:
    """What dispatch runs the cells of these padded head dims with, then every shipped row that is made for them."""
    for cell in cells:
        if padded(cell) == head_dims:
            yield from default_traits(cell, family, arch)
    for row in TABLES[TableKey("fwd", arch.name, family)]:
        if (row.traits.head_dim, row.traits.head_dim_v) == head_dims and row.traits.check(arch) is None:
            yield row.traits
