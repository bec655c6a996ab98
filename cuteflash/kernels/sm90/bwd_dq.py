"""The dQ pass of the sm90 backward in two passes: shaped as the forward, Q and dO stay, K and V pass by.

producer warp                consumer warpgroups (64 query rows each)
Q, dO ──TMA──► sQ, sdO       S = Q K^T, dP = dO V^T     WGMMA from shared memory
K ──TMA──► sK[s]             P = exp2(S - LSE)
V ──TMA──► sV[s]             dS = P (dP - delta)        registers
                             dQ += dS K                 dS from registers
                             scale dQ ──► sQ ──TMA──► global
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdScalars, BwdTensors, PackedTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.launch import Launch
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.tile import QueryTile
from cuteflash.core.workspace import Workspace
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm90.bwd_dq_mma import Block, Rings, Tiles, Tma, consume
from cuteflash.kernels.sm90.bwd_load import rows_of
from cuteflash.kernels.sm90.load import key_rows, query_rows
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS, BwdTwoPassTraitsSm90
from cuteflash.traits.sm90 import SWIZZLE_ALIGN, WARPGROUP, WGMMA_M


@dataclasses.dataclass(frozen=True)
class PassTraits:
    """What `Launch` asks of a forward's traits."""

    tile_n: int


@dataclasses.dataclass(frozen=True)
class DqPass:
    """The dQ pass for one problem and one set of traits."""

    rows: cutlass.Constexpr[BwdTwoPassTraitsSm90]
    problem: cutlass.Constexpr[BwdProblem]

    @property
    def traits(self) -> PassTraits:
        """For `Launch`."""
        return PassTraits(self.rows.dq_tile_n)

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of all operands and of dS."""
        return CUTE_DTYPES[self.problem.operands.qk_dtype]

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer warpgroup, and of a consumer warpgroup."""
        rows = self.rows
        return rows.packed_regs if self.problem.storage.q == "varlen" else (rows.producer_regs, rows.mma_regs)

    @property
    def longest_first(self) -> bool:
        """Whether tiles differ in length."""
        return self.problem.scores.mask != "full"

    @property
    def tile_tokens(self) -> int:
        """Queries of one tile."""
        return self.rows.dq_tile_m

    def tiled_mma_s(self) -> cute.TiledMma:
        """S = Q K^T and dP = dO V^T: (64, dq_tile_n)."""
        return atoms.tiled_mma(self.dtype, self.rows.dq_tile_n, OperandMajorMode.K, a_from_regs=False)

    def tiled_mma_dq(self) -> cute.TiledMma:
        """dQ += dS K: (64, head_dim), dS from registers, K MN-major."""
        return atoms.tiled_mma(self.dtype, self.rows.head_dim, OperandMajorMode.MN, a_from_regs=True)

    def smem_layout(self, name: str) -> cute.ComposedLayout:
        """Of a tensor of `dq_smem_plan`: (rows, columns, stages)."""
        rows = WGMMA_M if name in ("q", "do") else self.rows.dq_tile_n
        cols = self.rows.head_dim if name in ("q", "k") else self.rows.head_dim_v
        stages = CONSUMERS if name in ("q", "do") else self.rows.dq_smem_plan[name].stages
        return atoms.smem_tile_layout(self.dtype, rows, cols, stages)

    def box(self, name: str) -> tuple[int, int]:
        """Rows and columns of one TMA box."""
        rows = WGMMA_M if name in ("q", "do") else self.rows.dq_tile_n
        return rows, self.rows.head_dim if name in ("q", "k") else self.rows.head_dim_v

    def launch(
        self, tensors: BwdTensors, packed: PackedTensors, workspace: Workspace, scalars: BwdScalars, stream
    ) -> None:
        """Launch it; `tensors` as `batched` returns them."""

        def tma(make, tensor: cute.Tensor, name: str):
            view = rows_of(self.problem.storage.q if name in ("q", "do") else self.problem.storage.k)
            return make(view(tensor), cute.select(self.smem_layout(name), mode=[0, 1]), self.box(name))

        load_q, gQ = tma(atoms.tma_load, tensors.q, "q")
        load_do, gdO = tma(atoms.tma_load, tensors.do, "do")
        load_k, gK = tma(atoms.tma_load, tensors.k, "k")
        load_v, gV = tma(atoms.tma_load, tensors.v, "v")
        store_dq, gdQ = tma(atoms.tma_store, tensors.dq, "q")
        launch = Launch.of(self, tensors, packed, scalars, persistent=False)
        views = WorkspaceTensors.of(tensors.workspace, workspace, packed.cu_seqlens_q)
        self.kernel(
            Tma(load_q, load_do, load_k, load_v, store_dq, gQ, gdO, gK, gV, gdQ), views, launch, scalars.softmax_scale
        ).launch(
            grid=(launch.order.size(), 1, 1),
            block=(self.rows.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,  # it reads nothing of the pass before it, whose blocks wait for what both read
        )

    @cute.kernel
    def kernel(self, tma: Tma, workspace: WorkspaceTensors, launch: Launch, softmax_scale: Float32):
        traits, plan = self.rows, self.rows.dq_smem_plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(cutlass.Uint8, traits.smem_bytes, byte_alignment=SWIZZLE_ALIGN)
        barriers = cute.recast_ptr(base + plan["barriers"].start, dtype=cutlass.Int64)
        rings, tiles, position = {}, {}, 0
        for name in ("q", "do", "k", "v"):
            stages = 1 if name in ("q", "do") else plan[name].stages
            rings[name] = TmaRing.create(barriers + position, stages, plan[name].nbytes // stages)
            position += 2 * stages
            layout = self.smem_layout(name)
            start = cute.recast_ptr(base + plan[name].start, layout.inner, dtype=self.dtype)
            tiles[name] = cute.make_tensor(start, layout.outer)
        rings = Rings(**rings)
        tiles = Tiles(tiles["q"], tiles["do"], tiles["k"], tiles["v"])
        if warp == 0:
            for atom in (tma.load_q, tma.load_k, tma.load_v, tma.load_do, tma.store_dq):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for ring in (rings.q, rings.do, rings.k, rings.v):
                    ring.init(CONSUMERS * WARPGROUP // 32)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        block = Block(tma, tiles, rings, launch, workspace, softmax_scale)
        tile = launch.tile(cute.arch.block_idx()[0])
        if const_expr(self.problem.storage.q == "dense"):
            self.work(block, tile, warp)
        elif tile.exists():
            self.work(block, tile, warp)
        if cute.arch.block_idx()[0] == cute.arch.grid_dim()[0] - 1:
            cute.arch.griddepcontrol_wait()  # the launch after this one waits for this one, not for the pass before it

    @cute.jit
    def work(self, block: Block, tile: QueryTile, warp: Int32):
        """The part of a warp in a query tile that exists."""
        producer_regs, mma_regs = self.registers
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(producer_regs)
            if warp == 0:
                load(self, block.tma, block.tiles, block.rings, tile)
        else:
            cute.arch.setmaxregister_increase(mma_regs)
            consume(self, block, tile)


@cute.jit
def load(kernel: cutlass.Constexpr, tma: Tma, tiles: Tiles, rings: Rings, tile: QueryTile):
    """Load Q and dO once, K and V block by block, last block first; a whole warp calls it."""
    blocks = tile.visited_blocks()

    def partition(atom, sX, rows, name):
        return atoms.tma_partition(atom, sX, cute.local_tile(rows, kernel.box(name), (None, 0)))

    tQsQ, tQgQ = partition(tma.load_q, tiles.sQ, query_rows(kernel, tma.gQ, tile), "q")
    tOsdO, tOgdO = partition(tma.load_do, tiles.sdO, query_rows(kernel, tma.gdO, tile), "do")
    tKsK, tKgK = partition(tma.load_k, tiles.sK, key_rows(kernel, tma.gK, tile), "k")
    tVsV, tVgV = partition(tma.load_v, tiles.sV, key_rows(kernel, tma.gV, tile), "v")
    if blocks.hi > blocks.lo:
        barrier = rings.q.acquire(Int32(0))
        for wg in cutlass.range_constexpr(CONSUMERS):
            cute.copy(tma.load_q, tQgQ[None, tile.m_block * CONSUMERS + wg], tQsQ[None, wg], tma_bar_ptr=barrier)
        for position in cutlass.range(blocks.hi - blocks.lo, unroll=1):
            n_block = blocks.hi - 1 - position
            stage = rings.k.stage(position)
            cute.copy(tma.load_k, tKgK[None, n_block], tKsK[None, stage], tma_bar_ptr=rings.k.acquire(position))
            if position == 0:
                barrier = rings.do.acquire(Int32(0))
                for wg in cutlass.range_constexpr(CONSUMERS):
                    box = tOgdO[None, tile.m_block * CONSUMERS + wg]
                    cute.copy(tma.load_do, box, tOsdO[None, wg], tma_bar_ptr=barrier)
            stage = rings.v.stage(position)
            cute.copy(tma.load_v, tVgV[None, n_block], tVsV[None, stage], tma_bar_ptr=rings.v.acquire(position))
