"""Decoding latent attention on Ampere and after: one cached head of 576 columns is K, its first 512 columns are V, too.

    all warps
    Q    ──cp.async──► sQ      S = Q Kᵀ     warps share query rows and keys; Q by ldmatrix, or kept in registers
    keys ──cp.async──► sK[s]   maxima ──► shared memory ──► every warp with the same rows
                               P ──► sP
                               O += P V     every warp all query rows, and its part of the 512 columns

A tile is 16, 32 or 64 rows of (token, head). Its fp32 output takes up to half of the registers, so that each warp has
some of its columns: P has to pass through shared memory, and a step has three barriers: keys loaded, maxima known, P
written. The next step's keys arrive meanwhile.

Keys of all sequences are shared between the blocks, as in the sm90 family (`cuteflash.core.split`), and what these
computed of a tile is merged afterwards (`cuteflash.kernels.common.mla_combine`). Not here: other widths, pages that are
not a multiple of 64 rows, 8-bit caches, gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.atoms import row_copies
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.latent import LatentLaunch, LatentPages, each_latent_tile, entries_last, rows_of_lse
from cuteflash.core.mla_signature import mla_fake_args
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import transposed
from cuteflash.kernels.common.mla_combine import QUAD, THREADS, LatentParts, combine
from cuteflash.kernels.sm80.mla_decode_bundles import MlaBlock, MlaTiles
from cuteflash.kernels.sm80.mla_decode_epilogue import finish
from cuteflash.kernels.sm80.mla_decode_mma import attend, make_fragments
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaProblem, MlaScalars, MlaTensors
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.mla_sm80 import SMEM_ALIGN, MlaTraitsSm80

COLUMNS = 32  # of O, neighbours that a warp has: four lanes have, row by row, a pair of each 8


@dataclasses.dataclass(frozen=True)
class FlashMlaDecodeSm80:
    """The decoding kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[MlaTraitsSm80]
    problem: cutlass.Constexpr[MlaProblem]

    family: ClassVar[str] = "sm80"

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of Q, the cache and O."""
        return CUTE_DTYPES[self.problem.dtype]

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with."""
        return mla_fake_args(self.problem, self.traits.tile_m)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self) -> cute.TiledMma:
        """S = Q Kᵀ: warps along query rows and keys, those of one part of the columns."""
        traits = self.traits
        return atoms.tiled_mma_by_columns(
            self.dtype, traits.warps_m, traits.warps_n, traits.tile_n // traits.warps_n, traits.fetch
        )

    def tiled_mma_s(self) -> cute.TiledMma:
        """Whose accumulators are S as warps have it in the end, all of them along query rows and keys."""
        traits = self.traits
        return atoms.tiled_mma_by_columns(
            self.dtype, traits.warps_m, traits.key_groups, traits.tile_n // traits.key_groups
        )

    def tiled_mma_pv(self) -> cute.TiledMma:
        """O += P V: warps along the columns."""
        return atoms.tiled_mma_by_columns(self.dtype, 1, self.traits.num_warps, COLUMNS)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, 576, kv_stage)"""
        return atoms.swizzled_tile(self.traits.tile_n, LATENT_DIM, self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, 512, kv_stage), the first columns of K: whole slabs, one after the other."""
        page = atoms.swizzled_tile(self.traits.tile_n, LATENT_DIM_V)
        stages = cute.make_layout(self.traits.kv_stage, stride=self.traits.tile_n * LATENT_DIM)
        return cute.make_composed_layout(page.inner, 0, cute.append(page.outer, stages))

    def copy_q(self) -> cute.TiledCopy:
        """sQ to the A fragments of the product with K."""
        return cute.make_tiled_copy_A(atoms.ldmatrix(self.dtype), self.tiled_mma_qk())

    def copy_k(self) -> cute.TiledCopy:
        """sK to the B fragments of the product with K."""
        return cute.make_tiled_copy_B(atoms.ldmatrix(self.dtype), self.tiled_mma_qk())

    def store_p(self) -> cute.TiledCopy:
        """The S accumulators to sP."""
        return atoms.store_pairs(self.dtype, self.tiled_mma_s())

    def copy_p(self) -> cute.TiledCopy:
        """sP to the A fragments of the product with V."""
        return cute.make_tiled_copy_A(atoms.ldmatrix(self.dtype), self.tiled_mma_pv())

    def copy_v(self) -> cute.TiledCopy:
        """sVt to the B fragments of the product with V."""
        return cute.make_tiled_copy_B(atoms.ldmatrix(self.dtype, transpose=True), self.tiled_mma_pv())

    def load_copy(self, rows: int) -> cute.TiledCopy:
        """Global memory to a shared tile of 576 columns and `rows` rows, by as many threads as have a row."""
        lanes = swizzle_width(LATENT_DIM) // CHUNK
        return row_copies.load_copy(self.dtype, min(self.traits.num_threads, rows * lanes), LATENT_DIM)

    def make_tiles(self, base: cute.Pointer) -> MlaTiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan, traits = self.traits.smem_plan, self.traits

        def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=self.dtype), layout)

        def statistic(name: str, layout: cute.Layout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=Float32), layout)

        by_warps = cute.make_layout((traits.tile_m, traits.key_groups), stride=(traits.key_groups, 1))
        halves = cute.make_layout(
            (QUAD, traits.num_threads, traits.tile_m * traits.tile_n // traits.num_threads // QUAD)
        )
        return MlaTiles(
            sQ=tile("q", atoms.swizzled_tile(traits.tile_m, LATENT_DIM)),
            sK=tile("pages", self.smem_layout_k()),
            sVt=transposed(tile("pages", self.smem_layout_v())),
            sP=tile("p", atoms.swizzled_tile(traits.tile_m, traits.tile_n)),
            halves=None if traits.k_parts == 1 else statistic("halves", halves),
            by_warps=statistic("maxima", by_warps),
            of_rows=statistic("factors", cute.make_layout(traits.tile_m)),
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
        gQ, gK, gO = (entries_last(tensor) for tensor in (tensors.q, tensors.kv_cache, tensors.out))
        parts = None
        if const_expr(self.problem.is_split):
            parts = LatentParts(tensors.partials, tensors.partials_lse, tensors.seats)
        self.kernel.set_name_prefix("flash_mla_decode_sm80", remove_cutlass_symbol=True)
        self.kernel(gQ, gK, gO, mLSE, launch, pages, parts).launch(
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
        launch: LatentLaunch,
        pages: LatentPages,
        parts: LatentParts | None,
    ):
        base = SmemAllocator().allocate_array(Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        block = MlaBlock(gQ, gK, gO, mLSE, launch, pages, parts, self.make_tiles(base))
        each_latent_tile(launch, functools.partial(self.compute, block))

    @cute.jit
    def compute(self, block: MlaBlock, tile: QueryTile, q_pos: Int32, kv_pos: Int32):
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
