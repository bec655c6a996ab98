"""The producer warpgroup of the backward: one warp loads with TMA, one for each part of dQ adds it to memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.arguments import BwdTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.tile import KeyTile, QueryBlocks
from cuteflash.core.turns import turn_of
from cuteflash.core.views import rows_first
from cuteflash.kernels.common.turns import await_turn, pass_turn
from cuteflash.kernels.sm90.bwd_bundles import Block, Tma
from cuteflash.kernels.sm90.ragged import ragged, sequence_rows
from cuteflash.problem import StorageKind
from cuteflash.traits.bwd_sm90 import STATISTIC_BYTES


def make_tma(kernel, tensors: BwdTensors) -> Tma:
    """TMA descriptors over the (batch, seqlen, heads, head_dim) tensors."""
    traits, storage = kernel.traits, kernel.problem.storage
    queries, keys = rows_of(storage.q), rows_of(storage.k)
    k_box, v_box = (traits.tile_n, traits.head_dim), (traits.tile_n, traits.head_dim_v)
    q_box, do_box = (traits.tile_m, traits.head_dim), (traits.tile_m, traits.head_dim_v)
    smem_k, smem_v, smem_q, smem_do = (
        cute.select(layout, mode=[0, 1])
        for layout in (kernel.smem_layout_k(), kernel.smem_layout_v(), kernel.smem_layout_q(), kernel.smem_layout_do())
    )
    load_q, gQ = atoms.tma_load(queries(tensors.q), smem_q, q_box)
    load_do, gdO = atoms.tma_load(queries(tensors.do), smem_do, do_box)
    load_k, gK = atoms.tma_load(keys(tensors.k), smem_k, k_box)
    load_v, gV = atoms.tma_load(keys(tensors.v), smem_v, v_box)
    store_dk, gdK = atoms.tma_store(keys(tensors.dk), smem_k, k_box)
    store_dv, gdV = atoms.tma_store(keys(tensors.dv), smem_v, v_box)
    return Tma(load_q, load_do, load_k, load_v, store_dk, store_dv, gQ, gdO, gK, gV, gdK, gdV)


def rows_of(storage: StorageKind) -> Callable[[cute.Tensor], cute.Tensor]:
    """How a tensor is seen that a descriptor is made from: rows and columns first."""
    return rows_first if storage == "dense" else functools.partial(ragged, packed_heads=1)


def query_rows(kernel, gX: cute.Tensor, tile: KeyTile, head: Int32) -> cute.Tensor:
    """The rows of a query head and the tile's sequence in the coordinates of Q or dO: (rows, columns)."""
    if kernel.problem.storage.q == "dense":
        return gX[None, None, head, tile.batch]
    return sequence_rows(gX, 1, head, tile.first_q, tile.mask.seqlen_q)


def key_rows(kernel, gX: cute.Tensor, tile: KeyTile) -> cute.Tensor:
    """The rows of the tile's head and sequence in the coordinates of K, V or their gradients: (rows, columns)."""
    if kernel.problem.storage.k == "dense":
        return gX[None, None, tile.head, tile.batch]
    return sequence_rows(gX, 1, tile.head, tile.first_k, tile.mask.seqlen_k)


@cute.jit
def load(kernel: cutlass.Constexpr, block: Block, tile: KeyTile, blocks: QueryBlocks):
    """Load K and V once, then Q, dO and their row statistics block by block; a whole warp calls it.

    What the first product needs comes first.
    """
    traits, tma, tiles, rings = kernel.traits, block.tma, block.tiles, block.rings
    gK, gV = key_rows(kernel, tma.gK, tile), key_rows(kernel, tma.gV, tile)
    load_once(tma.load_k, rings.k, gK, tiles.sK, tile.n_block, (traits.tile_n, traits.head_dim))
    position = Int32(0)
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = tile.head * block.launch.heads_per_kv + i
        gQ = cute.local_tile(query_rows(kernel, tma.gQ, tile, head), (traits.tile_m, traits.head_dim), (None, 0))
        gdO = cute.local_tile(query_rows(kernel, tma.gdO, tile, head), (traits.tile_m, traits.head_dim_v), (None, 0))
        tQsQ, tQgQ = atoms.tma_partition(tma.load_q, tiles.sQ, gQ)
        tOsdO, tOgdO = atoms.tma_partition(tma.load_do, tiles.sdO, gdO)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            workspace = block.workspace.tile(m_block, head, tile.sequence)
            barrier, stage = rings.q.acquire(position), rings.q.stage(position)
            cute.copy(tma.load_q, tQgQ[None, m_block], tQsQ[None, stage], tma_bar_ptr=barrier)
            load_statistic(workspace.lse_log2, tiles.sLSE[None, stage], barrier)
            if position == 0:
                load_once(tma.load_v, rings.v, gV, tiles.sV, tile.n_block, (traits.tile_n, traits.head_dim_v))
            barrier, stage = rings.do.acquire(position), rings.do.stage(position)
            cute.copy(tma.load_do, tOgdO[None, m_block], tOsdO[None, stage], tma_bar_ptr=barrier)
            load_statistic(workspace.delta, tiles.sDelta[None, stage], barrier)
            m_block = blocks.following(m_block)
            position += 1


def load_once(
    atom: cute.CopyAtom, ring: TmaRing, gX: cute.Tensor, sX: cute.Tensor, n_block: Int32, box: cute.Tiler
) -> None:
    """Load a block of K or V, of rows `gX`."""
    tXsX, tXgX = key_partition(atom, gX, sX, n_block, box)
    cute.copy(atom, tXgX, tXsX, tma_bar_ptr=ring.acquire(Int32(0)))


def key_partition(
    atom: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, n_block: Int32, box: cute.Tiler
) -> tuple[cute.Tensor, cute.Tensor]:
    """A block of K, V or their gradients, of rows `gX`, in shared and in global memory."""
    tXsX, tXgX = atoms.tma_partition(atom, sX, cute.local_tile(gX, box, (None, 0)))
    return tXsX[None, 0], tXgX[None, n_block]


def load_statistic(gX: cute.Tensor, sX: cute.Tensor, barrier: cute.Pointer) -> None:
    """Load one fp32 number a row of a query tile."""
    with cute.arch.elect_one():
        atoms.bulk_load(sX.iterator, gX.iterator, cute.size(sX) * STATISTIC_BYTES, barrier)


@cute.jit
def add_dq(kernel: cutlass.Constexpr, block: Block, tile: KeyTile, blocks: QueryBlocks, index: cutlass.Constexpr[int]):
    """Add what consumer warpgroup `index` computes of dQ to memory, step by step; one thread calls it."""
    warpgroups, whole = kernel.traits.mma_warpgroups, kernel.traits.dq == "turns"
    handover = block.rings.dq[index]
    rows, cols = kernel.traits.dq_part
    sdQ = block.tiles.sdQ[None, index]
    position = Int32(0)
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = tile.head * block.launch.heads_per_kv + i
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            if not whole or position % warpgroups == index:
                workspace = block.workspace.tile(m_block, head, tile.sequence)
                target = workspace.dq.iterator
                if const_expr(not whole):
                    target = target + index * (rows * cols)
                handover.wait(position // warpgroups if whole else position)
                if const_expr(kernel.problem.is_deterministic):
                    turn = turn_of(tile.mask, tile.n_block, m_block, tile.tile_m, tile.tile_n)
                    await_turn(workspace.turn, turn if whole else turn * warpgroups)
                atoms.bulk_add(target, sdQ.iterator, rows * cols * 4)
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(kernel.problem.is_deterministic):
                    cute.arch.cp_async_bulk_wait_group(0)
                    pass_turn(workspace.turn)
                else:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                handover.release()
            m_block = blocks.following(m_block)
            position += 1
    cute.arch.cp_async_bulk_wait_group(0)
