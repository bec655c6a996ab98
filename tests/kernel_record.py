"""What the compiler said of kernels when they were compiled last, so that `make test` need not ask: `kernels.json`.

    make record      # the whole test run, which then writes what it knows: do so after a change of device code

A kernel is known by the digest of its cache key, which all that decides its code is part of: its class, traits and
problem, every source file that it imports, the compiler's version. So a record is never out of date; of what has
changed since, it has no entry, and a run compiles that. What reads the compiler's files has to be the same, too
(`readers`). A run also compiles one of `SAMPLE` kernels that it does know, which ones their digests say, and compares.

A test that asks for more than registers, spills, numbers of instructions or matches in the PTX has its kernel compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from cuteflash.compile import resources
from cuteflash.compile.resources import Resources
from tests import cross_compile, machine_code
from tests.cross_compile import Compiled

Facts = dict[str, Any]  # by name; JSON's values
SAMPLE = 32
PATH = pathlib.Path(__file__).with_name("kernels.json")
PART = "facts-*.json"  # of each process of a run


class Kernel:
    """A kernel with what is known of it, compiled once something else is asked for; as `Compiled`.

    Attributes:
        facts: what has been asked for, or is known.
    """

    def __init__(self, digest: str, known: Facts, compile_now: Callable[[], Compiled]) -> None:
        self.digest = digest
        self.facts: Facts = {}
        self._known = known
        self._compile = compile_now

    @property
    def is_sample(self) -> bool:
        """Whether what is known is compared with what the compiler says now."""
        return int(self.digest[:8], 16) % SAMPLE == 0

    @functools.cached_property
    def compiled(self) -> Compiled:
        """The compiler's files."""
        return self._compile()

    @property
    def folder(self) -> pathlib.Path:
        return self.compiled.folder

    @property
    def ptx(self) -> str:
        return self.compiled.ptx

    @property
    def cubin(self) -> bytes:
        return self.compiled.cubin

    @property
    def sass(self) -> str:
        return self.compiled.sass

    @property
    def resources(self) -> Resources:
        """See `Compiled`."""
        *numbers, warnings = self._fact("resources", lambda one: _plain(dataclasses.astuple(one.resources)))
        return Resources(*numbers, tuple(warnings))

    def count(self, instruction: str) -> int:
        """See `Compiled`."""
        return int(self._fact(f"count {instruction}", lambda one: one.count(instruction)))

    def found(self, pattern: str) -> tuple[str, ...]:
        """See `Compiled`."""
        return tuple(self._fact(f"found {pattern}", lambda one: list(one.found(pattern))))

    def times(self, pattern: str, before: str = "") -> int:
        """See `Compiled`."""
        name = f"times {pattern} before {before}" if before else f"times {pattern}"
        return int(self._fact(name, lambda one: one.times(pattern, before)))

    def assert_no_complaint(self) -> None:
        """See `Compiled`."""
        Compiled.assert_no_complaint(self)  # type: ignore[arg-type]

    def assert_clean(self) -> None:
        """See `Compiled`."""
        Compiled.assert_clean(self)  # type: ignore[arg-type]

    def _fact(self, name: str, ask: Callable[[Compiled], Any]) -> Any:
        if name not in self.facts:
            known = self._known.get(name)
            fact = ask(self.compiled) if known is None or self.is_sample else known
            assert known in (None, fact), (
                f"{PATH.name} says {name}: {known}, the compiler {fact}; it is written anew by `make record`"
            )
            self.facts[name] = fact
        return self.facts[name]


class Record:
    """The facts of many kernels, by digest; none if there is no file at `path`, or other readers wrote it."""

    def __init__(self, path: pathlib.Path) -> None:
        content = json.loads(path.read_text()) if path.exists() else {}
        self.known: dict[str, Facts] = content["kernels"] if content.get("readers") == readers() else {}

    def kernel(self, digest: str, compile_now: Callable[[], Compiled]) -> Kernel:
        """A kernel with what is known of it."""
        return Kernel(digest, self.known.get(digest, {}), compile_now)


def write_part(root: pathlib.Path, kernels: dict[str, Kernel]) -> None:
    """Note what one process of a run knows in the end."""
    path = root / PART.replace("*", str(os.getpid()))
    path.write_text(json.dumps({digest: kernel.facts for digest, kernel in kernels.items()}))


def write(path: pathlib.Path, root: pathlib.Path) -> None:
    """Write the record of a run from its processes' parts: a line a kernel, so that a change shows what has changed."""
    together: dict[str, Facts] = {}
    for part in sorted(root.glob(PART)):
        for digest, facts in json.loads(part.read_text()).items():
            together.setdefault(digest, {}).update(facts)
    kernels = ",\n".join(_lines(together))
    path.write_text(f'{{"readers": {json.dumps(readers())}, "kernels": {{\n{kernels}\n}}}}\n')


def readers() -> str:
    """A hash of the sources that read the compiler's files."""
    digest = hashlib.sha256()
    for module in (cross_compile, machine_code, resources):
        digest.update(pathlib.Path(module.__file__).read_bytes())
    return digest.hexdigest()


def _lines(together: dict[str, Facts]) -> Iterator[str]:
    for digest, facts in sorted(together.items()):
        if facts:
            yield f"{json.dumps(digest)}: {json.dumps(facts, sort_keys=True)}"


def _plain(value: Any) -> Any:
    """As a file gives it back, in which a tuple is a list."""
    return json.loads(json.dumps(value))
