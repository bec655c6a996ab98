"""Where a user's files lie, and files that other processes read or write at the same time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Sequence

COPY_ATTEMPTS = 5


class NoDirectoryError(Exception):
    """No directory for a user's files can be determined; the text says why."""


def user_directory(variable: str, xdg_variable: str, under_home: str) -> pathlib.Path:
    """The directory of one kind of files. Not created here.

    Args:
        variable: the environment variable that names the directory itself.
        xdg_variable: the variable of the XDG base directory, below which the directory is called `cuteflash`; relative
            paths are ignored, as the XDG specification asks.
        under_home: the XDG base directory if its variable is not set, relative to the home directory.

    Raises:
        NoDirectoryError: the directory is in a home that does not exist: containers run with user ids that have
            neither $HOME nor an entry in the user database, and the user of `~name` may not exist.
    """
    named = os.environ.get(variable)
    base = os.environ.get(xdg_variable)
    try:
        if named:
            return pathlib.Path(named).expanduser()
        if base and os.path.isabs(base):
            return pathlib.Path(base) / "cuteflash"
        return pathlib.Path.home() / under_home / "cuteflash"
    except RuntimeError:
        subject = f"{variable} is {named!r}, and that" if named else f"user {os.geteuid()}"
        raise NoDirectoryError(f"{subject} has no home directory") from None


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, whole or not at all: under a temporary name beside it, which is then renamed.

    Only this user may read it. OSError if the system refuses; an earlier file then remains.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def copy_together(paths: Sequence[pathlib.Path], folder: pathlib.Path) -> list[pathlib.Path]:
    """Copies files as they all were at one moment; a missing one is skipped. Returns the paths of the copies.

    OSError if the system refuses, or if a file changes during every attempt.
    """
    copies = [folder / path.name for path in paths]
    for _ in range(COPY_ATTEMPTS):
        before = [_state(path) for path in paths]
        for path, copy, state in zip(paths, copies, before):
            copy.unlink(missing_ok=True)
            if state is not None:
                copy.write_bytes(path.read_bytes())
        if before == [_state(path) for path in paths]:
            return copies
    raise OSError(f"{paths[0]} changes whenever it is copied")


def _state(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
