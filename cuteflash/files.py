"""Files that other processes read or write at the same time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Sequence

COPY_ATTEMPTS = 5


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, whole or not at all: under a temporary name beside it, which then becomes its own.

    Only this user may read it. OSError if the system refuses; what was there before is then still there.
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
    """Copies files as they all were at one moment; one that is missing has no copy. The paths of the copies.

    OSError if the system refuses, or if they change whenever they are copied.
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
