"""`cuteflash compile`: many kernels in parallel processes, and a table of their registers, spills and shared memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
from collections.abc import Sequence
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from cuteflash import usertable
from cuteflash.cli.bar import progress_bar
from cuteflash.cli.options import problem_of
from cuteflash.compile import BuildReport, build
from cuteflash.dispatch import choose, kernel_class
from cuteflash.problem import Operation, Problem
from cuteflash.problem_names import extras_of
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES, LengthClass
from cuteflash.traits.row import Traits
from cuteflash.traits.tables import TABLES

PLAIN_WIDTH = 200  # columns of the table if stdout is not a terminal
TASK_COLUMNS = ("kernel", "target", "family", "dims", "mask", "dtype", "lengths")
COST_COLUMNS = ("tile", "sec", "regs", "stack", "spills", "smem", "used")


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What to build: the product of its lists. `head_dims` None leaves the head dims to the table."""

    targets: list[str]
    families: list[Family | None]
    head_dims: list[tuple[int, int]] | None
    masks: list[Any]
    dtypes: list[Any]
    lse: list[bool]
    softcap: list[bool]
    lengths: Sequence[LengthClass] = LENGTH_CLASSES
    operations: Sequence[Operation] = ("fwd",)
    deterministic: Sequence[bool] = (False,)

    def problems(self, operation: Operation, head_dims: Sequence[tuple[int, int]]) -> list[Problem]:
        """The selected problems of an operation and these (head_dim, head_dim_v) pairs."""
        switches = self.softcap, self.lse, self.deterministic
        return [
            problem_of(operation, dtype, dims, mask, softcap=softcap, lse=lse, deterministic=deterministic)
            for dims, mask, dtype, softcap, lse, deterministic in itertools.product(
                head_dims, self.masks, self.dtypes, *switches
            )
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One kernel to build; `lengths` are the classes of lengths that it runs."""

    target: str
    family: Family
    problem: Problem
    traits: Traits
    lengths: tuple[LengthClass, ...] = LENGTH_CLASSES

    def cells(self) -> list[str]:
        """Kernel, target, family, head dims, mask and extras, dtype, length classes: how a table names a task."""
        problem = self.problem
        head_dims = f"{problem.operands.head_dim}x{problem.operands.head_dim_v}"
        lengths = "all" if self.lengths == LENGTH_CLASSES else ", ".join(self.lengths)
        mask, dtype = " ".join([problem.scores.mask, *extras_of(problem)]), problem.operands.qk_dtype
        return [problem.operation, self.target, self.family, head_dims, mask, dtype, lengths]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A task's report, or the error that prevented one."""

    task: Task
    report: BuildReport | None = None
    error: str | None = None

    @property
    def good(self) -> bool:
        """It compiled, without spills and without a warning."""
        return self.report is not None and not self.report.complaints

    def as_dict(self) -> dict[str, Any]:
        """JSON values: the task, then either the report's fields or the error."""
        operation = self.task.problem.operation
        result = {"operation": operation, **dataclasses.asdict(self.task), "error": self.error}
        if self.report is not None:
            result |= self.report.as_dict() | {"complaints": list(self.report.complaints)}
        return result


def grid_tasks(selection: Selection) -> list[Task]:
    """The kernels of the selected combinations. ValueError, NotImplementedError: a combination has no row."""
    tasks = []
    for operation, target, family in itertools.product(selection.operations, selection.targets, selection.families):
        for problem in selection.problems(operation, selection.head_dims or []):
            tasks += _tasks(problem, target, family, selection.lengths)
    return tasks


def table_tasks(selection: Selection) -> list[Task]:
    """The kernels of the selected combinations and each pair of head dims that the selected tables have a row for."""
    tasks = []
    for key, shipped in TABLES.items():
        operation = cast(Operation, key.operation)  # those of latents have no shipped table
        asked = operation in selection.operations and key.target in selection.targets
        if asked and key.family in selection.families:
            rows = (*(own.row for own in usertable.load(key)), *shipped)
            made_for = dict.fromkeys((row.traits.head_dim, row.traits.head_dim_v) for row in rows)
            pairs = [pair for pair in made_for if selection.head_dims is None or pair in selection.head_dims]
            for problem in selection.problems(operation, pairs):
                tasks += _tasks(problem, key.target, key.family, selection.lengths)
    if not tasks:
        raise ValueError("no row of the tables is left by the given options")
    return tasks


def _tasks(problem: Problem, target: str, family: Family | None, lengths: Sequence[LengthClass]) -> list[Task]:
    """The kernels that run a problem, each once however many length classes share it."""
    kernels: dict[Traits, list[LengthClass]] = {}
    for one in sorted(lengths, key=LENGTH_CLASSES.index):
        kernels.setdefault(choose(problem, target, family, one).traits, []).append(one)
    return [Task(target, traits.family, problem, traits, tuple(served)) for traits, served in kernels.items()]


def run(tasks: Sequence[Task], jobs: int) -> list[Outcome]:
    """Builds `tasks` in `jobs` fresh processes, in order of completion on a progress bar, in task order as a result.

    Processes, because the compiler is not thread-safe; spawned ones, because it must not inherit a CUDA context.
    """
    outcomes: dict[Task, Outcome] = {}
    bar = progress_bar()
    pool = concurrent.futures.ProcessPoolExecutor(
        max_workers=max(1, min(jobs, len(tasks))), mp_context=multiprocessing.get_context("spawn")
    )
    with bar, pool:
        progress = bar.add_task("compiling", total=len(tasks))
        futures = {pool.submit(build_task, task): task for task in tasks}
        try:
            for future in concurrent.futures.as_completed(futures):
                task = futures[future]
                try:
                    outcomes[task] = future.result()
                except concurrent.futures.process.BrokenProcessPool as error:
                    outcomes[task] = Outcome(task, error=f"a compiler process died: {error}")
                bar.advance(progress)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return [outcomes[task] for task in tasks]


def build_task(task: Task) -> Outcome:
    """Builds one task; a failure becomes text, because the compiler's exceptions do not travel between processes."""
    try:
        return Outcome(task, build(kernel_class(task.traits), task.traits, task.problem, task.target))
    except Exception as error:
        return Outcome(task, error=f"{type(error).__name__}: {error}")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """The outcomes on stdout, then every complaint in full."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = _table(outcomes, joined=False)
    if console.measure(table, options=console.options.update(max_width=PLAIN_WIDTH)).maximum > console.width:
        table = _table(outcomes, joined=True)
    console.print(table)
    for outcome in outcomes:
        for complaint in (outcome.error,) if outcome.report is None else outcome.report.complaints:
            title = " ".join(outcome.task.cells())
            console.print(f"{title}: {complaint}", style="red", markup=False, highlight=False, soft_wrap=True)
    built = [outcome.report for outcome in outcomes if outcome.report is not None and not outcome.report.cached]
    bad = sum(not outcome.good for outcome in outcomes)
    console.print(f"{len(outcomes)} kernels, {len(built)} compiled now, {bad} bad", highlight=False)


def _table(outcomes: Sequence[Outcome], joined: bool) -> Table:
    """A row for each outcome; with `joined` a task's name is one column, whose words wrap."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0) if joined else (0, 1))
    if joined:
        table.add_column(" ".join(TASK_COLUMNS), overflow="fold")
    else:
        for name in TASK_COLUMNS:
            table.add_column(name, no_wrap=True)
    for name in COST_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for outcome in outcomes:
        cells = outcome.task.cells()
        style = None if outcome.good else "red"
        table.add_row(*([" ".join(cells)] if joined else cells), *_costs(outcome), style=style)
    return table


def _costs(outcome: Outcome) -> list[str]:
    report = outcome.report
    if report is None:
        return ["failed"]
    used = report.resources
    return [
        f"{report.traits.tile_m}x{report.traits.tile_n}",
        f"{report.seconds:.2f}",
        str(used.registers),
        str(used.stack_bytes),
        f"{used.spill_store_bytes}+{used.spill_load_bytes}",
        str(report.smem_bytes),
        f"{report.smem_bytes / get_arch(outcome.task.target).smem_per_block:.0%}",
        "cache" if report.cached else "compiler",
    ]
