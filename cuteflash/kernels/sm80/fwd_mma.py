"""The main loop: S = Q K^T, softmax, O += P V over the key blocks of one query tile."""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.launch import Launch
from cuteflash.core.scores import ScoreTile, computed_here
from cuteflash.core.softmax import OnlineSoftmax, PlainSoftmax, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import acc_as_operand_a, rows_view
from cuteflash.kernels.sm80 import cache_mma
from cuteflash.kernels.sm80.bundles import Fragments, KvSources, Tiles
from cuteflash.kernels.sm80.load import load_kv


def make_fragments(kernel, tiles: Tiles, launch: Launch, thread: Int32) -> Fragments:
    """Partition the block's tiles for this thread."""
    traits = kernel.traits
    mma = kernel.tiled_mma()
    mine = mma.get_slice(thread)
    copy_q = kernel.copy_q().get_slice(thread)
    copy_k = kernel.copy_k().get_slice(thread)
    copy_v = kernel.copy_v().get_slice(thread)
    acc_S = cute.make_rmem_tensor(mine.partition_shape_C((traits.tile_m, traits.tile_n)), Float32)
    acc_O = cute.make_rmem_tensor(mine.partition_shape_C((traits.tile_m, traits.head_dim_v)), Float32)
    shape = traits.tile_m, traits.tile_n
    scores = ScoreTile.of(mma, thread, acc_S, shape, launch.inner_scale, launch.packed_heads)
    scores = dataclasses.replace(scores, tree=launch.tree)
    rows = cute.size(scores.values.shape[0])
    softmax = OnlineSoftmax if traits.fused_softmax else PlainSoftmax
    return Fragments(
        thread=thread,
        mma=mma,
        rQ=mine.make_fragment_A(mine.partition_A(tiles.sQ)),
        rK=mine.make_fragment_B(mine.partition_B(tiles.sK[None, None, 0])),
        rVt=mine.make_fragment_B(mine.partition_B(tiles.sVt[None, None, 0])),
        copy_q=copy_q,
        copy_k=copy_k,
        copy_v=copy_v,
        tSsQ=copy_q.partition_S(tiles.sQ),
        tSsK=copy_k.partition_S(tiles.sK),
        tOsVt=copy_v.partition_S(tiles.sVt),
        acc_S=acc_S,
        acc_O=acc_O,
        scores=scores,
        out=cache_mma.quads_view(acc_O) if kernel.converts else rows_view(acc_O),
        softmax=softmax.create(rows, launch.scale_log2, kernel.problem.may_be_empty, traits.p_offset),
        sQ=tiles.sQ,
    )


def wait_loads(pending: int) -> None:
    """Wait until all but the last `pending` groups of copies are in shared memory, those of every thread."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()


@cute.jit
def attend(kernel: cutlass.Constexpr, f: Fragments, loads: KvSources, tile: QueryTile):
    """Accumulate O over the key blocks of a tile, last block first; Q's copies are issued, not committed.

    A share of a tile's keys may have no block.
    """
    f.acc_O.fill(0.0)
    f.softmax.reset()
    if const_expr(tile.share is None):
        attend_blocks(kernel, f, loads, tile)
    else:
        blocks = tile.visited_blocks()
        if blocks.hi > blocks.lo:
            attend_blocks(kernel, f, loads, tile)
        else:
            cute.arch.cp_async_commit_group()  # Q
            wait_loads(0)


@cute.jit
def attend_blocks(kernel: cutlass.Constexpr, f: Fragments, loads: KvSources, tile: QueryTile):
    """`attend` from where O and the softmax are empty.

    Three loops visit the blocks cut by the mask's right edge, those seen whole, and those cut by its left edge. A tile
    that sees no key visits one block, wholly masked.
    """
    scores, blocks = kernel.problem.scores, tile.visited_blocks()
    full_lo, full_hi = tile.full_blocks()
    n_last = cutlass.max(blocks.hi - 1, 0)
    prologue(kernel, f, loads, tile, blocks.lo, n_last)

    step = functools.partial(attend_block, kernel, f, loads, tile, (blocks.lo, n_last))
    n_block = n_last + 1
    # The last block is always masked: the keys may end in it.
    if const_expr(scores.mask == "full"):
        right = 1
    else:
        right = cutlass.max(n_last + 1 - cutlass.max(full_hi, blocks.lo), 1)
    for _ in cutlass.range(right, unroll=1):
        n_block -= 1
        step(n_block, True)
    first_whole = 0
    if const_expr(scores.has_left_edge):
        first_whole = cutlass.max(full_lo, blocks.lo)
    elif const_expr(tile.share is not None):
        first_whole = blocks.lo
    whole = n_block - first_whole
    for _ in cutlass.range(whole, unroll=1):
        n_block -= 1
        step(n_block, False)
    if const_expr(scores.has_left_edge):
        for _ in cutlass.range(n_block - blocks.lo, unroll=1):
            n_block -= 1
            step(n_block, True)


@cute.jit
def prologue(kernel: cutlass.Constexpr, f: Fragments, loads: KvSources, tile: QueryTile, n_lo: Int32, n_last: Int32):
    """Issue the first loads: Q and K in one group, V and further blocks if there are stages for them; fetch Q."""
    traits = kernel.traits
    rows = tile.mask.seqlen_k - n_last * traits.tile_n
    if const_expr(traits.eager_loads):
        load_kv(loads.k, n_last, 0, rows)
    if const_expr(traits.kv_stage > 1):
        load_kv(loads.v, n_last, 0, rows)
    cute.arch.cp_async_commit_group()
    for stage in cutlass.range_constexpr(1, traits.kv_stage - 1):
        load_block(loads, n_last - stage, n_lo, stage)
    if const_expr(kernel.converts):
        wait_loads(max(traits.kv_stage - 2, 0))
        cache_mma.take_q(kernel, f)
    elif const_expr(traits.q_in_regs):
        wait_loads(max(traits.kv_stage - 2, 0))
        cute.copy(f.copy_q, f.tSsQ, f.copy_q.retile(f.rQ))


@cute.jit
def load_block(loads: KvSources, n_block: Int32, n_lo: Int32, stage: Int32 | int):
    """Issue K and V of a later block as one group, which is empty if the tile has no such block."""
    if n_block >= n_lo:
        load_kv(loads.k, n_block, stage, None)
        load_kv(loads.v, n_block, stage, None)
    cute.arch.cp_async_commit_group()


@cute.jit
def attend_block(
    kernel: cutlass.Constexpr,
    f: Fragments,
    loads: KvSources,
    tile: QueryTile,
    n_range: tuple,
    n_block: Int32,
    masked: cutlass.Constexpr[bool],
):
    """One step of the main loop; `n_range` is the (first, last) key block of the tile."""
    stages, eager = kernel.traits.kv_stage, kernel.traits.eager_loads
    n_lo, n_last = n_range
    stage = (n_last - n_block) % stages
    rows = tile.mask.seqlen_k - n_block * kernel.traits.tile_n if masked else None
    if const_expr(stages == 1):
        wait_loads(0)  # K is loaded, and every warp has read the last V
        if const_expr(not eager):
            load_kv(loads.k, n_block, 0, rows)
        load_kv(loads.v, n_block, 0, rows)
        cute.arch.cp_async_commit_group()
        if const_expr(not eager):
            wait_loads(0)
    else:
        wait_loads(stages - 2)  # K and V are loaded, and every warp has read the last block
        load_block(loads, n_block - (stages - 1), n_lo, (stage + stages - 1) % stages)
    product_qk(kernel, f, stage)
    if const_expr(eager and stages == 1):
        wait_loads(0)  # V is loaded, and every warp has read K
        if n_block > n_lo:
            load_kv(loads.k, n_block - 1, 0, None)
        cute.arch.cp_async_commit_group()
    softmax_block(kernel, f, tile, n_block, masked)
    scale_rows(f.out, f.softmax.row_scale)
    product_pv(kernel, f, stage)


def product_qk(kernel, f: Fragments, stage: Int32) -> None:
    """S = Q K^T for the K tile in `stage`."""
    f.acc_S.fill(0.0)
    if kernel.converts:
        cache_mma.product_qk(kernel, f, stage)
        return
    fetches = (atoms.Fetch(f.copy_k, f.tSsK[None, None, None, stage], f.copy_k.retile(f.rK)),)
    if not kernel.traits.q_in_regs:
        fetches += (atoms.Fetch(f.copy_q, f.tSsQ, f.copy_q.retile(f.rQ)),)
    atoms.gemm(f.mma, f.acc_S, f.rQ, f.rK, fetches, kernel.traits.ahead)


def product_pv(kernel, f: Fragments, stage: Int32) -> None:
    """O += P V for the V tile in `stage`, P rounded to the element type."""
    rP = cute.make_rmem_tensor_like(f.acc_S, kernel.dtype)
    rP.store(f.acc_S.load().to(kernel.dtype))
    if kernel.converts:
        cache_mma.product_pv(kernel, f, acc_as_operand_a(rP), stage)
        return
    fetches = (atoms.Fetch(f.copy_v, f.tOsVt[None, None, None, stage], f.copy_v.retile(f.rVt)),)
    atoms.gemm(f.mma, f.acc_O, acc_as_operand_a(rP), f.rVt, fetches, kernel.traits.ahead)


@cute.jit
def softmax_block(
    kernel: cutlass.Constexpr, f: Fragments, tile: QueryTile, n_block: Int32, masked: cutlass.Constexpr[bool]
):
    """Softcap, mask and online softmax of the scores of one key block, in place."""
    bounds = None
    if const_expr(masked):
        bounds = f.scores.make_bounds(cute.size(f.softmax.row_scale))
        seen_by = tile
        if const_expr(kernel.problem.scores.chunked):  # bounds that cost a division would be kept for the whole loop
            seen_by = dataclasses.replace(tile, first_token=computed_here(tile.first_token))
        f.scores.set_bounds(bounds, seen_by)
    f.scores.prepare(kernel.problem.scores, n_block * kernel.traits.tile_n, bounds)
    f.softmax.step(f.scores.values)
