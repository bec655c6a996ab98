"""What defines a training run: equal settings give equal batches and equal initial weights."""

from __future__ import annotations

import dataclasses
from typing import Any

DTYPES = ("bf16", "fp16", "fp32")
DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One run; the attention that it trains with is not part of it.

    Attributes:
        layers, dim, heads, kv_heads: of the model; a head has ``dim / heads`` columns.
        context: bytes of a sequence, or the most of a packed document.
        batch: sequences a step.
        steps: optimiser steps.
        lr: the highest learning rate: linear warm-up, then a cosine down to a tenth.
        seed: of the initial weights and of the order of the data.
        device: "cpu" or "cuda".
        dtype: what autocast computes in; parameters are fp32.
        packed: documents are packed with `cu_seqlens`, and attend to themselves alone.
        compile: the model goes through `torch.compile`.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    context: int
    batch: int
    steps: int
    lr: float
    seed: int = 0
    device: str = "cpu"
    dtype: str = "fp32"
    packed: bool = False
    compile: bool = False

    def check(self) -> None:
        """Raise ValueError, naming the setting, unless a run can have these settings."""
        for name in ("layers", "dim", "heads", "kv_heads", "context", "batch", "steps", "lr"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; allowed: positive numbers")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; allowed: 0 or more")
        if self.dim % (8 * self.heads):
            raise ValueError(f"dim is {self.dim}; allowed: multiples of 8 columns for each of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; allowed: divisors of heads, which is {self.heads}")
        if self.device == "cuda" and self.dtype == "fp32":
            raise ValueError("dtype is fp32 on cuda; allowed there: bf16, fp16")

    def difference(self, other: dict[str, Any]) -> str | None:
        """The first setting that differs from `other`, in words."""
        for name, value in dataclasses.asdict(self).items():
            if other.get(name) != value:
                return f"{name} is {value}, and was {other.get(name)}"
        return None


PRESETS = {
    "tiny": Settings(layers=2, dim=64, heads=4, kv_heads=4, context=128, batch=8, steps=100, lr=3e-3),
    "small": Settings(layers=6, dim=384, heads=6, kv_heads=6, context=1024, batch=32, steps=1000, lr=1e-3),
    "medium": Settings(layers=12, dim=768, heads=6, kv_heads=6, context=2048, batch=16, steps=1000, lr=6e-4),
    "long": Settings(layers=6, dim=512, heads=4, kv_heads=4, context=16384, batch=2, steps=500, lr=1e-3),
}
