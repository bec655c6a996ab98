"""Reading cubins without a disassembler: what it finds is what the disassembler prints."""

from __future__ import annotations

import re

import pytest

cutlass = pytest.importorskip("cutlass")
from cutlass import cute  # noqa: E402

from cuteflash.dispatch import kernel_class  # noqa: E402
from cuteflash.problem import FwdProblem  # noqa: E402
from cuteflash.traits.arch import ARCHS  # noqa: E402
from cuteflash.traits.sm80 import FwdTraitsSm80  # noqa: E402
from tests import test_e4m3_cache_sm80  # noqa: E402
from tests.cross_compile import Compiled  # noqa: E402
from tests.kernel_store import KernelStore  # noqa: E402
from tests.machine_code import count  # noqa: E402
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


def printed(compiled: Compiled, name: str) -> int:
    """How often the disassembler prints an instruction."""
    return len(re.findall(rf"\b{re.escape(name)}\b", compiled.sass))


@pytest.mark.parametrize("target", ARCHS)
def test_accesses_to_local_memory_are_found(kernels: KernelStore, target: str) -> None:
    compiled, plain = (kernels(cls, *REQUEST, target) for cls in (Indexed, ToyKernel))
    for name in ("LDL", "STL"):
        assert count(compiled.cubin, name) == printed(compiled, name) > 0 == count(plain.cubin, name)
    assert count(compiled.cubin, "LDL", "STL") == printed(compiled, "LDL") + printed(compiled, "STL")
    with pytest.raises(AssertionError):
        compiled.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("target", test_e4m3_cache_sm80.TARGETS)
def test_conversions_are_found(kernels: KernelStore, target: str) -> None:
    """In a kernel that has other conversions, too."""
    name = "F2FP.F16.E4M3.UNPACK_B"
    traits, problem = next(kernel for found, *kernel in test_e4m3_cache_sm80.kernels() if found == target)
    compiled = kernels(kernel_class(traits), traits, problem, target)
    assert count(compiled.cubin, name) == printed(compiled, name) > 0
    assert printed(compiled, "F2FP") > printed(compiled, name)
