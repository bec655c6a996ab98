"""Output files: whether a path can be written is known before the work, and nothing half-written is left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile


def check_file(path: pathlib.Path) -> None:
    """ValueError where no file can be written at `path`; leaves nothing behind."""
    if path.is_dir():
        raise ValueError(f"output {path} is a directory; a file is needed")
    if path.exists() and not path.is_file():
        raise ValueError(f"output {path} is no regular file")
    parent = path.resolve().parent
    if not parent.exists():
        raise ValueError(f"output {path}: the directory {parent} does not exist")
    _check_writable(path, parent)


def check_directory(path: pathlib.Path) -> None:
    """ValueError where no files can be written into `path`, which may have to be made first; leaves nothing behind."""
    if path.is_dir():
        _check_writable(path, path)
        return
    if path.exists() or path.is_symlink():
        raise ValueError(f"output {path} is no directory; a directory is needed")
    parent = path.resolve().parent
    if not parent.exists():
        raise ValueError(f"output {path}: the directory {parent} does not exist")
    _check_writable(path, parent)


def write_file(path: pathlib.Path, content: str | bytes) -> int:
    """Writes under a temporary name, then renames; the number of bytes. ValueError where the system refuses."""
    content = content.encode() if isinstance(content, str) else content
    path = path.resolve()  # a link stays a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return len(content)


def make_directory(path: pathlib.Path) -> None:
    """Makes the directory unless it is there. ValueError where the system refuses."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"output {path} cannot be made: {error.strerror}") from error


def _check_writable(path: pathlib.Path, directory: pathlib.Path) -> None:
    """By trying: permission bits do not tell of read-only file systems, quotas, or what root may do."""
    if not directory.is_dir():
        raise ValueError(f"output {path}: {directory} is no directory")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"output {path}: {directory} cannot be written: {error.strerror}") from error
