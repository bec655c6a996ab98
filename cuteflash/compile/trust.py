"""Who could have written a file. The cache holds machine code that this process runs, so only two are trusted with it:
this user, and root, whose read-only caches come with container images."""

from __future__ import annotations

import os
import pathlib
import stat

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def doubt_directory(directory: pathlib.Path) -> str | None:
    """Why others could have put files into a directory, None if they could not or if it does not exist yet.

    Links are followed to where the files really are. Above the directory only what everybody can write counts, and
    only without a sticky bit, which /tmp has: there anybody can put a directory of their own in the place of ours.
    Groups are let pass, because on many systems each user has one, and their homes are writable to it.
    """
    real = pathlib.Path(os.path.realpath(directory))
    for place in (real, *real.parents):
        try:
            status = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"it cannot be looked into ({error})"
        if place == real:
            doubt = _doubt(status)
            if doubt:
                return doubt
        elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(status.st_mode)
            return (
                f"everybody can replace it: the mode of {place} is {mode:04o}; allowed: not writable by all, or sticky"
            )
    return None


def read_trusted(path: pathlib.Path) -> bytes:
    """A file's content. PermissionError if somebody else could have written it: the directory may once have been
    open to others."""
    with open(path, "rb") as handle:
        doubt = _doubt(os.fstat(handle.fileno()))
        if doubt:
            raise PermissionError(f"{path}: {doubt}")
        return handle.read()


def _doubt(status: os.stat_result) -> str | None:
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        return f"it belongs to user {status.st_uid}; allowed: this user, {user}, or root"
    if status.st_mode & OTHERS_WRITE:
        return (
            f"others can write it: its mode is {stat.S_IMODE(status.st_mode):04o}; allowed: writable by its owner alone"
        )
    return None
