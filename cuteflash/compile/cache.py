"""Compiled kernels on disk: one object and one manifest an entry, safe between processes.

A writer holds the entry's lock, writes under temporary names and renames; a reader needs no lock, because it believes
an object only when the manifest's digest matches it. What cannot be believed is rebuilt with a warning; a directory
that cannot be written is reported once and done without.

CUTEFLASH_CACHE_DIR moves the cache (default: $XDG_CACHE_HOME/cuteflash, or ~/.cache/cuteflash),
CUTEFLASH_CACHE=0 turns it off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

from cuteflash.files import replace_file

MANIFEST_VERSION = 1
OFF = ("0", "off", "false", "no")


class CacheWarning(UserWarning):
    """The disk cache could not be used as it should; the kernel is compiled instead."""


def cache_dir() -> pathlib.Path | None:
    """Where compiled kernels are kept, or None where CUTEFLASH_CACHE turns the cache off. Not created here."""
    if os.environ.get("CUTEFLASH_CACHE", "1").strip().lower() in OFF:
        return None
    moved = os.environ.get("CUTEFLASH_CACHE_DIR")
    if moved:
        return pathlib.Path(moved).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    root = pathlib.Path(base) if base and os.path.isabs(base) else pathlib.Path.home() / ".cache"
    return root / "cuteflash"


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
        """(the stored report, None); (None, why not) where the entry cannot be believed; (None, None) where absent."""
        try:
            text = self.manifest_path.read_bytes()
            blob = self.object_path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except OSError as error:
            return None, f"cannot be read ({error})"
        try:
            manifest = json.loads(text)
            key, sha256, report = manifest["key"], manifest["sha256"], manifest["report"]
        except (ValueError, TypeError, KeyError):
            return None, "its manifest is not readable"
        if manifest.get("version") != MANIFEST_VERSION or key != self.key or not isinstance(report, dict):
            return None, "it was made for another key"
        if _checksum(blob, report) != sha256:
            return None, f"its object of {len(blob)} bytes does not match its manifest"
        return report, None

    def write(self, blob: bytes, report: dict[str, Any]) -> None:
        """Stores an object and its report; the manifest comes last, so that a reader never finds one without the other.

        OSError where the directory cannot be written.
        """
        manifest = {
            "version": MANIFEST_VERSION,
            "key": self.key,
            "sha256": _checksum(blob, report),
            "report": report,
        }
        replace_file(self.object_path, blob)
        replace_file(self.manifest_path, json.dumps(manifest, indent=1).encode())

    def discard(self) -> None:
        """Makes the entry absent. OSError where the directory cannot be written."""
        self.manifest_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the entry's lock: of several processes that miss one entry, one compiles and the others wait for it.

        OSError where the directory cannot be written or its file system has no locks.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.root / f"{self.digest}.lock", "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield  # closing the file releases the lock, also when the process dies


def key_digest(key: dict[str, Any]) -> str:
    """The entry's file name: 32 hex digits of the canonical key's SHA-256."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _checksum(blob: bytes, report: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(report, sort_keys=True).encode() + b"\0" + blob).hexdigest()


_unwritable: set[pathlib.Path] = set()


def warn_unwritable(root: pathlib.Path, error: OSError) -> None:
    """Says once a directory and process that compiled kernels are not kept."""
    if root not in _unwritable:
        _unwritable.add(root)
        warnings.warn(
            f"compiled kernels are not kept: {root}: {error}; CUTEFLASH_CACHE_DIR moves the cache, "
            "CUTEFLASH_CACHE=0 turns it off",
            CacheWarning,
            stacklevel=2,
        )
