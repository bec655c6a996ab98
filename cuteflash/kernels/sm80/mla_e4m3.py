"""Decoding latent attention from an e4m3 cache: cp.async loads, mma.sync products in fp16, from compute capability 8.9.

    all warps
    Q    ──cp.async──► sQ      made into fp16, its columns in the order in which K's come
    keys ──cp.async──► sK[s]   ldmatrix, e4m3 → fp16 in registers, S = Q Kᵀ
                               maxima ──► shared memory ──► every warp with the same rows
                               P ──► sP
                               ldmatrix, e4m3 → fp16 in registers, O += P V

The plan is that of `mla_decode.py`: a tile is 16, 32 or 64 rows of (token, head), and each warp has all rows and some
columns of O. Pairs of bytes are what ldmatrix moves: of K they are neighbours in the columns, in whose order Q's are
sorted; of V, transposed, two columns of two keys, so that a thread has four neighbouring columns of O in the end.

The descale of a sequence multiplies the scores and O: K and V are the same elements. Keys are shared between the blocks
and merged as in `mla_decode.py`. It is made for up to 32 heads: with more, WGMMA on 16-bit rows is faster on Hopper.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.atoms import row_copies
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.latent import LatentLaunch, LatentPages, each_latent_tile, entries_last, rows_of_lse
from cuteflash.core.mla_signature import mla_fake_args
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import words_of
from cuteflash.kernels.common.mla_combine import QUAD, THREADS, LatentParts, combine
from cuteflash.kernels.sm80.mla_e4m3_bundles import E4m3Block, E4m3Tiles
from cuteflash.kernels.sm80.mla_e4m3_epilogue import finish
from cuteflash.kernels.sm80.mla_e4m3_mma import attend, make_fragments
from cuteflash.mla_problem import LATENT_DIM, MlaProblem, MlaScalars, MlaTensors
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.mla_e4m3 import PAIRS, SMEM_ALIGN, MlaTraitsE4m3


@dataclasses.dataclass(frozen=True)
class FlashMlaDecodeE4m3:
    """The decoding kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[MlaTraitsE4m3]
    problem: cutlass.Constexpr[MlaProblem]

    family: ClassVar[str] = "sm80"
    dtype: ClassVar[type[cutlass.Numeric]] = Float16  # of the products' operands

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with."""
        return mla_fake_args(self.problem, self.traits.tile_m)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self) -> cute.TiledMma:
        """S = Q Kᵀ: warps along query rows and keys, those of one part of the columns."""
        traits = self.traits
        return atoms.tiled_mma_by_columns(self.dtype, traits.product_warps_m, traits.warps_n, traits.warp_keys)

    def tiled_mma_s(self) -> cute.TiledMma:
        """Whose accumulators are S as warps have it in the end, all of them along query rows and keys."""
        traits = self.traits
        keys = traits.tile_n // traits.key_groups
        return atoms.tiled_mma_by_columns(self.dtype, traits.warps_m, traits.key_groups, keys)

    def tiled_mma_pv(self) -> cute.TiledMma:
        """O += P V: warps along the columns."""
        return atoms.tiled_mma_by_columns(self.dtype, 1, self.traits.num_warps, self.traits.warp_columns)

    def store_p(self) -> cute.TiledCopy:
        """The S accumulators to sP."""
        return atoms.store_pairs(self.dtype, self.tiled_mma_s())

    def copy_p(self) -> cute.TiledCopy:
        """sP to the A fragments of the product with V."""
        return cute.make_tiled_copy_A(atoms.ldmatrix(self.dtype), self.tiled_mma_pv())

    def load_copy(self, rows: int, columns: int) -> cute.TiledCopy:
        """Global memory to a shared tile of `rows` rows of 16-bit columns, by as many threads as have a row."""
        lanes = swizzle_width(columns) // CHUNK
        return row_copies.load_copy(self.dtype, min(self.traits.num_threads, rows * lanes), columns)

    def make_tiles(self, base: cute.Pointer) -> E4m3Tiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan, traits = self.traits.smem_plan, self.traits

        def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=self.dtype), layout)

        def statistic(name: str, layout: cute.Layout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=Float32), layout)

        quads = traits.tile_m * traits.tile_n // traits.num_threads // QUAD
        halves = cute.make_layout((QUAD, traits.num_threads, quads))
        return E4m3Tiles(
            sQ=tile("q", atoms.swizzled_tile(traits.tile_m, LATENT_DIM)),
            start_q=base + plan["q"].start,
            sK=tile("pages", atoms.swizzled_tile(traits.tile_n, PAIRS, traits.kv_stage)),
            start_k=base + plan["pages"].start,
            sP=tile("p", atoms.swizzled_tile(traits.tile_m, traits.tile_n)),
            halves=None if traits.column_parts == 1 else statistic("halves", halves),
            by_warps=statistic(
                "maxima", cute.make_layout((traits.tile_m, traits.key_groups), stride=(traits.key_groups, 1))
            ),
            of_rows=statistic("factors", cute.make_layout(traits.tile_m)),
            scales=statistic("scales", cute.make_layout(traits.tile_m)),
        )

    @cute.jit
    def __call__(self, *arguments):
        tensors = MlaTensors(*arguments[: len(MlaTensors._fields)])
        *scalars, stream = arguments[len(MlaTensors._fields) :]
        scalars = MlaScalars(*scalars)
        traits = self.traits
        launch = LatentLaunch.of(traits, self.problem, tensors, scalars)
        pages = LatentPages.of(self.problem, tensors, traits.tile_n)
        mLSE = rows_of_lse(tensors.lse)
        q = cute.make_tensor(cute.recast_ptr(tensors.q.iterator, dtype=self.dtype), tensors.q.layout)
        gQ, gK, gO = (entries_last(x) for x in (q, words_of(tensors.kv_cache, self.dtype), tensors.out))
        parts = None
        if const_expr(self.problem.is_split):
            parts = LatentParts(tensors.partials, tensors.partials_lse, tensors.seats)
        self.kernel.set_name_prefix("flash_mla_decode_e4m3", remove_cutlass_symbol=True)
        self.kernel(gQ, gK, gO, mLSE, tensors.descale, launch, pages, parts).launch(
            grid=(scalars.shares * launch.m_blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.blocks_per_sm,
            preferred_smem_carveout=100,
        )
        if const_expr(self.problem.is_split):
            batch, rows, _ = tensors.q.shape
            self.combine(parts, gO, mLSE, scalars.rows_of_block, scalars.blocks_of_row).launch(
                grid=(batch, cute.ceil_div(rows, scalars.rows_of_block), scalars.blocks_of_row),
                block=(THREADS, 1, 1),
                stream=stream,
            )

    @cute.kernel
    def kernel(
        self,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        gO: cute.Tensor,
        mLSE: cute.Tensor,
        descale: cute.Tensor,
        launch: LatentLaunch,
        pages: LatentPages,
        parts: LatentParts | None,
    ):
        base = SmemAllocator().allocate_array(Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        block = E4m3Block(gQ, gK, gO, mLSE, descale, launch, pages, parts, self.make_tiles(base))
        each_latent_tile(launch, functools.partial(self.compute, block))

    @cute.jit
    def compute(self, block: E4m3Block, tile: QueryTile, q_pos: Int32, kv_pos: Int32):
        """Attend and write a tile, or this block's share of its keys."""
        cute.arch.sync_threads()  # every warp is done with the shared memory of the tile before
        f = make_fragments(self, block)
        attend(self, block, f, tile)
        finish(self, block, f, tile)
        return kv_pos

    @cute.kernel
    def combine(
        self, parts: LatentParts, gO: cute.Tensor, mLSE: cute.Tensor, rows_of_block: Int32, blocks_of_row: Int32
    ):
        combine(parts, gO, mLSE, rows_of_block, blocks_of_row, self.traits.tile_m)
