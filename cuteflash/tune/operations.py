"""What a sweep knows of each operation. One is added here and, with what runs it on a GPU, in `trials.TRIALS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from cuteflash.problem import BwdProblem, Feature, FwdProblem, Operation, Problem
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.traits.bwd_candidates import bwd_candidates_sm80, bwd_candidates_sm90
from cuteflash.traits.candidates import fwd_candidates_sm80, fwd_candidates_sm90
from cuteflash.traits.row import Traits

DEFAULT: Operation = "fwd"  # of cells and commands that do not name one


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One operation."""

    problem: Callable[..., Problem]  # (dtype, head_dim, head_dim_v, mask) → the plain problem
    # What a row of its tables may be compiled with or without; if not all of them fit, the first ones go first.
    features: tuple[Feature, ...]
    # (scores, head_dim, head_dim_v) → floating-point operations of the products over so many scores
    flops: Callable[[int, int, int], int]
    # (queries, keys, head_dim, head_dim_v) → of all tensors of a head, what has to be read or written once
    elements: Callable[[int, int, int, int], int]
    # by kernel family, padded (head_dim, head_dim_v) → the traits to consider; some come twice
    candidates: Mapping[Family, Callable[[int, int], Iterator[Traits]]]
    streamed: str  # the tensor that the main loop loads tile by tile, as a smem plan calls it
    lengths: str  # of the sequences that are timed if nobody says which, as `--seqlen` takes them


SPECS: dict[Operation, Spec] = {
    "fwd": Spec(
        problem=FwdProblem.dense,
        features=("softcap", "varlen", "lse"),
        flops=lambda scores, head_dim, head_dim_v: 2 * scores * (head_dim + head_dim_v),
        elements=lambda queries, keys, head_dim, head_dim_v: (queries + keys) * (head_dim + head_dim_v),
        candidates={"sm80": fwd_candidates_sm80, "sm90": fwd_candidates_sm90},
        streamed="k",
        lengths="1x8192,512,1024,4096,16384",  # one of a decode step, two short and two long ones
    ),
    "bwd": Spec(
        problem=BwdProblem.dense,
        features=("softcap", "deterministic", "varlen"),
        flops=lambda scores, head_dim, head_dim_v: 2 * scores * (3 * head_dim + 2 * head_dim_v),
        elements=lambda queries, keys, head_dim, head_dim_v: 2 * (queries + keys) * (head_dim + head_dim_v),
        candidates={"sm80": bwd_candidates_sm80, "sm90": bwd_candidates_sm90},
        streamed="q",
        lengths="512,1024,4096,16384",  # nobody trains on single queries
    ),
}
SWEPT: tuple[Operation, ...] = tuple(SPECS)  # what a sweep offers


def enumerate_traits(operation: Operation, family: Family, head_dim: int, head_dim_v: int) -> Iterator[Traits]:
    """The candidates of an operation's kernel family for padded head dims, each once. ValueError: no such family."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    yield from dict.fromkeys(SPECS[operation].candidates[family](head_dim, head_dim_v))
