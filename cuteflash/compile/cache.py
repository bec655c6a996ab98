"""Compiled kernels on disk: one object and one manifest an entry, safe between processes.

A writer holds the entry's lock, writes under temporary names and renames; a reader needs no lock, because it uses an
object only if the manifest's digest matches it. An entry that fails verification is rebuilt with a warning; a directory
that cannot be written, or that others can write, is reported once and not used.

CUTEFLASH_CACHE_DIR moves the cache (default: $XDG_CACHE_HOME/cuteflash, or ~/.cache/cuteflash; without a home,
cuteflash-<user id> where temporary files lie), CUTEFLASH_CACHE=0 turns it off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import IO, Any

from cuteflash.compile.trust import doubt_directory, read_trusted
from cuteflash.files import NoDirectoryError, replace_file, user_directory

MANIFEST_VERSION = 1
OFF = ("0", "off", "false", "no")
MOVES = "CUTEFLASH_CACHE_DIR moves the cache, CUTEFLASH_CACHE=0 turns it off"
# A kernel compiles in seconds, and on a machine with too much to do in some more.
LOCK_QUIET_SECONDS = 10.0  # a wait without a warning
LOCK_SECONDS = 60.0  # the longest wait
LOCK_POLL_SECONDS = 0.05


class CacheWarning(UserWarning):
    """The disk cache could not be used as it should; the kernel is compiled instead."""


def cache_dir() -> pathlib.Path | None:
    """Where compiled kernels are kept, not created here; None if CUTEFLASH_CACHE turns the cache off.

    None also, with a CacheWarning once a process, if others could have put their code there.
    """
    if os.environ.get("CUTEFLASH_CACHE", "1").strip().lower() in OFF:
        return None
    try:
        root = user_directory("CUTEFLASH_CACHE_DIR", "XDG_CACHE_HOME", ".cache")
    except NoDirectoryError as error:
        try:
            root = pathlib.Path(tempfile.gettempdir()) / f"cuteflash-{os.geteuid()}"
        except OSError as no_temporary:
            _warn_once("nowhere", f"compiled kernels are not kept: {error}; {no_temporary}; {MOVES}")
            return None
        _warn_once("homeless", f"compiled kernels are kept in {root}, because {error}; {MOVES}")
    doubt = doubt_directory(root)
    if doubt is not None:
        _warn_once(f"doubt {root}", f"the cache of compiled kernels {root} is not used: {doubt}; {MOVES}")
        return None
    return root


def cache_size(root: pathlib.Path) -> tuple[int, int]:
    """(entries, bytes of their objects) under `root`."""
    sizes = [path.stat().st_size for path in root.glob("*.o")] if root.is_dir() else []
    return len(sizes), sum(sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One kernel in the cache: `root`/`digest`.{o,json,lock}.

    Attributes:
        root: the cache directory.
        key: everything that decides what the object holds, as JSON values.
    """

    root: pathlib.Path
    key: dict[str, Any]

    @property
    def digest(self) -> str:
        return key_digest(self.key)

    @property
    def object_path(self) -> pathlib.Path:
        return self.root / f"{self.digest}.o"

    @property
    def manifest_path(self) -> pathlib.Path:
        return self.root / f"{self.digest}.json"

    def read(self) -> tuple[dict[str, Any] | None, str | None]:
        """(the stored report, None); (None, why not) if the entry fails verification; (None, None) if there is none."""
        try:
            text = read_trusted(self.manifest_path)
            blob = read_trusted(self.object_path)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except OSError as error:
            return None, f"cannot be read ({error})"
        try:
            manifest = json.loads(text)
            key, sha256, report = manifest["key"], manifest["sha256"], manifest["report"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None, "its manifest is not readable"
        if manifest.get("version") != MANIFEST_VERSION or key != self.key or not isinstance(report, dict):
            return None, "it was made for another key"
        if _checksum(blob, report) != sha256:
            return None, f"its object of {len(blob)} bytes does not match its manifest"
        return report, None

    def write(self, blob: bytes, report: dict[str, Any]) -> None:
        """Stores an object and its report; the manifest comes last, so that a reader never finds one without the other.

        OSError if the directory cannot be written, or others can write it: another process may have made it meanwhile.
        """
        doubt = doubt_directory(self.root)
        if doubt is not None:
            raise PermissionError(doubt)
        manifest = {
            "version": MANIFEST_VERSION,
            "key": self.key,
            "sha256": _checksum(blob, report),
            "report": report,
        }
        replace_file(self.object_path, blob)
        replace_file(self.manifest_path, json.dumps(manifest, indent=1).encode())

    def discard(self) -> None:
        """Makes the entry absent. OSError if the directory cannot be written."""
        self.manifest_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the entry's lock: of several processes that miss one entry, one compiles and the others wait for it.

        A long wait raises a CacheWarning, and ends after LOCK_SECONDS: the holder may hang.

        OSError if the directory cannot be written or its file system has no locks; its TimeoutError if the wait has
        ended.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.root / f"{self.digest}.lock", "a+", errors="replace") as handle:
            self._wait_for(handle)
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}")
            handle.flush()
            yield  # closing the file releases the lock, also when the process dies

    def _wait_for(self, handle: IO[str]) -> None:
        start = time.monotonic()
        spoken = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                waited = time.monotonic() - start
            handle.seek(0)
            kernel, holder = f"{self.key['kernel']} for {self.key['target']}", handle.read(200) or "another process"
            if waited >= LOCK_SECONDS:
                text = f"{holder} has held {handle.name} for {LOCK_SECONDS:.0f} s: {kernel} is compiled without waiting"
                warnings.warn(text, CacheWarning, stacklevel=2)
                raise TimeoutError(text)
            if waited >= LOCK_QUIET_SECONDS and not spoken:
                spoken = True
                text = f"waiting up to {LOCK_SECONDS:.0f} s for {holder} to compile {kernel}; it holds {handle.name}"
                warnings.warn(text, CacheWarning, stacklevel=2)
            time.sleep(LOCK_POLL_SECONDS)


def key_digest(key: dict[str, Any]) -> str:
    """The entry's file name: 32 hex digits of the canonical key's SHA-256."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _checksum(blob: bytes, report: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(report, sort_keys=True).encode() + b"\0" + blob).hexdigest()


_told: set[str] = set()


def warn_unwritable(root: pathlib.Path, error: OSError) -> None:
    """Says once a directory and process that compiled kernels are not kept."""
    _warn_once(f"unwritable {root}", f"compiled kernels are not kept: {root}: {error}; {MOVES}")


def _warn_once(what: str, text: str) -> None:
    if what not in _told:
        _told.add(what)
        warnings.warn(text, CacheWarning, stacklevel=3)
