"""What a sweep knows of each operation. One is added here and, with what runs it on a GPU, in `cuda_backend.TRIALS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from cuteflash.problem import Feature, FwdProblem, Operation
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.traits.candidates import fwd_candidates_sm80, fwd_candidates_sm90
from cuteflash.traits.row import FwdRowTraits, Row, fwd_sm80, fwd_sm90

Problem = FwdProblem  # of any operation
DEFAULT: Operation = "fwd"  # of cells and commands that do not name one


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One operation."""

    problem: Callable[..., Problem]  # (dtype, head_dim, head_dim_v, mask), and any of `features` by name → the problem
    features: tuple[Feature, ...]  # what a row of its tables may be compiled with or without
    # (scores, head_dim, head_dim_v) → floating-point operations of the products over so many scores
    flops: Callable[[int, int, int], int]
    # (queries, keys, head_dim, head_dim_v) → of all tensors of a head, what has to be read or written once
    elements: Callable[[int, int, int, int], int]
    # by kernel family, padded (head_dim, head_dim_v) → the traits to consider; some come twice
    candidates: Mapping[Family, Callable[[int, int], Iterator[FwdRowTraits]]]
    # by kernel family, the function of `cuteflash.traits.row` that the files of shipped rows call
    rows: Mapping[Family, Callable[..., Row]]


SPECS: dict[Operation, Spec] = {
    "fwd": Spec(
        problem=FwdProblem.dense,
        features=("softcap", "lse"),
        flops=lambda scores, head_dim, head_dim_v: 2 * scores * (head_dim + head_dim_v),
        elements=lambda queries, keys, head_dim, head_dim_v: (queries + keys) * (head_dim + head_dim_v),
        candidates={"sm80": fwd_candidates_sm80, "sm90": fwd_candidates_sm90},
        rows={"sm80": fwd_sm80, "sm90": fwd_sm90},
    )
}
SWEPT: tuple[Operation, ...] = tuple(SPECS)  # what a sweep offers


def enumerate_traits(operation: Operation, family: Family, head_dim: int, head_dim_v: int) -> Iterator[FwdRowTraits]:
    """The candidates of an operation's kernel family for padded head dims, each once. ValueError: no such family."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    yield from dict.fromkeys(SPECS[operation].candidates[family](head_dim, head_dim_v))
