"""Output files: a path is checked before the work begins, and no partly written file is left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator


def check_file(path: pathlib.Path) -> None:
    """ValueError if no file can be written at `path`, whose directory may be missing; leaves nothing behind."""
    with _said(path):
        if path.is_dir():
            raise ValueError(f"output {path} is a directory; a file is needed")
        if path.exists() and not path.is_file():
            raise ValueError(f"output {path} is not a regular file")
        _check_writable(path, path.resolve().parent)


def check_directory(path: pathlib.Path) -> None:
    """ValueError if no files can be written into `path`, which may be missing; leaves nothing behind."""
    with _said(path):
        if not path.is_dir() and (path.exists() or path.is_symlink()):
            raise ValueError(f"output {path} is not a directory; a directory is needed")
        _check_writable(path, path if path.is_dir() else path.resolve().parent)


def write_file(path: pathlib.Path, content: str | bytes) -> int:
    """Writes under a temporary name, then renames; the number of bytes. Makes the directory if it is missing.

    ValueError if the system refuses.
    """
    content = content.encode() if isinstance(content, str) else content
    path = path.resolve()  # a link stays a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _said(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return len(content)


def make_directory(path: pathlib.Path) -> None:
    """Makes the directory, with those above it, unless it is there. ValueError if the system refuses."""
    with _said(path):
        path.mkdir(parents=True, exist_ok=True)


def _check_writable(path: pathlib.Path, directory: pathlib.Path) -> None:
    """By trying: permission bits do not cover read-only file systems, quotas and root's rights."""
    while not directory.exists():
        directory = directory.parent  # where the missing ones will be made
    if not directory.is_dir():
        raise ValueError(f"output {path}: {directory} is not a directory")
    with tempfile.TemporaryFile(dir=directory):
        pass


@contextlib.contextmanager
def _said(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names the output."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from error
