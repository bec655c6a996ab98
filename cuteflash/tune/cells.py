"""What is measured: the grid of problem cells, their operation counts and their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
HIDDEN = 2048


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One self-attention problem: `tokens` tokens in sequences of `seqlen`, as many heads as fit into `hidden`."""

    head_dim: int
    causal: bool
    seqlen: int
    tokens: int = TOKENS
    hidden: int = HIDDEN

    def __post_init__(self) -> None:
        if not 0 < self.head_dim <= self.hidden:
            raise ValueError(f"head_dim is {self.head_dim}; allowed: 1 to the hidden size {self.hidden}")
        if self.tokens % self.seqlen:
            raise ValueError(f"seqlen is {self.seqlen}; it must divide the {self.tokens} tokens")

    @property
    def batch(self) -> int:
        return self.tokens // self.seqlen

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products; a causal mask halves them, by convention."""
        full = 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full // 2 if self.causal else full

    @property
    def label(self) -> str:
        return f"D{self.head_dim} {self.mask} {self.seqlen}"


def grid(
    head_dims: Iterable[int] = HEAD_DIMS,
    seqlens: Iterable[int] = SEQLENS,
    causal: Iterable[bool] = (False, True),
) -> list[Cell]:
    """All cells, ordered so that cells that share a kernel are neighbours."""
    seqlens, causal = tuple(seqlens), tuple(causal)
    return [Cell(d, c, s) for d in head_dims for c in causal for s in seqlens]


def parse_cell(text: str) -> Cell:
    """`"128:16384:causal"` as a Cell; ValueError says what the form is."""
    try:
        head_dim, seqlen, mask = text.split(":")
        causal = {"full": False, "causal": True}[mask]
        return Cell(int(head_dim), causal, int(seqlen))
    except (ValueError, KeyError) as error:
        raise ValueError(f"cell is {text!r}; the form is HEAD_DIM:SEQLEN:full|causal ({error})") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Q, K and V of one cell, each (batch, seqlen, heads, head_dim)."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_inputs(cell: Cell, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Fresh normal inputs of `cell`."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
    return Inputs(cell, q, k, v)
