"""A model of when the units of a multiprocessor are busy: tasks that wait for each other and share units.

The rates are those of docs/performance.md ("The floor").
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

FLOPS_PER_CLOCK = 4096  # dense bf16, one multiprocessor
EXPONENTIALS_PER_CLOCK = 16
TENSOR, EXPONENTIAL, FP32 = "tensor", "exponential", "fp32"
Key = tuple[int, str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Work of one warpgroup on one unit; it starts when the tasks `after` are done.

    Attributes:
        key: (warpgroup, what, block).
        clocks: how long it takes if the unit does nothing else.
    """

    key: Key
    unit: str
    clocks: int
    after: tuple[Key, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A task as it ran: [start, end) in clocks."""

    task: Task
    start: float
    end: float


def simulate(work: list[Task]) -> list[Span]:
    """When each task runs, in order of their ends. A unit is shared equally by all tasks that run on it."""
    waiting = list(work)
    running: dict[Key, tuple[Task, float, float]] = {}  # task, start, clocks left
    done: dict[Key, Span] = {}
    now = 0.0
    while waiting or running:
        ready = [task for task in waiting if all(key in done for key in task.after)]
        waiting = [task for task in waiting if task not in ready]
        running |= {task.key: (task, now, float(task.clocks)) for task in ready}
        if not running:
            raise ValueError("these tasks wait for each other")
        share = collections.Counter(task.unit for task, _, _ in running.values())
        advance = min(left * share[task.unit] for task, _, left in running.values())
        now += advance
        for key, (task, start, left) in list(running.items()):
            left -= advance / share[task.unit]
            running[key] = (task, start, left)
            if left < 1e-9:
                done[key] = Span(task, start, now)
                del running[key]
    return list(done.values())


def spans_data(spans: Sequence[Span]) -> dict[str, Any]:
    """Spans `[warpgroup, what, block, start, end]`, the clocks of all, the share in which the tensor cores work."""
    total = max(span.end for span in spans)
    used = sum(span.task.clocks for span in spans if span.task.unit == TENSOR)
    listed = [[*span.task.key, round(span.start), round(span.end)] for span in spans]
    return {"spans": listed, "clocks": round(total), "tensor": round(used / total, 4)}
