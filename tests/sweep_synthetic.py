"""A sweep that was never run: databases as a real one leaves them, with times from `rank.estimate` and noise."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DTYPES, MASK_KINDS, Operation
from cuteflash.problem_names import problem_id
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES, length_class_of
from cuteflash.traits.row import Traits
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import enumerate_traits
from cuteflash.tune.rank import beyond, estimate, shortlist
from cuteflash.tune.store import Store, Timing, Verdict, candidate_id
from cuteflash.tune.timing import Rules, interval, losers, median

GPU, DRIVER, SOURCE = "NVIDIA H200", "570.124.06", "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
VERSIONS = {"cuteflash": "0.1.0", "torch": "2.11.0", "nvidia-cutlass-dsl": "4.8.1", "cudnn": "91900"}
START = datetime.datetime(2026, 3, 2, 9, 30, tzinfo=datetime.UTC)
MATMUL, BEST = 715.0, 690.0  # TFLOP/s of the matrix product, and of attention without end
PEERS = {"peer:fa4": 0.955, "peer:cudnn": 0.97, "peer:fa2": 0.61}  # speed over the best candidate's
LENGTHS = ((1, 8192), (512, 512), (1024, 1024), (4096, 4096), (16384, 16384))
RULES = Rules()


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What was swept.

    Attributes:
        limit: candidates a space that the analytic score lets through, beside the default.
        peers: whether FA4, cuDNN and FA2 took part.
        until: the last stage.
    """

    target: str = "sm_90a"
    operation: Operation = "fwd"
    families: tuple[Family, ...] = ("sm90",)
    head_dims: tuple[int, ...] = (128,)
    masks: tuple[Any, ...] = ("full", "causal")
    dtypes: tuple[Any, ...] = ("bf16",)
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    limit: int = 150
    peers: bool = True
    until: str = "time"


@functools.cache
def _space(
    operation: Operation, target: str, family: Family, head_dim: int
) -> tuple[list[Traits], list[Traits], list[tuple[Traits, str]]]:
    """What takes part in everything, what runs in the order of its estimate, what does not with the reason."""
    problems = [
        Cell(head_dim, mask, 4096, dtype, operation=operation).problem for mask in MASK_KINDS for dtype in DTYPES
    ]
    rows = itertools.product(problems, LENGTH_CLASSES)
    always = dict.fromkeys(choose_shipped(one, target, family, lengths).traits for one, lengths in rows)
    found = dict.fromkeys([*enumerate_traits(operation, family, head_dim, head_dim), *always])
    judged = [(one, one.check(get_arch(target))) for one in found]
    order = shortlist([one for one, reason in judged if reason is None], get_arch(target), list(always))
    return list(always), order, [(one, reason) for one, reason in judged if reason is not None]


class Filler:
    """Writes one sweep into a store."""

    def __init__(self, store: Store, sweep: Sweep, seed: int = 0):
        self.store, self.sweep, self.random = store, sweep, random.Random(seed)
        self.arch = get_arch(sweep.target)
        self.seconds = 0
        self.always: set[str] = set()  # the defaults take part in everything

    def fill(self) -> None:
        if self.sweep.until == "time":
            at = self._now()
            run = {"gpu": GPU, "driver": DRIVER, "target": self.sweep.target, "versions": VERSIONS}
            self.store.add_run(at, {**run, "matmul_tflops": MATMUL})
        for family, head_dim in itertools.product(self.sweep.families, self.sweep.head_dims):
            chosen = self._prune(family, head_dim)
            if self.sweep.until == "prune":
                continue
            for mask, dtype in itertools.product(self.sweep.masks, self.sweep.dtypes):
                cells = [
                    self._cell(head_dim, mask, keys, dtype, seqlen_q=queries)
                    for queries, keys in self.sweep.lengths
                    if mask == "full" or queries > 1
                ]
                self._problem(family, chosen, cells)

    def _cell(self, *sizes: Any, **more: Any) -> Cell:
        return Cell(*sizes, **more, operation=self.sweep.operation)

    def _now(self) -> str:
        self.seconds += 1
        return (START + datetime.timedelta(seconds=self.seconds)).isoformat(timespec="milliseconds")

    def _prune(self, family: Family, head_dim: int) -> dict[str, Traits]:
        always, order, impossible = _space(self.sweep.operation, self.sweep.target, family, head_dim)
        self.always = {candidate_id(traits) for traits in always}
        refused = list(impossible)
        for place, one in enumerate(order[self.sweep.limit :], self.sweep.limit + 1):
            refused.append((one, beyond(place, len(order))))
        chosen = order[: self.sweep.limit]
        names = self.store.add_candidates([*chosen, *(one for one, _ in refused)])
        reasons = [None] * len(chosen) + [reason for _, reason in refused]
        self._judge(names, "", "prune", reasons)
        return dict(zip(names, chosen, strict=False))

    def _judge(
        self, names: Iterable[str], problem: str, stage: Any, reasons: Iterable[str | None], **details: Any
    ) -> None:
        at = self._now()
        key = "k" if problem else ""
        self.store.record(
            *(
                Verdict(name, self.sweep.target, problem, stage, key, reason is None, reason, details, at)
                for name, reason in zip(names, reasons, strict=True)
            )
        )

    def _problem(self, family: Family, chosen: dict[str, Traits], cells: Sequence[Cell]) -> None:
        problem = problem_id(cells[0].problem)
        left = dict(chosen)
        for name, traits in chosen.items():
            full = traits.accumulator_regs / 240 + self.random.gauss(0, 0.05)
            spills = full > 0.85 and name not in self.always
            words = f"spills {8 * self.random.randint(1, 30)} bytes a thread" if spills else None
            self._judge([name], problem, "compile", [words], registers=min(240, 40 + traits.accumulator_regs))
            if spills:
                left.pop(name)
            elif self.sweep.until == "time":
                wrong = self.random.random() < 0.01 and name not in self.always
                words = f"error {self.random.random():.3f} of O at (0, 3, 65, 7), allowed 0.012" if wrong else None
                self._judge([name], problem, "gate", [words])
                if wrong:
                    left.pop(name)
        if self.sweep.until == "time":
            self._race(family, left, cells)

    def _race(self, family: Family, racers: dict[str, Traits], cells: Sequence[Cell]) -> None:
        clocks = {name: estimate(traits, self.arch) for name, traits in racers.items()}
        clocks = {name: value * math.exp(self.random.gauss(0, 0.012)) for name, value in clocks.items()}
        fastest = min(clocks.values())
        behind: dict[str, set[str]] = {}
        for cell in cells:
            self.store.add_cell(cell.id, dataclasses.asdict(cell))
            lengths = length_class_of(cell.seqlen_q, cell.seqlen, cell.operation)
            slower = 1.25 if family == "sm80" else 1.0
            floor = slower * cell.flops / (BEST * _fill(cell) * 1e9)
            means = {
                name: floor * (clocks[name] / fastest) ** _weight(cell) * (1 + 64 * traits.tile_m / 128 / cell.seqlen)
                for name, traits in racers.items()
                if name not in behind.setdefault(lengths, set()) or name in self.always
            }
            peers = {name: floor / slower / speed for name, speed in PEERS.items() if self.sweep.peers}
            if cell.mask == "window":
                peers = {name: ms for name, ms in peers.items() if name == "peer:fa4"}
            samples: dict[str, list[float]] = {name: [] for name in means | peers}
            self._rounds(samples, means | peers)
            behind[lengths] |= losers({name: samples[name] for name in means}, 0.10)
            at = self._now()
            race = f"{family} 1"
            self.store.record(*[self._timing(name, cell, race, values, at) for name, values in samples.items()])

    def _rounds(self, samples: dict[str, list[float]], means: dict[str, float]) -> None:
        out: set[str] = set()
        for index in range(RULES.rounds):
            for name in samples:
                if name not in out:
                    samples[name].append(means[name] * math.exp(self.random.gauss(0, 0.003)))
            if index + 1 >= RULES.first:
                judged = {name: values for name, values in samples.items() if name not in out and name[:5] != "peer:"}
                out |= losers(judged, RULES.margin) - self.always

    def _timing(self, name: str, cell: Cell, race: str, samples: list[float], at: str) -> Timing:
        ms, (low, high) = median(samples), interval(samples)
        numbers: dict[str, Any] = {"ms": ms, "low": low, "high": high, "tflops": cell.flops / (ms * 1e9)}
        names = (name, cell.id, self.sweep.target, GPU, DRIVER, "k", race, tuple(samples))
        return Timing(*names, versions=VERSIONS, source=SOURCE, at=at, **numbers)


def _fill(cell: Cell) -> float:
    """The share of the best rate that a cell's size can reach."""
    if cell.seqlen_q == 1:
        return 0.004
    return cell.seqlen / (cell.seqlen + (500 if cell.mask == "full" else 1400)) * min(1, 0.6 + cell.head_dim / 320)


def _weight(cell: Cell) -> float:
    """How far the main loop's clocks decide the time."""
    return 0.15 if cell.seqlen_q == 1 else cell.seqlen / (cell.seqlen + 600)
