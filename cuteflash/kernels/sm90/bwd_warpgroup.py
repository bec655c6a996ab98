"""A consumer warpgroup of the backward: its 64 keys, and what it holds of them in registers."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.core.scores import ScoreTile
from cuteflash.core.views import acc_as_operand_a, transposed
from cuteflash.kernels.sm90.bwd_bundles import Block, Tiles
from cuteflash.kernels.sm90.bwd_dq_product import DqProduct, make_dq_product
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

ROWS = 2  # keys of S^T that one thread holds elements of


@dataclasses.dataclass(frozen=True)
class Products:
    """One consumer warpgroup's operands and accumulators.

    Attributes:
        tSrK, tSrQ: operands of S^T = K Q^T; tPrV, tPrdO: of dP^T = V dO^T.
        tVrP, tVrdO: of dV += P^T dO; tKrdS, tKrQ: of dK += dS^T Q. P and dS are registers.
        weights: what dP is multiplied with to give dS: P, or under a softcap P times the slope of the cap.
        acc_S, acc_dP, acc_dV, acc_dK: accumulators.
    """

    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dv: cute.TiledMma
    mma_dk: cute.TiledMma
    tSrK: cute.Tensor
    tSrQ: cute.Tensor
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrP: cute.Tensor
    tVrdO: cute.Tensor
    tKrdS: cute.Tensor
    tKrQ: cute.Tensor
    weights: cute.Tensor
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor


@dataclasses.dataclass(frozen=True)
class KeyWarpgroup:
    """One consumer warpgroup and its 64 keys.

    Attributes:
        index: 0 for the first consumer warpgroup.
        thread: 0..127 inside the warpgroup.
        products: operands and accumulators.
        dq: what the warpgroup computes of dQ; None if that is another one's work.
        scores: S^T's accumulator as (keys, queries).
    """

    index: Int32
    thread: Int32
    products: Products
    dq: DqProduct | None
    scores: ScoreTile


def make_products(kernel, tiles: Tiles, index: Int32, thread: Int32) -> Products:
    """Partition the block's tiles for this thread's warpgroup."""
    traits, dtype = kernel.traits, kernel.dtype
    mma_s, mma_dp = kernel.tiled_mma_s(), kernel.tiled_mma_dp()
    mma_dv, mma_dk = kernel.tiled_mma_dv(), kernel.tiled_mma_dk()
    thr_s, thr_dp, thr_dv, thr_dk = (mma.get_slice(thread) for mma in (mma_s, mma_dp, mma_dv, mma_dk))

    def accumulator(thr, shape: tuple[int, int]) -> cute.Tensor:
        return cute.make_rmem_tensor(thr.partition_shape_C(shape), Float32)

    acc_S = accumulator(thr_s, (WGMMA_M, traits.tile_m))
    sK_rows = cute.local_tile(tiles.sK, (WGMMA_M, traits.head_dim), (index, 0, None))
    sV_rows = cute.local_tile(tiles.sV, (WGMMA_M, traits.head_dim_v), (index, 0, None))
    tVrP = cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), dtype)
    return Products(
        mma_s=mma_s,
        mma_dp=mma_dp,
        mma_dv=mma_dv,
        mma_dk=mma_dk,
        tSrK=key_operand(mma_s, thr_s, sK_rows, traits.k_in_regs, dtype),
        tSrQ=mma_s.make_fragment_B(thr_s.partition_B(tiles.sQ)),
        tPrV=key_operand(mma_dp, thr_dp, sV_rows, traits.v_in_regs, dtype),
        tPrdO=mma_dp.make_fragment_B(thr_dp.partition_B(tiles.sdO)),
        tVrP=tVrP,
        weights=cute.make_rmem_tensor_like(tVrP) if kernel.problem.scores.softcap else tVrP,
        tVrdO=mma_dv.make_fragment_B(thr_dv.partition_B(transposed(tiles.sdO))),
        tKrdS=cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), dtype),
        tKrQ=mma_dk.make_fragment_B(thr_dk.partition_B(transposed(tiles.sQ))),
        acc_S=acc_S,
        acc_dP=accumulator(thr_dp, (WGMMA_M, traits.tile_m)),
        acc_dV=accumulator(thr_dv, (WGMMA_M, traits.head_dim_v)),
        acc_dK=accumulator(thr_dk, (WGMMA_M, traits.head_dim)),
    )


def key_operand(mma: cute.TiledMma, thr: cute.TiledMma, sX: cute.Tensor, in_regs: bool, dtype: type) -> cute.Tensor:
    """K or V as operand of the scores' product: stages in shared memory, or registers that `fetch` fills."""
    if in_regs:
        return cute.make_rmem_tensor(thr.partition_shape_A((WGMMA_M, cute.size(sX.shape[1]))), dtype)
    return mma.make_fragment_A(thr.partition_A(sX))


def of_stage(operand: cute.Tensor, in_regs: bool, stage: Int32) -> cute.Tensor:
    """The operand K or V of the tile in a stage."""
    return operand if in_regs else operand[None, None, None, stage]


def fetch(wg: KeyWarpgroup, copy: cute.TiledCopy, sX: cute.Tensor, stage: Int32, operand: cute.Tensor) -> None:
    """Fetch this warpgroup's rows of K or V, which have landed, into registers."""
    rows = cute.local_tile(sX[None, None, stage], (WGMMA_M, cute.size(sX.shape[1])), (wg.index, 0))
    mine = copy.get_slice(wg.thread)
    cute.copy(mine, mine.partition_S(rows), mine.retile(operand))


def make_key_warpgroup(kernel, block: Block) -> KeyWarpgroup:
    """This thread's warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    if kernel.traits.keep_thread:  # ptxas would read it again wherever it is used, but does not shuffle again
        thread = cute.arch.shuffle_sync(thread, cute.arch.lane_idx())
    index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
    products = make_products(kernel, block.tiles, index, thread)
    shape = WGMMA_M, kernel.traits.tile_m
    return KeyWarpgroup(
        index=index,
        thread=thread,
        products=products,
        dq=None if kernel.traits.is_dq_apart else make_dq_product(kernel, block.tiles, index, thread),
        scores=ScoreTile.of(products.mma_s, thread, products.acc_S, shape, block.launch.inner_scale, 1),
    )
