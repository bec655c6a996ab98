"""FlashAttention-2 backward for Ampere and everything after it: cp.async loads, ldmatrix, mma.sync.

    one block for each key tile, a loop over the query blocks that see it
    K, V ──cp.async──► sK, sV         S^T = K Q^T        P = exp2(S - LSE)
    Q, LSE ──cp.async──► sQ[s]        dP^T = V dO^T      dS = P (dP - delta) ──► sdS
    dO, delta ──cp.async──► sdO[s]    dV += P^T dO       dK += dS^T Q
                                      dQ = dS K ──add──► fp32 sum in memory

A kernel before this one computes delta = rowsum(dO O) and clears the sum, one after it rounds the sum to dQ. The query
heads of one KV head are visited in turn by the same block, which sums up their dK and dV in registers. In a
deterministic backward blocks take turns at adding to a tile of dQ (`bwd_turns.py`). Not here: dropout, ALiBi.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdArguments
from cuteflash.atoms import row_copies
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.bwd_signature import bwd_fake_args
from cuteflash.core.launch import BwdLaunch, batched
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.views import rows_first
from cuteflash.kernels.common.bwd_finish import BwdFinish, DqParts
from cuteflash.kernels.common.bwd_prepare import BwdPrepare
from cuteflash.kernels.common.workspace import WorkspaceTensors, workspace_of
from cuteflash.kernels.sm80.bwd_barriers import sync_warps
from cuteflash.kernels.sm80.bwd_bundles import (
    BwdOperands,
    BwdTiles,
    Gradients,
    KeyWork,
    QuerySources,
)
from cuteflash.kernels.sm80.bwd_load import store_rows
from cuteflash.kernels.sm80.bwd_mma import accumulate, make_gradients
from cuteflash.kernels.sm80.bwd_products import stage_rows
from cuteflash.kernels.sm80.bwd_turns import await_each_turn, pass_each_turn
from cuteflash.kernels.sm80.load import load_kv, make_kv_source
from cuteflash.problem import BwdProblem
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm80 import TURN_REGS, WARPGROUP, BwdTraitsSm80

SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle, so that a tile's offset never carries into it


class FlashBwdSm80:
    """The sm80 backward kernel for one problem and one set of traits."""

    family = "sm80"

    def __init__(self, traits: BwdTraitsSm80, problem: BwdProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.turns_apart = problem.is_deterministic and traits.turn_warpgroup
        self.turns_between = problem.is_deterministic and not self.turns_apart  # by a warp that computes, too
        self.turn_threads = WARPGROUP if self.turns_apart or traits.idle_warpgroup else 0
        self.is_descending = problem.is_deterministic or traits.idle_warpgroup
        self.dtype = CUTE_DTYPES[problem.operands.qk_dtype]

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with: fakes of `BwdArguments`."""
        return bwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def _tiled_mma(self, warps_m: int) -> cute.TiledMma:
        return atoms.tiled_mma(self.dtype, warps_m, self.traits.num_warps // warps_m)

    def tiled_mma_s(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T."""
        return self._tiled_mma(self.traits.s_warps)

    def tiled_mma_dkv(self) -> cute.TiledMma:
        """dV += P^T dO and dK += dS^T Q."""
        return self._tiled_mma(self.traits.dkv_warps)

    def tiled_mma_dq(self) -> cute.TiledMma:
        """dQ = dS K."""
        return self._tiled_mma(self.traits.dq_warps)

    def dq_parts(self) -> DqParts:
        """The dQ accumulators: one part, of the whole block."""
        shape = self.traits.tile_m, self.traits.head_dim
        return DqParts(self.tiled_mma_dq(), self.traits.num_threads, shape, ((0, 0),))

    def load_copy(self, cols: int) -> cute.TiledCopy:
        """Global memory to a shared tile of `cols` columns, by all threads of the block."""
        return row_copies.load_copy(self.dtype, self.traits.num_threads, cols)

    def store_copy(self, cols: int) -> cute.TiledCopy:
        """A shared tile of `cols` columns to registers and global memory, by all threads of the block."""
        return row_copies.store_copy(self.dtype, self.traits.num_threads, cols)

    @cute.jit
    def __call__(self, *arguments):
        has_sinks = self.problem.scores.sink is not None
        tensors, packed, scalars, sinks, stream = BwdArguments.of(arguments, has_sinks)
        tensors = batched(tensors, self.problem.storage)
        workspace = workspace_of(self.traits, tensors, packed)
        launch = BwdLaunch.of(self, tensors, packed, scalars)
        views = WorkspaceTensors.of(tensors.workspace, workspace, packed.cu_seqlens_q)
        operands = BwdOperands(
            *(rows_first(x) for x in (tensors.q, tensors.k, tensors.v, tensors.do, tensors.dk, tensors.dv)),
            gdQ=rows_first(tensors.dq) if self.traits.lone_tiles else None,
        )
        BwdPrepare(self.traits, self.problem).launch(tensors, packed, sinks, workspace, stream)
        self.kernel.set_name_prefix("flash_bwd_sm80", remove_cutlass_symbol=True)
        self.kernel(operands, views, launch).launch(
            grid=(launch.order.size(), 1, 1),
            block=(self.traits.num_threads + self.turn_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.traits.blocks_per_sm,
            preferred_smem_carveout=100,
        )
        BwdFinish(self).launch(tensors, packed, workspace, scalars.softmax_scale, stream)

    @cute.kernel
    def kernel(self, operands: BwdOperands, workspace: WorkspaceTensors, launch: BwdLaunch):
        thread = cute.arch.thread_idx()[0]
        tile = launch.tile(cute.arch.block_idx()[0])
        work = KeyWork(launch, tile, tile.query_blocks(), self.is_descending)
        if const_expr(self.problem.storage.k == "dense"):
            self.work_on(operands, workspace, work, thread)
        elif tile.exists():
            self.work_on(operands, workspace, work, thread)

    @cute.jit
    def work_on(self, operands: BwdOperands, workspace: WorkspaceTensors, work: KeyWork, thread: Int32):
        """What the warps of a block do for a key tile that exists."""
        traits = self.traits
        if const_expr(self.turn_threads == 0):
            self.differentiate(operands, workspace, work, thread)
        else:
            warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
            if warp < traits.num_warps:
                cute.arch.setmaxregister_increase(traits.mma_regs(get_arch("sm_90a")))
                self.differentiate(operands, workspace, work, thread)
            else:
                cute.arch.setmaxregister_decrease(TURN_REGS)
                if const_expr(self.turns_apart):
                    if warp == traits.num_warps:
                        await_each_turn(self, workspace, work, lane)
                    elif warp == traits.num_warps + 1:
                        pass_each_turn(self, workspace, work, lane)

    @cute.jit
    def differentiate(self, operands: BwdOperands, workspace: WorkspaceTensors, work: KeyWork, thread: Int32):
        """The gradients of a key tile."""
        base = SmemAllocator().allocate_array(cutlass.Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        tiles = self.make_tiles(base)
        g = make_gradients(self, tiles, work, thread)
        g.acc_dK.fill(0.0)
        g.acc_dV.fill(0.0)
        if work.blocks.hi > work.blocks.lo:
            self.load_keys(operands, tiles, work, thread)
            accumulate(self, g, self.query_sources(operands, workspace, tiles, work, thread), work)
        self.write_gradients(operands, g, tiles, work)

    @cute.jit
    def load_keys(self, operands: BwdOperands, tiles: BwdTiles, work: KeyWork, thread: Int32):
        """Issue the copies of K and V."""
        rows = work.tile.mask.seqlen_k - work.tile.first_key
        for gX, sX in ((operands.gK, tiles.sK), (operands.gV, tiles.sV)):
            source = make_kv_source(self, self.key_rows(gX, work), sX, thread)
            load_kv(source, work.tile.n_block, 0, rows)

    def query_sources(
        self, operands: BwdOperands, workspace: WorkspaceTensors, tiles: BwdTiles, work: KeyWork, thread: Int32
    ) -> QuerySources:
        """This thread's share of the loads of Q, dO and the row statistics."""
        tile = work.tile

        def rows(gX: cute.Tensor | None) -> cute.Tensor | None:
            if gX is None:
                return None
            gX = gX[None, None, None, tile.batch]
            return gX if self.problem.storage.q == "dense" else cute.domain_offset((tile.first_q, 0, 0), gX)

        return QuerySources(
            *(rows(gX) for gX in (operands.gQ, operands.gdO, operands.gdQ)),
            workspace=workspace,
            tiles=tiles,
            thread=thread,
            seqlen_q=tile.mask.seqlen_q,
            first_head=work.first_head,
            sequence=tile.sequence,
        )

    def key_rows(self, gX: cute.Tensor, work: KeyWork) -> cute.Tensor:
        """The rows of the tile's head and sequence in K, V or their gradients."""
        rows = gX[None, None, work.tile.head, work.tile.batch]
        return rows if self.problem.storage.k == "dense" else cute.domain_offset((work.tile.first_k, 0), rows)

    @cute.jit
    def write_gradients(self, operands: BwdOperands, g: Gradients, tiles: BwdTiles, work: KeyWork):
        """Round dK and dV, stage them in the place of K and V, and store their rows."""
        rows = work.tile.mask.seqlen_k - work.tile.first_key
        sdK, sdV = (sX[None, None, 0] for sX in (tiles.sK, tiles.sV))
        sync_warps(self)  # every warp has read K and V
        stage_rows(self, g.mma_dkv, g.thread, (g.acc_dK, work.launch.softmax_scale), sdK)
        stage_rows(self, g.mma_dkv, g.thread, (g.acc_dV, Float32(1.0)), sdV)
        sync_warps(self)
        for sX, gX, head_dim in (
            (sdK, operands.gdK, self.problem.operands.head_dim),
            (sdV, operands.gdV, self.problem.operands.head_dim_v),
        ):
            store_rows(self, sX, self.key_rows(gX, work), work.tile.n_block, rows, head_dim, g.thread)

    def make_tiles(self, base: cute.Pointer) -> BwdTiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        traits, plan = self.traits, self.traits.smem_plan

        def tile(name: str, rows: int, cols: int, *stages: int) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, dtype=self.dtype)
            return cute.make_tensor(start, atoms.swizzled_tile(rows, cols, *stages))

        def numbers(name: str) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, dtype=Float32)
            return cute.make_tensor(start, cute.make_layout((traits.tile_m, traits.stages)))

        return BwdTiles(
            sK=tile("k", traits.tile_n, traits.head_dim, 1),
            sV=tile("v", traits.tile_n, traits.head_dim_v, 1),
            sQ=tile("q", traits.tile_m, traits.head_dim, traits.stages),
            sdO=tile("do", traits.tile_m, traits.head_dim_v, traits.stages),
            sdS=tile("ds", traits.tile_n, traits.tile_m),
            sP=tile("p", traits.tile_n, traits.tile_m) if "p" in plan else None,
            sLSE=numbers("lse"),
            sDelta=numbers("delta"),
        )
