"""The steps of the sm80 family's latent-attention decodes: S = Q Kᵀ, softmax, O += P V, and the loads of later steps.

The products are the kernel's own, as `mla_kernel.py` says.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.latent import place_of
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.mla_bundles import MlaBlock, MlaFragments
from cuteflash.kernels.sm80.mla_load import load_keys, load_q
from cuteflash.kernels.sm80.mla_softmax import scale_out, soften

NO_MAXIMUM = -1e30  # of a row before its first key; finite, so that no difference of maxima is NaN


def wait_loads(pending: int) -> None:
    """Wait until all but the last `pending` groups of copies are in shared memory, those of every thread."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()


@cute.jit
def attend(kernel: cutlass.Constexpr, block: MlaBlock, f: MlaFragments, tile: QueryTile):
    """Accumulate O over a tile's keys, or over this block's share of them, which may be none."""
    f.acc_O.fill(0.0)
    f.row_sum.fill(0.0)
    f.row_max.fill(NO_MAXIMUM)
    blocks = tile.visited_blocks()
    if blocks.hi > blocks.lo:
        place = load_first(kernel, block, f, tile, blocks.lo, blocks.hi)
        attend_steps(kernel, block, f, tile, (blocks.lo, blocks.hi), place)


@cute.jit
def load_first(kernel: cutlass.Constexpr, block: MlaBlock, f: MlaFragments, tile: QueryTile, first: Int32, end: Int32):
    """Issue the loads of Q and of all stages but the last, and prepare Q; where the next keys lie."""
    stages = kernel.traits.kv_stage
    load_q(kernel, block, tile)
    cute.arch.cp_async_commit_group()
    for stage in cutlass.range_constexpr(stages - 1):
        page = first + stage
        load_step(kernel, block, tile, (page, end), place_of(block, tile, page, end), Int32(stage + 1))
    place = place_of(block, tile, first + stages - 1, end)
    kernel.keep_q(block, f, tile)
    return place


@cute.jit
def attend_steps(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    f: MlaFragments,
    tile: QueryTile,
    pages: tuple[Int32, Int32],
    place: tuple[Int32, Int32],
):
    """`attend` of the steps `pages`, one or more, each after the other.

    A step's keys are loaded `kv_stage - 1` steps ahead, and looked up one more; `place` is that of the next ones.
    """
    first, end = pages
    stages = kernel.traits.kv_stage
    for page in cutlass.range(first, end, unroll=1):
        wait_loads(stages - 2)  # this step's keys are loaded, and every warp has read the last step's
        following = page + stages - 1
        load_step(kernel, block, tile, (following, end), place, stage_of(kernel, first, following))
        place = place_of(block, tile, following + 1, end)
        stage = stage_of(kernel, first, page)
        kernel.product_qk(block, f, stage)
        soften(kernel, block, f, tile, page)
        cute.arch.sync_threads()  # P is written, and the factors
        scale_out(block, f)
        kernel.product_pv(block, f, stage)


@cute.jit
def load_step(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    tile: QueryTile,
    pages: tuple[Int32, Int32],
    place: tuple[Int32, Int32],
    stage: Int32,
):
    """Issue the loads of a step as one group, which is empty if the tile has no such step; `pages` (step, end)."""
    page, end = pages
    if page < end:
        load_keys(kernel, block, tile, page, place, stage)
    cute.arch.cp_async_commit_group()


def stage_of(kernel, first: Int32, page: Int32) -> Int32:
    """The stage of a step's keys: stage 0 is loaded last, for the time that Q may lie there."""
    return (page - first + 1) % kernel.traits.kv_stage
