"""Hashes of the machine code of every shipped row, to tell whether a change of source changed code.

    python -m tests.cubins record before.json          # each row's most and least demanding problem, several minutes
    python -m tests.cubins record after.json
    python -m tests.cubins compare before.json after.json

Needs no GPU. `record --only REGEX` takes the kernels whose name matches; `compare` looks at what both records have.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple

from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.problem import DTYPES, MASK_KINDS, BwdProblem, FwdProblem, Operation, Problem
from cuteflash.problem_names import problem_id
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import TableKey, Traits
from cuteflash.traits.tables import MODULES, TABLES, tables_of
from tests.machine_code import machine_code

PACKED = 4  # query heads for each KV head of the cases that fold them

# How an operation's problems are made, and which of their features cost registers.
PROBLEMS: dict[Operation, tuple[Callable[..., Problem], tuple[str, ...]]] = {
    "fwd": (FwdProblem.dense, ("softcap", "lse")),
    "bwd": (BwdProblem.dense, ("softcap", "deterministic")),
}


class Case(NamedTuple):
    """A kernel that the tables ship."""

    target: str
    traits: Traits
    problem: Problem

    @property
    def name(self) -> str:
        """Readable, and the same whatever fields of traits that no row sets come and go."""
        fields = dataclasses.fields(self.traits)
        values = ((field.name, getattr(self.traits, field.name), field.default) for field in fields)
        told = " ".join(f"{name}={value}" for name, value, default in values if value != default)
        operation = "" if self.problem.operation == "fwd" else f"{self.problem.operation} "
        return f"{operation}{self.target}/{self.traits.family} {problem_id(self.problem)} | {told}"


def row_kernels(hardest: bool = True) -> list[Case]:
    """Each kernel of the tables once, with the most or the least demanding of the problems that it runs.

    Of backward tables that share their rows only the first is taken: a kernel compiles for several seconds.
    """
    backward: dict[tuple[ModuleType, ...], TableKey] = {}
    for key in tables_of("bwd"):
        backward.setdefault(MODULES[key], key)
    kernels: dict[tuple[str, Traits], Problem] = {}
    for key in (*tables_of("fwd"), *backward.values()):
        make, features = PROBLEMS[key.operation]
        every = itertools.product(
            *((True, False) for _ in features), reversed(MASK_KINDS), reversed(DTYPES), LENGTH_CLASSES
        )
        order = list(every) if hardest else list(every)[::-1]
        made_for = dict.fromkeys((row.traits.head_dim, row.traits.head_dim_v) for row in TABLES[key])
        for (*asked, mask, dtype, lengths), head_dims in itertools.product(order, made_for):
            problem = make(dtype, *head_dims, mask, **dict(zip(features, asked, strict=True)))
            traits = choose_shipped(problem, key.target, key.family, lengths).traits
            kernels.setdefault((key.target, traits), problem)
    return [Case(*key, problem) for key, problem in kernels.items()]


def all_cases() -> list[Case]:
    """What a record holds: of each row's kernel two problems, and the least demanding one with packed heads, too."""
    light = row_kernels(hardest=False)
    packed = [
        case._replace(problem=case.problem.packed(PACKED)) for case in light if isinstance(case.problem, FwdProblem)
    ]
    return list(dict.fromkeys([*row_kernels(), *light, *packed]))


def code_hash(case: Case) -> tuple[str, str]:
    """(name, hash) of a kernel, compiled now."""
    from tests.cross_compile import cross_compile

    kernel = kernel_class(case.traits)(case.traits, case.problem)
    with tempfile.TemporaryDirectory() as folder:
        compiled = cross_compile(kernel, case.target, pathlib.Path(folder))
        return case.name, hashlib.sha256(machine_code(compiled.cubin)).hexdigest()[:16]


def record(cases: Iterable[Case], jobs: int) -> dict[str, str]:
    """The hash of each case by name."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        return dict(pool.map(code_hash, cases, chunksize=4))


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The names that both records have with different code."""
    return [name for name in before if name in after and before[name] != after[name]]


def main(arguments: list[str] | None = None) -> int:
    """Record or compare; the exit status of a comparison says whether all code is the same."""
    parser = argparse.ArgumentParser(prog="python -m tests.cubins", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile and write the hashes to FILE")
    recording.add_argument("file", type=pathlib.Path)
    recording.add_argument("--only", default="", metavar="REGEX", help="only the kernels whose name matches")
    recording.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes")
    comparing = commands.add_parser("compare", help="name what differs between two records")
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    given = parser.parse_args(arguments)
    if given.command == "record":
        cases = [case for case in all_cases() if re.search(given.only, case.name)]
        given.file.write_text(json.dumps(record(cases, given.jobs), indent=1) + "\n")
        print(f"{len(cases)} kernels recorded in {given.file}")
        return 0
    before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
    changed = differences(before, after)
    print(*changed, sep="\n", end="\n" if changed else "")
    for one, other, text in ((before, after, "gone"), (after, before, "new")):
        missing = [name for name in one if name not in other]
        print(*(f"{text}: {name}" for name in missing), sep="\n", end="\n" if missing else "")
    print(f"{len(before.keys() & after.keys())} kernels in both records, {len(changed)} with other machine code")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
