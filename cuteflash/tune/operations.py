"""What a sweep knows of each task. One is added here and, with what runs it on a GPU, in `trials.TRIALS`.

A task is an operation on operands of one form. Candidates of a task compete with each other alone, although the rows of
all tasks of an operation and kernel family stand in one table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

from cuteflash.problem import DTYPES, FP8_DTYPES, BwdProblem, Dtype, Feature, FwdProblem, MaskKind, Operation, Problem
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.traits.bwd_candidates import bwd_candidates_sm80, bwd_candidates_sm90
from cuteflash.traits.candidates import fwd_candidates_fp8_sm90, fwd_candidates_sm80, fwd_candidates_sm90
from cuteflash.traits.row import Traits

Task = Literal["fwd", "fwd e4m3", "fwd e4m3 vt", "bwd"]  # of 8-bit operands: V as it is stored, or given as V^T
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

    def asking(self, problem: Problem, features: tuple[Feature, ...]) -> Problem:
        """The problem with just these features, and those that it always has."""
        return problem.asking((*self.always, *features))


def _given_vt(dtype: Dtype, head_dim: int, head_dim_v: int, mask: MaskKind) -> FwdProblem:
    """The plain problem of a forward that gets V^T: it lacks the turning of V, too."""
    return FwdProblem.dense(dtype, head_dim, head_dim_v, mask).asking(())


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
}
TASKS: tuple[Task, ...] = get_args(Task)
SWEPT: tuple[Operation, ...] = tuple(dict.fromkeys(spec.operation for spec in SPECS.values()))  # what a sweep offers
SWEPT_DTYPES = (*DTYPES, "e4m3")


def task_of(operation: Operation, dtype: str, is_transposed: bool = False) -> Task:
    """The task of an operation on tensors of a dtype; `is_transposed`: V is given as V^T.

    ValueError: there is no such task.
    """
    if is_transposed and dtype in DTYPES:
        raise ValueError(f"transposed_v is True with dtype {dtype}; allowed with: e4m3")
    for task, spec in SPECS.items():
        own = spec.operation == operation and dtype in SWEPT_DTYPES and dtype in spec.dtypes
        if own and is_transposed == (spec.problem is _given_vt):
            return task
    served = {name for spec in SPECS.values() if spec.operation == operation for name in spec.dtypes}
    allowed = [name for name in SWEPT_DTYPES if name in served]
    raise ValueError(f"dtype is {dtype!r}; allowed for {operation}: {', '.join(allowed)}")


def task_of_traits(traits: Traits) -> Task:
    """The task that traits are candidates of."""
    turns_v = "turned_v" in traits.features
    return task_of(traits.operation, traits.dtypes[0], traits.dtypes == FP8_DTYPES and not turns_v)


def made_for(traits: Traits) -> tuple[Task, Family, tuple[int, int]]:
    """What traits compete for: task, kernel family and head dims."""
    return task_of_traits(traits), traits.family, (traits.head_dim, traits.head_dim_v)


def enumerate_traits(task: Task, family: Family, head_dim: int, head_dim_v: int) -> Iterator[Traits]:
    """The candidates of a task's kernel family for padded head dims, each once. ValueError: no such family."""
    candidates = SPECS[task].candidates
    if family not in candidates:
        allowed = [name for name in FAMILIES if name in candidates]
        raise ValueError(
            f"family is {family!r}; allowed{'' if task == DEFAULT else f' for {task}'}: {', '.join(allowed)}"
        )
    yield from dict.fromkeys(candidates[family](head_dim, head_dim_v))
