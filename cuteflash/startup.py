"""Ctrl-C while a program of ours still imports its modules, which takes seconds."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C ends the process by the signal (status 130 in a shell), without a traceback.

    A signal that the process ignores or handles in its own way is left as it is.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
