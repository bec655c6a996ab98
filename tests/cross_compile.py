"""Kernels compiled for a target that this machine need not have, with everything the compiler says about them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
import sysconfig
from typing import Any

from cutlass import cute

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

    def found(self, pattern: str) -> tuple[str, ...]:
        """What a regular expression, or its group, matches in the PTX: each text once, in order."""
        return tuple(sorted(set(re.findall(pattern, self.ptx))))

    def times(self, pattern: str, before: str = "") -> int:
        """How often a regular expression matches in the PTX, or in what comes before a text there, which it has."""
        text = self.ptx
        if before:
            text, _ = text.split(before, 1)
        return len(re.findall(pattern, text))

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
