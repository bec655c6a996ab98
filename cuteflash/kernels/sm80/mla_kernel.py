"""What both kernels of the sm80 family that decode latent attention are made of: from 16-bit rows, and from e4m3.

Arguments and launches, the blocks' way through tiles, and products whose operands are 16 bits in either kernel. What
differs are the methods that `MlaKernel` names.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.atoms import row_copies
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.ahead import fetch_table, fetch_vectors
from cuteflash.core.latent import LatentLaunch, LatentPages, each_latent_tile, entries_last, rows_of_lse
from cuteflash.core.mla_signature import mla_fake_args
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import QUAD, LatentParts
from cuteflash.kernels.sm80.mla_bundles import MlaBlock, MlaFragments
from cuteflash.kernels.sm80.mla_steps import attend
from cuteflash.mla_problem import LATENT_DIM, MlaProblem, MlaScalars, MlaTensors
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.mla_mma import SMEM_ALIGN


@dataclasses.dataclass(frozen=True)
class MlaKernel:
    """A decoding kernel for one problem and one set of traits.

    A subclass has `name`, the `dtype` of the products' operands, `warp_columns` of O, and

    - `views(tensors)`: Q and the cached rows as blocks read them;
    - `make_tiles(base)`: the shared-memory tensors;
    - `make_fragments(block)`: what a thread has of a tile;
    - `keep_q(block, f, tile)`: what happens to Q once its loads are issued, those of the first steps among them;
    - `product_qk(block, f, stage)`, `product_pv(block, f, stage)`: the products with a step's keys;
    - `finish(block, f, tile)`: O and the log-sum-exp to memory.
    """

    traits: cutlass.Constexpr[Any]
    problem: cutlass.Constexpr[MlaProblem]

    family: ClassVar[str] = "sm80"
    name: ClassVar[str]
    parts: ClassVar[type[LatentParts]] = LatentParts  # of split keys

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with."""
        return mla_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_s(self) -> cute.TiledMma:
        """Whose accumulators are S as warps have it in the end, all of them along query rows and keys."""
        traits = self.traits
        keys = traits.tile_n // traits.key_groups
        return atoms.tiled_mma_by_columns(self.dtype, traits.warps_m, traits.key_groups, keys)

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

    def tile(self, base: cute.Pointer, name: str, layout: cute.ComposedLayout) -> cute.Tensor:
        """A shared tile of operands, at its place in the traits' plan."""
        start = self.traits.smem_plan[name].start
        return cute.make_tensor(cute.recast_ptr(base + start, dtype=self.dtype), layout)

    def statistic(self, base: cute.Pointer, name: str, layout: cute.Layout) -> cute.Tensor:
        """A shared fp32 tensor, at its place in the traits' plan."""
        start = self.traits.smem_plan[name].start
        return cute.make_tensor(cute.recast_ptr(base + start, dtype=Float32), layout)

    def common_tiles(self, base: cute.Pointer) -> dict[str, cute.Tensor | None]:
        """The shared-memory tensors that both kernels have, by their names in `MlaTiles`."""
        traits, halves = self.traits, None
        if traits.column_parts > 1:
            quads = traits.tile_m * traits.tile_n // traits.num_threads // QUAD
            halves = self.statistic(base, "halves", cute.make_layout((QUAD, traits.num_threads, quads)))
        by_warps = cute.make_layout((traits.tile_m, traits.key_groups), stride=(traits.key_groups, 1))
        return {
            "sQ": self.tile(base, "q", atoms.swizzled_tile(traits.tile_m, LATENT_DIM)),
            "sP": self.tile(base, "p", atoms.swizzled_tile(traits.tile_m, traits.tile_n)),
            "halves": halves,
            "by_warps": self.statistic(base, "maxima", by_warps),
            "of_rows": self.statistic(base, "factors", cute.make_layout(traits.tile_m)),
        }

    @cute.jit
    def __call__(self, *arguments):
        tensors = MlaTensors(*arguments[: len(MlaTensors._fields)])
        *scalars, stream = arguments[len(MlaTensors._fields) :]
        scalars = MlaScalars(*scalars)
        traits = self.traits
        launch = LatentLaunch.of(traits, self.problem, tensors, scalars)
        pages = LatentPages.of(self.problem, tensors, traits.tile_n)
        mLSE = rows_of_lse(tensors.lse)
        gQ, gK, gO = (entries_last(x) for x in (*self.views(tensors), tensors.out))
        parts = None
        if const_expr(self.problem.is_split):
            parts = self.parts.of_launch(tensors, gO, mLSE, traits.tile_m)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True)
        self.kernel(gQ, gK, gO, mLSE, tensors.descale, launch, pages, parts).launch(
            grid=(scalars.shares * launch.m_blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.blocks_per_sm,
            preferred_smem_carveout=100,
            use_pdl=traits.early_launch,
            cooperative=self.problem.is_split,  # its blocks may wait for each other
        )

    @cute.kernel
    def kernel(
        self,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        gO: cute.Tensor,
        mLSE: cute.Tensor,
        descale: cute.Tensor | None,
        launch: LatentLaunch,
        pages: LatentPages,
        parts: LatentParts | None,
    ):
        base = SmemAllocator().allocate_array(Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        block = MlaBlock(gQ, gK, gO, mLSE, descale, launch, pages, parts, self.make_tiles(base))
        if const_expr(self.traits.early_launch):
            fetch_vectors((launch.lengths,))
            fetch_table(pages.table)
        self.await_launch()
        each_latent_tile(launch, functools.partial(self.compute, block))

    @cute.jit
    def compute(self, block: MlaBlock, tile: QueryTile, q_pos: Int32, kv_pos: Int32):
        """Attend and write a tile, or this block's share of its keys."""
        cute.arch.sync_threads()  # every warp is done with the shared memory of the tile before
        f: MlaFragments = self.make_fragments(block)
        attend(self, block, f, tile)
        self.finish(block, f, tile)
        return kv_pos

    def await_launch(self) -> None:
        """Let the next launch begin where blocks of this one end, and wait for the end of the one before."""
        if self.traits.early_launch:
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
