"""The dK, dV pass of the sm90 backward in two passes: 64 keys a block, one consumer warpgroup for dV and one for dK.

    producer warp                  warpgroup "P"                   warpgroup "dS"
    K, V ──TMA──► sK, sV           S^T = K Q^T                     dP^T = V dO^T
    Q, LSE ──TMA──► sQ[s]          P = exp2(S - LSE) ──► sP[s] ──► dS = P (dP - delta)
    dO, delta ──TMA──► sdO[s]      dV += P^T dO                    dK += dS^T Q

Each accumulator is as wide as a head, which leaves no registers for a second one. In both warpgroups the first product
of the next step is issued before the second one of this step, beside whose pointwise part it runs.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdScalars, BwdTensors, PackedTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import StageRing, TmaRing
from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.tile import KeyTile
from cuteflash.core.workspace import Workspace
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm90.bwd_bundles import Tma, Visit
from cuteflash.kernels.sm90.bwd_dkv_mma import WARPS, Block, Rings, Tiles, consume
from cuteflash.kernels.sm90.bwd_load import load, make_tma
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm90 import STATISTIC_BYTES
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS, BwdTwoPassTraitsSm90
from cuteflash.traits.sm90 import SWIZZLE_ALIGN, WARPGROUP


@dataclasses.dataclass(frozen=True)
class DkvPass:
    """The dK, dV pass for one problem and one set of traits."""

    traits: cutlass.Constexpr[BwdTwoPassTraitsSm90]
    problem: cutlass.Constexpr[BwdProblem]

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of all operands, of P and of dS."""
        return CUTE_DTYPES[self.problem.operands.qk_dtype]

    def tiled_mma_s(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: (64, tile_m)."""
        return atoms.tiled_mma(self.dtype, self.traits.tile_m, OperandMajorMode.K, a_from_regs=False)

    def tiled_mma_gradient(self, cols: int) -> cute.TiledMma:
        """dV += P^T dO or dK += dS^T Q: (64, cols), the first from registers, the second MN-major."""
        return atoms.tiled_mma(self.dtype, cols, OperandMajorMode.MN, a_from_regs=True)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, head_dim, 1)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, self.traits.head_dim)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, 1)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, self.traits.head_dim_v)

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(tile_m, head_dim, q_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_m, self.traits.head_dim, self.traits.q_stage)

    def smem_layout_do(self) -> cute.ComposedLayout:
        """(tile_m, head_dim_v, do_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_m, self.traits.head_dim_v, self.traits.do_stage)

    def smem_layout_weights(self) -> cute.Layout:
        """(pairs, 128 threads, p_stage): pieces of 16 bytes, of neighbouring threads side by side."""
        traits = self.traits
        pairs = traits.tile_m * traits.tile_n // 2 // WARPGROUP  # of one thread, a multiple of 4 as tile_m is one of 16
        return cute.make_layout(
            ((4, pairs // 4), WARPGROUP, traits.p_stage), stride=((1, 4 * WARPGROUP), 4, pairs * WARPGROUP)
        )

    def launch(
        self, tensors: BwdTensors, packed: PackedTensors, workspace: Workspace, scalars: BwdScalars, stream
    ) -> None:
        """Launch it; `tensors` as `batched` returns them."""
        launch = BwdLaunch.of(self, tensors, packed, scalars)
        views = WorkspaceTensors.of(tensors.workspace, workspace, packed.cu_seqlens_q)
        self.kernel(make_tma(self, tensors), views, launch).launch(
            grid=(launch.order.size(), 1, 1),
            block=(self.traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tma: Tma, workspace: WorkspaceTensors, launch: BwdLaunch):
        traits = self.traits
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(cutlass.Uint8, traits.smem_bytes, byte_alignment=SWIZZLE_ALIGN)
        rings = self.make_rings(base)
        block = Block(tma, self.make_tiles(base), rings, launch, workspace)
        if warp == 0:
            for atom in (tma.load_k, tma.load_q, tma.load_v, tma.load_do, tma.store_dk, tma.store_dv):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for ring in (rings.k, rings.v):
                    ring.init(WARPS)
                for ring in (rings.q, rings.do):
                    ring.init(CONSUMERS * WARPS)
                rings.p.init_for(WARPS, WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # the pass for dQ may begin where blocks end, with all it reads
        cute.arch.sync_threads()
        tile = launch.tile(cute.arch.block_idx()[0])
        if const_expr(self.problem.storage.k == "dense"):
            self.work(block, tile, warp)
        elif tile.exists():
            self.work(block, tile, warp)

    @cute.jit
    def work(self, block: Block, tile: KeyTile, warp: Int32):
        """The part of a warp in a key tile that exists."""
        traits = self.traits
        visit = Visit(tile, tile.query_blocks(), Int32(0), Int32(0), Int32(0))
        if warp < WARPS:
            cute.arch.setmaxregister_decrease(traits.producer_regs)
            if visit.blocks.hi > visit.blocks.lo:
                if warp == 0:
                    load(self, block, visit)
        else:
            cute.arch.setmaxregister_increase(traits.mma_regs)
            if warp < 2 * WARPS:
                consume(self, block, visit, True)
            else:
                consume(self, block, visit, False)

    def make_rings(self, base: cute.Pointer) -> Rings:
        """The rings over the mbarriers at the start of the block's shared memory."""
        traits, plan = self.traits, self.traits.smem_plan
        barriers = cute.recast_ptr(base + plan["barriers"].start, dtype=cutlass.Int64)
        rings, position = {}, 0
        for name in ("k", "v", "q", "do"):
            region = plan[name]
            statistic = traits.tile_m * STATISTIC_BYTES if name in ("q", "do") else 0
            rings[name] = TmaRing.create(barriers + position, region.stages, region.nbytes // region.stages + statistic)
            position += 2 * region.stages
        return Rings(**rings, p=StageRing.create(barriers + position, plan["p"].stages))

    def make_tiles(self, base: cute.Pointer) -> Tiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan = self.traits.smem_plan

        def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, layout.inner, dtype=self.dtype)
            return cute.make_tensor(start, layout.outer)

        def plain(name: str, dtype: type[cutlass.Numeric], layout: cute.Layout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=dtype), layout)

        traits = self.traits
        return Tiles(
            sK=tile("k", self.smem_layout_k()),
            sV=tile("v", self.smem_layout_v()),
            sQ=tile("q", self.smem_layout_q()),
            sdO=tile("do", self.smem_layout_do()),
            sLSE=plain("lse", Float32, cute.make_layout((traits.tile_m, traits.q_stage))),
            sDelta=plain("delta", Float32, cute.make_layout((traits.tile_m, traits.do_stage))),
            sWeights=plain("p", Uint32, self.smem_layout_weights()),
        )
