"""Decoding latent attention on Hopper: one cached head of 576 columns is K, its first 512 columns are V, too.

    producer warp            warpgroup 0                      warpgroup 1
    Q    ──TMA──► sQ         S of pages 0, 2, ..              S of pages 1, 3, ..
    page ──TMA──► sK[0, 1]   O[:, :256] += P V of all pages   O[:, 256:] += P V of all pages

A tile is 64 rows of (token, head); its fp32 output of 64 x 512 takes the registers of two warpgroups, which therefore
trade P and the maxima of rows through shared memory (`mla_decode_mma.py`). Of the shared memory Q and two pages of 64
keys take nearly all: a page arrives in groups of columns, and each part of it is refilled as soon as it was read.

The query tiles of a sequence are computed side by side, so that they find its pages in L2. Keys of all sequences are
shared between the blocks (`cuteflash.core.split`), which merge what they computed of a tile (`mla_parts.py`,
`mla_decode_merge.py`). Not here: other widths, pages that are not a multiple of 64 rows, 8-bit caches, gradients.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.atoms import sm90 as atoms
from cuteflash.core.ahead import fetch_table, fetch_vectors
from cuteflash.core.latent import LatentLaunch, LatentPages, entries_last, rows_of_lse
from cuteflash.core.mla_signature import mla_fake_args
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.views import transposed
from cuteflash.kernels.sm90.mla_decode_bundles import MlaBlock, MlaRings, MlaTiles, MlaTma
from cuteflash.kernels.sm90.mla_decode_load import load
from cuteflash.kernels.sm90.mla_decode_merge import MergedParts
from cuteflash.kernels.sm90.mla_decode_mma import consume
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaProblem, MlaScalars, MlaTensors
from cuteflash.traits.mla_sm90 import CONSUMERS, PART_SLABS, SLAB, SLABS, SWIZZLE_ALIGN, WGMMA_M, MlaTraitsSm90
from cuteflash.traits.sm90 import WARPGROUP

HALF_DIM_V = LATENT_DIM_V // CONSUMERS


@dataclasses.dataclass(frozen=True)
class FlashMlaDecodeSm90:
    """The decoding kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[MlaTraitsSm90]
    problem: cutlass.Constexpr[MlaProblem]

    family: ClassVar[str] = "sm90"

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of Q, the cache and O."""
        return CUTE_DTYPES[self.problem.dtype]

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with."""
        return mla_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self, a_from_regs: bool) -> cute.TiledMma:
        """S = Q Kᵀ: (64, 64 keys), both operands K-major, K in shared memory."""
        return atoms.tiled_mma(self.dtype, self.traits.tile_n, OperandMajorMode.K, a_from_regs)

    def tiled_mma_pv(self, a_from_regs: bool) -> cute.TiledMma:
        """O += P V: (64, 128), V MN-major in shared memory."""
        return atoms.tiled_mma(self.dtype, PART_SLABS * SLAB, OperandMajorMode.MN, a_from_regs)

    def smem_layout(self, cols: int, tiles: int = 1) -> cute.ComposedLayout:
        """(64, cols, tiles) of Q, of pages of K and of P: slabs of 64 columns, one after the other."""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, cols, tiles)

    def copy_q_last(self) -> cute.TiledCopy:
        """The last columns of sQ to the A fragments of their product with K."""
        return atoms.load_copy_a(self.dtype, self.tiled_mma_qk(a_from_regs=True))

    def copy_p(self) -> cute.TiledCopy:
        """The S accumulators to sP."""
        return atoms.store_copy(self.dtype, self.tiled_mma_qk(a_from_regs=False))

    def make_tma(self, tensors: MlaTensors) -> MlaTma:
        """TMA descriptors of Q and of the cache, a slab at a time."""
        slab = cute.select(self.smem_layout(SLAB), mode=[0, 1])
        load_q, gQ = atoms.tma_load(entries_last(tensors.q), slab, (WGMMA_M, SLAB))
        load_k, gK = atoms.tma_load(entries_last(tensors.kv_cache), slab, (self.traits.tile_n, SLAB))
        return MlaTma(load_q, load_k, gQ, gK)

    def make_tiles(self, base: cute.Pointer) -> MlaTiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan, keys = self.traits.smem_plan, self.traits.tile_n

        def tile(name: str, cols: int, tiles: int | None = None, skip: int = 0) -> cute.Tensor:
            layout = self.smem_layout(cols, tiles or 1)
            start = cute.recast_ptr(base + plan[name].start + skip, layout.inner, dtype=self.dtype)
            return cute.make_tensor(start, cute.select(layout.outer, mode=[0, 1]) if tiles is None else layout.outer)

        def statistic(number: int) -> cute.Tensor:
            start = cute.recast_ptr(base + plan["statistics"].start, dtype=Float32) + number * CONSUMERS * WGMMA_M
            return cute.make_tensor(start, cute.make_layout((WGMMA_M, CONSUMERS)))

        half_bytes = keys * HALF_DIM_V * self.dtype.width // 8
        values = []
        for who in range(CONSUMERS):
            page = tile("pages", HALF_DIM_V, skip=who * half_bytes)
            stride = keys * LATENT_DIM  # elements, from one page to the other
            both = cute.append(page.layout, cute.make_layout(CONSUMERS, stride=stride))
            values.append(transposed(cute.make_tensor(page.iterator, both)))
        return MlaTiles(
            sQ=tile("q", LATENT_DIM),
            sQ_slabs=tile("q", SLAB, SLABS),
            sK=tile("pages", LATENT_DIM, CONSUMERS),
            sK_slabs=tile("pages", SLAB, CONSUMERS * SLABS),
            sVt=tuple(values),
            sP=(tile("p0", keys), tile("p1", keys)),
            pages=base + plan["pages"].start,
            maxima=statistic(0),
            sums=statistic(1),
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
        gO, parts = entries_last(tensors.out), None
        if const_expr(self.problem.is_split):
            parts = MergedParts.of_launch(tensors, gO, mLSE, traits.tile_m)
        self.kernel(self.make_tma(tensors), gO, mLSE, launch, pages, parts).launch(
            grid=(scalars.shares * launch.m_blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
            cooperative=self.problem.is_split,  # its blocks may wait for each other
        )

    @cute.kernel
    def kernel(
        self,
        tma: MlaTma,
        gO: cute.Tensor,
        mLSE: cute.Tensor,
        launch: LatentLaunch,
        pages: LatentPages,
        parts: MergedParts | None,
    ):
        traits, plan = self.traits, self.traits.smem_plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(Uint8, traits.smem_bytes, byte_alignment=SWIZZLE_ALIGN)
        rings = MlaRings.create(cute.recast_ptr(base + plan["barriers"].start, dtype=Int64), len(traits.groups))
        if const_expr(parts is not None):
            stage, beside = (base + plan[name].start for name in ("q", "beside"))
            parts = dataclasses.replace(parts, stage=stage, beside=beside, arrived=rings.merged)
        block = MlaBlock(tma, self.make_tiles(base), rings, launch, gO, pages, mLSE, parts)
        if warp == 0:
            for atom in (tma.load_q, tma.load_k):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                rings.init()
            cute.arch.mbarrier_init_fence()
        else:
            fetch_vectors((launch.lengths,), first_warp=1)
            fetch_table(pages.table, first_warp=1)
        cute.arch.griddepcontrol_launch_dependents()  # the next launch may begin where blocks end;
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # this one has, perhaps

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(traits.producer_regs)
            if warp == 0:
                load(self, block)
        else:
            cute.arch.setmaxregister_increase(traits.mma_regs)
            consume(self, block)
