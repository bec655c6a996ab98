"""Kernels compiled for a target that this machine need not have, with everything the compiler says about them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sysconfig
from typing import Any

from cutlass import cute

from cuteflash.compile.resources import Resources, parse_ptxas_log

CUOBJDUMP = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", "cuobjdump")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One cross-compiled kernel: its PTX, its machine code, and what ptxas reports of it."""

    ptx: str
    sass: str
    resources: Resources

    def count(self, instruction: str) -> int:
        """How often the machine code has `instruction`, a regular expression from the start of its name."""
        return len(re.findall(rf"\b{instruction}", self.sass))

    def assert_clean(self) -> None:
        """No spill, no stack, no diagnostic, no access to local memory."""
        used = self.resources
        assert used.warnings == ()
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)
        assert not self.count(r"LDL\b") and not self.count(r"STL\b")


def cross_compile(kernel: Any, target: str, folder: pathlib.Path) -> Compiled:
    """`kernel` for `target`; the compiler's files go to the empty `folder`."""
    remarks = folder / "remarks.yaml"
    options = (
        f"--gpu-arch={target} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {folder} "
        f"remarks{{ptx}} --remark-output={remarks}"
    )
    cute.compile(kernel, *kernel.fake_args(), options=options)
    (cubin,) = folder.glob("*.cubin")
    (ptx,) = folder.glob("*.ptx")
    sass = subprocess.run([CUOBJDUMP, "-sass", cubin], check=True, capture_output=True, text=True).stdout
    return Compiled(ptx.read_text(), sass, parse_ptxas_log(remarks.read_text()))
