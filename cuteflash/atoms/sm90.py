"""Hopper instructions as the kernels use them: WGMMA products, swizzled tiles, TMA boxes, stmatrix."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

WARPGROUP_ROWS = 64


def smem_tile_layout(dtype: type[cutlass.Numeric], rows: int, cols: int, stages: int = 1) -> cute.ComposedLayout:
    """A row-major (rows, cols, stages) tile with the widest swizzle that `cols` allows (128, 64 or 32 bytes).

    TMA writes this layout for a box of `cols` in swizzle-wide slabs, and WGMMA descriptors read it.
    """
    kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, cols)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2))


def banded_tile_layout(
    dtype: type[cutlass.Numeric], rows: int, cols: int, band: int, stages: int
) -> cute.ComposedLayout:
    """As `smem_tile_layout`, with all columns of `band` rows before those of the next ones: (rows, cols, stages)."""
    one = cute.select(smem_tile_layout(dtype, band, cols), mode=[0, 1])
    return cute.tile_to_shape(one, (rows, cols, stages), order=(0, 1, 2))


def rows_of_tile(tile: cute.ComposedLayout, rows: int) -> cute.ComposedLayout:
    """The first `rows` rows of a (rows, cols, stages) tile, a multiple of 8, as TMA writes them: (rows, cols)."""
    band = cute.flat_divide(cute.select(tile.outer, mode=[0, 1]), (rows,))  # (rows, bands, cols)
    return cute.make_composed_layout(tile.inner, 0, cute.select(band, mode=[0, 2]))


def slabs_of_tile(tile: cute.ComposedLayout, rows: int, slab: int) -> cute.ComposedLayout:
    """As `rows_of_tile`, with the columns in swizzle-wide slabs: (rows, slab, slabs)."""
    bands = cute.flat_divide(cute.select(tile.outer, mode=[0, 1]), (rows, slab))  # (rows, slab, bands, slabs)
    return cute.make_composed_layout(tile.inner, 0, cute.select(bands, mode=[0, 1, 3]))


def packed_rows(tile: cute.ComposedLayout, heads: int, tokens: int) -> cute.ComposedLayout:
    """The first `heads * tokens` rows of a (rows, cols, stages) tile, seen as ((heads, tokens), cols, stages)."""
    row_stride = cute.flatten(tile.outer.stride[0])[0]  # rows of a swizzle-wide slab are evenly spaced
    outer = cute.make_layout(
        ((heads, tokens), *tile.outer.shape[1:]),
        stride=((row_stride, row_stride * heads), *tile.outer.stride[1:]),
    )
    return cute.make_composed_layout(tile.inner, 0, outer)


def tiled_mma(
    dtype: type[cutlass.Numeric],
    n: int,
    b_major: OperandMajorMode,
    a_from_regs: bool,
    a_major: OperandMajorMode = OperandMajorMode.K,
    a_dtype: type[cutlass.Numeric] | None = None,
) -> cute.TiledMma:
    """One warpgroup's product of m64 x n and 32 bytes of k with fp32 accumulators; `a_dtype` None is `dtype`, B's."""
    return hopper_helpers.make_trivial_tiled_mma(
        a_dtype or dtype,
        dtype,
        a_major,
        b_major,
        Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(WARPGROUP_ROWS, n),
        a_source=warpgroup.OperandSource.RMEM if a_from_regs else warpgroup.OperandSource.SMEM,
    )


def gemm(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
    """Issue acc (+)= a @ b over all k-blocks and commit them as one group; returns before they finish."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)  # a fresh one: the flag set below must not outlive the loop it is set in
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def load_copy_a(dtype: type[cutlass.Numeric], mma: cute.TiledMma) -> cute.TiledCopy:
    """ldmatrix.x4 from a row-major tile to `mma`'s A fragment."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    return cute.make_tiled_copy_A(atom, mma)


def store_copy(dtype: type[cutlass.Numeric], mma: cute.TiledMma, transpose: bool = False) -> cute.TiledCopy:
    """stmatrix.x4 from `mma`'s accumulator fragment to a row-major tile, or with `transpose` to a column-major one."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)
    return cute.make_tiled_copy_C(atom, mma)


def tma_load(tensor: cute.Tensor, tile: cute.ComposedLayout, box: cute.Tiler):
    """(copy atom, coordinate tensor) of a global-to-shared box."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, box)


def tma_store(tensor: cute.Tensor, tile: cute.ComposedLayout, box: cute.Tiler):
    """(copy atom, coordinate tensor) of a shared-to-global box."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, tile, box)


def tma_partition(
    atom: cute.CopyAtom, tiles: cute.Tensor, boxes: cute.Tensor, modes: int = 2
) -> tuple[cute.Tensor, cute.Tensor]:
    """TMA partitions: (box, stages) of a tile (rows, cols, stages), (box, n) of global boxes (rows, cols, n).

    `modes` is 3 if both are (rows, columns of a slab, slabs, ..).
    """
    whole = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, whole, *(cute.group_modes(x, 0, modes) for x in (tiles, boxes)))


def bulk_load(target: cute.Pointer, source: cute.Pointer, nbytes: int | Int32, barrier: cute.Pointer) -> None:
    """Global to shared memory without a descriptor, by one thread; 16-byte aligned. `barrier` counts the bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(nbytes), barrier],
    )


def bulk_store(target: cute.Pointer, source: cute.Pointer, nbytes: int) -> None:
    """Shared to global memory without a descriptor, by one thread; 16-byte aligned. Belongs to its bulk group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, source, Int32(nbytes)],
    )


def bulk_add(target: cute.Pointer, source: cute.Pointer, nbytes: int) -> None:
    """Add fp32 of shared memory to global memory, by one thread; 16-byte aligned. Belongs to its bulk group."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, source, Int32(nbytes)],
    )
