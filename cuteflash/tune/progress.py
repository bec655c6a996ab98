"""What a sweep is doing: counts of each stage, live on a terminal, otherwise as plain lines."""

from __future__ import annotations

import collections
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

PLAIN_SECONDS = 10.0  # between the lines of a stage if there is no terminal


class Display:
    """Told what happens, and shows it on standard error; a context manager. Stages may overlap.

    Attributes:
        counts: of each stage so far its outcomes, in the order in which they first came.
        said: what was said.
    """

    def __init__(self, console: Console | None = None):
        self.counts: dict[str, collections.Counter[str]] = {}
        self.said: list[str] = []
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[doing]}"), console=self._console,
        )  # fmt: skip
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4)
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, int | None] = {}
        self._spoken = time.monotonic()

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, stage: str, total: int | None) -> None:
        """A stage starts, with so many steps if that is known."""
        self.counts.setdefault(stage, collections.Counter())
        self._totals[stage] = total
        self._tasks[stage] = self._bars.add_task(stage, total=total, doing="")
        self._spoken = time.monotonic()

    def step(self, stage: str, outcome: str, count: int = 1) -> None:
        """So many steps of a stage ended with this outcome."""
        self.counts[stage][outcome] += count
        self._bars.advance(self._tasks[stage], count)
        if not self._console.is_terminal and time.monotonic() - self._spoken > PLAIN_SECONDS:
            self._line(stage)

    def doing(self, stage: str, what: str) -> None:
        """What a stage is at."""
        self._bars.update(self._tasks[stage], doing=what)

    def end(self, stage: str) -> None:
        self._bars.remove_task(self._tasks.pop(stage))
        if not self._console.is_terminal:
            self._line(stage)

    def say(self, text: str) -> None:
        """Something a person should know."""
        self.said.append(text)
        self._print(text)

    def _line(self, stage: str) -> None:
        self._spoken = time.monotonic()
        total = self._totals[stage]
        of = f" of {total}" if total is not None else ""
        self._print(f"{stage}: {sum(self.counts[stage].values())}{of}: {summary(self.counts[stage])}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> Any:
        table = Table(box=None, show_header=False, pad_edge=False)
        for stage, outcomes in self.counts.items():
            table.add_row(stage, str(sum(outcomes.values())), summary(outcomes))
        return Group(table, self._bars)


def summary(outcomes: collections.Counter[str]) -> str:
    """`"12 kept, 3 rejected"`."""
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "nothing to do"
