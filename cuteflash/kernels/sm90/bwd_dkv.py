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
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdScalars, BwdTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.convert import round_fragment, rounded_fragment, weigh_pair
from cuteflash.core.launch import BwdLaunch
from cuteflash.core.scores import ScoreTile
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.softmax import exp2
from cuteflash.core.tile import KeyTile, QueryBlocks
from cuteflash.core.views import acc_as_operand_a, rows_first, transposed
from cuteflash.core.workspace import Workspace
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm90.bwd_load import key_partition, load_once, load_statistic
from cuteflash.kernels.sm90.bwd_mma import ROWS, cap_slope, column_statistics, prepare_scores
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm90 import STATISTIC_BYTES
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS, BwdTwoPassTraitsSm90
from cuteflash.traits.sm90 import SWIZZLE_ALIGN, WARPGROUP, WGMMA_M

WARPS = WARPGROUP // 32


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    EPILOGUE = 1  # + warpgroup: its gradient is in shared memory


@dataclasses.dataclass(frozen=True)
class Tma:
    """TMA descriptors and the coordinate tensors they are sliced with: (rows, columns, heads, batch)."""

    load_q: cute.CopyAtom
    load_do: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_dk: cute.CopyAtom
    store_dv: cute.CopyAtom
    gQ: cute.Tensor
    gdO: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gdK: cute.Tensor
    gdV: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors; dK and dV are staged in the place of K and V."""

    sK: cute.Tensor  # (64, head_dim, 1)
    sV: cute.Tensor  # (64, head_dim_v, 1)
    sQ: cute.Tensor  # (tile_m, head_dim, q_stage)
    sdO: cute.Tensor  # (tile_m, head_dim_v, do_stage)
    sLSE: cute.Tensor  # (tile_m, q_stage) fp32, times log2(e)
    sDelta: cute.Tensor  # (tile_m, do_stage) fp32
    sP: cute.Tensor  # (registers, 128 threads, p_stage) pairs of P, in the order of the fragments


@dataclasses.dataclass(frozen=True)
class Rings:
    """TMA rings (K and V have one tile each), and the ring of P tiles between the warpgroups."""

    k: TmaRing
    v: TmaRing
    q: TmaRing
    do: TmaRing
    p: TmaRing


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: BwdLaunch
    workspace: WorkspaceTensors


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

    def box(self, name: str) -> tuple[int, int]:
        """Rows and columns of one tile."""
        traits = self.traits
        rows = traits.tile_m if name in ("q", "do") else traits.tile_n
        return rows, traits.head_dim if name in ("q", "k") else traits.head_dim_v

    def smem_layout(self, name: str) -> cute.ComposedLayout:
        """Of a tensor of `smem_plan`: (rows, columns, stages)."""
        return atoms.smem_tile_layout(self.dtype, *self.box(name), self.traits.smem_plan[name].stages)

    def launch(self, tensors: BwdTensors, workspace: Workspace, scalars: BwdScalars, stream) -> None:
        """Launch it."""

        def tma(make, tensor: cute.Tensor, name: str):
            return make(rows_first(tensor), cute.select(self.smem_layout(name), mode=[0, 1]), self.box(name))

        load_q, gQ = tma(atoms.tma_load, tensors.q, "q")
        load_do, gdO = tma(atoms.tma_load, tensors.do, "do")
        load_k, gK = tma(atoms.tma_load, tensors.k, "k")
        load_v, gV = tma(atoms.tma_load, tensors.v, "v")
        store_dk, gdK = tma(atoms.tma_store, tensors.dk, "k")
        store_dv, gdV = tma(atoms.tma_store, tensors.dv, "v")
        launch = BwdLaunch.of(self, tensors.q, tensors.k, scalars)
        views = WorkspaceTensors.of(tensors.workspace, workspace)
        atoms_and_views = Tma(load_q, load_do, load_k, load_v, store_dk, store_dv, gQ, gdO, gK, gV, gdK, gdV)
        self.kernel(atoms_and_views, views, launch).launch(
            grid=(launch.order.size(), 1, 1),
            block=(self.traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
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
                for stage in range(traits.p_stage):
                    cute.arch.mbarrier_init(rings.p.full + stage, WARPS)
                    cute.arch.mbarrier_init(rings.p.empty + stage, WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tile = launch.tile(cute.arch.block_idx()[0])
        blocks = tile.query_blocks()
        if warp < WARPS:
            cute.arch.setmaxregister_decrease(traits.producer_regs)
            if blocks.hi > blocks.lo:
                if warp == 0:
                    load(self, block, tile, blocks)
        else:
            cute.arch.setmaxregister_increase(traits.mma_regs)
            if warp < 2 * WARPS:
                consume(self, block, tile, blocks, True)
            else:
                consume(self, block, tile, blocks, False)

    def make_rings(self, base: cute.Pointer) -> Rings:
        """The rings over the mbarriers at the start of the block's shared memory."""
        traits, plan = self.traits, self.traits.smem_plan
        barriers = cute.recast_ptr(base + plan["barriers"].start, dtype=cutlass.Int64)
        rings, position = {}, 0
        for name in ("k", "v", "q", "do", "p"):
            region = plan[name]
            statistic = traits.tile_m * STATISTIC_BYTES if name in ("q", "do") else 0
            rings[name] = TmaRing.create(barriers + position, region.stages, region.nbytes // region.stages + statistic)
            position += 2 * region.stages
        return Rings(**rings)

    def make_tiles(self, base: cute.Pointer) -> Tiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan = self.traits.smem_plan

        def tile(name: str) -> cute.Tensor:
            layout = self.smem_layout(name)
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, layout.inner, dtype=self.dtype), layout.outer)

        def plain(name: str, dtype: type[cutlass.Numeric], layout: cute.Layout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=dtype), layout)

        traits = self.traits
        pairs = traits.tile_m * traits.tile_n // 2 // WARPGROUP  # of one thread
        # 16 bytes a thread, neighbouring threads side by side; what is left of odd counts by 8 bytes.
        chunk = 4 if pairs % 4 == 0 else 2
        p_layout = cute.make_layout(
            ((chunk, pairs // chunk), WARPGROUP, traits.p_stage),
            stride=((1, chunk * WARPGROUP), chunk, pairs * WARPGROUP),
        )
        return Tiles(
            sK=tile("k"),
            sV=tile("v"),
            sQ=tile("q"),
            sdO=tile("do"),
            sLSE=plain("lse", Float32, cute.make_layout((traits.tile_m, traits.q_stage))),
            sDelta=plain("delta", Float32, cute.make_layout((traits.tile_m, traits.do_stage))),
            sP=plain("p", Uint32, p_layout),
        )


@cute.jit
def load(kernel: cutlass.Constexpr, block: Block, tile: KeyTile, blocks: QueryBlocks):
    """Load K and V once, then Q, dO and their row statistics block by block; a whole warp calls it."""
    tma, tiles, rings = block.tma, block.tiles, block.rings
    load_once(tma.load_k, rings.k, tma.gK, tiles.sK, tile, kernel.box("k"))
    position = Int32(0)
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = tile.head * block.launch.heads_per_kv + i
        gQ = cute.local_tile(tma.gQ[None, None, head, tile.batch], kernel.box("q"), (None, 0))
        gdO = cute.local_tile(tma.gdO[None, None, head, tile.batch], kernel.box("do"), (None, 0))
        tQsQ, tQgQ = atoms.tma_partition(tma.load_q, tiles.sQ, gQ)
        tOsdO, tOgdO = atoms.tma_partition(tma.load_do, tiles.sdO, gdO)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            workspace = block.workspace.tile(m_block, head, tile.batch)
            barrier, stage = rings.q.acquire(position), rings.q.stage(position)
            cute.copy(tma.load_q, tQgQ[None, m_block], tQsQ[None, stage], tma_bar_ptr=barrier)
            load_statistic(workspace.lse_log2, tiles.sLSE[None, stage], barrier)
            if position == 0:
                load_once(tma.load_v, rings.v, tma.gV, tiles.sV, tile, kernel.box("v"))
            barrier, stage = rings.do.acquire(position), rings.do.stage(position)
            cute.copy(tma.load_do, tOgdO[None, m_block], tOsdO[None, stage], tma_bar_ptr=barrier)
            load_statistic(workspace.delta, tiles.sDelta[None, stage], barrier)
            m_block = blocks.following(m_block)
            position += 1


@dataclasses.dataclass(frozen=True)
class Side:
    """One consumer warpgroup: the products of S and dV, or of dP and dK.

    Attributes:
        tSrA, tSrB: operands of the scores' product, S^T = K Q^T or dP^T = V dO^T.
        tGrA, tGrB: of the gradient's, dV += P^T dO or dK += dS^T Q; the first is registers.
        acc, gradient: accumulators.
        scores: `acc` as (keys, queries).
        weights: fp32, what dP is multiplied with if it is not P.
        bounds: (keys, 2) queries [lo, hi) that see each key of this thread.
        first, second: rings of what the two products read.
        statistics: (tile_m, stages) of the row statistic that belongs to the first ring.
    """

    thread: Int32
    mma_s: cute.TiledMma
    mma_gradient: cute.TiledMma
    tSrA: cute.Tensor
    tSrB: cute.Tensor
    tGrA: cute.Tensor
    tGrB: cute.Tensor
    acc: cute.Tensor
    gradient: cute.Tensor
    scores: ScoreTile
    weights: cute.Tensor | None
    bounds: cute.Tensor
    first: TmaRing
    second: TmaRing
    statistics: cute.Tensor


def make_side(kernel: DkvPass, block: Block, of_p: bool) -> Side:
    """Partition the block's tiles for this thread's warpgroup."""
    traits, tiles, rings = kernel.traits, block.tiles, block.rings
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    cols = traits.head_dim_v if of_p else traits.head_dim
    mma_s, mma_gradient = kernel.tiled_mma_s(), kernel.tiled_mma_gradient(cols)
    thr_s, thr_gradient = mma_s.get_slice(thread), mma_gradient.get_slice(thread)
    acc = cute.make_rmem_tensor(thr_s.partition_shape_C((WGMMA_M, traits.tile_m)), Float32)
    keys, queries, others = (tiles.sK, tiles.sQ, tiles.sdO) if of_p else (tiles.sV, tiles.sdO, tiles.sQ)
    return Side(
        thread=thread,
        mma_s=mma_s,
        mma_gradient=mma_gradient,
        tSrA=mma_s.make_fragment_A(thr_s.partition_A(keys))[None, None, None, 0],
        tSrB=mma_s.make_fragment_B(thr_s.partition_B(queries)),
        tGrA=cute.make_rmem_tensor_like(acc_as_operand_a(acc), kernel.dtype),
        tGrB=mma_gradient.make_fragment_B(thr_gradient.partition_B(transposed(others))),
        acc=acc,
        gradient=cute.make_rmem_tensor(thr_gradient.partition_shape_C((WGMMA_M, cols)), Float32),
        scores=ScoreTile.of(mma_s, thread, acc, (WGMMA_M, traits.tile_m), block.launch.inner_scale, 1),
        weights=cute.make_rmem_tensor_like(acc) if of_p and kernel.problem.scores.softcap else None,
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
        first=rings.q if of_p else rings.do,
        second=rings.do if of_p else rings.q,
        statistics=tiles.sLSE if of_p else tiles.sDelta,
    )


@cute.jit
def consume(
    kernel: cutlass.Constexpr, block: Block, tile: KeyTile, blocks: QueryBlocks, of_p: cutlass.Constexpr[bool]
):
    """dV of a key tile, or dK."""
    side = make_side(kernel, block, of_p)
    for r in cutlass.range_constexpr(ROWS):
        side.bounds[r, 0], side.bounds[r, 1] = tile.q_bounds(side.scores.row(r))
    side.gradient.fill(0.0)
    if blocks.hi > blocks.lo:
        keys = block.rings.k if const_expr(of_p) else block.rings.v
        keys.wait(0)
        m_block = blocks.first
        step(kernel, side, block, blocks, m_block, Int32(0), of_p, True)
        count = block.launch.heads_per_kv * blocks.count
        for position in cutlass.range(1, count, unroll=1):
            m_block = blocks.following(m_block)
            step(kernel, side, block, blocks, m_block, position, of_p, False)
        issue_gradient(side, count - 1)
        warpgroup.wait_group(0)
    write_gradient(kernel, side, block, tile, of_p)


def issue_gradient(side: Side, position: Int32) -> None:
    """Issue the gradient's product of a step."""
    b = side.tGrB[None, None, None, side.second.stage(position)]
    atoms.gemm(side.mma_gradient, side.gradient, side.tGrA, b, accumulate=True)


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    side: Side,
    block: Block,
    blocks: QueryBlocks,
    m_block: Int32,
    position: Int32,
    of_p: cutlass.Constexpr[bool],
    is_first: cutlass.Constexpr[bool],
):
    """The scores of one query block beside the gradient's product of the one before."""
    acc, launch = side.acc, block.launch
    stage = side.first.stage(position)
    side.first.wait(position)
    atoms.gemm(side.mma_s, acc, side.tSrA, side.tSrB[None, None, None, stage], accumulate=False)
    if const_expr(not is_first):
        side.second.wait(position - 1)
        issue_gradient(side, position - 1)
    statistics = column_statistics(side.statistics[None, stage], side.thread)
    warpgroup.wait_group(0 if is_first else 1)  # scores | gradient
    pairs = cute.recast_tensor(side.tGrA, Uint32)
    if const_expr(of_p):
        prepare_scores(kernel, side.scores, side.bounds, blocks, m_block)
        for i in cutlass.range_constexpr(cute.size(acc)):
            p = exp2(acc[i] * launch.scale_log2 - statistics[i % 2, i // (2 * ROWS)])
            if const_expr(kernel.problem.scores.softcap):
                side.weights[i] = p * cap_slope(acc[i])
            acc[i] = p
    else:
        weights = take_weights(kernel, side, block, position)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] - statistics[i % 2, i // (2 * ROWS)]
    if const_expr(not is_first):
        warpgroup.wait_group(0)
        side.second.release(position - 1)
    side.first.release(position)
    if const_expr(of_p):
        round_fragment(acc_as_operand_a(acc), side.tGrA)
        give_weights(kernel, side, block, position)
    else:
        for i in cutlass.range_constexpr(cute.size(pairs)):
            pairs[i] = weigh_pair(weights[i], acc[2 * i], acc[2 * i + 1], kernel.dtype)


@cute.jit
def give_weights(kernel: cutlass.Constexpr, side: Side, block: Block, position: Int32):
    """To the other warpgroup what it multiplies dP with: P, or under a softcap P times the slope of the cap."""
    ring = block.rings.p
    stage = ring.stage(position)
    if position >= ring.stages:
        wait_empty(ring, position)
    weights = side.tGrA
    if const_expr(kernel.problem.scores.softcap):
        weights = rounded_fragment(side.weights, kernel.dtype)
    cute.autovec_copy(cute.recast_tensor(weights, Uint32), thread_weights(side, block, stage))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.full + stage)


@cute.jit
def wait_empty(ring: TmaRing, position: Int32):
    """Wait until the tile before the one at `position` has left the stage."""
    cute.arch.mbarrier_wait(ring.empty + ring.stage(position), ring.phase(position) ^ 1)


@cute.jit
def take_weights(kernel: cutlass.Constexpr, side: Side, block: Block, position: Int32):
    """The weights of the other warpgroup, in the order of this one's accumulator."""
    ring = block.rings.p
    stage = ring.stage(position)
    ring.wait(position)
    weights = cute.make_rmem_tensor_like(cute.recast_tensor(side.tGrA, Uint32))
    cute.autovec_copy(thread_weights(side, block, stage), weights)
    cute.arch.sync_warp()
    ring.release(position)
    return weights


def thread_weights(side: Side, block: Block, stage: Int32) -> cute.Tensor:
    """This thread's pairs of weights in shared memory."""
    mine = block.tiles.sP[None, side.thread, stage]
    chunk = mine.shape[0][0]
    return cute.make_tensor(mine.iterator.align(4 * chunk), mine.layout)


@cute.jit
def write_gradient(
    kernel: cutlass.Constexpr, side: Side, block: Block, tile: KeyTile, of_p: cutlass.Constexpr[bool]
):
    """Stage dV in the place of V, or dK in that of K, and store it with TMA, which clips rows and columns outside.

    The other warpgroup reads that place: it has to have finished.
    """
    tma, tiles = block.tma, block.tiles
    gradient = side.gradient
    if const_expr(not of_p):
        for i in cutlass.range_constexpr(cute.size(gradient)):
            gradient[i] = gradient[i] * block.launch.softmax_scale
    sX = tiles.sV if const_expr(of_p) else tiles.sK
    gX = tma.gdV if const_expr(of_p) else tma.gdK
    atom = tma.store_dv if const_expr(of_p) else tma.store_dk
    box = kernel.box("v" if of_p else "k")
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=CONSUMERS * WARPGROUP)
    copy = atoms.store_copy(kernel.dtype, side.mma_gradient).get_slice(side.thread)
    cute.copy(copy, copy.retile(rounded_fragment(gradient, kernel.dtype)), copy.partition_D(sX[None, None, 0]))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + 1 + int(of_p), number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(side.thread // 32) == 0:
        tXsX, tXgX = key_partition(atom, gX, sX, tile, box)
        cute.copy(atom, tXsX, tXgX)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
