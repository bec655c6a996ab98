"""Ampere's instructions as CuTe atoms: cp.async, ldmatrix, mma.sync m16n8k16, and the swizzle that suits all three."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import CopyUniversalOp, warp

from cuteflash.traits.chunks import swizzle_width
from cuteflash.traits.sm80 import MMA_K, MMA_M, MMA_N


def swizzled_tile(rows: int, cols: int, *stages: int, most_bits: int = 3) -> cute.ComposedLayout:
    """A row-major (rows, cols) tile, or a (rows, cols, stages) one, whose 16-byte chunks are XORed with the row.

    The eight rows that one ldmatrix phase, or one quarter-warp of 128-bit accesses, touches lie in different banks:
    S<3,3,3> over 64-wide, S<2,3,3> over 32-wide and S<1,3,3> over 16-wide column slabs (in elements of 2 bytes), if
    `most_bits` allows it.
    """
    width = swizzle_width(cols)
    bits = min({64: 3, 32: 2, 16: 1}[width], most_bits)
    slab = cute.make_composed_layout(cute.make_swizzle(bits, 3, 3), 0, cute.make_layout((8, width), stride=(width, 1)))
    return cute.tile_to_shape(slab, (rows, cols, *stages), tuple(range(2 + len(stages))))


def tiled_mma(dtype: type[cutlass.Numeric], warps_m: int, warps_n: int = 1) -> cute.TiledMma:
    """mma.sync m16n8k16 with fp32 accumulation by (warps_m, warps_n) warps; N in pairs, to feed it by ldmatrix.x4."""
    op = warp.MmaF16BF16Op(dtype, Float32, (MMA_M, MMA_N, MMA_K))
    return cute.make_tiled_mma(
        op,
        cute.make_layout((warps_m, warps_n, 1)),
        permutation_mnk=(warps_m * MMA_M, warps_n * 2 * MMA_N, MMA_K),
    )


def tiled_mma_by_columns(
    dtype: type[cutlass.Numeric], warps_m: int, warps_n: int, columns: int, deep: int = MMA_K
) -> cute.TiledMma:
    """As `tiled_mma`, but each warp has `columns` neighbouring ones of N, and `deep` of K at a time.

    If these are 32, ldmatrix.x4 feeds a warp that has as few as 8 columns, too.
    """
    op = warp.MmaF16BF16Op(dtype, Float32, (MMA_M, MMA_N, MMA_K))
    order = cute.make_layout((MMA_N, warps_n, columns // MMA_N), stride=(1, columns, MMA_N))
    return cute.make_tiled_mma(
        op, cute.make_layout((warps_m, warps_n, 1)), permutation_mnk=(warps_m * MMA_M, order, deep)
    )


def ldmatrix(dtype: type[cutlass.Numeric], transpose: bool = False) -> cute.CopyAtom:
    """Four 8x8 matrices a warp and instruction; `transpose` for an operand whose k extent runs over rows."""
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)


def add_groups(source: cute.Tensor, target: cute.Tensor, vector: bool) -> None:
    """Add groups of 4 fp32 registers (4, n) to global memory, atomically; `vector`: 16 bytes at once, from sm_90 on."""
    for i in range(cute.size(source.shape[1])):
        group = target[None, i]
        if vector:
            values = source[None, i].load().ir_value()
            cute.arch.red(group.iterator, values, op="add", dtype="f32", sem="relaxed", scope="gpu")
        else:
            for j in range(cute.size(group)):
                cute.arch.red(group.iterator + j, source[j, i], op="add", dtype="f32", sem="relaxed", scope="gpu")


def store_pairs(dtype: type[cutlass.Numeric], mma: cute.TiledMma) -> cute.TiledCopy:
    """Accumulators to shared memory, two neighbouring columns (32 bits) at a time."""
    atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=2 * dtype.width)
    return cute.make_tiled_copy_C(atom, mma)


@dataclasses.dataclass(frozen=True)
class Fetch:
    """How an operand's fragments come from shared memory by ldmatrix.

    Attributes:
        copy: one thread's slice of the tiled copy.
        source: (atom, tiles of M or N, k-blocks) in shared memory.
        fragment: the operand's registers in the same shape.
    """

    copy: cute.TiledCopy
    source: cute.Tensor
    fragment: cute.Tensor

    def __call__(self, k: int) -> None:
        cute.copy(self.copy, self.source[None, None, k], self.fragment[None, None, k])


def gemm(
    mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, fetches: tuple[Fetch, ...], ahead: int
) -> None:
    """`acc` += A B over all k-blocks; `fetches` bring operands `ahead` k-blocks early."""
    k_blocks = cute.size(rA.shape[2])
    for k in range(-ahead, k_blocks):
        if k + ahead < k_blocks:
            for fetch in fetches:
                fetch(k + ahead)
        if k >= 0:
            cute.gemm(mma, acc, rA[None, None, k], rB[None, None, k], acc)
