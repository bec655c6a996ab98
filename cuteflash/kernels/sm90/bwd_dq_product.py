"""dQ of the one-pass backward: who computes it of which step, and how it gets to the warps that add it to memory."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.tile import KeyTile
from cuteflash.core.views import aligned, transposed
from cuteflash.kernels.sm90.bwd_bundles import Block, NamedBarrier, Sum, Tiles, Visit, readers_of_keys
from cuteflash.traits.sm90 import WARPGROUP


@dataclasses.dataclass(frozen=True)
class DqProduct:
    """What a warpgroup computes of dQ = dS K, or of dQ^T = K^T dS^T.

    Attributes:
        part: the stage of sdQ that it fills; steps alternate if a warpgroup of its own fills both.
        thread: 0..127 inside the warpgroup.
        of_ds, of_k: operands, (fragment, M or N, K, stage).
        acc: accumulator.
    """

    part: Int32
    thread: Int32
    mma: cute.TiledMma
    of_ds: cute.Tensor
    of_k: cute.Tensor
    acc: cute.Tensor


def make_dq_product(kernel, tiles: Tiles, part: Int32, thread: Int32) -> DqProduct:
    """Partition dS and K for part `part` of dQ, or for whole tiles."""
    traits, mma = kernel.traits, kernel.tiled_mma_dq()
    thr = mma.get_slice(thread)
    rows, cols = traits.dq_part
    m_part, d_part = {"rows": (part, 0), "columns": (0, part), "transposed": (0, part)}.get(traits.dq, (0, 0))
    ds = cute.local_tile(tiles.sdS, (rows, traits.tile_n), (m_part, 0, None))
    k = cute.local_tile(transposed(tiles.sK), (cols, traits.tile_n), (d_part, 0, None))
    is_transposed = traits.is_dq_transposed
    a, b = (k, ds) if is_transposed else (ds, k)
    a, b = mma.make_fragment_A(thr.partition_A(a)), mma.make_fragment_B(thr.partition_B(b))
    shape = thr.partition_shape_C((cols, rows) if is_transposed else (rows, cols))
    return DqProduct(
        part=part,
        thread=thread,
        mma=mma,
        of_ds=b if is_transposed else a,
        of_k=a if is_transposed else b,
        acc=cute.make_rmem_tensor(shape, Float32),
    )


def issue(kernel, dq: DqProduct, ds_stage: Int32, k_stage: Int32, accumulate: bool = False) -> None:
    """Issue the product of a step, perhaps added to what the accumulator holds."""
    ds, k = dq.of_ds[None, None, None, ds_stage], dq.of_k[None, None, None, k_stage]
    a, b = (k, ds) if kernel.traits.is_dq_transposed else (ds, k)
    atoms.gemm(dq.mma, dq.acc, a, b, accumulate=accumulate)


def has_turn(kernel, dq: DqProduct, position: Int32) -> Boolean | bool:
    """Whether a consumer computes some of a step's dQ; only in turns it may not."""
    return kernel.traits.dq != "turns" or position % kernel.traits.mma_warpgroups == dq.part


@cute.jit
def issue_dq(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, position: Int32, k_stage: Int32):
    """Issue what a consumer computes of a step's dQ, as one group also if that is nothing."""
    if has_turn(kernel, dq, position):
        issue(kernel, dq, block.rings.ds.stage(position), k_stage)
    else:
        warpgroup.commit_group()


@cute.jit
def stage_dq(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, tile: KeyTile, m_block: Int32, position: Int32):
    """Write what a consumer computed of a step's dQ, of query tile `m_block`, to sdQ."""
    if const_expr(kernel.passes_dq_on):
        if block.launch.stores_dq(tile):
            pass_dq_on(kernel, dq, block, tile, m_block, position)
        else:
            block.rings.dq_of(dq.part).acquire(position)
            put_fragments(dq, block, dq.part)
    elif has_turn(kernel, dq, position):
        turns = kernel.traits.mma_warpgroups if kernel.traits.dq == "turns" else 1
        put_dq(kernel, dq, block, tile, dq.part, position // turns)


@cute.jit
def pass_dq_on(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, tile: KeyTile, m_block: Int32, position: Int32):
    """Add to what the key tiles before this one computed of dQ of a query tile, and round it if this is the last."""
    before, after = tile.turn_at(m_block)
    block.rings.dq_of(dq.part).acquire(position + 1)  # released before each step, with the sum so far in it
    if before > 0:
        add_fragments(dq, block, dq.part)
    if after == 0:
        cute.arch.barrier(barrier_id=NamedBarrier.DQ_READ + dq.part, number_of_threads=WARPGROUP)
        put_rounded(kernel, dq, block, dq.part)
    else:
        put_fragments(dq, block, dq.part)


@cute.jit
def publish_dq(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, position: Int32):
    """Tell the warp that takes it of what `stage_dq` wrote, which the async proxy sees by now."""
    if has_turn(kernel, dq, position):
        block.rings.dq_of(dq.part).publish()


@cute.jit
def put_dq(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, tile: KeyTile, stage: Int32, count: Int32):
    """Fill a stage of sdQ for the `count`-th time: for a sum in fp32, or rounded, of a lone tile or as the last one."""
    if const_expr(kernel.traits.last_rounds):
        put_last(kernel, dq, block, stage, count)
    else:
        block.rings.dq_of(stage).acquire(count)
        if const_expr(not kernel.traits.lone_tiles):
            put_fragments(dq, block, stage)
        elif block.launch.stores_dq(tile):
            put_rounded(kernel, dq, block, stage)
        else:
            put_fragments(dq, block, stage)


@cute.jit
def put_last(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, stage: Int32, count: Int32):
    """Fill a stage of sdQ for the `count`-th time: rounded, if it comes with all that the others have added."""
    block.rings.dq_of(stage).acquire(count + 1)  # released before each step, with word of the sum
    others = block.tiles.sums[stage]
    if others == Sum.WHOLE:
        add_fragments(dq, block, stage)
    if others == Sum.PARTIAL:
        put_fragments(dq, block, stage)
    else:
        cute.arch.barrier(barrier_id=NamedBarrier.DQ_READ + dq.part, number_of_threads=WARPGROUP)
        put_rounded(kernel, dq, block, stage)


@cute.jit
def put_rounded(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, stage: Int32):
    """Fill a stage of sdQ with a part of dQ as it is stored."""
    for i in cutlass.range_constexpr(cute.size(dq.acc)):
        dq.acc[i] = dq.acc[i] * block.launch.softmax_scale
    part = block.tiles.sdQ_rounded[None, None, 2 * stage]
    if const_expr(kernel.traits.is_dq_transposed):
        part = transposed(part)
    copy = kernel.copy_dq().get_slice(dq.thread)
    cute.copy(copy, copy.retile(rounded_fragment(dq.acc, kernel.dtype)), copy.partition_D(part))


def fragments(dq: DqProduct, block: Block, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """(4, chunks) a thread's accumulator, and where it lies in a stage of sdQ."""
    chunks = cute.size(dq.acc) // 4
    start = aligned(block.tiles.sdQ[None, stage].iterator + dq.thread * 4, 16)
    staged = cute.make_tensor(start, cute.make_layout((4, chunks), stride=(1, 4 * WARPGROUP)))
    return cute.make_tensor(dq.acc.iterator, cute.make_layout((4, chunks))), staged


@cute.jit
def put_fragments(dq: DqProduct, block: Block, stage: Int32):
    """Fill a stage of sdQ: each thread's fragment by 16 bytes, neighbours side by side."""
    acc, target = fragments(dq, block, stage)
    cute.autovec_copy(acc, target)


@cute.jit
def take_fragments(dq: DqProduct, block: Block, stage: Int32):
    """What `put_fragments` put into a stage of sdQ, in the same threads."""
    acc, source = fragments(dq, block, stage)
    cute.autovec_copy(source, acc)


@cute.jit
def add_fragments(dq: DqProduct, block: Block, stage: Int32):
    """Add what `put_fragments` put into a stage of sdQ."""
    acc, source = fragments(dq, block, stage)
    some = cute.make_rmem_tensor((4, 1), Float32)
    for j in cutlass.range_constexpr(cute.size(acc.shape[1])):
        cute.autovec_copy(cute.local_tile(source, (4, 1), (0, j)), some)
        for i in cutlass.range_constexpr(4):
            acc[i, j] = acc[i, j] + some[i, 0]


@cute.jit
def compute_dq(kernel: cutlass.Constexpr, block: Block, dq: DqProduct, visit: Visit):
    """dQ of all steps of a tile, by a warpgroup of its own; then word that it has read K."""
    block.rings.k.wait(visit.wave)
    if const_expr(not block.launch.held_dq):
        hand_over_dq(kernel, block, dq, visit)
    elif block.launch.stores_dq(visit.tile):
        hold_dq(kernel, block, dq, visit)
    else:
        hand_over_dq(kernel, block, dq, visit)
    # Not only an arrival: with tiles that no query sees this warpgroup could arrive for the next tile as well.
    cute.arch.barrier(barrier_id=NamedBarrier.KEYS_READ, number_of_threads=readers_of_keys(kernel.traits))


@cute.jit
def hold_dq(kernel: cutlass.Constexpr, block: Block, dq: DqProduct, visit: Visit):
    """Add up dQ over all key tiles, each query tile's in a stage of sdQ of its own, and hand it over with the last."""
    rings, position = block.rings, visit.start
    for head in cutlass.range(block.launch.heads_per_kv, unroll=1):
        m_block = visit.blocks.first
        for _ in cutlass.range(visit.blocks.count, unroll=1):
            stage = block.held_stage(head, m_block)
            before, after = visit.tile.turn_at(m_block)
            if before == 0:
                dq.acc.fill(0.0)
            else:
                take_fragments(dq, block, stage)
            rings.ds.wait(position)
            issue(kernel, dq, rings.ds.stage(position), rings.k.stage(visit.wave), accumulate=True)
            warpgroup.wait_group(0)
            rings.ds.release(position)
            if before == 0:
                rings.dq_of(stage).acquire(visit.item)
            if after == 0:
                cute.arch.barrier(barrier_id=NamedBarrier.DQ_READ, number_of_threads=WARPGROUP)
                put_rounded(kernel, dq, block, stage)
                cute.arch.fence_view_async_shared()
                rings.dq_of(stage).publish()
            else:
                put_fragments(dq, block, stage)
            m_block = visit.blocks.following(m_block)
            position += 1


@cute.jit
def hand_over_dq(kernel: cutlass.Constexpr, block: Block, dq: DqProduct, visit: Visit):
    """Hand over dQ of each step."""
    rings, stages = block.rings, kernel.traits.mma_warpgroups
    for position in cutlass.range(visit.start, visit.start + block.launch.steps(visit.blocks), unroll=1):
        rings.ds.wait(position)
        issue(kernel, dq, rings.ds.stage(position), rings.k.stage(visit.wave))
        warpgroup.wait_group(0)
        rings.ds.release(position)
        stage = Int32(position % stages)
        put_dq(kernel, dq, block, visit.tile, stage, position // stages)
        cute.arch.fence_view_async_shared()
        rings.dq_of(stage).publish()
