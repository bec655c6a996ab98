"""How long each sequence of a batch is, and where it begins in memory.

The source runs on Python ints and lists (in the tests) and on traced `Int32` values and tensors alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass

Index = Any  # a Python int or a traced cutlass.Int32
Vector = Any  # a list of ints or a one-dimensional cute.Tensor of Int32


class Sequence(NamedTuple):
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
        seqlen_q, seqlen_k: rows of every sequence of a dense batch; of a packed one, all rows of its tensor.
        cu_q, cu_k: (batch + 1,), the first row of each packed sequence, then the end of the last one; None if dense.
        used_q, used_k: (batch,), how many of a sequence's rows count, the first ones; None is all.
        left_k: (batch,), how many of the first rows of K and V do not count either; None is none.
        batch: number of sequences, at least 1; asked for if queries or keys are packed.
    """

    seqlen_q: Index
    seqlen_k: Index
    cu_q: Vector | None = None
    cu_k: Vector | None = None
    used_q: Vector | None = None
    used_k: Vector | None = None
    batch: Index | None = None
    left_k: Vector | None = None

    @property
    def are_known(self) -> bool:
        """Whether all sequences have the lengths `seqlen_q` and `seqlen_k`, so that no vector is to be read."""
        return all(vector is None for vector in (self.cu_q, self.cu_k, self.used_q, self.used_k, self.left_k))

    def sequence(self, index: Index) -> Sequence:
        """The sequence of a batch entry.

        Packed queries have one sequence more: number `batch` holds the rows after the last one's end and has no keys,
        so that O is 0 there.
        """
        last, is_rest = self._last(index, self.cu_q)
        found = self._sequence(last)
        if self.cu_q is None:
            return found
        first_q, seqlen_q = _rest(found.first_q, found.seqlen_q, self.cu_q[last + 1], self.seqlen_q, is_rest)
        return Sequence(first_q, seqlen_q, found.first_k, found.seqlen_k - is_rest * found.seqlen_k)

    def sequence_of_keys(self, index: Index) -> Sequence:
        """The sequence of a batch entry, for a kernel that goes by keys.

        Packed keys have one sequence more: number `batch` holds the rows after the last one's end and has no queries,
        so that their gradients are 0.
        """
        last, is_rest = self._last(index, self.cu_k)
        found = self._sequence(last)
        if self.cu_k is None:
            return found
        first_k, seqlen_k = _rest(found.first_k, found.seqlen_k, self.cu_k[last + 1], self.seqlen_k, is_rest)
        return Sequence(found.first_q, found.seqlen_q - is_rest * found.seqlen_q, first_k, seqlen_k)

    def _last(self, index: Index, cu: Vector | None) -> tuple[Index, Index]:
        """(the batch entry, or the last one, 1 if it is one after that)"""
        if cu is None:
            return index, 0
        last = cutlass.min(index, self.batch - 1)
        return last, index - last

    def _sequence(self, index: Index) -> Sequence:
        """That of a batch entry."""
        first_k, seqlen_k = _span(index, self.seqlen_k, self.cu_k, self.used_k)
        if self.left_k is not None:
            left = self.left_k[index]
            first_k, seqlen_k = first_k + left, cutlass.max(seqlen_k - left, 0)
        first_q, seqlen_q = _span(index, self.seqlen_q, self.cu_q, self.used_q)
        return Sequence(first_q, seqlen_q, first_k, seqlen_k)


def _rest(first: Index, length: Index, end: Index, rows: Index, is_rest: Index) -> tuple[Index, Index]:
    """(first row, number of rows) of a sequence; with `is_rest` 1, of what follows its `end`."""
    return first + is_rest * (end - first), length + is_rest * (rows - end - length)


def _span(index: Index, seqlen: Index, cu: Vector | None, used: Vector | None) -> tuple[Index, Index]:
    """(first row, number of rows)"""
    first, length = (0, seqlen) if cu is None else (cu[index], cu[index + 1] - cu[index])
    return first, length if used is None else used[index]
