"""What a sweep knows of each task. One is added here and, with what runs it on a GPU, in `trials.TRIALS`.

A task is an operation on operands of one form. Candidates of a task compete with each other alone, although the rows of
all tasks of an operation and kernel family stand in one table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, cast, get_args

from cuteflash.problem import DTYPES, FP8_DTYPES, BwdProblem, Dtype, Feature, FwdProblem, MaskKind, Operation, Problem
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.traits.bwd_candidates import bwd_candidates_sm80, bwd_candidates_sm90
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.candidates import fwd_candidates_fp8_sm90, fwd_candidates_sm80, fwd_candidates_sm90
from cuteflash.traits.row import Row, TableKey, Traits
from cuteflash.traits.split_candidates import cache_candidates_sm90, split_candidates_sm80, split_candidates_sm90
from cuteflash.traits.tables import SPLIT_ROWS, SWEPT_CACHE_ROWS, TABLES

# Of 8-bit operands: V as it is stored, or given as V^T. Of few queries: split keys, of a cache of 16 and of 8 bits.
Task = Literal["fwd", "fwd e4m3", "fwd e4m3 vt", "bwd", "decode", "cache"]
Form = Literal["", "decode", "cache"]  # of a forward: the tasks of few queries by their names, or none of these
FORMS: tuple[Form, ...] = ("decode", "cache")
DEFAULT: Operation = "fwd"  # of cells and commands that do not name one


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One task."""

    operation: Operation
    problem: Callable[..., Problem]  # (dtype, head_dim, head_dim_v, mask) → the plain problem
    # What a row of its tables may be compiled with or without; if not all of them fit, the first ones go first.
    features: tuple[Feature, ...]
    # (scores, head_dim, head_dim_v) → floating-point operations of the products over so many scores
    flops: Callable[[int, int, int], int]
    # (queries, keys, head_dim, head_dim_v) → of all tensors of a head, what has to be read or written once, in elements
    # of Q's size
    elements: Callable[[int, int, int, int], int]
    # by kernel family, padded (head_dim, head_dim_v) → the traits to consider; some come twice
    candidates: Mapping[Family, Callable[[int, int], Iterator[Traits]]]
    streamed: str  # the tensor that the main loop loads tile by tile, as a smem plan calls it
    lengths: str  # of the sequences that are timed if nobody says which, as `--seqlen` takes them
    dtypes: tuple[str, ...] = DTYPES  # of Q, K and V; those of 8 bits run alike, so that e4m3 alone is timed
    spare: tuple[Feature, ...] = ()  # features that a row may be compiled with, and that a table need not serve
    always: tuple[Feature, ...] = ()  # features that all of its problems have
    # by kernel family, the shipped rows among which its winners are looked for, of a table; None is the table
    shipped: Mapping[Family, tuple[Row, ...]] | None = None

    def asking(self, problem: Problem, features: tuple[Feature, ...]) -> Problem:
        """The problem with just these features, and those that it always has."""
        return problem.asking((*self.always, *features))


def _given_vt(dtype: Dtype, head_dim: int, head_dim_v: int, mask: MaskKind) -> FwdProblem:
    """The plain problem of a forward that gets V^T: it lacks the turning of V, too."""
    return FwdProblem.dense(dtype, head_dim, head_dim_v, mask).asking(())


def _decoding(*features: Feature) -> Callable[..., FwdProblem]:
    """What makes the plain problem of a forward that splits keys."""

    def problem(dtype: Dtype, head_dim: int, head_dim_v: int, mask: MaskKind) -> FwdProblem:
        return FwdProblem.dense(dtype, head_dim, head_dim_v, mask).asking(features)

    return problem


FWD = Spec(
    operation=FwdProblem.operation,
    problem=FwdProblem.dense,
    features=("softcap", "varlen", "lse"),
    flops=lambda scores, head_dim, head_dim_v: 2 * scores * (head_dim + head_dim_v),
    elements=lambda queries, keys, head_dim, head_dim_v: (queries + keys) * (head_dim + head_dim_v),
    candidates={"sm80": fwd_candidates_sm80, "sm90": fwd_candidates_sm90},
    streamed="k",
    lengths="1x8192,512,1024,4096,16384",  # one of a decode step, two short and two long ones
)
FP8 = dataclasses.replace(
    FWD,
    features=("softcap", "varlen", "v_mean", "lse"),
    # O takes twice Q's bytes.
    elements=lambda queries, keys, head_dim, head_dim_v: (
        queries * (head_dim + 2 * head_dim_v) + keys * (head_dim + head_dim_v)
    ),
    candidates={"sm90": functools.partial(fwd_candidates_fp8_sm90, turns_v=True)},
    dtypes=FP8_DTYPES,
    spare=("block_scales",),
    always=("turned_v",),
)
DECODE = dataclasses.replace(
    FWD,
    problem=_decoding("split"),
    features=("softcap", "varlen", "lse"),
    candidates={"sm80": split_candidates_sm80, "sm90": split_candidates_sm90},
    lengths="1x2048,1x8192,1x131072",  # many short sequences, some, a single one
    spare=("sink",),
    always=("split",),
    shipped=SPLIT_ROWS,
)
SPECS: dict[Task, Spec] = {
    "fwd": FWD,
    "fwd e4m3": FP8,
    "fwd e4m3 vt": dataclasses.replace(
        FP8,
        problem=_given_vt,
        candidates={"sm90": functools.partial(fwd_candidates_fp8_sm90, turns_v=False)},
        always=(),
    ),
    "bwd": Spec(
        operation=BwdProblem.operation,
        problem=BwdProblem.dense,
        features=("softcap", "deterministic", "varlen"),
        flops=lambda scores, head_dim, head_dim_v: 2 * scores * (3 * head_dim + 2 * head_dim_v),
        elements=lambda queries, keys, head_dim, head_dim_v: 2 * (queries + keys) * (head_dim + head_dim_v),
        candidates={"sm80": bwd_candidates_sm80, "sm90": bwd_candidates_sm90},
        streamed="q",
        lengths="512,1024,4096,16384",  # nobody trains on single queries
    ),
    "decode": DECODE,
    "cache": dataclasses.replace(
        DECODE,
        problem=_decoding("split", "e4m3_cache"),
        # K and V take half of Q's bytes.
        elements=lambda queries, keys, head_dim, head_dim_v: (
            queries * (head_dim + head_dim_v) + keys * (head_dim + head_dim_v) // 2
        ),
        candidates={"sm90": cache_candidates_sm90},
        streamed="stored_k",
        always=("split", "e4m3_cache"),
        shipped={family: tuple(row for row in rows if row.traits.splits) for family, rows in SWEPT_CACHE_ROWS.items()},
    ),
}
TASKS: tuple[Task, ...] = get_args(Task)
SWEPT: tuple[str, ...] = (*dict.fromkeys(spec.operation for spec in SPECS.values()), *FORMS)  # what a sweep offers
SWEPT_DTYPES = (*DTYPES, "e4m3")


def swept_kernel(name: str) -> tuple[Operation, Form]:
    """The operation and form that one of `SWEPT` stands for."""
    return next(((DEFAULT, form) for form in FORMS if form == name), (cast(Operation, name), ""))


def task_of(operation: Operation, dtype: str, is_transposed: bool = False, form: Form = "") -> Task:
    """The task of an operation on tensors of a dtype; `is_transposed`: V is given as V^T.

    ValueError: there is no such task.
    """
    if form:
        if is_transposed or dtype not in SPECS[form].dtypes or operation != SPECS[form].operation:
            raise ValueError(
                f"dtype is {dtype!r}{' with transposed_v' if is_transposed else ''}; "
                f"allowed for {form}: {', '.join(SPECS[form].dtypes)}"
            )
        return form
    if is_transposed and dtype in DTYPES:
        raise ValueError(f"transposed_v is True with dtype {dtype}; allowed with: e4m3")
    for task, spec in SPECS.items():
        own = task not in FORMS and spec.operation == operation
        own = own and dtype in SWEPT_DTYPES and dtype in spec.dtypes
        if own and is_transposed == (spec.problem is _given_vt):
            return task
    served = {name for spec in SPECS.values() if spec.operation == operation for name in spec.dtypes}
    allowed = [name for name in SWEPT_DTYPES if name in served]
    raise ValueError(f"dtype is {dtype!r}; allowed for {operation}: {', '.join(allowed)}")


def task_of_traits(traits: Traits) -> Task:
    """The task that traits are candidates of; of those of e4m3 caches that with split keys."""
    if isinstance(traits, FwdTraitsCacheSm90):
        return "cache"
    if "split" in traits.features:
        return "decode"
    turns_v = "turned_v" in traits.features
    return task_of(traits.operation, traits.dtypes[0], traits.dtypes == FP8_DTYPES and not turns_v)


def made_for(traits: Traits) -> tuple[Task, Family, tuple[int, int]]:
    """What traits compete for: task, kernel family and head dims."""
    return task_of_traits(traits), traits.family, (traits.head_dim, traits.head_dim_v)


def form_of(problem: Problem) -> Form:
    """The form of a problem that splits keys; empty of others."""
    return "" if not problem.is_split else "cache" if "e4m3_cache" in problem.features else "decode"


def shipped_rows(task: Task, table: TableKey) -> tuple[Row, ...]:
    """The shipped rows of a table, or beside it, that a task's winners compete with."""
    shipped = SPECS[task].shipped
    return TABLES[table] if shipped is None else shipped[table.family]


def enumerate_traits(task: Task, family: Family, head_dim: int, head_dim_v: int) -> Iterator[Traits]:
    """The candidates of a task's kernel family for padded head dims, each once. ValueError: no such family."""
    candidates = SPECS[task].candidates
    if family not in candidates:
        allowed = [name for name in FAMILIES if name in candidates]
        raise ValueError(
            f"family is {family!r}; allowed{'' if task == DEFAULT else f' for {task}'}: {', '.join(allowed)}"
        )
    yield from dict.fromkeys(candidates[family](head_dim, head_dim_v))
