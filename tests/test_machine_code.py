"""Reading cubins without a disassembler: what it finds is what the disassembler prints."""

from __future__ import annotations

import pytest

cutlass = pytest.importorskip("cutlass")
from cutlass import cute  # noqa: E402

from cuteflash.problem import FwdProblem  # noqa: E402
from cuteflash.traits.arch import ARCHS  # noqa: E402
from cuteflash.traits.sm80 import FwdTraitsSm80  # noqa: E402
from tests.cross_compile import KernelStore  # noqa: E402
from tests.machine_code import LOCAL_MEMORY, local_accesses  # noqa: E402
from tests.toy_kernel import ToyKernel  # noqa: E402

REQUEST = (FwdTraitsSm80(64, 64, 64, 64), FwdProblem.dense("bf16", 64, 64))


class Indexed(ToyKernel):
    """Its private elements have numbers that are known at run time only, so they lie in local memory."""

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mO: cute.Tensor):  # type: ignore[no-untyped-def]
        thread, _, _ = cute.arch.thread_idx()
        private = cute.make_rmem_tensor((64,), cutlass.Float32)
        for i in cutlass.range(64, unroll=1):
            private[i] = mV[64 * thread + i]
        for i in cutlass.range(mV.shape[0], unroll=1):
            mO[64 * thread + i] = private[(i + thread) % 64]


@pytest.mark.parametrize("target", ARCHS)
def test_accesses_to_local_memory_are_found(kernels: KernelStore, target: str) -> None:
    compiled = kernels(Indexed, *REQUEST, target)
    printed = [compiled.count(rf"{name}\b") for name in LOCAL_MEMORY]
    assert all(printed) and local_accesses(compiled.cubin) == sum(printed)
    with pytest.raises(AssertionError):
        compiled.assert_clean()
    assert not local_accesses(kernels(ToyKernel, *REQUEST, target).cubin)
