"""What the functions of the sm80 latent-attention decode pass to each other, by subject."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.latent import LatentLaunch, LatentPages
from cuteflash.core.scores import ScoreTile
from cuteflash.kernels.common.mla_combine import LatentParts


@dataclasses.dataclass(frozen=True)
class MlaTiles:
    """Shared-memory tensors. What is kept of Q in registers lies over what is used later."""

    sQ: cute.Tensor  # (tile_m, 576)
    sK: cute.Tensor  # (tile_n, 576, kv_stage)
    sVt: cute.Tensor  # (512, tile_n, kv_stage), the same data
    sP: cute.Tensor  # (tile_m, tile_n)
    halves: cute.Tensor | None  # (4, threads, n) fp32: of S, what a warp has for the one with the other columns
    by_warps: cute.Tensor  # (tile_m, key_groups) fp32: what each warp found of a row, its largest score or its sum
    of_rows: cute.Tensor  # (tile_m,) fp32: factors of O, in the end the rows' maxima


@dataclasses.dataclass(frozen=True)
class MlaBlock:
    """The values that all warps of a block use."""

    gQ: cute.Tensor  # (rows, 576, batch)
    gK: cute.Tensor  # (rows of an entry, 576, entries)
    gO: cute.Tensor  # (rows, 512, batch)
    mLSE: cute.Tensor  # (batch, 1, (heads, tokens))
    launch: LatentLaunch
    pages: LatentPages
    parts: LatentParts | None  # of split keys
    tiles: MlaTiles


@dataclasses.dataclass(frozen=True)
class Fragments:
    """One thread's operands, accumulators and running softmax.

    Attributes:
        thread: index in the block.
        row_group, key_group: of the thread's warp in S.
        k_part: which of Q's and K's columns the warp multiplies.
        mma_qk, mma_pv: the products; rQ, rK, rP, rVt fragments of their operands.
        copy_q, copy_k, copy_p, copy_v: ldmatrix slices; tSsQ, tSsK, tOsP, tOsVt what they read.
        accs_S: accumulators of the product with K, to be added up.
        acc_S: what the warp has of S in the end, the first one of them if warps do not share columns; `scores.values`
            is the same as (rows, keys).
        acc_O: accumulator of O; `out.values` is the same as (rows, columns).
        row_max: of this thread's rows of S, by which exponentials are shifted: scaled scores, base 2. Every warp with
            these rows has the same.
        row_sum: of this thread's exponentials.
        bounds: (rows, 2) visible keys of each of these rows.
    """

    thread: Int32
    row_group: Int32
    key_group: Int32
    k_part: Int32
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    rQ: cute.Tensor
    rK: cute.Tensor
    rP: cute.Tensor
    rVt: cute.Tensor
    copy_q: cute.TiledCopy
    copy_k: cute.TiledCopy
    copy_p: cute.TiledCopy
    copy_v: cute.TiledCopy
    tSsQ: cute.Tensor
    tSsK: cute.Tensor
    tOsP: cute.Tensor
    tOsVt: cute.Tensor
    accs_S: tuple[cute.Tensor, ...]
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: ScoreTile
    out: ScoreTile
    row_max: cute.Tensor
    row_sum: cute.Tensor
    bounds: cute.Tensor
