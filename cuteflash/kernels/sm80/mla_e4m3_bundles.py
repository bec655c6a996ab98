"""What the functions of the latent-attention decode from an e4m3 cache pass to each other, by subject."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.latent import LatentLaunch, LatentPages
from cuteflash.core.scores import ScoreTile
from cuteflash.kernels.common.mla_combine import LatentParts


@dataclasses.dataclass(frozen=True)
class E4m3Tiles:
    """Shared-memory tensors, and where two of them begin, of which chunks are addressed by hand."""

    sQ: cute.Tensor  # (tile_m, 576)
    start_q: cute.Pointer
    sK: cute.Tensor  # (tile_n, 288, kv_stage), pairs of bytes
    start_k: cute.Pointer
    sP: cute.Tensor  # (tile_m, tile_n)
    halves: cute.Tensor | None  # (4, threads, n) fp32: of S, what a warp has for the one with the other columns
    by_warps: cute.Tensor  # (tile_m, key_groups) fp32: what each warp found of a row, its largest score or its sum
    of_rows: cute.Tensor  # (tile_m,) fp32: factors of O, in the end the rows' maxima
    scales: cute.Tensor  # (tile_m,) fp32: factors of the rows' products with K


@dataclasses.dataclass(frozen=True)
class E4m3Block:
    """The values that all warps of a block use."""

    gQ: cute.Tensor  # (rows, 576, batch), as fp16 whatever it is
    gK: cute.Tensor  # (rows of an entry, 288, entries), pairs of bytes
    gO: cute.Tensor  # (rows, 512, batch)
    mLSE: cute.Tensor  # (batch, 1, (heads, tokens))
    descale: cute.Tensor  # (batch,)
    launch: LatentLaunch
    pages: LatentPages
    parts: LatentParts | None  # of split keys
    tiles: E4m3Tiles


@dataclasses.dataclass(frozen=True)
class E4m3Fragments:
    """One thread's operands, accumulators and running softmax.

    Attributes:
        thread: index in the block; `lane` in its warp.
        row_group, key_group: of the thread's warp in S.
        key_part: of the step's keys, which the warp multiplies; k_part: which of Q's and K's columns.
        warp: index in the block, by which it has columns of O.
        mma_qk, mma_pv: the products.
        rQ: fragments of Q, ((2, 2, 2), groups of 16 rows, steps of a warp).
        rP: fragments of P; copy_p their ldmatrix slice; tOsP what that reads.
        accs_S: accumulators of the product with K, to be added up.
        acc_S: what the warp has of S in the end, the first one of them if warps do not share columns; `scores.values`
            is the same as (rows, keys).
        acc_O: accumulator of O; `out.values` is the same as (rows, columns), of 16 columns the even ones first.
        row_max: of this thread's rows of S, by which exponentials are shifted: scaled scores, base 2. Every warp with
            these rows has the same.
        row_sum: of this thread's exponentials.
        row_scale: of these rows, what the products with K are multiplied with.
        bounds: (rows, 2) visible keys of each of these rows.
    """

    thread: Int32
    lane: Int32
    warp: Int32
    row_group: Int32
    key_group: Int32
    key_part: Int32
    k_part: Int32
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    rQ: cute.Tensor
    rP: cute.Tensor
    copy_p: cute.TiledCopy
    tOsP: cute.Tensor
    accs_S: tuple[cute.Tensor, ...]
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: ScoreTile
    out: ScoreTile
    row_max: cute.Tensor
    row_sum: cute.Tensor
    row_scale: cute.Tensor
    bounds: cute.Tensor
