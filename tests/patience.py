"""How long tests wait for what other processes do: a guard against waiting for ever, never an expectation of speed.

Tests assert no time, since the machine may be busy with other work: `test_architecture.py` holds that none reads a
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Returns as soon as the condition holds. `what` says in a failure what was waited for."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE:g} s")
        time.sleep(0.01)
