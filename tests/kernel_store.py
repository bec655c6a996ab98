"""The kernels of a run of the tests: each compiled once at most, for all tests and for all processes of the run."""

from __future__ import annotations

import fcntl
import functools
import pathlib
import tempfile
from typing import Any

from cuteflash.compile.cache import key_digest
from cuteflash.compile.key import cache_key
from tests import cross_compile
from tests.cross_compile import Compiled
from tests.kernel_record import Kernel, Record


class KernelStore:
    """What a run of the tests has compiled, and what is known of the others.

    It is a directory that the run starts empty, never the user's cache.

    Attributes:
        kernels: those that this process has asked for, by digest.
    """

    def __init__(self, root: pathlib.Path, record: Record) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.record = record
        self.kernels: dict[str, Kernel] = {}

    def __call__(self, kernel_cls: type, traits: Any, problem: Any, target: str) -> Kernel:
        """`kernel_cls(traits, problem)` for `target`."""
        digest = key_digest(cache_key(kernel_cls, traits, problem, target))
        if digest not in self.kernels:
            compile_now = functools.partial(self._compiled, digest, kernel_cls, traits, problem, target)
            self.kernels[digest] = self.record.kernel(digest, compile_now)
        return self.kernels[digest]

    def _compiled(self, digest: str, kernel_cls: type, traits: Any, problem: Any, target: str) -> Compiled:
        folder = self.root / digest
        with open(self.root / f"{digest}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if not folder.exists():
                scratch = pathlib.Path(tempfile.mkdtemp(dir=self.root))
                cross_compile.cross_compile(kernel_cls(traits, problem), target, scratch)
                scratch.rename(folder)
        return Compiled(folder)
