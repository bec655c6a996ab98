"""The main loop: S = Q K^T, softmax, O += P V over the key blocks of one query tile."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.gqa import row_token
from cuteflash.core.mask import IntervalMask
from cuteflash.core.softmax import OnlineSoftmax, PlainSoftmax, apply_softcap, mask_scores, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import acc_as_operand_a, rows_view
from cuteflash.core.work import Work
from cuteflash.kernels.sm80.bundles import Fragments, Loads, Tiles
from cuteflash.kernels.sm80.load import load_kv


def make_fragments(kernel, tiles: Tiles, work: Work, thread: Int32) -> Fragments:
    """Partition the block's tiles for this thread."""
    traits = kernel.traits
    mma = kernel.tiled_mma()
    mine = mma.get_slice(thread)
    copy_q = kernel.copy_q().get_slice(thread)
    copy_k = kernel.copy_k().get_slice(thread)
    copy_v = kernel.copy_v().get_slice(thread)
    acc_S = cute.make_rmem_tensor(mine.partition_shape_C((traits.tile_m, traits.tile_n)), Float32)
    acc_O = cute.make_rmem_tensor(mine.partition_shape_C((traits.tile_m, traits.head_dim_v)), Float32)
    scores, out = rows_view(acc_S), rows_view(acc_O)
    rows = cute.size(scores.shape[0])
    identity = cute.make_identity_tensor((traits.tile_m, traits.tile_n))
    own = rows_view(mine.partition_C(identity))
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
        out=out,
        softmax=softmax.create(rows, work.scale_log2, kernel.problem.scores.mask != "full"),
        inner_scale=work.inner_scale,
        row_scale=cute.make_rmem_tensor(rows, Float32),
        columns=rows_view(mma.get_slice(0).partition_C(identity)),
        first_row=own[0, 0][0],
        first_column=own[0, 0][1],
    )


def arrived(pending: int) -> None:
    """Wait until all but the last `pending` groups of copies are in shared memory, those of every thread."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()


@cute.jit
def attend(kernel: cutlass.Constexpr, f: Fragments, loads: Loads, tile: QueryTile, work: Work):
    """Accumulate O over the key blocks of a tile, last block first; Q's copies are issued, not committed.

    Blocks come in three runs: those the mask's right edge cuts, those seen whole, those its left edge cuts. A tile that
    sees no key visits one block, wholly masked.
    """
    mask, tile_n = work.mask, kernel.traits.tile_n
    n_lo, n_hi = tile.n_blocks(mask, tile_n)
    full_lo, full_hi = tile.full_n_blocks(mask, tile_n)
    n_last = cutlass.max(n_hi - 1, 0)
    f.acc_O.fill(0.0)
    f.softmax.row_max.fill(-Float32.inf)
    f.softmax.row_sum.fill(0.0)
    prologue(kernel, f, loads, n_lo, n_last, mask.seqlen_k)

    step = functools.partial(attend_block, kernel, f, loads, tile, mask, (n_lo, n_last))
    n_block = n_last + 1
    # The last block is always masked: the keys may end in it.
    right = (
        1
        if const_expr(kernel.problem.scores.mask == "full")
        else cutlass.max(n_last + 1 - cutlass.max(full_hi, n_lo), 1)
    )
    for _ in cutlass.range(right, unroll=1):
        n_block -= 1
        step(n_block, True)
    whole = n_block - (cutlass.max(full_lo, n_lo) if const_expr(mask.has_left_edge) else 0)
    for _ in cutlass.range(whole, unroll=1):
        n_block -= 1
        step(n_block, False)
    if const_expr(mask.has_left_edge):
        for _ in cutlass.range(n_block - n_lo, unroll=1):
            n_block -= 1
            step(n_block, True)


@cute.jit
def prologue(
    kernel: cutlass.Constexpr,
    f: Fragments,
    loads: Loads,
    n_lo: Int32,
    n_last: Int32,
    seqlen_k: Int32,
):
    """Issue the first loads: Q and K in one group, with V and further blocks where there are stages; fetch Q."""
    traits = kernel.traits
    rows = seqlen_k - n_last * traits.tile_n
    if const_expr(traits.eager_loads):
        load_kv(loads.k, n_last, 0, rows)
    if const_expr(traits.kv_stage > 1):
        load_kv(loads.v, n_last, 0, rows)
    cute.arch.cp_async_commit_group()
    for stage in cutlass.range_constexpr(1, traits.kv_stage - 1):
        load_block(loads, n_last - stage, n_lo, stage)
    if const_expr(traits.q_in_regs):
        arrived(max(traits.kv_stage - 2, 0))
        cute.copy(f.copy_q, f.tSsQ, f.copy_q.retile(f.rQ))


@cute.jit
def load_block(loads: Loads, n_block: Int32, n_lo: Int32, stage: Int32 | int):
    """Issue K and V of a block ahead as one group, which is empty where the tile has no such block."""
    if n_block >= n_lo:
        load_kv(loads.k, n_block, stage, None)
        load_kv(loads.v, n_block, stage, None)
    cute.arch.cp_async_commit_group()


@cute.jit
def attend_block(
    kernel: cutlass.Constexpr,
    f: Fragments,
    loads: Loads,
    tile: QueryTile,
    mask: IntervalMask,
    n_range: tuple,
    n_block: Int32,
    masked: cutlass.Constexpr[bool],
):
    """One step of the main loop, `n_range` the tile's (first, last) key block."""
    stages, eager = kernel.traits.kv_stage, kernel.traits.eager_loads
    n_lo, n_last = n_range
    stage = (n_last - n_block) % stages
    rows = mask.seqlen_k - n_block * kernel.traits.tile_n if masked else None
    if const_expr(stages == 1):
        arrived(0)  # K is here, and nobody reads the last V any more
        if const_expr(not eager):
            load_kv(loads.k, n_block, 0, rows)
        load_kv(loads.v, n_block, 0, rows)
        cute.arch.cp_async_commit_group()
        if const_expr(not eager):
            arrived(0)
    else:
        arrived(stages - 2)  # and nobody reads the last block any more
        load_block(loads, n_block - (stages - 1), n_lo, (stage + stages - 1) % stages)
    product_qk(kernel, f, stage)
    if const_expr(eager and stages == 1):
        arrived(0)  # V is here, and nobody reads K any more
        if n_block > n_lo:
            load_kv(loads.k, n_block - 1, 0, None)
        cute.arch.cp_async_commit_group()
    soften(kernel, f, tile, mask, n_block, masked)
    scale_rows(f.out, f.row_scale)
    product_pv(kernel, f, stage)


def product_qk(kernel, f: Fragments, stage: Int32) -> None:
    """S = Q K^T for the K tile in `stage`."""
    f.acc_S.fill(0.0)
    fetches = (atoms.Fetch(f.copy_k, f.tSsK[None, None, None, stage], f.copy_k.retile(f.rK)),)
    if not kernel.traits.q_in_regs:
        fetches += (atoms.Fetch(f.copy_q, f.tSsQ, f.copy_q.retile(f.rQ)),)
    atoms.gemm(f.mma, f.acc_S, f.rQ, f.rK, fetches, kernel.traits.ahead)


def product_pv(kernel, f: Fragments, stage: Int32) -> None:
    """O += P V for the V tile in `stage`, P rounded to the element type."""
    rP = cute.make_rmem_tensor_like(f.acc_S, kernel.dtype)
    rP.store(f.acc_S.load().to(kernel.dtype))
    fetches = (atoms.Fetch(f.copy_v, f.tOsVt[None, None, None, stage], f.copy_v.retile(f.rVt)),)
    atoms.gemm(f.mma, f.acc_O, acc_as_operand_a(rP), f.rVt, fetches, kernel.traits.ahead)


@cute.jit
def soften(
    kernel: cutlass.Constexpr,
    f: Fragments,
    tile: QueryTile,
    mask: IntervalMask,
    n_block: Int32,
    masked: cutlass.Constexpr[bool],
):
    """Softcap, mask and online softmax of the scores of one key block, in place."""
    if const_expr(kernel.problem.scores.softcap):
        apply_softcap(f.scores, f.inner_scale)
    if const_expr(masked):
        bounds = cute.make_rmem_tensor((cute.size(f.row_scale), 2), Int32)
        for r in cutlass.range_constexpr(cute.size(f.row_scale)):
            token, _ = row_token(f.first_row + f.columns[r, 0][0], kernel.problem.operands.packed_heads)
            bounds[r, 0], bounds[r, 1] = mask.kv_bounds(tile.first_token + token)
        first_key = n_block * kernel.traits.tile_n + f.first_column
        mask_scores(f.scores, f.columns, first_key, bounds, mask.has_left_edge)
    f.softmax.step(f.scores, f.row_scale, False)
