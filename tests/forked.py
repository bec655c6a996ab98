"""Processes that tests start to kill them, and what some do.

Each is forked from a process that has imported torch, so that a start does not take the second which that takes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from cuteflash.tune.store import Store, Timing


@contextlib.contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """A process that calls a function of a module and leads a process group of its own; killed at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    process = context.Process(target=_lead, args=(target, *arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _lead(target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    target(*arguments)


def write_timings(path: pathlib.Path, first: int, last: int, written: Connection) -> None:
    """Times what a database lacks of the candidates from `first` to before `last`; tells of each when it is there."""
    numbers: dict[str, Any] = {"samples": tuple(float(i + 1) for i in range(7)), "ms": 4.0, "low": 3.0, "high": 5.0}
    with Store(path) as store:
        for index in range(first, last):
            name = f"candidate {index}"
            if not store.have_timing(name, "cell", "g", "d", "k"):
                store.record(Timing(name, "cell", "sm_90a", "g", "d", "k", **numbers, tflops=1.0))
                written.send(index)


def die_inside_a_transaction(path: pathlib.Path) -> None:
    """Kills its process when all timings of a database are deleted, and that is not yet committed."""
    store = Store(path)
    with store._transaction():
        store._connection.execute("DELETE FROM timings")
        os.kill(os.getpid(), signal.SIGKILL)
