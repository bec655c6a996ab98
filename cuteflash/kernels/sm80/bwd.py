"""FlashAttention-2 backward for Ampere and everything after it: cp.async loads, ldmatrix, mma.sync.

    one block for each key tile, a loop over the query blocks that see it
    K, V ──cp.async──► sK, sV         S^T = K Q^T        P = exp2(S - LSE)
    Q, LSE ──cp.async──► sQ[s]        dP^T = V dO^T      dS = P (dP - delta) ──► sdS
    dO, delta ──cp.async──► sdO[s]    dV += P^T dO       dK += dS^T Q
                                      dQ = dS K ──add──► fp32 sum in memory

A kernel before this one computes delta = rowsum(dO O) and clears the sum, one after it rounds the sum to dQ. With
`lone_tiles` the only block of a sequence does all of that itself: it loads O, too, and each tensor crosses memory once
(`bwd_lone.py`). The query heads of one KV head are visited in turn by the same block, which sums up their dK and dV in
registers. In a deterministic backward blocks take turns at adding to a tile of dQ (`bwd_turns.py`). Not here: dropout,
ALiBi.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdArguments
from cuteflash.atoms import row_copies
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.bwd_signature import bwd_fake_args
from cuteflash.core.launch import batched
from cuteflash.core.scores import computed_here
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.views import rows_first
from cuteflash.kernels.common.bwd_finish import BwdFinish, DqParts
from cuteflash.kernels.common.bwd_prepare import BwdPrepare
from cuteflash.kernels.common.workspace import WorkspaceTensors, workspace_of
from cuteflash.kernels.sm80.bwd_barriers import sync_warps
from cuteflash.kernels.sm80.bwd_bundles import (
    Block,
    BwdOperands,
    BwdTiles,
    Gradients,
    KeyWork,
    QuerySources,
)
from cuteflash.kernels.sm80.bwd_load import store_rows
from cuteflash.kernels.sm80.bwd_lone import lone_rows
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
        self.has_delta = not traits.lone_tiles or problem.scores.sink is not None
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
            lone=lone_rows(self, tensors) if self.traits.lone_tiles else None,
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
        base = SmemAllocator().allocate_array(cutlass.Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        block = Block(operands, workspace, self.make_tiles(base), cute.arch.thread_idx()[0])
        tile = launch.tile(cute.arch.block_idx()[0])
        if const_expr(self.traits.lone_tiles and self.problem.storage.k == "varlen"):
            tile = tile.uniform()  # sums over lanes need not ask which of them are here
        work = KeyWork(launch, tile, tile.query_blocks(), self.is_descending)
        if const_expr(self.problem.storage.k == "dense"):
            self.work_on(block, work)
        elif tile.exists():
            if const_expr(launch.heads_at_once is None):
                self.work_on(block, work)
            else:
                self.work_on_heads(block, work)

    @cute.jit
    def work_on_heads(self, block: Block, work: KeyWork):
        """`work_on` of each head that the block takes of a key tile."""
        launch = work.launch
        first = work.tile.head * launch.heads_at_once
        for head in cutlass.range(first, cutlass.min(first + launch.heads_at_once, launch.heads), unroll=1):
            self.work_on(block, dataclasses.replace(work, tile=dataclasses.replace(work.tile, head=head)))
            cute.arch.sync_threads()  # what is in shared memory has been read

    @cute.jit
    def work_on(self, block: Block, work: KeyWork):
        """What a block does for a key tile that exists. Lone tiles have code of their own.

        What one of the two needs is computed there: computed before, it would take registers in the other, too.
        """
        if const_expr(block.operands.lone is None):
            self.divide(block, work)
        else:
            here = dataclasses.replace(block, thread=computed_here(block.thread))
            if work.tile.is_lone():
                self.divide(here, found_here(work, 0))
            else:
                operands = dataclasses.replace(block.operands, lone=None)
                n_block = computed_here(work.tile.n_block)
                self.divide(dataclasses.replace(here, operands=operands), found_here(work, n_block))

    @cute.jit
    def divide(self, block: Block, work: KeyWork):
        """What the warps of a block do for a key tile."""
        traits = self.traits
        if const_expr(self.turn_threads == 0):
            self.differentiate(block, work)
        else:
            warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
            if warp < traits.num_warps:
                cute.arch.setmaxregister_increase(traits.mma_regs(get_arch("sm_90a")))
                self.differentiate(block, work)
            else:
                cute.arch.setmaxregister_decrease(TURN_REGS)
                if const_expr(self.turns_apart):
                    if warp == traits.num_warps:
                        await_each_turn(self, block.workspace, work, lane)
                    elif warp == traits.num_warps + 1:
                        pass_each_turn(self, block.workspace, work, lane)

    @cute.jit
    def differentiate(self, block: Block, work: KeyWork):
        """The gradients of a key tile."""
        g = make_gradients(self, block.tiles, work, block.thread)
        g.acc_dK.fill(0.0)
        g.acc_dV.fill(0.0)
        if work.blocks.hi > work.blocks.lo:
            self.load_keys(block, work)
            accumulate(self, g, self.query_sources(block, work), work)
        self.write_gradients(block, g, work)

    @cute.jit
    def load_keys(self, block: Block, work: KeyWork):
        """Issue the copies of K and V."""
        rows = work.tile.mask.seqlen_k - work.tile.first_key
        for gX, sX in ((block.operands.gK, block.tiles.sK), (block.operands.gV, block.tiles.sV)):
            source = make_kv_source(self, self.key_rows(gX, work), sX, block.thread)
            load_kv(source, work.tile.n_block, 0, rows)

    def query_sources(self, block: Block, work: KeyWork) -> QuerySources:
        """This thread's share of the loads of Q, dO and the row statistics."""
        tile, operands = work.tile, block.operands

        def rows(gX: cute.Tensor | None) -> cute.Tensor | None:
            if gX is None:
                return None
            between = (None,) * (cute.rank(gX) - 1)
            gX = gX[*between, tile.batch]
            if self.problem.storage.q == "dense":
                return gX
            return cute.domain_offset((tile.first_q, *(0 for _ in between[1:])), gX)

        return QuerySources(
            rows(operands.gQ),
            rows(operands.gdO),
            lone=None if operands.lone is None else operands.lone.map(rows),
            workspace=block.workspace,
            tiles=block.tiles,
            thread=block.thread,
            seqlen_q=tile.mask.seqlen_q,
            first_head=work.first_head,
            sequence=tile.sequence,
        )

    def key_rows(self, gX: cute.Tensor, work: KeyWork) -> cute.Tensor:
        """The rows of the tile's head and sequence in K, V or their gradients."""
        rows = gX[None, None, work.tile.head, work.tile.batch]
        return rows if self.problem.storage.k == "dense" else cute.domain_offset((work.tile.first_k, 0), rows)

    @cute.jit
    def write_gradients(self, block: Block, g: Gradients, work: KeyWork):
        """Round dK and dV, stage them in the place of K and V, and store their rows."""
        rows = work.tile.mask.seqlen_k - work.tile.first_key
        sdK, sdV = (sX[None, None, 0] for sX in (block.tiles.sK, block.tiles.sV))
        sync_warps(self)  # every warp has read K and V
        stage_rows(self, g.mma_dkv, g.thread, (g.acc_dK, work.launch.softmax_scale), sdK)
        stage_rows(self, g.mma_dkv, g.thread, (g.acc_dV, Float32(1.0)), sdV)
        sync_warps(self)
        for sX, gX, head_dim in (
            (sdK, block.operands.gdK, self.problem.operands.head_dim),
            (sdV, block.operands.gdV, self.problem.operands.head_dim_v),
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
            sO=tile("o", traits.tile_m, traits.head_dim_v, traits.stages) if "o" in plan else None,
            sLSE=numbers("lse"),
            sDelta=numbers("delta"),
        )


def found_here(work: KeyWork, n_block: Int32 | int) -> KeyWork:
    """The same of another key tile of the sequence, of whose place nothing is computed before the branch this is in."""
    place = {name: getattr(work.tile, name) for name in ("head", "sequence", "batch", "first_q", "first_k")}
    # Of packed sequences the entry of the batch mode is 0.
    here = {name: computed_here(value) for name, value in place.items() if not isinstance(value, int)}
    return dataclasses.replace(work, tile=dataclasses.replace(work.tile, **here)).of_tile(n_block)
