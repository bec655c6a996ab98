"""A consumer warpgroup: its 64 rows, what it holds of them in registers, and its turn at the tensor cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cuteflash.core.convert import round_fragment, rounded_words
from cuteflash.core.launch import Launch
from cuteflash.core.scales import BlockScales, Scales
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import OnlineSoftmax
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import acc_as_operand_a, rows_view
from cuteflash.kernels.sm90.bundles import NamedBarrier, Tiles
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

ROWS = 2  # rows of S and O that one thread holds elements of


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """One consumer warpgroup's operands, fragments and running softmax.

    Attributes:
        index: 0 for the first consumer warpgroup, and for those that share its rows.
        part: which part of each key block it reads; 0 of whole ones.
        thread: 0..127 inside the warpgroup.
        tSrQ, tSrK: operands of the QK product; tOrP, tOrV: operands of the PV product. Q's is of the present tile only
            after `with_q`.
        acc_S, acc_O: accumulators; `scores.values` and `out` are the same as (rows, columns).
        acc_PV: accumulator of one PV product, if it is added to O only afterwards (`two_level`).
        bounds: visible keys of each row of this thread, see `ScoreTile.set_bounds`.
        zero: 0, which the compiler does not know.
        block_scales: those of the present tile's key blocks, if they have scales of their own; set by `with_scales`.
    """

    index: Int32
    part: Int32 | int
    thread: Int32
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    acc_PV: cute.Tensor | None
    scores: ScoreTile
    out: cute.Tensor
    softmax: OnlineSoftmax
    bounds: cute.Tensor
    zero: Uint32
    block_scales: BlockScales | None = None


def make_warpgroup(kernel, tiles: Tiles, launch: Launch) -> Warpgroup:
    """Partition the block's tiles for this thread's warpgroup."""
    traits = kernel.traits
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - traits.producer_warpgroups
    part: Int32 | int = 0
    sK, sVt = tiles.sK, tiles.sVt
    if traits.key_warpgroups > 1:
        index, part = Int32(0), index
        sK = cute.local_tile(sK, (traits.step_keys, traits.head_dim), (part, 0, None))
        sVt = cute.local_tile(sVt, (traits.head_dim_v, traits.step_keys), (0, part, None))
    mma_qk, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_pv()
    thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
    acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((WGMMA_M, traits.step_keys)), Float32)
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, traits.head_dim_v)), Float32)
    if traits.q_in_regs:
        tSrQ = cute.make_rmem_tensor(thr_qk.partition_shape_A((WGMMA_M, traits.head_dim)), kernel.dtype)
    else:
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(tiles.sQ))
    if kernel.problem.operands.is_fp8:
        tOrP = cute.make_rmem_tensor(thr_pv.partition_shape_A((WGMMA_M, traits.tile_n)), kernel.p_dtype)
    elif traits.p_in_regs:
        tOrP = cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), kernel.dtype)
    else:
        tOrP = mma_pv.make_fragment_A(thr_pv.partition_A(tiles.sP[None, None, index]))
    shape = WGMMA_M, traits.step_keys
    scores = ScoreTile.of(mma_qk, thread, acc_S, shape, launch.inner_scale, launch.packed_heads)
    scores = dataclasses.replace(scores, tree=launch.tree)
    if traits.key_warpgroups > 1:
        scores = dataclasses.replace(scores, first_key=scores.first_key + part * traits.step_keys)
    may_be_empty = kernel.problem.may_be_empty or traits.key_warpgroups > 1
    return Warpgroup(
        index=index,
        part=part,
        thread=thread,
        mma_qk=mma_qk,
        mma_pv=mma_pv,
        tSrQ=tSrQ,
        tSrK=mma_qk.make_fragment_B(thr_qk.partition_B(sK)),
        tOrP=tOrP,
        tOrV=mma_pv.make_fragment_B(thr_pv.partition_B(sVt)),
        acc_S=acc_S,
        acc_O=acc_O,
        acc_PV=cute.make_rmem_tensor_like(acc_O) if traits.two_level else None,
        scores=scores,
        out=rows_view(acc_O),
        softmax=OnlineSoftmax.create(ROWS, launch.scale_log2, may_be_empty, traits.p_offset),
        bounds=scores.make_bounds(ROWS),
        zero=Uint32(launch.heads_per_kv >> 31),
    )


def with_q(kernel, wg: Warpgroup, tiles: Tiles, stage: Int32) -> Warpgroup:
    """The warpgroup with its part of the Q tile in `stage` as operand, loaded if it stays in registers."""
    if not kernel.traits.q_in_regs:
        tile = stage * kernel.traits.mma_warpgroups + wg.index
        return dataclasses.replace(wg, tSrQ=wg.tSrQ[None, None, None, tile])
    copy = kernel.copy_q().get_slice(wg.thread)
    cute.copy(copy, copy.partition_S(tiles.sQ[None, None, wg.index]), copy.retile(wg.tSrQ))
    return wg


def with_scales(kernel, wg: Warpgroup, scales: Scales, launch: Launch, tile: QueryTile) -> Warpgroup:
    """The warpgroup with the scales of its part of a tile: those of Q and K in those of its scores."""
    factor = scales.of_scores(tile)
    wg = dataclasses.replace(wg, block_scales=scales.of_blocks(tile))
    if kernel.problem.scores.softcap:
        return dataclasses.replace(wg, scores=dataclasses.replace(wg.scores, inner_scale=launch.inner_scale * factor))
    return dataclasses.replace(wg, softmax=dataclasses.replace(wg.softmax, scale_log2=launch.scale_log2 * factor))


def at_block(kernel, wg: Warpgroup, n_block: Int32) -> Warpgroup:
    """The warpgroup with the scale of a key block in that of its scores, if key blocks have scales of their own."""
    if wg.block_scales is None:
        return wg
    factor = wg.block_scales.of_keys(n_block)
    if kernel.problem.scores.softcap:
        scores = dataclasses.replace(wg.scores, inner_scale=wg.scores.inner_scale * factor)
        return dataclasses.replace(wg, scores=scores)
    return dataclasses.replace(wg, softmax=dataclasses.replace(wg.softmax, block_scale=factor))


def take_v_scale(wg: Warpgroup, n_block: Int32) -> None:
    """Load what the product of a key block's V is multiplied with, once the product before it is part of O."""
    if wg.block_scales is not None:
        wg.block_scales.take_v(n_block)


def round_p(wg: Warpgroup) -> None:
    """Round the exponentials in S's registers into P's.

    A register of an 8-bit A operand holds four neighbouring keys of a row. It gets two pairs of S, from two groups of 8
    keys, so that no lane needs another one's exponentials. So the keys of Vᵀ are permuted within 16: position
    4 t + 2 j + b holds key 8 j + 2 t + b.
    """
    dtype = wg.tOrP.element_type
    if dtype.width == 16:
        round_fragment(acc_as_operand_a(wg.acc_S), wg.tOrP)
        return
    scores = wg.scores.values
    for row in range(ROWS):
        store_p_row(wg, row, rounded_words([scores[row, c] for c in range(cute.size(scores.shape[1]))], dtype))


def store_p_row(wg: Warpgroup, row: int, words: Iterable[Uint32]) -> None:
    """A row's rounded exponentials, into the registers that the PV product reads."""
    registers = cute.recast_tensor(wg.tOrP, Uint32)
    for i, word in enumerate(words):
        registers[ROWS * i + row] = word


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
