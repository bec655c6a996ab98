"""Parameters of which a developer's loop takes a few: `make quick` runs those, `make test` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(parameters: Iterable[str], *quick: str) -> list[Any]:
    """The parameters, all but those named `quick` with the mark `slow`."""
    names = list(parameters)
    if not set(quick) <= set(names):
        raise ValueError(f"quick is {quick}; allowed: {', '.join(names)}")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
