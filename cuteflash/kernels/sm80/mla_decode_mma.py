"""The main loop of the sm80 latent-attention decode: S = Q Kᵀ, softmax across warps, O += P V."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import ScoreTile, computed_here
from cuteflash.core.softmax import exp2, quad_max
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.mla_decode_bundles import Fragments, MlaBlock
from cuteflash.kernels.sm80.mla_decode_load import load_keys, load_q, place_of
from cuteflash.mla_problem import LATENT_DIM_V
from cuteflash.traits.mla_sm80 import STEPS
from cuteflash.traits.sm80 import WARP

ROWS = 2  # of S that one thread holds elements of
NO_MAXIMUM = -1e30  # of a row before its first key; finite, so that no difference of maxima is NaN
ROW_GROUP_BARRIER = 1  # + group of query rows; 0 is `__syncthreads`


def make_fragments(kernel, block: MlaBlock) -> Fragments:
    """Partition the block's tiles for this thread."""
    traits, tiles = kernel.traits, block.tiles
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    mma_qk, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_pv()
    thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
    copies = kernel.copy_q(), kernel.copy_k(), kernel.copy_p(), kernel.copy_v()
    copy_q, copy_k, copy_p, copy_v = (copy.get_slice(thread) for copy in copies)
    shape_S, shape_O = (traits.tile_m, traits.tile_n), (traits.tile_m, LATENT_DIM_V)
    accs = tuple(cute.make_rmem_tensor(thr_qk.partition_shape_C(shape_S), Float32) for _ in range(traits.chains))
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C(shape_O), Float32)
    return Fragments(
        thread=thread,
        row_group=warp % traits.warps_m,
        key_group=warp // traits.warps_m,
        mma_qk=mma_qk,
        mma_pv=mma_pv,
        rQ=thr_qk.make_fragment_A(thr_qk.partition_A(tiles.sQ)),
        rK=thr_qk.make_fragment_B(thr_qk.partition_B(tiles.sK[None, None, 0])),
        rP=thr_pv.make_fragment_A(thr_pv.partition_A(tiles.sP)),
        rVt=thr_pv.make_fragment_B(thr_pv.partition_B(tiles.sVt[None, None, 0])),
        copy_q=copy_q,
        copy_k=copy_k,
        copy_p=copy_p,
        copy_v=copy_v,
        tSsQ=copy_q.partition_S(tiles.sQ),
        tSsK=copy_k.partition_S(tiles.sK),
        tOsP=copy_p.partition_S(tiles.sP),
        tOsVt=copy_v.partition_S(tiles.sVt),
        accs_S=accs,
        acc_O=acc_O,
        scores=ScoreTile.of(mma_qk, thread, accs[0], shape_S, Float32(1.0), 1),
        out=ScoreTile.of(mma_pv, thread, acc_O, shape_O, Float32(1.0), 1),
        row_max=cute.make_rmem_tensor(ROWS, Float32),
        row_sum=cute.make_rmem_tensor(ROWS, Float32),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
    )


def wait_loads(pending: int) -> None:
    """Wait until all but the last `pending` groups of copies are in shared memory, those of every thread."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()


@cute.jit
def attend(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments, tile: QueryTile):
    """Accumulate O over a tile's keys, or over this block's share of them, which may be none."""
    f.acc_O.fill(0.0)
    f.row_sum.fill(0.0)
    f.row_max.fill(NO_MAXIMUM)
    blocks = tile.visited_blocks()
    if blocks.hi > blocks.lo:
        attend_steps(kernel, block, f, tile, blocks.lo, blocks.hi)


@cute.jit
def attend_steps(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments, tile: QueryTile, first: Int32, end: Int32):
    """`attend` of at least one step; a step's keys are loaded `kv_stage - 1` steps ahead, and looked up one more."""
    stages = kernel.traits.kv_stage
    load_q(kernel, block, tile)
    cute.arch.cp_async_commit_group()
    for stage in cutlass.range_constexpr(stages - 1):
        load_step(kernel, block, tile, (first + stage, end), place_of(block, tile, first + stage, end), Int32(stage))
    place = place_of(block, tile, first + stages - 1, end)
    if const_expr(kernel.traits.q_kept > 0):
        wait_loads(stages - 1)
        for step in cutlass.range_constexpr(kernel.traits.q_kept):
            fetch_q(f, step)
    for page in cutlass.range(first, end, unroll=1):
        wait_loads(stages - 2)  # this step's keys are loaded, and every warp has read the last step's
        following = page + stages - 1
        load_step(kernel, block, tile, (following, end), place, (following - first) % stages)
        place = place_of(block, tile, following + 1, end)
        stage = (page - first) % stages
        product_qk(kernel, f, stage)
        hide(kernel, f, tile, page)
        soften(kernel, block, f)
        cute.arch.sync_threads()  # P is written, and the factors
        scale_out(block, f)
        product_pv(kernel, f, stage)


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


def fetch_q(f: Fragments, step: int) -> None:
    """The fragments of 32 columns of Q."""
    cute.copy(f.copy_q, f.tSsQ[None, None, step], f.copy_q.retile(f.rQ)[None, None, step])


def product_qk(kernel, f: Fragments, stage: Int32) -> None:
    """S = Q Kᵀ for the keys in `stage`; k-blocks go to the accumulators in turn."""
    traits = kernel.traits
    fragment = f.copy_k.retile(f.rK)
    for acc in f.accs_S:
        acc.fill(0.0)
    for step in range(-traits.ahead, STEPS):
        ahead = step + traits.ahead
        if ahead < STEPS:
            cute.copy(f.copy_k, f.tSsK[None, None, ahead, stage], fragment[None, None, ahead])
            if ahead >= traits.q_kept:
                fetch_q(f, ahead)
        if step >= 0:
            for k in (2 * step, 2 * step + 1):
                acc = f.accs_S[k % traits.chains]
                cute.gemm(f.mma_qk, acc, f.rQ[None, None, k], f.rK[None, None, k], acc)
    total = f.accs_S[0]
    for acc in f.accs_S[1:]:
        total.store(total.load() + acc.load())


def product_pv(kernel, f: Fragments, stage: Int32) -> None:
    """O += P V for the keys in `stage`."""
    fetches = (
        atoms.Fetch(f.copy_p, f.tOsP, f.copy_p.retile(f.rP)),
        atoms.Fetch(f.copy_v, f.tOsVt[None, None, None, stage], f.copy_v.retile(f.rVt)),
    )
    atoms.gemm(f.mma_pv, f.acc_O, f.rP, f.rVt, fetches, kernel.traits.ahead)


@cute.jit
def hide(kernel: cutlass.Constexpr, f: Fragments, tile: QueryTile, page: Int32):
    """Hide the keys of a step that a row does not see, if there are any."""
    _, full_hi = tile.full_blocks()
    if page >= full_hi:
        here = dataclasses.replace(tile, first_token=computed_here(tile.first_token))
        f.scores.set_bounds(f.bounds, here)
        f.scores.hide(page * kernel.traits.tile_n, f.bounds, False)


@cute.jit
def soften(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments):
    """Turn the scores into exponentials, round them into sP and add them to the sums; write O's factors.

    The warps with the same rows find a row's maximum together. It moves only if a score exceeds it by more than the
    headroom, after a tile's first steps hardly ever.
    """
    traits, tiles = kernel.traits, block.tiles
    values, scale = f.scores.values, block.launch.scale_log2
    is_first_lane = f.thread % 4 == 0
    for r in cutlass.range_constexpr(ROWS):
        peak = values[r, 0]
        for c in cutlass.range_constexpr(1, cute.size(values.shape[1])):
            peak = cute.arch.fmax(peak, values[r, c])
        peak = quad_max(peak) * scale
        if is_first_lane:
            tiles.by_warps[f.scores.row(r), f.key_group] = peak
    cute.arch.barrier(barrier_id=ROW_GROUP_BARRIER + f.row_group, number_of_threads=traits.warps_n * WARP)
    for r in cutlass.range_constexpr(ROWS):
        row = f.scores.row(r)
        peak = tiles.by_warps[row, 0]
        for w in cutlass.range_constexpr(1, traits.warps_n):
            peak = cute.arch.fmax(peak, tiles.by_warps[row, w])
        old = f.row_max[r]
        new = cutlass.select_(peak > old + traits.headroom, peak, old)
        factor = exp2(old - new)
        total = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            p = exp2(values[r, c] * scale - new)
            values[r, c] = p
            total += p
        f.row_max[r] = new
        f.row_sum[r] = f.row_sum[r] * factor + total
        if f.scores.first_key == 0:
            tiles.of_rows[row] = factor
    copy = kernel.store_p().get_slice(f.thread)
    cute.copy(copy, copy.retile(rounded_fragment(f.accs_S[0], kernel.dtype)), copy.partition_D(tiles.sP))


@cute.jit
def scale_out(block: MlaBlock, f: Fragments):
    """Multiply O's rows with their factors, unless all of a warp's are 1."""
    values = f.out.values
    rows = cute.size(values.shape[0])
    factors = cute.make_rmem_tensor(rows, Float32)
    moved = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        factors[r] = block.tiles.of_rows[f.out.row(r)]
        moved = moved | (factors[r] != 1.0)
    if cute.arch.vote_any_sync(moved):
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(cute.size(values.shape[1])):
                values[r, c] = values[r, c] * factors[r]
