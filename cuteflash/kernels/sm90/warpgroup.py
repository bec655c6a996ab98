"""A consumer warpgroup: its 64 rows, what it holds of them in registers, and its turn at the tensor cores."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.atoms.barriers import NamedBarrier
from cuteflash.core.gqa import row_token
from cuteflash.core.mask import IntervalMask
from cuteflash.core.softmax import OnlineSoftmax
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import acc_as_operand_a, rows_view
from cuteflash.core.work import Work
from cuteflash.kernels.sm90.bundles import Tiles
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

ROWS = 2  # rows of S and O that one thread holds elements of


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """One consumer warpgroup's operands, fragments and running softmax.

    Attributes:
        index: 0 for the first consumer warpgroup.
        thread: 0..127 inside the warpgroup.
        tSrQ, tSrK: operands of the QK product; tOrP, tOrV: operands of the PV product. Q's is of the present tile only
            after `with_q`.
        acc_S, acc_O: accumulators; `scores`, `out` are the same as (rows, columns).
        inner_scale: what a score is multiplied with before tanh, under a softcap.
        row_scale: what O has to be multiplied with after a softmax step.
        bounds: (rows, 2) visible keys [lo, hi) of each row of this thread.
        columns: (rows, columns) coordinates of thread 0, static.
        first_row, first_column: this thread's first element in the warpgroup's tile.
    """

    index: Int32
    thread: Int32
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: cute.Tensor
    out: cute.Tensor
    inner_scale: Float32
    softmax: OnlineSoftmax
    row_scale: cute.Tensor
    bounds: cute.Tensor
    columns: cute.Tensor
    first_row: Int32
    first_column: Int32


def make_warpgroup(kernel, tiles: Tiles, work: Work) -> Warpgroup:
    """Partition the block's tiles for this thread's warpgroup."""
    traits = kernel.traits
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - traits.producer_warpgroups
    mma_qk, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_pv()
    thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
    acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((WGMMA_M, traits.tile_n)), Float32)
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, traits.head_dim_v)), Float32)
    if traits.q_in_regs:
        tSrQ = cute.make_rmem_tensor(thr_qk.partition_shape_A((WGMMA_M, traits.head_dim)), kernel.dtype)
    else:
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(tiles.sQ))
    if traits.p_in_regs:
        tOrP = cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), kernel.dtype)
    else:
        tOrP = mma_pv.make_fragment_A(thr_pv.partition_A(tiles.sP[None, None, index]))
    scores, out = rows_view(acc_S), rows_view(acc_O)
    identity = cute.make_identity_tensor((WGMMA_M, traits.tile_n))
    own = rows_view(thr_qk.partition_C(identity))
    return Warpgroup(
        index=index,
        thread=thread,
        mma_qk=mma_qk,
        mma_pv=mma_pv,
        tSrQ=tSrQ,
        tSrK=mma_qk.make_fragment_B(thr_qk.partition_B(tiles.sK)),
        tOrP=tOrP,
        tOrV=mma_pv.make_fragment_B(thr_pv.partition_B(tiles.sVt)),
        acc_S=acc_S,
        acc_O=acc_O,
        scores=scores,
        out=out,
        inner_scale=work.inner_scale,
        softmax=OnlineSoftmax.create(ROWS, work.scale_log2, kernel.problem.scores.mask != "full"),
        row_scale=cute.make_rmem_tensor(ROWS, Float32),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
        columns=rows_view(mma_qk.get_slice(0).partition_C(identity)),
        first_row=own[0, 0][0],
        first_column=own[0, 0][1],
    )


def with_q(kernel, wg: Warpgroup, tiles: Tiles, stage: Int32) -> Warpgroup:
    """The warpgroup with its part of the Q tile in `stage` as operand, loaded if it stays in registers."""
    if not kernel.traits.q_in_regs:
        tile = stage * kernel.traits.mma_warpgroups + wg.index
        return dataclasses.replace(wg, tSrQ=wg.tSrQ[None, None, None, tile])
    copy = kernel.copy_q().get_slice(wg.thread)
    cute.copy(copy, copy.partition_S(tiles.sQ[None, None, wg.index]), copy.retile(wg.tSrQ))
    cute.arch.sync_warp()  # every lane has read its rows before one of them lets the next tile's Q in
    return wg


@cute.jit
def set_bounds(kernel: cutlass.Constexpr, wg: Warpgroup, tile: QueryTile, mask: IntervalMask):
    """The visible keys of each row of this thread."""
    first = tile.first_token + wg.index * kernel.tokens_per_warpgroup
    for r in cutlass.range_constexpr(cute.size(wg.bounds.shape[0])):
        token, _ = row_token(wg.first_row + wg.columns[r, 0][0], kernel.problem.operands.packed_heads)
        wg.bounds[r, 0], wg.bounds[r, 1] = mask.kv_bounds(first + token)


# Ping-pong: a warpgroup issues its products only in its turn, so that its softmax falls into another one's products.


def take_turn(kernel, wg: Warpgroup) -> None:
    """Wait until it is this warpgroup's turn to issue products."""
    if kernel.traits.pingpong:
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + wg.index, number_of_threads=2 * WARPGROUP)


def pass_turn(kernel, wg: Warpgroup) -> None:
    """Let the next warpgroup issue its products."""
    if kernel.traits.pingpong:
        following = (wg.index + 1) % kernel.traits.mma_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)
