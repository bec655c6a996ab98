"""`cuteflash sweep apply`: the rows that a sweep's timings speak for, into the tables that dispatch uses."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from cuteflash import usertable
from cuteflash.cli import sweep_results as results
from cuteflash.cli.options import Usage, head_dims, names
from cuteflash.compile import cache_dir
from cuteflash.traits.arch import FAMILIES, Family, get_arch
from cuteflash.traits.row import TableKey, Traits
from cuteflash.tune import tables
from cuteflash.tune.building import Kernel, complaints
from cuteflash.tune.cuda_backend import backend
from cuteflash.tune.explain import title
from cuteflash.tune.feature_checks import settle
from cuteflash.tune.operations import FORMS, SPECS, Task, task_of_traits
from cuteflash.tune.progress import Display
from cuteflash.tune.results import measured_gpu
from cuteflash.tune.select import Pick, proposed, swept_head_dims
from cuteflash.usertable import MeasuredRow


def apply(
    *,
    arch: results.Arch = None,
    family: results.Families = None,
    head_dim: results.HeadDims = None,
    gpu: results.Gpu = None,
    shipped: Annotated[
        pathlib.Path | None, typer.Option(help="Write the shipped tables' Python into this directory instead.")
    ] = None,
    jobs: results.Jobs = os.cpu_count() or 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")] = False,
    database: results.Database = results.DATABASE,
) -> None:
    """Write the rows that the timings speak for: into your own table, which dispatch prefers, or the shipped ones'.

    Their kernels are compiled with all features as well, such as a softcap: a row serves what ptxas has no complaint
    about.
    """
    with results.opened(database) as store, Usage():
        target = results.swept(store, arch)
        chosen = measured_gpu(store, target, gpu)
        asked = [results.padded(pair) for pair in head_dims(head_dim, None)] if head_dim else None
        families: Sequence[Family] = names("family", family, FAMILIES) or get_arch(target).families
        swept = {task: swept_head_dims(store, task) for task in SPECS}
        picked = {}
        for (task, spec), name in itertools.product(SPECS.items(), families):
            table, pairs = TableKey(spec.operation, target, name), swept[task] if asked is None else asked
            picked[table, task] = [pick for pair in pairs for pick in proposed(store, table, pair, chosen, task)]
        if not any(picked.values()):
            there = ", ".join(f"{d}x{d_v}" for d, d_v in sorted(set(itertools.chain(*swept.values()))))
            raise ValueError(
                f"nothing was timed for {target}, family {', '.join(families)}, head_dim {head_dim or there}; "
                f"{database} has head dims {there}"
            )
        _refuse_shipped(shipped, [task for (_, task), picks in picked.items() if picks])
        better = [picks for picks in picked.values() if shipped is not None or not all(pick.kept for pick in picks)]
        if better and not dry_run:
            _check_writable(shipped)
        settled = _settled([pick for picks in better for pick in picks], target, jobs)
        for (table, task), picks in picked.items():
            rows = [one for one in settled if _place(one.row.traits) == (task, table.family)]
            words = str(table) if task == table.operation else f"{table}, {task}"
            for pick in rows or picks:
                typer.echo(f"{words}: {_words(pick)}")
            if picks and not rows:
                typer.echo(f"{words}: nothing beats the shipped rows beyond noise; nothing is written")
            elif rows and not dry_run:
                measured = [MeasuredRow(one.row, chosen, one.at[:10], one.tflops) for one in rows]
                if shipped is None:
                    path = tables.write_user(table, measured)
                else:
                    path = tables.write_shipped(table, measured, shipped)
                typer.echo(f"written: {path}")


def _refuse_shipped(shipped: pathlib.Path | None, tasks: Sequence[Task]) -> None:
    """ValueError if shipped rows that are written by hand were to be replaced."""
    for task in tasks:
        if shipped is not None and task in FORMS:
            raise ValueError(
                f"shipped is given, and rows of {task} were timed; those are written by hand, in cuteflash/traits/"
                "rows_split_*.py, rows_cache_*.py, rows_few_*.py and rows_mla_*.py: --dry-run says which won"
            )


def _place(traits: Traits) -> tuple[Task, Family]:
    """The task and kernel family that a row is for."""
    return task_of_traits(traits), traits.family


def _settled(picks: Sequence[Pick], target: str, jobs: int) -> list[Pick]:
    """The picks with the features that they serve, for which this compiles their kernels."""
    if not picks:
        return []
    compiler = backend(target)

    def judge(kernels: Sequence[Kernel], what: str) -> Mapping[Kernel, str | None]:
        return complaints(kernels, f"compile {what}", jobs, display, compiler)

    kept = f"nothing is written; the kernels compiled so far are kept in {cache_dir()}"
    with results.stopping(lambda: kept), Display() as display:
        return settle(picks, judge)


def _check_writable(shipped: pathlib.Path | None) -> None:
    """ValueError if no table can be written, before anything is compiled for one."""
    if shipped is None:
        usertable.check_writable()
    elif not shipped.is_dir():
        raise ValueError(f"shipped is {shipped}, which is not a directory; one is needed for the shipped tables' files")


def _words(pick: Pick) -> str:
    """A row with what was measured, and why it lacks features, if that is known."""
    if pick.kept:
        change = "as shipped"
    elif pick.gain is None:
        change = "no shipped row was timed there"
    else:
        change = f"{pick.gain:+.1%} over the shipped rows"
    reasons = [f"no {name}, because of {reason}" for name, reason in pick.lacking.items()]
    return "; ".join([f"{pick.row.title}: {title(pick.row.traits)}, {pick.tflops:.0f} TFLOP/s, {change}", *reasons])
