"""How long each sequence of a batch is, and where it begins in memory.

The source runs on Python ints and lists (in the tests) and on traced `Int32` values and tensors alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Index = Any  # a Python int or a traced cutlass.Int32
Vector = Any  # a list of ints or a one-dimensional cute.Tensor of Int32


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence: the rows `[first_q, first_q + seqlen_q)` of Q and O, `[first_k, first_k + seqlen_k)` of K and V."""

    first_q: Index
    seqlen_q: Index
    first_k: Index
    seqlen_k: Index


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of all sequences of a batch.

    A dense batch has one length for all sequences and a batch mode in its tensors: only `seqlen_q` and `seqlen_k` are
    given, and the other fields leave no code behind.

    Attributes:
        seqlen_q, seqlen_k: rows of every sequence of a dense batch; of a packed one, of the longest.
        cu_q, cu_k: (batch + 1,), the first row of each packed sequence, then the end of the last one; None if dense.
        used_q, used_k: (batch,), how many of a sequence's rows count, the first ones; None is all.
    """

    seqlen_q: Index
    seqlen_k: Index
    cu_q: Vector | None = None
    cu_k: Vector | None = None
    used_q: Vector | None = None
    used_k: Vector | None = None

    def sequence(self, batch: Index) -> Sequence:
        """The sequence of a batch entry."""
        return Sequence(
            *_span(batch, self.seqlen_q, self.cu_q, self.used_q), *_span(batch, self.seqlen_k, self.cu_k, self.used_k)
        )


def _span(batch: Index, seqlen: Index, cu: Vector | None, used: Vector | None) -> tuple[Index, Index]:
    """(first row, number of rows)"""
    first, length = (0, seqlen) if cu is None else (cu[batch], cu[batch + 1] - cu[batch])
    return first, length if used is None else used[batch]
