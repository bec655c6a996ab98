"""What a sweep knows of each task. One is added here and, with what runs it on a GPU, in `trials.TRIALS`.

A task is an operation on operands of one form. Candidates of a task compete with each other alone, although the rows of
all tasks of an operation and kernel family stand in one table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, cast, get_args

from cuteflash.dispatch import MLA_ROWS, latent_rows
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, AnyOperation, AnyProblem, MlaProblem
from cuteflash.problem import (
    DTYPES,
    FP8_DTYPES,
    MASK_KINDS,
    UNBOUNDED,
    BwdProblem,
    Dtype,
    Feature,
    FwdProblem,
    HalfDtype,
    MaskKind,
)
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.traits.bwd_candidates import bwd_candidates_sm80, bwd_candidates_sm90
from cuteflash.traits.candidates import fwd_candidates_fp8_sm90, fwd_candidates_sm80, fwd_candidates_sm90
from cuteflash.traits.mla_candidates import mla_candidates_sm80, mla_candidates_sm90
from cuteflash.traits.row import ANY_ROWS, Row, TableKey, Traits
from cuteflash.traits.split_candidates import cache_candidates_sm90, split_candidates_sm80, split_candidates_sm90
from cuteflash.traits.tables import FEW_ROWS, SPLIT_ROWS, SWEPT_CACHE_ROWS, TABLES

# Of 8-bit operands: V as it is stored, or given as V^T. Of few queries: split keys, of a cache of 16 and of 8 bits; and
# latent attention.
Task = Literal["fwd", "fwd e4m3", "fwd e4m3 vt", "bwd", "decode", "cache", "mla"]
FewTask = Literal["decode", "cache", "mla"]  # those of few queries
Form = FewTask | Literal[""]  # of a problem or a cell: one of these tasks by its name, or none of them
FORMS: tuple[FewTask, ...] = get_args(FewTask)
DEFAULT: AnyOperation = "fwd"  # of cells and commands that do not name one
Rows = tuple[int, int]  # the fewest and the most query rows


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One task."""

    operation: AnyOperation
    problem: Callable[..., AnyProblem]  # (dtype, head_dim, head_dim_v, mask) → the plain problem
    # What a row of its tables may be compiled with or without; if not all of them fit, the first ones go first.
    features: tuple[Feature, ...]
    # (scores, head_dim, head_dim_v) → floating-point operations of the products over so many scores
    flops: Callable[[int, int, int], int]
    # (queries, keys, head_dim, head_dim_v) → of all tensors of a head, what has to be read or written once, in elements
    # of Q's size
    elements: Callable[[int, int, int, int], int]
    # by kernel family, padded (head_dim, head_dim_v) → the traits to consider; some come twice
    candidates: Mapping[Family, Callable[[int, int], Iterator[Traits]]]
    # the tensor that the main loop loads tile by tile, as a smem plan calls it: the first of these that it has
    streamed: tuple[str, ...]
    lengths: str  # of the sequences that are timed if nobody says which, as `--seqlen` takes them
    dtypes: tuple[str, ...] = DTYPES  # of Q, K and V; those of 8 bits run alike, so that e4m3 alone is timed
    spare: tuple[Feature, ...] = ()  # features that a row may be compiled with, and that a table need not serve
    always: tuple[Feature, ...] = ()  # features that all of its problems have
    # by kernel family, the shipped rows among which its winners are looked for, of a table; None is the table
    shipped: Mapping[Family, tuple[Row, ...]] | None = None
    masks: tuple[str, ...] = MASK_KINDS  # that its problems differ in
    # numbers of query rows of a KV head of a sequence that its tables tell apart
    classes_of_rows: tuple[Rows, ...] = (ANY_ROWS,)
    heads: str = ""  # of a form, what is timed if nobody says which, as `--heads` takes them
    # of latents the only (head_dim, head_dim_v): there is one KV head, of whose K the first columns are V
    latent_dims: tuple[int, int] | None = None

    def asking(self, problem: AnyProblem, features: tuple[Feature, ...]) -> AnyProblem:
        """The problem with just these features, and those that it always has."""
        return problem.asking((*self.always, *features))

    def class_of_rows(self, query_rows: int) -> Rows:
        """The one of `classes_of_rows` that has a number of query rows."""
        return next((least, most) for least, most in self.classes_of_rows if least <= query_rows <= most)


def _given_vt(dtype: Dtype, head_dim: int, head_dim_v: int, mask: MaskKind) -> FwdProblem:
    """The plain problem of a forward that gets V^T: it lacks the turning of V, too."""
    return FwdProblem.dense(dtype, head_dim, head_dim_v, mask).asking(())


def _decoding(*features: Feature) -> Callable[..., FwdProblem]:
    """What makes the plain problem of a forward that splits keys."""

    def problem(dtype: Dtype, head_dim: int, head_dim_v: int, mask: MaskKind) -> FwdProblem:
        return FwdProblem.dense(dtype, head_dim, head_dim_v, mask).asking(features)

    return problem


def _latent(dtype: HalfDtype, head_dim: int, head_dim_v: int, mask: MaskKind) -> MlaProblem:
    """The plain problem of latent attention, from pages and with split keys; its head dims are given."""
    return MlaProblem(dtype)


def _classes(*most: int) -> tuple[Rows, ...]:
    """Numbers of query rows up to each of these, and beyond."""
    return tuple(zip((1, *(end + 1 for end in most)), (*most, UNBOUNDED), strict=True))


FWD = Spec(
    operation=FwdProblem.operation,
    problem=FwdProblem.dense,
    features=("softcap", "varlen", "lse"),
    flops=lambda scores, head_dim, head_dim_v: 2 * scores * (head_dim + head_dim_v),
    elements=lambda queries, keys, head_dim, head_dim_v: (queries + keys) * (head_dim + head_dim_v),
    candidates={"sm80": fwd_candidates_sm80, "sm90": fwd_candidates_sm90},
    streamed=("k",),
    lengths="1x8192,256,512,1024,4096,16384",  # one of a decode step, a brief one, two short and two long ones
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
    heads="32x8",
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
        streamed=("q",),
        lengths="64,256,512,1024,4096,16384",  # a small and a brief one, too; nobody trains on single queries
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
        streamed=("stored_k", "k"),
        always=("split", "e4m3_cache"),
        shipped={
            family: (*FEW_ROWS[family], *(row for row in rows if "split" in row.traits.features))
            for family, rows in SWEPT_CACHE_ROWS.items()
        },
        classes_of_rows=_classes(8, 16, 32),  # of the tiles of few rows
    ),
    "mla": dataclasses.replace(
        DECODE,
        operation=MlaProblem.operation,
        problem=_latent,
        features=(),  # pages and split keys, which take the most registers, are what is timed
        # V is a part of K.
        elements=lambda queries, keys, head_dim, head_dim_v: queries * (head_dim + head_dim_v) + keys * head_dim,
        candidates={"sm80": mla_candidates_sm80, "sm90": mla_candidates_sm90},
        streamed=("pages",),
        spare=(),
        always=("varlen", "split"),
        shipped={family: latent_rows(rows) for family, rows in MLA_ROWS.items()},
        masks=("full",),
        classes_of_rows=_classes(16, 32, 64),  # of the sm80 family's tiles
        heads="16,128",
        latent_dims=(LATENT_DIM, LATENT_DIM_V),
    ),
}
TASKS: tuple[Task, ...] = get_args(Task)
# What a sweep offers; decoding of latent attention is an operation and a form.
SWEPT: tuple[str, ...] = tuple(dict.fromkeys((*(spec.operation for spec in SPECS.values()), *FORMS)))
SWEPT_DTYPES = (*DTYPES, "e4m3")


def swept_kernel(name: str) -> tuple[AnyOperation, Form]:
    """The operation and form that one of `SWEPT` stands for."""
    return next(((SPECS[form].operation, form) for form in FORMS if form == name), (cast(AnyOperation, name), ""))


def task_of(operation: AnyOperation, dtype: str, is_transposed: bool = False, form: Form = "") -> Task:
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
    form = _form(traits.operation, traits.features | ({"split"} if "e4m3_cache" in traits.features else set()))
    if form:
        return form
    turns_v = "turned_v" in traits.features
    return task_of(traits.operation, traits.dtypes[0], traits.dtypes == FP8_DTYPES and not turns_v)


def made_for(traits: Traits) -> tuple[Task, Family, tuple[int, int]]:
    """What traits compete for: task, kernel family and head dims."""
    return task_of_traits(traits), traits.family, (traits.head_dim, traits.head_dim_v)


def form_of(problem: AnyProblem) -> Form:
    """The form of a problem that splits keys; empty of others."""
    return _form(problem.operation, problem.features)


def _form(operation: AnyOperation, features: Collection[Feature]) -> Form:
    """The form of an operation's problems, or traits, with these features; empty of others."""
    for form in FORMS:
        spec = SPECS[form]
        of_cache = "e4m3_cache" in spec.always
        if spec.operation == operation and "split" in features and ("e4m3_cache" in features) == of_cache:
            return form
    return ""


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
