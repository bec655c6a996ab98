"""Hopper kernels that are slow on purpose: each draws one of the ptxas diagnostics that a build must not hide."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

TILE = 64
THREADS = 128


class WgmmaKernel:
    """C (64, 64) fp32 = eight times A Aᵀ, for the A (64, 64) bf16 of one block; subclasses spoil it."""

    family = "sm90"
    reads_accumulator_early = False
    asks_for_registers = False

    def __init__(self, traits: Any, problem: Any) -> None:
        self.traits = traits
        self.problem = problem

    def fake_args(self) -> tuple[Any, ...]:
        return (
            make_fake_compact_tensor(cutlass.BFloat16, (cute.sym_int32(),), assumed_align=16),
            make_fake_compact_tensor(cutlass.Float32, (TILE, TILE), stride_order=(1, 0), assumed_align=16),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(self, mA: cute.Tensor, mC: cute.Tensor, stream: Any):
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16,
            cutlass.BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(TILE, TILE),
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
        layout = cute.tile_to_shape(atom, (TILE, TILE), (0, 1))
        launch = self.kernel(mA, mC, tiled_mma, layout)
        if cutlass.const_expr(self.asks_for_registers):
            launch.launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)  # no register cap at entry
        else:
            launch.launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mC: cute.Tensor, tiled_mma: cute.TiledMma, layout: cute.ComposedLayout):
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.asks_for_registers):
            cute.arch.setmaxregister_increase(240)
        sA = SmemAllocator().allocate_tensor(cutlass.BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        sA[thread] = mA[thread]
        cute.arch.sync_threads()
        slice_mma = tiled_mma.get_slice(thread)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(sA))
        tCgC = slice_mma.partition_C(mC)
        acc = cute.make_rmem_tensor(tCgC.shape, cutlass.Float32)
        acc.fill(0.0)
        for _ in cutlass.range(8):
            warpgroup.fence()
            cute.gemm(tiled_mma, acc, tCrA[None, None, 0], tCrB[None, None, 0], acc)
            if cutlass.const_expr(self.reads_accumulator_early):
                for i in cutlass.range_constexpr(cute.size(acc)):
                    acc[i] = acc[i] * 2.0
            cute.gemm(tiled_mma, acc, tCrA[None, None, 1], tCrB[None, None, 1], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            tCgC[i] = acc[i]


class SerialisedWgmma(WgmmaKernel):
    """Touches the accumulator while a product writes it: ptxas serialises the products (C7514)."""

    reads_accumulator_early = True


class IgnoredSetmaxnreg(WgmmaKernel):
    """Asks for registers without a cap at launch: ptxas ignores setmaxnreg (C7508)."""

    asks_for_registers = True
