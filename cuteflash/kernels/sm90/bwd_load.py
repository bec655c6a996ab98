"""The producer warpgroup of the backward: a warp that loads, one for each part of dQ, one that stores.

The last one has time left, and finds the tiles of packed sequences for all roles of a persistent block: see `hand_out`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.arguments import BwdTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing, wait_phase
from cuteflash.core.tile import KeyTile
from cuteflash.core.views import rows_first
from cuteflash.kernels.sm90.bwd_bundles import Block, Tma, Visit
from cuteflash.kernels.sm90.handout import tile_of_words
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
    store_dq = gdQ = None
    if traits.stores_dq:
        smem_dq = cute.select(kernel.smem_layout_dq(), mode=[0, 1])
        store_dq, gdQ = atoms.tma_store(queries(tensors.dq), smem_dq, traits.dq_part)
    return Tma(load_q, load_do, load_k, load_v, store_dk, store_dv, gQ, gdO, gK, gV, gdK, gdV, store_dq, gdQ)


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
def load(kernel: cutlass.Constexpr, block: Any, visit: Visit):
    """Load K and V once, then Q, dO and their row statistics block by block; a whole warp calls it.

    What the first product needs comes first.
    """
    traits, tma, tiles, rings = kernel.traits, block.tma, block.tiles, block.rings
    tile, blocks, wave, start = visit.tile, visit.blocks, visit.wave, visit.start
    gK, gV = key_rows(kernel, tma.gK, tile), key_rows(kernel, tma.gV, tile)
    load_once(tma.load_k, rings.k, wave, gK, tiles.sK, tile.n_block, (traits.tile_n, traits.head_dim))
    v_box = (traits.tile_n, traits.head_dim_v)
    load_v = functools.partial(load_once, tma.load_v, rings.v, wave, gV, tiles.sV, tile.n_block, v_box)
    if blocks.hi <= blocks.lo:  # no step to bring V in, but gradients to take its place
        load_v()
    position = start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = tile.head * block.launch.heads_per_kv + i
        gQ = cute.local_tile(query_rows(kernel, tma.gQ, tile, head), (traits.tile_m, traits.head_dim), (None, 0))
        gdO = cute.local_tile(query_rows(kernel, tma.gdO, tile, head), (traits.tile_m, traits.head_dim_v), (None, 0))
        tQsQ, tQgQ = atoms.tma_partition(tma.load_q, tiles.sQ, gQ)
        tOsdO, tOgdO = atoms.tma_partition(tma.load_do, tiles.sdO, gdO)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            workspace = block.workspace.tile(m_block, head, tile.sequence, tile.first_q)
            barrier, stage = rings.q.acquire(position), rings.q.stage(position)
            cute.copy(tma.load_q, tQgQ[None, m_block], tQsQ[None, stage], tma_bar_ptr=barrier)
            load_statistic(workspace.lse_log2, tiles.sLSE[None, stage], barrier)
            if position == start:
                load_v()
            barrier, stage = rings.do.acquire(position), rings.do.stage(position)
            cute.copy(tma.load_do, tOgdO[None, m_block], tOsdO[None, stage], tma_bar_ptr=barrier)
            load_statistic(workspace.delta, tiles.sDelta[None, stage], barrier)
            m_block = blocks.following(m_block)
            position += 1


def load_once(
    atom: cute.CopyAtom,
    ring: TmaRing,
    wave: Int32,
    gX: cute.Tensor,
    sX: cute.Tensor,
    n_block: Int32,
    box: cute.Tiler,
) -> None:
    """Load a block of K or V, of rows `gX`, as tile `wave` of its ring."""
    tXsX, tXgX = key_partition(atom, gX, sX, ring.stage(wave), n_block, box)
    cute.copy(atom, tXgX, tXsX, tma_bar_ptr=ring.acquire(wave))


def key_partition(
    atom: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, stage: Int32, n_block: Int32, box: cute.Tiler
) -> tuple[cute.Tensor, cute.Tensor]:
    """A block of K, V or their gradients, of rows `gX`, in shared and in global memory."""
    tXsX, tXgX = atoms.tma_partition(atom, sX, cute.local_tile(gX, box, (None, 0)))
    return tXsX[None, stage], tXgX[None, n_block]


def store_gradients(kernel, block: Block, visit: Visit) -> None:
    """Store dK and dV of the tile of a visit."""
    store_tile(kernel, block, visit.tile, visit.wave)


@cute.jit
def store_tile(kernel: cutlass.Constexpr, block: Block, tile: KeyTile, wave: Int32):
    """Store dK and dV, which TMA clips, once the consumers have put them in the place of K and V; a whole warp."""
    traits, tma, tiles, rings = kernel.traits, block.tma, block.tiles, block.rings
    wait_phase(rings.gradients_of(wave), rings.k.phase(wave))
    for atom, gX, sX, cols in (
        (tma.store_dv, tma.gdV, tiles.sV, traits.head_dim_v),
        (tma.store_dk, tma.gdK, tiles.sK, traits.head_dim),
    ):
        stage, box = rings.k.stage(wave), (traits.tile_n, cols)
        tXsX, tXgX = key_partition(atom, key_rows(kernel, gX, tile), sX, stage, tile.n_block, box)
        cute.copy(atom, tXsX, tXgX)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    rings.k.release(wave)
    rings.v.release(wave)


@cute.jit
def store_until(kernel: cutlass.Constexpr, block: Block, done: Int32, position: Int32):
    """Store the gradients of the tiles before `position` that were handed out, from tile `done` on; see `hand_out`."""
    while done < position:
        store_tile(kernel, block, tile_of_words(block.launch, block.handout.handed(done)), done)
        done += 1
    return done


@cute.jit
def load_in_turn(kernel: cutlass.Constexpr, block: Block, visit: Visit):
    """`load` for blocks that draw their tiles and take turns; it says when the consumers have read the last Q."""
    load(kernel, block, visit)
    q = block.rings.q
    if visit.tile.mask.seqlen_k > kernel.traits.tile_n:  # nothing else is handed out, so nothing to load
        q.wait_free(visit.start + block.launch.steps(visit.blocks) - 1 + q.stages)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(block.rings.steps)


def await_steps(block: Block, position: Int32) -> None:
    """Wait until the steps of tile `position` are done; see `hand_out`.

    It may return sooner if tiles shortly before have not been waited for.
    """
    wait_phase(block.rings.steps, position & 1)


def load_statistic(gX: cute.Tensor, sX: cute.Tensor, barrier: cute.Pointer) -> None:
    """Load one fp32 number a row of a query tile."""
    with cute.arch.elect_one():
        atoms.bulk_load(sX.iterator, gX.iterator, cute.size(sX) * STATISTIC_BYTES, barrier)
