"""FlashAttention backward for Hopper in one pass: dK and dV of 128 keys at a time, dQ summed up in memory.

    producer warpgroup           two consumer warpgroups (64 keys each)
    K, V ──TMA──► sK, sV         S^T = K Q^T       K from shared memory or registers
    Q, LSE ──TMA──► sQ[s]        dP^T = V dO^T     V likewise
    dO, delta ──TMA──► sdO[s]    P = exp2(S - LSE), dS = P (dP - delta)
                                 dV += P^T dO      P^T and dS^T from registers
                                 dK += dS^T Q
    sdQ ──bulk add──► fp32 dQ    dQ = dS K         dS through shared memory; a part for each, or by a third warpgroup
    sdK, sdV ──TMA──► dK, dV

A kernel before this one computes delta = rowsum(dO O), one after it rounds the sum to dQ; each begins where the one
before it ends, and then waits for it. The first block that comes to a tile of dQ stores, the others add
(`kernels/common/turns.py`), so that nothing has to be cleared. If dQ has to be the same bits in every run, or if it is
faster, blocks take turns, by ascending key (`KeyTile.turn_at`). With `lone_tiles` the only block of a sequence
stores dQ as it does dK and dV, rounded, and nothing is left for the kernel after this one. With `held_dq` that is so of
more keys, too: a block takes all key tiles of a KV head and holds the sum of dQ, in shared memory or, if there is no
room, in memory, from where it comes back for the next key tile. With `last_rounds` a block that finds that all others
have added to a tile brings the sum back, adds to it, and stores dQ, rounded. The query heads of one KV head are visited
in turn by the same block, which sums up their dK and dV in registers. Persistent blocks get the tiles of packed
sequences from the warp that stores dK and dV (`handout.py`), all others find their one tile before the roles part; the
descriptors clip boxes at a sequence's end (`ragged.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdArguments
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import Handover, StageRing, TmaRing
from cuteflash.core.bwd_launch import BwdLaunch, adds_in_turn, held_dq
from cuteflash.core.bwd_signature import bwd_fake_args
from cuteflash.core.launch import batched
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.kernels.common.bwd_finish import BwdFinish, DqParts
from cuteflash.kernels.common.bwd_prepare import BwdPrepare
from cuteflash.kernels.common.workspace import WorkspaceTensors, workspace_of
from cuteflash.kernels.sm90.bwd_bundles import Block, Rings, Tiles, Tma
from cuteflash.kernels.sm90.bwd_dq_product import compute_dq, make_dq_product
from cuteflash.kernels.sm90.bwd_dq_store import take_dq
from cuteflash.kernels.sm90.bwd_load import await_steps, load, load_in_turn, make_tma, store_gradients, store_until
from cuteflash.kernels.sm90.bwd_mma import consume, pass_turn
from cuteflash.kernels.sm90.bwd_visit import visit_key_tiles
from cuteflash.kernels.sm90.bwd_warpgroup import make_key_warpgroup
from cuteflash.kernels.sm90.handout import Handout, hand_out
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm90 import STATISTIC_BYTES, BwdTraitsSm90
from cuteflash.traits.sm90 import HANDED_TILES, SWIZZLE_ALIGN, WARPGROUP


@dataclasses.dataclass(frozen=True)
class FlashBwdSm90:
    """The sm90 backward kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[BwdTraitsSm90]
    problem: cutlass.Constexpr[BwdProblem]

    family: ClassVar[str] = "sm90"

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of all operands, of P and of dS."""
        return CUTE_DTYPES[self.problem.operands.qk_dtype]

    @property
    def hands_out(self) -> bool:
        """Whether blocks draw their tiles on demand, since those of packed sequences differ in what they cost."""
        return self.traits.persistent and self.problem.storage.k == "varlen"

    @property
    def in_turn(self) -> bool:
        """Whether blocks add to a tile of dQ by ascending key, each after the one before it."""
        return adds_in_turn(self.traits, self.problem)

    @property
    def held_dq(self) -> int:
        """See `BwdLaunch`."""
        return held_dq(self.traits, self.problem)

    @property
    def passes_dq_on(self) -> bool:
        """Whether the sum of dQ that a block holds goes to memory between key tiles."""
        return self.held_dq > 0 and not self.traits.is_dq_apart

    @property
    def runs_at_once(self) -> bool:
        """Whether blocks that wait for each other's turns have their tiles in advance, so that all of them must run."""
        return self.traits.persistent and self.in_turn and not (self.hands_out or self.held_dq)

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with: fakes of `BwdArguments`."""
        return bwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_s(self) -> cute.TiledMma:
        """S^T = K Q^T: (64, tile_m), K-major; K from shared memory or registers."""
        return atoms.tiled_mma(self.dtype, self.traits.tile_m, OperandMajorMode.K, a_from_regs=self.traits.k_in_regs)

    def tiled_mma_dp(self) -> cute.TiledMma:
        """dP^T = V dO^T: (64, tile_m), K-major; V from shared memory or registers."""
        return atoms.tiled_mma(self.dtype, self.traits.tile_m, OperandMajorMode.K, a_from_regs=self.traits.v_in_regs)

    def tiled_mma_dv(self) -> cute.TiledMma:
        """dV += P^T dO: (64, head_dim_v), P^T from registers, dO MN-major."""
        return atoms.tiled_mma(self.dtype, self.traits.head_dim_v, OperandMajorMode.MN, a_from_regs=True)

    def tiled_mma_dk(self) -> cute.TiledMma:
        """dK += dS^T Q: (64, head_dim), dS^T from registers, Q MN-major."""
        return atoms.tiled_mma(self.dtype, self.traits.head_dim, OperandMajorMode.MN, a_from_regs=True)

    def tiled_mma_dq(self) -> cute.TiledMma:
        """A part of dQ = dS K, or of dQ^T = K^T dS^T; K is MN-major, all in shared memory."""
        rows, cols = self.traits.dq_part
        if self.traits.is_dq_transposed:
            return atoms.tiled_mma(self.dtype, rows, OperandMajorMode.K, a_from_regs=False, a_major=OperandMajorMode.MN)
        return atoms.tiled_mma(self.dtype, cols, OperandMajorMode.MN, a_from_regs=False)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, head_dim, kv_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, self.traits.head_dim, self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, kv_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, self.traits.head_dim_v, self.traits.kv_stage)

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(tile_m, head_dim, q_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_m, self.traits.head_dim, self.traits.q_stage)

    def smem_layout_do(self) -> cute.ComposedLayout:
        """(tile_m, head_dim_v, do_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_m, self.traits.head_dim_v, self.traits.do_stage)

    def smem_layout_ds(self) -> cute.ComposedLayout:
        """(tile_m, tile_n, ds_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_m, self.traits.tile_n, self.traits.ds_stage)

    def smem_layout_dq(self) -> cute.ComposedLayout:
        """(rows, columns, 2 parts) of dQ, rounded: half as wide as the fp32 parts, of which each other one begins."""
        return atoms.smem_tile_layout(self.dtype, *self.traits.dq_part, 2 * self.traits.dq_stages)

    def copy_k(self) -> cute.TiledCopy:
        """sK to the A fragments of S^T, used if K stays in registers."""
        return atoms.load_copy_a(self.dtype, self.tiled_mma_s())

    def copy_v(self) -> cute.TiledCopy:
        """sV to the A fragments of dP^T, used if V stays in registers."""
        return atoms.load_copy_a(self.dtype, self.tiled_mma_dp())

    def copy_ds(self) -> cute.TiledCopy:
        """The accumulators of S^T to sdS, whose rows are queries."""
        return atoms.store_copy(self.dtype, self.tiled_mma_s(), transpose=True)

    def copy_dv(self) -> cute.TiledCopy:
        """The accumulators of dV to the place of V."""
        return atoms.store_copy(self.dtype, self.tiled_mma_dv())

    def copy_dk(self) -> cute.TiledCopy:
        """The accumulators of dK to the place of K."""
        return atoms.store_copy(self.dtype, self.tiled_mma_dk())

    def copy_dq(self) -> cute.TiledCopy:
        """The accumulators of dQ, or of dQ^T, to the place of a part of it, rounded."""
        return atoms.store_copy(self.dtype, self.tiled_mma_dq(), transpose=self.traits.is_dq_transposed)

    @cute.jit
    def __call__(self, *arguments):
        has_sinks = self.problem.scores.sink is not None
        tensors, packed, scalars, sinks, stream = BwdArguments.of(arguments, has_sinks)
        traits = self.traits
        tensors = batched(tensors, self.problem.storage)
        workspace = workspace_of(traits, tensors, packed)
        launch = BwdLaunch.of(self, tensors, packed, scalars)
        views = WorkspaceTensors.of(tensors.workspace, workspace, packed.cu_seqlens_q)
        blocks = launch.order.size()
        if const_expr(traits.persistent):
            blocks = cutlass.min(blocks, scalars.num_sms)
        BwdPrepare(traits, self.problem).launch(tensors, packed, sinks, workspace, stream)
        self.kernel(make_tma(self, tensors), views, launch).launch(
            grid=(blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            cooperative=self.runs_at_once,
            use_pdl=not self.runs_at_once,
        )
        BwdFinish(self).launch(tensors, packed, workspace, scalars.softmax_scale, stream)

    def dq_parts(self) -> DqParts:
        """How the consumers' accumulators make up a tile of dQ."""
        traits = self.traits
        rows, cols = traits.dq_part
        origins = tuple((i, j) for i in range(0, traits.tile_m, rows) for j in range(0, traits.head_dim, cols))
        return DqParts(self.tiled_mma_dq(), WARPGROUP, (rows, cols), origins, traits.is_dq_transposed)

    @cute.kernel
    def kernel(self, tma: Tma, workspace: WorkspaceTensors, launch: BwdLaunch):
        traits = self.traits
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(cutlass.Uint8, traits.smem_bytes, byte_alignment=SWIZZLE_ALIGN)
        rings, handout = self.make_rings(base), None
        if const_expr(self.hands_out):
            handout = Handout.create(base, traits.smem_handout, most_ahead=HANDED_TILES - 1)
        if warp == 0:
            for atom in (tma.load_k, tma.load_q, tma.load_v, tma.load_do, tma.store_dk, tma.store_dv, tma.store_dq):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                consumer_warps = traits.mma_warpgroups * WARPGROUP // 32
                for ring in (rings.q, rings.do):
                    ring.init(consumer_warps)
                for ring in (rings.k, rings.v):
                    ring.init(1)  # the warp that stores what takes their place
                rings.ds.init_for(consumer_warps, WARPGROUP // 32)
                for handover in rings.dq:
                    handover.init(WARPGROUP // 32)
                for stage in range(traits.kv_stage):
                    cute.arch.mbarrier_init(rings.gradients + stage, consumer_warps)
                cute.arch.mbarrier_init(rings.steps, 1)
                if const_expr(handout is not None):
                    handout.init(readers=traits.num_threads // 32 - 1)  # all but the one that hands out
            cute.arch.mbarrier_init_fence()
        tile = None
        if const_expr(self.problem.storage.k == "varlen" and not traits.persistent):
            # Once, not by each role: it takes a search, beside which warp 0 initialises the barriers.
            tile = launch.tile(cute.arch.block_idx()[0])
        block = Block(tma, self.make_tiles(base), rings, launch, tile, handout, workspace)
        cute.arch.sync_threads()
        if const_expr(tile is None):
            self.differentiate(block, warp)
        elif tile.exists():
            self.differentiate(block, warp)
        else:
            cute.arch.griddepcontrol_wait()  # if no block has a tile, the kernel after this one waits for nothing else

    @cute.jit
    def differentiate(self, block: Block, warp: Int32):
        """The part of a warp in the tiles of a block, which exist."""
        traits = self.traits
        first_consumer, dq_warp = WARPGROUP // 32, (1 + traits.mma_warpgroups) * WARPGROUP // 32
        if warp < first_consumer:
            cute.arch.setmaxregister_decrease(traits.producer_regs)
            self.produce(block, warp)
        elif warp < dq_warp:
            cute.arch.setmaxregister_increase(traits.mma_regs)
            wg = make_key_warpgroup(self, block)
            if const_expr(traits.pingpong):
                if wg.index == traits.mma_warpgroups - 1:
                    pass_turn(self, wg)
            visit_key_tiles(self, block, functools.partial(consume, self, block, wg))
        elif const_expr(traits.is_dq_apart):
            cute.arch.setmaxregister_decrease(traits.dq_regs)
            dq = make_dq_product(self, block.tiles, Int32(0), cute.arch.thread_idx()[0] % WARPGROUP)
            visit_key_tiles(self, block, functools.partial(compute_dq, self, block, dq))

    @cute.jit
    def produce(self, block: Block, warp: Int32):
        """The warps that feed the others with tiles and take results from them."""
        visit, stages = functools.partial(visit_key_tiles, self, block), self.traits.mma_warpgroups
        cute.arch.griddepcontrol_launch_dependents()  # the kernel after this one may begin where blocks end
        cute.arch.griddepcontrol_wait()  # this one has, perhaps, where those of the kernel before end
        if warp == 0:
            waits = block.handout is not None and block.launch.order.draws_first
            visit(functools.partial(load_in_turn if waits else load, self, block))
        for stage in cutlass.range_constexpr(stages):
            if warp == 1 + stage:
                visit(functools.partial(take_dq, self, block, stage))
                cute.arch.cp_async_bulk_wait_group(0)
        if warp == 1 + stages:
            if const_expr(block.handout is None):
                visit(functools.partial(store_gradients, self, block))
            else:
                follow, steps = functools.partial(store_until, self, block), functools.partial(await_steps, block)
                hand_out(block.handout, block.launch, follow, Int32(0), steps)

    def make_rings(self, base: cute.Pointer) -> Rings:
        """The rings and barriers over the mbarriers at the start of the block's shared memory."""
        traits, plan = self.traits, self.traits.smem_plan
        barriers = cute.recast_ptr(base + plan["barriers"].start, dtype=cutlass.Int64)
        rings, position = {}, 0
        for name, statistic in (("k", None), ("v", None), ("q", "lse"), ("do", "delta")):
            region = plan[name]
            tile_bytes = region.nbytes // region.stages + (traits.tile_m * STATISTIC_BYTES if statistic else 0)
            rings[name] = TmaRing.create(barriers + position, region.stages, tile_bytes)
            position += 2 * region.stages
        ds = StageRing.create(barriers + position, traits.ds_stage)
        position += 2 * traits.ds_stage
        dq = tuple(
            Handover(barriers + position + 2 * part, barriers + position + 2 * part + 1)
            for part in range(traits.dq_stages)
        )
        gradients = barriers + position + 2 * traits.dq_stages
        return Rings(**rings, ds=ds, dq=dq, gradients=gradients, steps=gradients + traits.kv_stage)

    def make_tiles(self, base: cute.Pointer) -> Tiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        traits, plan = self.traits, self.traits.smem_plan

        def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, layout.inner, dtype=self.dtype)
            return cute.make_tensor(start, layout.outer)

        def numbers(name: str, count: int) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, dtype=Float32)
            return cute.make_tensor(start, cute.make_layout((count, plan[name].stages)))

        def words(name: str) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, dtype=Int32)
            return cute.make_tensor(start, cute.make_layout(plan[name].stages))

        rows, cols = traits.dq_part
        return Tiles(
            sK=tile("k", self.smem_layout_k()),
            sV=tile("v", self.smem_layout_v()),
            sQ=tile("q", self.smem_layout_q()),
            sdO=tile("do", self.smem_layout_do()),
            sdS=tile("ds", self.smem_layout_ds()),
            sLSE=numbers("lse", traits.tile_m),
            sDelta=numbers("delta", traits.tile_m),
            sdQ=numbers("dq", rows * cols),
            sdQ_rounded=tile("dq", self.smem_layout_dq()) if traits.stores_dq else None,
            sums=words("sums") if traits.last_rounds else None,
        )
