"""Packed sequences of given distributions of lengths, and their inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable

import torch
from torch import Tensor

from cuteflash.problem import UNBOUNDED, Dtype, MaskKind
from cuteflash.tune import accuracy
from cuteflash.tune.cells import HIDDEN, TORCH_DTYPES
from cuteflash.tune.gradients import BwdInputs

TOKENS = 65536
SEQUENCES = 64
SEED = 0


def _shares(weights: list[float], tokens: int) -> list[int]:
    """Lengths of at least 1 in proportion to weights, `tokens` together, in random order."""
    total = sum(weights)
    ends = [round(tokens * end / total) for end in itertools.accumulate(weights)]
    lengths = [max(1, end - start) for start, end in itertools.pairwise([0, *ends])]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    random.Random(SEED).shuffle(lengths)
    return lengths


def _equal(tokens: int) -> list[int]:
    return [tokens // SEQUENCES] * SEQUENCES


def _uniform(tokens: int) -> list[int]:
    generator = random.Random(SEED)
    return _shares([generator.random() for _ in range(SEQUENCES)], tokens)


def _zipf(tokens: int) -> list[int]:
    return _shares([1 / rank for rank in range(1, SEQUENCES + 1)], tokens)


def _one_long(tokens: int) -> list[int]:
    """Half of the tokens in one sequence, between short ones."""
    short = tokens // 2 // 512
    return [*[short] * 256, tokens - 512 * short, *[short] * 256]


def _tiny(tokens: int) -> list[int]:
    return [tokens // 4096] * 4096


# name → the lengths that make up so many tokens, a multiple of 4096
DISTRIBUTIONS: dict[str, Callable[[int], list[int]]] = {
    "equal": _equal,  # 64 sequences of 1024
    "uniform": _uniform,  # 64 of 1 to about 2048
    "zipf": _zipf,  # 64, the length of each in inverse proportion to its rank: 13.8k to 216
    "one-long": _one_long,  # one of 32k and 512 of 64
    "tiny": _tiny,  # 4096 of 16
}


@dataclasses.dataclass(frozen=True, slots=True)
class PackedCell:
    """Self-attention of packed sequences, as many heads as fit into the hidden size."""

    distribution: str  # of `DISTRIBUTIONS`
    head_dim: int
    mask: MaskKind  # full or causal
    dtype: Dtype = "bf16"
    tokens: int = TOKENS
    hidden: int = HIDDEN

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences, in their order."""
        return _lengths(self.distribution, self.tokens)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def window(self) -> tuple[int, int]:
        """Keys a query sees before and after its own."""
        return UNBOUNDED, 0 if self.mask == "causal" else UNBOUNDED

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products; under a causal mask half of them count, by convention."""
        pairs = sum(length**2 for length in self.lengths)
        return 4 * self.heads * self.head_dim * pairs // (2 if self.mask == "causal" else 1)

    @property
    def label(self) -> str:
        dtype = "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"D{self.head_dim} {self.mask} {self.distribution}{dtype}"


@functools.cache
def _lengths(distribution: str, tokens: int) -> tuple[int, ...]:
    return tuple(DISTRIBUTIONS[distribution](tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class PackedInputs:
    """Q, K and V of one cell, (tokens, heads, head_dim), and where its sequences begin and end."""

    cell: PackedCell
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor  # (batch + 1,), int32

    @property
    def longest(self) -> int:
        return max(self.cell.lengths)


def make_packed_inputs(cell: PackedCell, device: torch.device, seed: int = 0) -> PackedInputs:
    """Fresh normal inputs."""
    generator = torch.Generator(device).manual_seed(seed)
    shape, dtype = (cell.tokens, cell.heads, cell.head_dim), TORCH_DTYPES[cell.dtype]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
    ends = [0, *itertools.accumulate(cell.lengths)]
    return PackedInputs(cell, q, k, v, torch.tensor(ends, dtype=torch.int32, device=device))


def make_packed_bwd_inputs(cell: PackedCell, device: torch.device, seed: int = 0) -> BwdInputs[PackedInputs]:
    """Fresh normal inputs, and a normal gradient of O."""
    forward = make_packed_inputs(cell, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    dout = torch.randn(forward.q.shape, device=device, dtype=forward.q.dtype, generator=generator)
    return BwdInputs(forward, dout)


def checked_places(inputs: PackedInputs) -> tuple[accuracy.Place, ...]:
    """The first, the longest and the last sequence, of the first and of the last head."""
    lengths = inputs.cell.lengths
    ends = list(itertools.accumulate(lengths))
    chosen = sorted({0, lengths.index(max(lengths)), len(lengths) - 1})
    heads = sorted({0, inputs.cell.heads - 1})
    return tuple((slice(ends[i] - lengths[i], ends[i]), head) for i in chosen for head in heads)
