# mypy: ignore-errors
"""A kernel that is one chain of WGMMA on 8-bit operands: D = C + A Bᵀ, 32 products an instruction, one a time."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cuteflash.atoms import sm90
from cuteflash.reference.fp8_accumulator import PRODUCTS

THREADS = 128
ALIGN = 1024  # bytes: the period of the widest swizzle


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The rows and columns of D, those of one instruction. All that the kernel is generated from."""

    rows: int
    columns: int

    @property
    def smem_bytes(self) -> int:
        """Of A's and B's tiles, each aligned."""
        return sum(-(-PRODUCTS * n // ALIGN) * ALIGN for n in (self.rows, self.columns))


class AccumulatorProbe:
    """One warpgroup."""

    family = "accumulator_probe"

    def __init__(self, traits: Shape, problem: Shape) -> None:
        self.rows, self.columns = traits.rows, traits.columns

    def fake_args(self) -> tuple:
        """Arguments of `__call__`: e4m3 as bytes, the chain as long as k."""
        k = cute.sym_int32(symbol="k")

        def tensor(dtype, shape, alignment):
            return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=alignment)

        accumulators = [tensor(Float32, (self.rows, self.columns), 16) for _ in range(2)]
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return (*accumulators, tensor(Uint8, (self.rows, k), 16), tensor(Uint8, (self.columns, k), 16), stream)

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (rows, columns) fp32
        mC: cute.Tensor,  # likewise
        mA: cute.Tensor,  # (rows, k)
        mB: cute.Tensor,  # (columns, k)
        stream,
    ):
        self.kernel.set_name_prefix("accumulator_probe", remove_cutlass_symbol=True)
        self.kernel(mD, mC, mA, mB).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mD: cute.Tensor, mC: cute.Tensor, mA: cute.Tensor, mB: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        mma = sm90.tiled_mma(Float8E4M3FN, self.columns, OperandMajorMode.K, a_from_regs=False)
        part = mma.get_slice(thread)
        memory = SmemAllocator()
        bytes_a, sA = self.tile(memory, self.rows)
        bytes_b, sB = self.tile(memory, self.columns)
        tDrA, tDrB = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
        places = part.partition_C(cute.make_identity_tensor((self.rows, self.columns)))
        acc = cute.make_rmem_tensor(part.partition_shape_C((self.rows, self.columns)), Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = mC[places[i]]
        for step in cutlass.range(mA.shape[1] // PRODUCTS, unroll=1):
            self.load(bytes_a, mA, self.rows, step)
            self.load(bytes_b, mB, self.columns, step)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            sm90.gemm(mma, acc, tDrA[None, None, None, 0], tDrB[None, None, None, 0], accumulate=True)
            warpgroup.wait_group(0)
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(cute.size(acc)):
            mD[places[i]] = acc[i]

    def tile(self, memory, rows):
        """A (rows, PRODUCTS, 1) tile in shared memory as bytes, and as an operand."""
        layout = sm90.smem_tile_layout(Float8E4M3FN, rows, PRODUCTS)
        start = memory.allocate_array(Uint8, rows * PRODUCTS, byte_alignment=ALIGN)
        return [
            cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=dtype), layout.outer)
            for dtype in (Uint8, Float8E4M3FN)
        ]

    def load(self, tile, source, rows, step):
        """The columns of a step, a byte of each thread at a time."""
        thread = cute.arch.thread_idx()[0]
        for i in range(rows * PRODUCTS // THREADS):
            row, column = (i * THREADS + thread) // PRODUCTS, thread % PRODUCTS
            tile[row, column, 0] = source[row, step * PRODUCTS + column]
