"""Kernels compiled for a target that this machine need not have, with everything the compiler says about them."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import pathlib
import re
import subprocess
import sysconfig
import tempfile
from typing import Any

from cutlass import cute

from cuteflash.compile.cache import key_digest
from cuteflash.compile.key import cache_key
from cuteflash.compile.options import compiler_options
from cuteflash.compile.resources import Resources, parse_ptxas_log
from tests import machine_code

NVDISASM = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", "nvdisasm")
REMARKS = "remarks.yaml"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One cross-compiled kernel: its PTX, its machine code, and what ptxas reports of it.

    Attributes:
        folder: where the compiler's files lie; each is read if a test asks for it.
    """

    folder: pathlib.Path

    @functools.cached_property
    def ptx(self) -> str:
        return self._only("*.ptx").read_text()

    @functools.cached_property
    def cubin(self) -> bytes:
        return self._only("*.cubin").read_bytes()

    @functools.cached_property
    def sass(self) -> str:
        """Takes a quarter of a second: cuobjdump, which prints encodings, too, would take half as much again."""
        command = [NVDISASM, "--no-dataflow", "--print-code", self._only("*.cubin")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    @functools.cached_property
    def resources(self) -> Resources:
        return parse_ptxas_log((self.folder / REMARKS).read_text())

    def _only(self, pattern: str) -> pathlib.Path:
        (path,) = self.folder.glob(pattern)
        return path

    def count(self, instruction: str) -> int:
        """How often the machine code has `instruction`, a regular expression from the start of its name.

        Disassembles it, but for those that `machine_code.ENCODINGS` has by this name.
        """
        if instruction in machine_code.ENCODINGS:
            return machine_code.count(self.cubin, instruction)
        return len(re.findall(rf"\b{instruction}", self.sass))

    def assert_no_complaint(self) -> None:
        """No spill, no stack, no diagnostic, as ptxas reports it."""
        used = self.resources
        assert used.warnings == ()
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)

    def assert_clean(self) -> None:
        """No complaint, and no access to local memory in the machine code."""
        self.assert_no_complaint()
        assert not self.count("LDL") and not self.count("STL")


def cross_compile(kernel: Any, target: str, folder: pathlib.Path) -> Compiled:
    """`kernel` for `target`, compiled now; the compiler's files go to the empty `folder`."""
    cute.compile[compiler_options(target, folder / REMARKS, kept=folder)](kernel, *kernel.fake_args())
    return Compiled(folder)


class KernelStore:
    """What a run of the tests has compiled: each kernel once, for all tests and for all processes of the run.

    It is a directory that the run starts empty, never the user's cache: what was compiled before a change of source
    or of the compiler would hide what the change breaks.
    """

    def __init__(self, root: pathlib.Path) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self._found: dict[str, Compiled] = {}

    def __call__(self, kernel_cls: type, traits: Any, problem: Any, target: str) -> Compiled:
        """`kernel_cls(traits, problem)` for `target`."""
        digest = key_digest(cache_key(kernel_cls, traits, problem, target))
        if digest not in self._found:
            folder = self.root / digest
            with open(self.root / f"{digest}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
                if not folder.exists():
                    scratch = pathlib.Path(tempfile.mkdtemp(dir=self.root))
                    cross_compile(kernel_cls(traits, problem), target, scratch)
                    scratch.rename(folder)
            self._found[digest] = Compiled(folder)
        return self._found[digest]
