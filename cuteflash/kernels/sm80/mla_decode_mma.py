"""The main loop of the sm80 latent-attention decode: S = Q Kᵀ, softmax across warps, O += P V."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import ScoreTile, computed_here
from cuteflash.core.softmax import exp2, quad_max
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_combine import QUAD, copy_chunk
from cuteflash.kernels.sm80.mla_decode_bundles import Fragments, MlaBlock
from cuteflash.kernels.sm80.mla_decode_load import load_keys, load_q, place_of
from cuteflash.mla_problem import LATENT_DIM_V
from cuteflash.traits.mla_sm80 import STEP
from cuteflash.traits.sm80 import MMA_K, WARP

ROWS = 2  # of S that one thread holds elements of
NO_MAXIMUM = -1e30  # of a row before its first key; finite, so that no difference of maxima is NaN
P_REGS, V_REGS = 4, 8  # of a thread: P of 16 rows and 16 keys, V of 16 keys and 32 columns
ROW_GROUP_BARRIER = 1  # + group of query rows; 0 is `__syncthreads`


def make_fragments(kernel, block: MlaBlock) -> Fragments:
    """Partition the block's tiles for this thread."""
    traits, tiles = kernel.traits, block.tiles
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row_group, key_group = warp % traits.warps_m, warp // traits.warps_m
    k_part = key_group % traits.k_parts
    thread_qk = (key_group // traits.k_parts * traits.warps_m + row_group) * WARP + thread % WARP
    mma_qk, mma_s, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_s(), kernel.tiled_mma_pv()
    thr_qk, thr_s, thr_pv = mma_qk.get_slice(thread_qk), mma_s.get_slice(thread), mma_pv.get_slice(thread)
    copy_q, copy_k = (copy.get_slice(thread_qk) for copy in (kernel.copy_q(), kernel.copy_k()))
    copy_p, copy_v = (copy.get_slice(thread) for copy in (kernel.copy_p(), kernel.copy_v()))
    shape_S, shape_O = (traits.tile_m, traits.tile_n), (traits.tile_m, LATENT_DIM_V)
    accs = tuple(cute.make_rmem_tensor(thr_qk.partition_shape_C(shape_S), Float32) for _ in range(traits.chains))
    acc_S = accs[0]
    if traits.k_parts > 1:
        acc_S = cute.make_rmem_tensor(thr_s.partition_shape_C(shape_S), Float32)
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C(shape_O), Float32)
    tSsQ, tSsK = copy_q.partition_S(tiles.sQ), copy_k.partition_S(tiles.sK)
    if traits.k_parts > 1:  # every other 32 columns, of which a fetch may have half
        if traits.fetch == STEP:
            tSsQ, tSsK = tSsQ[None, None, (k_part, None)], tSsK[None, None, (k_part, None), None]
        else:
            some = (None, k_part), None
            tSsQ, tSsK = (cute.group_modes(x, 2, 4) for x in (tSsQ[None, None, some], tSsK[None, None, some, None]))
    return Fragments(
        thread=thread,
        row_group=row_group,
        key_group=key_group,
        k_part=k_part,
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
        tSsQ=tSsQ,
        tSsK=tSsK,
        tOsP=copy_p.partition_S(tiles.sP),
        tOsVt=copy_v.partition_S(tiles.sVt),
        accs_S=accs,
        acc_S=acc_S,
        acc_O=acc_O,
        scores=ScoreTile.of(mma_s, thread, acc_S, shape_S, Float32(1.0), 1),
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
        place = load_first(kernel, block, f, tile, blocks.lo, blocks.hi)
        if const_expr(kernel.traits.overlap):
            attend_overlapped(kernel, block, f, tile, (blocks.lo, blocks.hi), place)
        else:
            attend_steps(kernel, block, f, tile, (blocks.lo, blocks.hi), place)


@cute.jit
def load_first(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments, tile: QueryTile, first: Int32, end: Int32):
    """Issue the loads of Q and of all stages but the last, fetch what is kept of Q; where the next keys lie."""
    stages = kernel.traits.kv_stage
    load_q(kernel, block, tile)
    cute.arch.cp_async_commit_group()
    for stage in cutlass.range_constexpr(stages - 1):
        page = first + stage
        load_step(kernel, block, tile, (page, end), place_of(block, tile, page, end), Int32(stage + 1))
    place = place_of(block, tile, first + stages - 1, end)
    if const_expr(kernel.traits.q_kept > 0):
        wait_loads(stages - 1)
        for step in cutlass.range_constexpr(*kept_fetches(kernel.traits)):
            fetch_q(f, step)
    return place


@cute.jit
def attend_steps(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    f: Fragments,
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
        place = load_ahead(kernel, block, tile, pages, page, place)
        stage = stage_of(kernel, pages, page)
        interleave(scores_of(kernel, f, stage))
        soften(kernel, block, f, tile, page)
        cute.arch.sync_threads()  # P is written, and the factors
        scale_out(block, f)
        interleave(values_of(kernel, f, stage))


@cute.jit
def attend_overlapped(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    f: Fragments,
    tile: QueryTile,
    pages: tuple[Int32, Int32],
    place: tuple[Int32, Int32],
):
    """As `attend_steps`, but S of the next step is computed beside O of this one."""
    first, end = pages
    stages = kernel.traits.kv_stage
    wait_loads(stages - 2)
    interleave(scores_of(kernel, f, stage_of(kernel, pages, first)))
    for page in cutlass.range(first, end - 1, unroll=1):
        soften(kernel, block, f, tile, page)
        wait_loads(stages - 3)  # P is written, the next keys are loaded, and those of the last step have been read
        place = load_ahead(kernel, block, tile, pages, page, place)
        scale_out(block, f)
        stage, next_stage = stage_of(kernel, pages, page), stage_of(kernel, pages, page + 1)
        interleave(scores_of(kernel, f, next_stage), values_of(kernel, f, stage))
    soften(kernel, block, f, tile, end - 1)
    cute.arch.sync_threads()
    scale_out(block, f)
    interleave(values_of(kernel, f, stage_of(kernel, pages, end - 1)))


@cute.jit
def load_ahead(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    tile: QueryTile,
    pages: tuple[Int32, Int32],
    page: Int32,
    place: tuple[Int32, Int32],
):
    """Issue the loads of the keys `kv_stage - 1` steps after `page`, which lie at `place`; where the next ones lie."""
    _, end = pages
    following = page + kernel.traits.kv_stage - 1
    load_step(kernel, block, tile, (following, end), place, stage_of(kernel, pages, following))
    return place_of(block, tile, following + 1, end)


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


def stage_of(kernel, pages: tuple[Int32, Int32], page: Int32) -> Int32:
    """The stage of a step's keys: the first one is used last, for the time that Q lies there."""
    return (page - pages[0] + 1) % kernel.traits.kv_stage


def kept_fetches(traits) -> tuple[int, int]:
    """Which fetches of a warp's columns of Q are kept in registers: from the first to the end."""
    a_step = STEP // traits.fetch
    return (traits.steps - traits.q_kept) * a_step, traits.steps * a_step


def fetch_q(f: Fragments, step: int) -> None:
    """The fragments of some columns of Q."""
    cute.copy(f.copy_q, f.tSsQ[None, None, step], f.copy_q.retile(f.rQ)[None, None, step])


def interleave(*products: Sequence[Callable[[], None]]) -> None:
    """Issue the parts of products in their orders, spread evenly: instructions of one fill the gaps of the other."""
    parts = [((i + 0.5) / len(product), part) for product in products for i, part in enumerate(product)]
    for _, part in sorted(parts, key=lambda placed: placed[0]):
        part()


def scores_of(kernel, f: Fragments, stage: Int32) -> list[Callable[[], None]]:
    """S = Q Kᵀ for the keys in `stage`, some columns after the other; k-blocks go to the accumulators in turn."""
    traits, together = kernel.traits, kernel.traits.fetch // MMA_K
    first_kept, count = kept_fetches(traits)
    fragment = f.copy_k.retile(f.rK)

    def fetch(step: int) -> None:
        if step < count:
            cute.copy(f.copy_k, f.tSsK[None, None, step, stage], fragment[None, None, step])
            if step < first_kept:
                fetch_q(f, step)

    def part(step: int) -> None:
        if step == 0:
            for acc in f.accs_S:
                acc.fill(0.0)
            for early in range(traits.ahead):
                fetch(early)
        fetch(step + traits.ahead)
        for k in range(step * together, (step + 1) * together):
            acc = f.accs_S[k % traits.chains]
            cute.gemm(f.mma_qk, acc, f.rQ[None, None, k], f.rK[None, None, k], acc)
        if step == count - 1:
            total = f.accs_S[0]
            for acc in f.accs_S[1:]:
                total.store(total.load() + acc.load())

    return [functools.partial(part, step) for step in range(count)]


def values_of(kernel, f: Fragments, stage: Int32) -> list[Callable[[], None]]:
    """O += P V for the keys in `stage`, 16 of them and some of a warp's rows or columns after the other.

    The operand that takes fewer registers is fetched whole for these keys, the other one bit by bit.
    """
    rP, rVt = f.copy_p.retile(f.rP), f.copy_v.retile(f.rVt)
    tiles, groups = cute.size(rP.shape[1]), cute.size(rVt.shape[1])
    by_rows = tiles * P_REGS + V_REGS > groups * V_REGS + P_REGS
    rows, columns = (1, None) if by_rows else (None, cute.size(f.acc_O.shape[2]) // groups)
    out = cute.logical_divide(f.acc_O, (None, rows, columns))
    weights, values = cute.logical_divide(f.rP, (None, rows, None)), cute.logical_divide(f.rVt, (None, columns, None))

    def part(k: int, i: int) -> None:
        m, group = (i, None) if by_rows else (None, i)
        if by_rows or i == 0:
            cute.copy(f.copy_p, f.tOsP[None, m, k], rP[None, m, k])
        if i == 0 or not by_rows:
            cute.copy(f.copy_v, f.tOsVt[None, group, k, stage], rVt[None, group, k])
        some_rows, some_columns = ((None, m), None) if by_rows else (None, (None, group))
        acc = out[None, some_rows, some_columns]
        cute.gemm(f.mma_pv, acc, weights[None, some_rows, k], values[None, some_columns, k], acc)

    blocks, parts = cute.size(f.rP.shape[2]), tiles if by_rows else groups
    return [functools.partial(part, k, i) for k in range(blocks) for i in range(parts)]


def sync_row_group(kernel, f: Fragments) -> None:
    """A barrier of all warps with the same query rows."""
    threads = kernel.traits.key_groups * WARP
    cute.arch.barrier(barrier_id=ROW_GROUP_BARRIER + f.row_group, number_of_threads=threads)


@cute.jit
def add_parts(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments):
    """S from the products of both parts of the columns: each of two warps gets half of the keys."""
    halves, warps = block.tiles.halves, kernel.traits.warps_m * WARP
    product, mine = f.accs_S[0], f.acc_S
    count = cute.size(mine)
    is_first = f.k_part == 0
    other = f.thread + cutlass.select_(is_first, warps, -warps)
    chunk = cute.make_rmem_tensor(QUAD, Float32)
    for i in cutlass.range_constexpr(0, count, QUAD):
        for e in cutlass.range_constexpr(i, i + QUAD):
            chunk[e - i] = cutlass.select_(is_first, product[count + e], product[e])
            mine[e] = cutlass.select_(is_first, product[e], product[count + e])
        copy_chunk(chunk, halves[None, other, i // QUAD])
    sync_row_group(kernel, f)
    for i in cutlass.range_constexpr(0, count, QUAD):
        copy_chunk(halves[None, f.thread, i // QUAD], chunk)
        for e in cutlass.range_constexpr(i, i + QUAD):
            mine[e] = mine[e] + chunk[e - i]


@cute.jit
def hide(kernel: cutlass.Constexpr, f: Fragments, tile: QueryTile, page: Int32):
    """Hide the keys of a step that a row does not see, if there are any."""
    _, full_hi = tile.full_blocks()
    if page >= full_hi:
        here = dataclasses.replace(tile, first_token=computed_here(tile.first_token))
        f.scores.set_bounds(f.bounds, here)
        f.scores.hide(page * kernel.traits.tile_n, f.bounds, False)


@cute.jit
def soften(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments, tile: QueryTile, page: Int32):
    """Turn a step's scores into exponentials, round them into sP and add them to the sums; write O's factors.

    The warps with the same rows find a row's maximum together. It moves only if a score exceeds it by more than the
    headroom, after a tile's first steps hardly ever.
    """
    traits, tiles = kernel.traits, block.tiles
    if const_expr(traits.k_parts > 1):
        add_parts(kernel, block, f)
    hide(kernel, f, tile, page)
    values, scale = f.scores.values, block.launch.scale_log2
    is_first_lane = f.thread % 4 == 0
    for r in cutlass.range_constexpr(ROWS):
        peak = values[r, 0]
        for c in cutlass.range_constexpr(1, cute.size(values.shape[1])):
            peak = cute.arch.fmax(peak, values[r, c])
        peak = quad_max(peak) * scale
        if is_first_lane:
            tiles.by_warps[f.scores.row(r), f.key_group] = peak
    if const_expr(traits.overlap):
        cute.arch.sync_threads()  # every warp has read the last step's P, too
    else:
        sync_row_group(kernel, f)
    for r in cutlass.range_constexpr(ROWS):
        row = f.scores.row(r)
        peak = tiles.by_warps[row, 0]
        for w in cutlass.range_constexpr(1, traits.key_groups):
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
    cute.copy(copy, copy.retile(rounded_fragment(f.acc_S, kernel.dtype)), copy.partition_D(tiles.sP))


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
