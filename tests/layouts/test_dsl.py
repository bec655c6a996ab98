"""The context in which the explorer makes the DSL's objects."""

from __future__ import annotations

import pytest

from layouts.dsl import context


def test_a_compilation_that_failed_leaves_no_target_behind() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode

    from cuteflash.atoms import sm90

    @cute.jit
    def broken(missing):
        return missing

    with pytest.raises(Exception, match=r"(?i)argument"):
        cute.compile(broken, options="--gpu-arch=sm_80")
    with context("sm_90a"):
        assert sm90.tiled_mma(cutlass.BFloat16, 64, OperandMajorMode.K, a_from_regs=False)
