"""A copy kernel with the interface of a forward kernel: compiles in a second, so it stands in for one in tests.

O (n,) = V (n,) for the elements of one tile; `tile_n` is the number of threads of a block.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


class ToyKernel:
    """Copies a vector; `problem.operands.head_dim` elements a thread."""

    family = "sm80"

    def __init__(self, traits: Any, problem: Any) -> None:
        self.traits = traits
        self.problem = problem

    def fake_args(self) -> tuple[Any, ...]:
        length = cute.sym_int32()
        return (
            make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=4),
            make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=4),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(self, mV: cute.Tensor, mO: cute.Tensor, stream: Any):
        threads = self.traits.tile_n
        blocks = cute.ceil_div(mV.shape[0], threads * self.problem.operands.head_dim)
        self.kernel(mV, mO).launch(grid=(blocks, 1, 1), block=(threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mO: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = (block * self.traits.tile_n + thread) * self.problem.operands.head_dim
        for i in cutlass.range(self.problem.operands.head_dim, unroll=4):
            if first + i < mV.shape[0]:
                mO[first + i] = mV[first + i]
