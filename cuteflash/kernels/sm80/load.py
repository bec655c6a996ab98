"""Loads of Q, K and V into swizzled shared memory, by cp.async or, without `async_copy`, through registers.

Elements beyond the head dim, the queries or the keys become zeros, by cp.async itself or, through registers, by
`row_copies.load`: if shared memory held NaN before, its product with a masked weight (0) would be NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms import row_copies
from cuteflash.core.gqa import row_coord
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.gather import RowGather
from cuteflash.kernels.sm80.bundles import KvSource
from cuteflash.traits.chunks import CHUNK


def column_predicate(coords: cute.Tensor, head_dim: int) -> cute.Tensor:
    """(1, passes, slabs) whether each chunk's columns lie inside `head_dim`; the same for every pass."""
    passes, slabs = coords.shape[1], coords.shape[2]
    inside = cute.make_rmem_tensor(cute.make_layout((1, passes, slabs), stride=(slabs, 0, 1)), Boolean)
    for slab in range(cute.size(slabs)):
        inside[0, 0, slab] = coords[0, 0, slab][1] < head_dim
    return inside


def make_kv_source(kernel, gX: cute.Tensor, sX: cute.Tensor, thread: Int32) -> KvSource:
    """Partition one head's K or V (seqlen_k, head_dim) and its shared-memory tile (tile_n, columns, stages)."""
    rows, cols, _ = sX.shape
    rows, cols, head_dim = cute.size(rows), cute.size(cols), gX.shape[1]
    copy = kernel.load_copy(cols)
    mine = copy.get_slice(thread)
    identity = cute.make_identity_tensor((rows, cols))
    coords = mine.partition_S(identity)
    return KvSource(
        copy=copy,
        tXgX=mine.partition_S(cute.local_tile(gX, (rows, cols), (None, 0))),
        tXsX=mine.partition_D(sX),
        columns=None if cols == head_dim else column_predicate(coords, head_dim),
        pass_rows=copy.get_slice(0).partition_S(identity)[0, None, 0],
        first_row=coords[0, 0, 0][0],
    )


@cute.jit
def load_kv(load: KvSource | RowGather, n_block: Int32, stage: Int32 | int, rows: Int32 | None):
    """Issue the copies of key block `n_block`, of which the first `rows` rows exist; None if all do."""
    if const_expr(isinstance(load, RowGather)):
        load.load(load.find(n_block), n_block, stage)
    else:
        load_rows(load, n_block, stage, rows)


@cute.jit
def load_rows(load: KvSource, n_block: Int32, stage: Int32 | int, rows: Int32 | None):
    """`load_kv` of rows that follow each other."""
    inside = load.columns
    if const_expr(rows is not None):
        _, passes, slabs, _ = load.tXsX.shape
        inside = cute.make_rmem_tensor(cute.make_layout((1, passes, slabs)), Boolean)
        for i in cutlass.range_constexpr(cute.size(passes)):
            for slab in cutlass.range_constexpr(cute.size(slabs)):
                exists = load.pass_rows[i][0] < rows - load.first_row
                if const_expr(load.columns is not None):
                    exists = exists and load.columns[0, i, slab]
                inside[0, i, slab] = exists
    row_copies.load(load.copy, load.tXgX[None, None, None, n_block], load.tXsX[None, None, None, stage], inside)


@cute.jit
def load_q(kernel: cutlass.Constexpr, gQ: cute.Tensor, sQ: cute.Tensor, tile: QueryTile, thread: Int32):
    """Issue the copies of a query tile; gQ (rows, head_dim) of one head, or of the packed heads of one KV head."""
    head_dim = kernel.problem.operands.head_dim
    copy = kernel.load_copy(kernel.traits.head_dim)
    mine = copy.get_slice(thread)
    tQsQ = mine.partition_D(sQ)
    coords = mine.partition_S(cute.make_identity_tensor((kernel.traits.tile_m, kernel.traits.head_dim)))
    rows = tile.rows()
    for i in cutlass.range_constexpr(cute.size(tQsQ.shape[1])):
        row = coords[0, i, 0][0]
        for slab in cutlass.range_constexpr(cute.size(tQsQ.shape[2])):
            column = coords[0, i, slab][1]
            inside = cute.make_rmem_tensor((1,), Boolean)
            inside[0] = row < rows and column < head_dim
            row_copies.load(copy, query_chunk(gQ, tile, row, column), tQsQ[None, i, slab], inside)


def query_chunk(gX: cute.Tensor, tile: QueryTile, row: Int32, column: Int32) -> cute.Tensor:
    """The 16 bytes at (`row`, `column`) of a query tile in (rows, columns) `gX`, as ((8, 1),)."""
    origin = tile.first_row if tile.packed_heads == 1 else (0, tile.first_row)
    line = cute.domain_offset((origin, 0), gX)[row_coord(row, tile.packed_heads), None]
    start = cute.zipped_divide(line, (CHUNK,))[None, column // CHUNK].iterator
    return cute.make_tensor(start, cute.make_layout(((CHUNK, 1),), stride=((1, 0),)))
