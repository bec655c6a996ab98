"""Work that may crash or hang, in a child process: one request at a time, each with a time limit.

The child lives on from request to request: what it has imported, loaded and allocated stays warm. Whatever ends it is
the fault of the request at hand; the next request starts another child. Children are forked from a server process that
has imported torch and done nothing else, so a start takes no seconds, and none inherits the parent's compiler or CUDA
context. A child ignores Ctrl-C, which is the parent's to act upon, and ends as soon as the parent does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pathlib
import re
import signal
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

START_SECONDS = 240.0  # importing torch and the compiler and creating a CUDA context, on a busy machine
END_SECONDS = 10.0
WORDS = 300  # characters of an error that are worth keeping
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Tool(Protocol):
    """What lives in the child; its methods are the requests."""

    def usable(self) -> bool:
        """Asked after a failure: whether the process can go on, or has e.g. lost its GPU context."""
        ...


class RequestFailed(RuntimeError):
    """The request raised; the child goes on."""


class WorkerLost(RequestFailed):
    """The request ended the child: it crashed, did not answer in time or became unusable."""


class StartFailed(RuntimeError):
    """The child cannot be set up, whatever it would be asked."""


class Worker:
    """A child process that holds the tool that `make` returns there.

    Args:
        make: picklable; called in the child.
        start_seconds: time limit of that call.
    """

    def __init__(self, make: Callable[[], Tool], start_seconds: float = START_SECONDS):
        self.make, self.start_seconds = make, start_seconds
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._log = pathlib.Path()
        self._stopped = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """What the tool's `method` returns for `arguments`, which are pickled, as is the result.

        Raises:
            RequestFailed: the method raised.
            WorkerLost: it ended the child, or took longer than `seconds`.
            OSError: the method raised one, e.g. of a full disk; that is no fault of what was asked for.
            StartFailed: there is no child, and none can be set up.
        """
        connection = self._connection or self._start()
        try:
            connection.send((method, arguments))
            answer = connection.recv() if connection.poll(seconds) else None
        except (EOFError, ConnectionError):
            raise WorkerLost(self._end()) from None
        if answer is None:
            self._end()
            raise WorkerLost(f"no answer within {seconds:g} s")
        kind, value = answer
        if kind == "failed":
            raise RequestFailed(value)
        if kind == "system":
            raise OSError(value)
        if kind == "lost":
            self._end()
            raise WorkerLost(value)
        return value

    def stop(self) -> None:
        """Ends the child at once, also while another thread waits for its answer; it holds nothing to be saved."""
        self._stopped = True
        if self._process is not None:
            self._end()

    def _start(self) -> Connection:
        if self._stopped:
            raise StartFailed("the worker was stopped")
        context = _context()
        ours, theirs = context.Pipe()
        descriptor, log = tempfile.mkstemp(prefix="cuteflash-worker-", suffix=".log")
        os.close(descriptor)
        self._log = pathlib.Path(log)
        arguments = (theirs, self.make, log, dict(os.environ))
        process = self._process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the child's end is the last one, and its death an end of file
        try:
            answer = ours.recv() if ours.poll(self.start_seconds) else ("late", "")
        except (EOFError, ConnectionError):
            raise StartFailed(self._end()) from None
        kind, text = answer
        if kind != "ready":
            self._end()
            raise StartFailed(text or f"the worker process was not ready within {self.start_seconds:g} s")
        self._connection = ours
        return ours

    def _end(self) -> str:
        """Ends the child, however it is; how it ended, in words."""
        process, self._process, self._connection = self._process, None, None
        if process is None:
            return "the worker process was stopped"
        process.join(0.2)  # one that is crashing is left to it, so that its exit status is its own
        process.kill()
        process.join(END_SECONDS)
        status = process.exitcode
        last = _last_line(self._log)
        with contextlib.suppress(OSError):
            self._log.unlink()
        if status is None:
            return "the worker process cannot be ended: its GPU work does not stop"
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return f"the worker process ended {how}" + (f": {last}" if last else "")


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # not this package: the server does not know the parent's sys.path
    return context


def one_line(failure: BaseException) -> str:
    """An exception on one line of at most `WORDS` characters."""
    return " ".join(plain(f"{type(failure).__name__}: {failure}").split())[:WORDS]


def plain(text: str) -> str:
    """A compiler's words without the terminal's colours."""
    return COLOUR.sub("", text)


def _last_line(log: pathlib.Path) -> str:
    """The error a dying process wrote: its first fatal line, or else the last one."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if line.startswith("Fatal")]
        return (fatal or lines[-1:] or [""])[0][:WORDS]
    return ""


def _serve(connection: Connection, make: Callable[[], Tool], log: str, environment: dict[str, str]) -> None:
    """The child's whole life. `environment` is the parent's, which the server's need not be any more."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    with open(log, "wb", buffering=0) as output:  # the terminal is the parent's display
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    faulthandler.enable()
    try:
        tool = make()
    except Exception as failure:
        connection.send(("unfit", one_line(failure)))
        return
    connection.send(("ready", ""))
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = "done", getattr(tool, method)(*arguments)
        except OSError as failure:
            answer = "system", one_line(failure)
        except Exception as failure:
            answer = "failed" if tool.usable() else "lost", one_line(failure)
        connection.send(answer)
        if answer[0] == "lost":
            os._exit(0)  # a normal exit would wait for GPU work without end


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children, and a child that waits in a GPU call sees no closed pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def wait() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()
