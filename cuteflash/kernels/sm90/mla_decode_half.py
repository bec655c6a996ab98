"""A consumer warpgroup of the latent-attention decode: what it holds in registers, its products and its softmax."""

from __future__ import annotations

import dataclasses
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cuteflash.core.convert import round_fragment
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import exp2, quad_max, row_peak
from cuteflash.core.views import acc_as_operand_a, rows_view
from cuteflash.kernels.sm90.mla_decode_bundles import HALF_PARTS, MlaBlock, MlaRings, MlaTiles
from cuteflash.traits.mla_sm90 import CONSUMERS, LATENT_DIM_V, SLAB, SLABS_V, WGMMA_M
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_K

ROWS = 2  # of S and O that one thread holds elements of
NO_MAXIMUM = -1e30  # of a row before its first key; finite, so that no difference of maxima is NaN
SLAB_STEPS = SLAB // WGMMA_K


@dataclasses.dataclass(frozen=True)
class Half:
    """One consumer warpgroup: every other page's scores, and its half of O's columns.

    Attributes:
        who: 0 or 1.
        thread: 0..127 inside the warpgroup.
        mma_qk, mma_qk_last: products with K, of slabs of Q in shared memory and of the last one in registers.
        mma_own, mma_other: products with V, of P in registers and of the other warpgroup's in shared memory.
        tSrQ, tSrQ_last, tSrK: operands of the products with K; K's of the own page.
        tOrP, tOrP_other: operands P.
        tOrV: operands V, of each page this half of the columns.
        acc_S, acc_O: accumulators; `scores.values` and `out` are the same as (rows, columns).
        row_max: of the rows of this thread, by which exponentials are shifted: scaled scores, base 2.
        row_sum: of this thread's exponentials.
        bounds: (rows, 2) visible keys of each row of this thread.
    """

    who: cutlass.Constexpr[int]
    thread: Int32
    mma_qk: cute.TiledMma
    mma_qk_last: cute.TiledMma
    mma_own: cute.TiledMma
    mma_other: cute.TiledMma
    tSrQ: cute.Tensor
    tSrQ_last: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrP_other: cute.Tensor
    tOrV: cute.Tensor
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: ScoreTile
    out: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    bounds: cute.Tensor


def make_halves(kernel, tiles: MlaTiles) -> tuple[Half, Half]:
    """What either warpgroup works with; registers are the same, as a thread belongs to one of them."""
    first = make_half(kernel, tiles, 0)
    second = make_half(kernel, tiles, 1)
    shared = ("thread", "tSrQ_last", "tOrP", "acc_S", "acc_O", "scores", "out", "row_max", "row_sum", "bounds")
    return first, dataclasses.replace(second, **{name: getattr(first, name) for name in shared})


def make_half(kernel, tiles: MlaTiles, who: int) -> Half:
    """Partition the block's tiles for a warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    mma_qk, mma_qk_last = kernel.tiled_mma_qk(a_from_regs=False), kernel.tiled_mma_qk(a_from_regs=True)
    mma_own, mma_other = kernel.tiled_mma_pv(a_from_regs=True), kernel.tiled_mma_pv(a_from_regs=False)
    thr_qk, thr_own, thr_other = (mma.get_slice(thread) for mma in (mma_qk, mma_own, mma_other))
    shape = WGMMA_M, kernel.traits.tile_n
    acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C(shape), Float32)
    acc_O = cute.make_rmem_tensor(thr_own.partition_shape_C((WGMMA_M, LATENT_DIM_V // CONSUMERS)), Float32)
    last = mma_qk_last.get_slice(thread).partition_shape_A((WGMMA_M, SLAB))
    return Half(
        who=who,
        thread=thread,
        mma_qk=mma_qk,
        mma_qk_last=mma_qk_last,
        mma_own=mma_own,
        mma_other=mma_other,
        tSrQ=mma_qk.make_fragment_A(thr_qk.partition_A(tiles.sQ)),
        tSrQ_last=cute.make_rmem_tensor(last, kernel.dtype),
        tSrK=mma_qk.make_fragment_B(thr_qk.partition_B(tiles.sK[None, None, who])),
        tOrP=cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), kernel.dtype),
        tOrP_other=mma_other.make_fragment_A(thr_other.partition_A(tiles.sP[1 - who])),
        tOrV=mma_own.make_fragment_B(thr_own.partition_B(tiles.sVt[who])),
        acc_S=acc_S,
        acc_O=acc_O,
        scores=ScoreTile.of(mma_qk, thread, acc_S, shape, Float32(1.0), 1),
        out=rows_view(acc_O),
        row_max=cute.make_rmem_tensor(ROWS, Float32),
        row_sum=cute.make_rmem_tensor(ROWS, Float32),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
    )


def take_last_slab(kernel, half: Half, tiles: MlaTiles) -> None:
    """The last columns of Q into registers; P of the second warpgroup takes their place."""
    copy = kernel.copy_q_last().get_slice(half.thread)
    cute.copy(copy, copy.partition_S(tiles.sQ_slabs[None, None, SLABS_V]), copy.retile(half.tSrQ_last))


def issue_scores(kernel, half: Half, rings: MlaRings, phase: Int32) -> None:
    """Issue S = Q Kᵀ of the own page, group by group as these arrive; all are there when it returns."""
    for group, slabs in enumerate(kernel.traits.slabs_of_groups):
        rings.wait_group(half.who, group, phase)
        warpgroup.fence()
        product, last = cute.make_mma_atom(half.mma_qk.op), cute.make_mma_atom(half.mma_qk_last.op)
        for atom in (product, last):
            atom.set(warpgroup.Field.ACCUMULATE, group > 0)
        for slab, step in itertools.product(slabs, range(SLAB_STEPS)):
            k = slab * SLAB_STEPS + step
            keys = half.tSrK[None, None, k]
            if slab < SLABS_V:
                cute.gemm(product, half.acc_S, half.tSrQ[None, None, k], keys, half.acc_S)
            else:
                cute.gemm(last, half.acc_S, half.tSrQ_last[None, None, step], keys, half.acc_S)
            for atom in (product, last):
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()


def issue_values(half: Half, mma: cute.TiledMma, weights: cute.Tensor, page: int) -> None:
    """Issue O += P V of a page: each part of the columns as a group of its own."""
    warpgroup.fence()
    shape, stride = half.acc_O.layout.shape[0], half.acc_O.layout.stride[0]
    columns = cute.make_layout((shape, 1, 1), stride=(stride, 0, 0))
    one = cute.make_layout((1, 1), stride=(0, 0))
    for part in range(HALF_PARTS):
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        acc = cute.make_tensor(half.acc_O[None, 0, part].iterator, columns)
        for k in range(cute.size(weights.shape[2])):
            values = cute.make_tensor(half.tOrV[None, part, k, page].iterator, one)
            cute.gemm(atom, acc, weights[None, None, k], values, acc)
        warpgroup.commit_group()


def await_values(half: Half, rings: MlaRings, page: int) -> None:
    """Wait for the latest product with V, and let go of each part of the page once it has been read."""
    for part in range(HALF_PARTS):
        warpgroup.wait_group(HALF_PARTS - 1 - part)
        rings.release(page, half.who * HALF_PARTS + part)


def issue_own(half: Half) -> None:
    """Issue O += P V of the own page."""
    issue_values(half, half.mma_own, half.tOrP, half.who)


def issue_other(kernel, half: Half, rings: MlaRings, phase: Int32) -> None:
    """Issue O += P V of the other warpgroup's page, which that has seen arrive."""
    page = 1 - half.who
    for group in kernel.traits.groups_of_half(half.who):
        rings.wait_group(page, group, phase)
    issue_values(half, half.mma_other, half.tOrP_other, page)


def publish(kernel, half: Half, tiles: MlaTiles) -> None:
    """P of the own page and the rows' maxima into shared memory, for the other warpgroup and the async proxy."""
    round_fragment(acc_as_operand_a(half.acc_S), half.tOrP)
    copy = kernel.copy_p().get_slice(half.thread)
    cute.copy(copy, copy.retile(half.tOrP), copy.partition_D(tiles.sP[half.who]))
    cute.arch.fence_view_async_shared()


@cute.jit
def soften(kernel: cutlass.Constexpr, half: Half, block: MlaBlock, factor: cute.Tensor):
    """Turn the scores into exponentials, in place, and add them to the sums; `factor` becomes that of O.

    A maximum moves only if a score exceeds it by more than the headroom, after a tile's first pages hardly ever: only
    then lanes compare their largest scores of a row. Returns whether one of the warp's did.
    """
    values, scale = half.scores.values, block.launch.scale_log2
    peaks = [row_peak(values, r) for r in range(ROWS)]
    factor.fill(1.0)
    outgrown = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(ROWS):
        outgrown = outgrown | (peaks[r] * scale > half.row_max[r] + kernel.traits.headroom)
    moved = cute.arch.vote_any_sync(outgrown)
    if moved:
        for r in cutlass.range_constexpr(ROWS):
            old = half.row_max[r]
            peak = quad_max(peaks[r]) * scale
            new = cutlass.select_(peak > old + kernel.traits.headroom, peak, old)
            half.row_max[r] = new
            factor[r] = exp2(old - new)
            half.row_sum[r] = half.row_sum[r] * factor[r]
    for r in cutlass.range_constexpr(ROWS):
        new = half.row_max[r]
        total = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            p = exp2(values[r, c] * scale - new)
            values[r, c] = p
            total += p
        half.row_sum[r] = half.row_sum[r] + total
        if half.scores.first_key == 0:
            block.tiles.maxima[half.scores.row(r), half.who] = new
    return moved


@cute.jit
def take_maxima(half: Half, block: MlaBlock, factor: cute.Tensor):
    """The maxima after the other warpgroup's page; whether one of the warp's rows has another one than before.

    Then the sums are scaled, and `factor` becomes that of O.
    """
    found = [block.tiles.maxima[half.scores.row(r), 1 - half.who] for r in range(ROWS)]
    differs = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(ROWS):
        differs = differs | (found[r] != half.row_max[r])
    moved = cute.arch.vote_any_sync(differs)
    if moved:
        for r in cutlass.range_constexpr(ROWS):
            factor[r] = exp2(half.row_max[r] - found[r])
            half.row_max[r] = found[r]
            half.row_sum[r] = half.row_sum[r] * factor[r]
    return moved


@cute.jit
def scale_out(half: Half, factor: cute.Tensor, moved: cutlass.Boolean):
    """Multiply O's rows with their factors, if one of the warp's maxima has moved."""
    if moved:
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(half.out.shape[1])):
                half.out[r, c] = half.out[r, c] * factor[r]
