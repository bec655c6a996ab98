"""What the DSL's compiler is asked for."""

from __future__ import annotations

import pathlib
from typing import Any


def compiler_options(target: str, remarks: str | pathlib.Path, kept: str | pathlib.Path | None = None) -> Any:
    """The options of a kernel for `target`, as `cute.compile[...]` takes them.

    ptxas' verbose log comes as a remark. The option `remarks{ptx}` asks for it, too, but then every operation also gets
    its place in Python's source, which takes a sixth to a third of the time that a kernel compiles and changes no code.

    Args:
        target: of the GPU, "sm_90a" for instance.
        remarks: the file that the remarks go to.
        kept: a directory for PTX and machine code; None keeps neither.
    """
    from cutlass.base_dsl import compiler as dsl

    options = (
        dsl.GPUArch(target),
        dsl.EnableTVMFFI(True),
        dsl.PtxasOptions("-v"),
        dsl.ExtraCompilerOpts("diagnostic=ptx"),
        dsl.RemarkOutput(str(remarks)),
    )
    return options if kept is None else (*options, dsl.KeepPTX(True), dsl.KeepCUBIN(True), dsl.DumpDir(str(kept)))
