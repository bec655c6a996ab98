"""dQ of the one-pass backward: who computes it of which step, and how it gets to the warps that add it to memory."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.core.views import aligned, transposed
from cuteflash.kernels.sm90.bwd_bundles import Block, NamedBarrier, Tiles, Visit, readers_of_keys
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


def issue(kernel, dq: DqProduct, ds_stage: Int32, k_stage: Int32) -> None:
    """Issue the product of a step."""
    ds, k = dq.of_ds[None, None, None, ds_stage], dq.of_k[None, None, None, k_stage]
    a, b = (k, ds) if kernel.traits.is_dq_transposed else (ds, k)
    atoms.gemm(dq.mma, dq.acc, a, b, accumulate=False)


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
def stage_dq(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, position: Int32):
    """Write what a consumer computed of a step's dQ to sdQ."""
    if has_turn(kernel, dq, position):
        turns = kernel.traits.mma_warpgroups if kernel.traits.dq == "turns" else 1
        store_dq(dq, block, dq.part, position // turns)


@cute.jit
def publish_dq(kernel: cutlass.Constexpr, dq: DqProduct, block: Block, position: Int32):
    """Tell the warp that adds to memory of what `stage_dq` wrote, which the async proxy sees by now."""
    if has_turn(kernel, dq, position):
        block.rings.dq_of(dq.part).publish()


@cute.jit
def store_dq(dq: DqProduct, block: Block, stage: Int32, count: Int32):
    """Fill a stage of sdQ for the `count`-th time: each thread's fragment by 16 bytes, neighbours side by side."""
    block.rings.dq_of(stage).acquire(count)
    chunks = cute.size(dq.acc) // 4
    start = aligned(block.tiles.sdQ[None, stage].iterator + dq.thread * 4, 16)
    target = cute.make_tensor(start, cute.make_layout((4, chunks), stride=(1, 4 * WARPGROUP)))
    cute.autovec_copy(cute.make_tensor(dq.acc.iterator, cute.make_layout((4, chunks))), target)


@cute.jit
def compute_dq(kernel: cutlass.Constexpr, block: Block, dq: DqProduct, visit: Visit):
    """dQ of all steps of a tile, by a warpgroup of its own; then word that it has read K."""
    rings, stages = block.rings, kernel.traits.mma_warpgroups
    rings.k.wait(visit.wave)
    for position in cutlass.range(visit.start, visit.start + block.launch.steps(visit.blocks), unroll=1):
        rings.ds.wait(position)
        issue(kernel, dq, rings.ds.stage(position), rings.k.stage(visit.wave))
        warpgroup.wait_group(0)
        rings.ds.release(position)
        stage = Int32(position % stages)
        store_dq(dq, block, stage, position // stages)
        cute.arch.fence_view_async_shared()
        rings.dq_of(stage).publish()
    # Not only an arrival: with tiles that no query sees this warpgroup could arrive for the next tile as well.
    cute.arch.barrier(barrier_id=NamedBarrier.KEYS_READ, number_of_threads=readers_of_keys(kernel.traits))
