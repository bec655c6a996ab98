"""Loads of the sm80 backward by cp.async: Q, dO and the row statistics of a query block."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from cuteflash.kernels.sm80.bundles import KvSource
from cuteflash.kernels.sm80.bwd_barriers import sync_warps
from cuteflash.kernels.sm80.bwd_bundles import KeyWork, QuerySources
from cuteflash.kernels.sm80.bwd_delta import load_statistics, sum_rows
from cuteflash.kernels.sm80.load import column_predicate, load_kv

STATISTICS = 4  # fp32 numbers of one 16-byte copy


def make_query_source(kernel, gX: cute.Tensor, sX: cute.Tensor, head_dim: int, thread: Int32) -> KvSource:
    """Partition Q or dO (seqlen_q, columns, heads) and its shared-memory tile (tile_m, columns, stages)."""
    rows, cols = (cute.size(mode) for mode in sX.shape[:2])
    copy = kernel.load_copy(cols)
    mine = copy.get_slice(thread)
    identity = cute.make_identity_tensor((rows, cols))
    coords = mine.partition_S(identity)
    blocks = cute.local_tile(gX, (rows, cols), (None, 0, None))
    return KvSource(
        copy=copy,
        tXgX=cute.group_modes(mine.partition_S(blocks), 3, 5),
        tXsX=mine.partition_D(sX),
        columns=None if cols == head_dim else column_predicate(coords, head_dim),
        pass_rows=copy.get_slice(0).partition_S(identity)[0, None, 0],
        first_row=coords[0, 0, 0][0],
    )


def varying(kernel, thread: Int32, position: Int32) -> Int32:
    """`thread`, with `fresh_addresses` made to depend on the number of the step, which is never negative."""
    return thread + (position >> 31) if kernel.traits.fresh_addresses else thread


@cute.jit
def load_queries(
    kernel: cutlass.Constexpr, loads: QuerySources, head: Int32, m_block: Int32, stage: Int32 | int, thread: Int32
):
    """Issue the copies of a query block of the `head`-th query head, not committed."""
    operands, place = kernel.problem.operands, (m_block, loads.first_head + head)
    load_query_rows(kernel, loads, (loads.gQ, loads.tiles.sQ, operands.head_dim), place, stage, thread)
    load_query_rows(kernel, loads, (loads.gdO, loads.tiles.sdO, operands.head_dim_v), place, stage, thread)
    if const_expr(loads.sums_rows):
        load_query_rows(kernel, loads, (loads.lone.gO, loads.tiles.sO, operands.head_dim_v), place, stage, thread)
        load_statistics(kernel, loads, place, stage, thread)
    else:
        load_prepared(kernel, loads, place, stage, thread)


def load_query_rows(kernel, loads: QuerySources, rows: tuple, place: tuple, stage: Int32 | int, thread: Int32) -> None:
    """Issue the copies of a query block at `place`, its (block, head); `rows` are its (source, tiles, columns)."""
    gX, sX, head_dim = rows
    count = loads.seqlen_q - place[0] * kernel.traits.tile_m
    load_kv(make_query_source(kernel, gX, sX, head_dim, thread), place, stage, count)


@cute.jit
def load_prepared(kernel: cutlass.Constexpr, loads: QuerySources, place: tuple, stage: Int32 | int, thread: Int32):
    """Issue the copies of the row statistics that the kernel before this one has prepared."""
    m_block, head = place
    tile = loads.workspace.tile(m_block, head, loads.sequence)
    pieces = kernel.traits.tile_m // STATISTICS
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), cutlass.Float32, num_bits_per_copy=128
    )
    for index, (source, target) in enumerate(((tile.lse_log2, loads.tiles.sLSE), (tile.delta, loads.tiles.sDelta))):
        piece = thread - index * pieces
        if piece >= 0 and piece < pieces:
            cute.copy(
                atom,
                cute.zipped_divide(source, (STATISTICS,))[None, piece],
                cute.zipped_divide(target[None, stage], (STATISTICS,))[None, piece],
            )


def wait_loads(kernel, loads: QuerySources, m_block: Int32, stage: Int32 | int, thread: Int32) -> None:
    """Wait until query block `m_block` is in shared memory, the copies of every thread and its row statistics."""
    cute.arch.cp_async_wait_group(0)
    if loads.sums_rows:
        sum_rows(kernel, loads, m_block, stage, thread)
    sync_warps(kernel)


@cute.jit
def load_step(kernel: cutlass.Constexpr, loads: QuerySources, work: KeyWork, place: tuple):
    """Wait for a step's Q and dO, and with two stages issue those of the next step; returns the step's stage."""
    head, m_block, position = place
    thread = varying(kernel, loads.thread, position)
    stage = Int32(0)
    if const_expr(kernel.traits.stages == 1):
        sync_warps(kernel)  # every warp has read the last block
        load_queries(kernel, loads, head, m_block, 0, thread)
        cute.arch.cp_async_commit_group()
        wait_loads(kernel, loads, m_block, stage, thread)
    else:
        stage = position & 1
        wait_loads(kernel, loads, m_block, stage, thread)  # and every warp has read the last block
        next_head, next_block = work.after(head, m_block)
        if next_head < work.launch.heads_per_kv:
            load_queries(kernel, loads, next_head, next_block, stage ^ 1, thread)
        cute.arch.cp_async_commit_group()
    return stage


@cute.jit
def store_rows(
    kernel: cutlass.Constexpr,
    sX: cute.Tensor,
    gX: cute.Tensor,
    n_block: Int32,
    rows: Int32,
    cols: cutlass.Constexpr[int],
    thread: Int32,
):
    """Store the first `rows` rows and `cols` columns of a shared tile to block `n_block` of gX (rows, columns)."""
    height, width = (cute.size(mode) for mode in sX.shape)
    copy = kernel.store_copy(width)
    mine = copy.get_slice(thread)
    staged = mine.partition_S(sX)
    target = mine.partition_D(cute.local_tile(gX, (height, width), (n_block, 0)))
    coords = mine.partition_S(cute.make_identity_tensor((height, width)))
    piece = cute.make_rmem_tensor_like(staged)
    cute.copy(copy, staged, piece)
    for i in cutlass.range_constexpr(cute.size(staged.shape[1])):
        if coords[0, i, 0][0] < rows:
            for slab in cutlass.range_constexpr(cute.size(staged.shape[2])):
                if const_expr(cols == width):
                    cute.copy(copy, piece[None, i, slab], target[None, i, slab])
                elif coords[0, i, slab][1] < cols:
                    cute.copy(copy, piece[None, i, slab], target[None, i, slab])


def column_statistics(sX: cute.Tensor, scores) -> cute.Tensor:
    """(queries,) the numbers of sX (tile_m,) that belong to this thread's columns of S^T."""
    columns = cute.size(scores.values.shape[1])
    mine = cute.make_rmem_tensor((2, columns // 2), cutlass.Float32)
    atom = cute.make_copy_atom(CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=64)
    pairs = cute.zipped_divide(sX, (2,))
    first = scores.first_key // 2
    for c in range(columns // 2):
        cute.copy(atom, pairs[None, first + scores.column(0, 2 * c) // 2], mine[None, c])
    return cute.make_tensor(mine.iterator, cute.make_layout(columns))
