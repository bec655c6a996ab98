"""Packed sequences of given lengths, and what attention of each by itself gives."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cuteflash
from tests.gpu.checks import Case, assert_close_to, assert_lse_close_to, poisoned, reference

Lengths = tuple[int, ...]
WITH_LSE = Case(lse=True)


def uniform(choose: random.Random) -> Lengths:
    return tuple(choose.randint(0, 300) for _ in range(12))


def zipf(choose: random.Random) -> Lengths:
    lengths = [900 // rank for rank in range(1, 25)]
    choose.shuffle(lengths)
    return tuple(lengths)


def one_long(choose: random.Random) -> Lengths:
    lengths = [choose.randint(0, 9) for _ in range(40)]
    lengths[choose.randrange(40)] = 1100
    return tuple(lengths)


def tiny(choose: random.Random) -> Lengths:
    return tuple(choose.randint(0, 3) for _ in range(150))


def around_tiles(choose: random.Random) -> Lengths:
    return tuple(choose.choice((0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256)) for _ in range(10))


DISTRIBUTIONS: dict[str, Callable[[random.Random], Lengths]] = {
    function.__name__: function for function in (uniform, zipf, one_long, tiny, around_tiles)
}


@dataclasses.dataclass(frozen=True)
class Packed:
    """One call of `flash_attn_varlen_func`.

    Attributes:
        lengths_q, lengths_k: of each sequence; `lengths_k` None is the same.
        case: everything but the lengths.
        used_q, used_k: how many rows of each sequence count; None is all, and nothing is said of it.
        rest_q, rest_k: rows after the last sequence's end.
        num_splits: as of the public function.
    """

    lengths_q: Lengths
    lengths_k: Lengths | None = None
    case: Case = WITH_LSE
    used_q: Lengths | None = None
    used_k: Lengths | None = None
    rest_q: int = 0
    rest_k: int = 0
    num_splits: int = 1

    @property
    def keys(self) -> Lengths:
        """The lengths of the keys."""
        return self.lengths_q if self.lengths_k is None else self.lengths_k

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh Q, K and V; rows that do not count are NaN."""
        case = dataclasses.replace(
            self.case, batch=1, seqlen_q=sum(self.lengths_q) + self.rest_q, seqlen_k=sum(self.keys) + self.rest_k
        )
        q, k, v = (x[0] for x in case.inputs(device, seed))
        for tensors, spans in (((q,), self.spans("q")), ((k, v), self.spans("k"))):
            counts = torch.zeros(tensors[0].shape[0], dtype=torch.bool, device=device)
            for span in spans:
                counts[span] = True
            for tensor in tensors:
                tensor[~counts] = float("nan")
        return q, k, v

    def spans(self, side: str) -> list[slice]:
        """The rows of each sequence that count."""
        lengths, used = (self.lengths_q, self.used_q) if side == "q" else (self.keys, self.used_k)
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        return [slice(begin, begin + n) for begin, n in zip(begins, used or lengths, strict=True)]

    def vectors(self, device: torch.device) -> dict[str, Any]:
        """`cu_seqlens_*` and `seqused_*`."""

        def vector(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def ends(lengths: Lengths) -> Tensor:
            return torch.nn.functional.pad(vector(lengths).cumsum(0, dtype=torch.int32), (1, 0))

        return {
            "cu_seqlens_q": ends(self.lengths_q),
            "cu_seqlens_k": ends(self.keys),
            "seqused_q": None if self.used_q is None else vector(self.used_q),
            "seqused_k": None if self.used_k is None else vector(self.used_k),
        }

    def call(
        self, inputs: tuple[Tensor, Tensor, Tensor], family: str, vectors: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """O and LSE from the public function, into poisoned memory."""
        with poisoned(), torch.no_grad():
            given = vectors or self.vectors(inputs[0].device)
            options = {"family": family, "num_splits": self.num_splits, **self.case.options()}
            result = cuteflash.flash_attn_varlen_func(*inputs, **given, **options)
        return result if self.case.lse else (result, None)

    def reference(self, inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """O and LSE, every step in `dtype`, as fp32: each sequence by itself, zeros and -inf in between."""
        q, k, v = inputs
        o = q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float32)
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
        for of_q, of_k in zip(self.spans("q"), self.spans("k"), strict=True):
            if of_q.start < of_q.stop:
                part = reference(q[None, of_q], k[None, of_k], v[None, of_k], self.case, dtype)
                o[of_q], lse[:, of_q] = part[0][0], part[1][0]
        return o, lse

    def assert_right(self, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor | None) -> None:
        """Every element of a result."""
        exact, exact_lse = self.reference(inputs, torch.float32)
        low, _ = self.reference(inputs, inputs[0].dtype)
        assert out.dtype == inputs[0].dtype
        assert out.shape == exact.shape
        assert_close_to(out, exact, low)
        if lse is not None:
            assert_lse_close_to(lse, exact_lse, self.case)

    def check(self, family: str, device: torch.device, seed: int = 0) -> None:
        """Run it on fresh inputs and judge it."""
        inputs = self.inputs(device, seed)
        self.assert_right(inputs, *self.call(inputs, family))
