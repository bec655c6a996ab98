"""What the tests of `examples/train_gpt.py` train: a small model on a small corpus."""

from __future__ import annotations

import pathlib
import random

from gpt.settings import Settings

SETTINGS = Settings(layers=1, dim=16, heads=2, kv_heads=1, context=16, batch=4, steps=7, lr=1e-2)
SMALL = [
    "--device=cpu",
    *(f"--{name}={getattr(SETTINGS, name)}" for name in ("layers", "dim", "heads", "context", "batch", "steps")),
]


def small_library(root: pathlib.Path) -> pathlib.Path:
    """A tree like the standard library's, with 60 sources of 0 to 118 bytes."""
    letters = random.Random(0)
    for number in range(60):
        path = root / ("package" if number % 2 else "") / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(letters.choices(b"abcdef \n", k=2 * number)))
    return root
