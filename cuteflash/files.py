"""Files that other processes read while they are written."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, whole or not at all: under a temporary name beside it, which then becomes its own.

    Only this user may read it. OSError where the system refuses; what was there before is then still there.
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
