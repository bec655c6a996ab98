"""What the functions of both latent-attention decodes of the sm80 family pass to each other, by subject.

`mla_decode_bundles.py` and `mla_e4m3_bundles.py` add what either kernel has alone.
"""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.latent import LatentLaunch, LatentPages
from cuteflash.core.scores import ScoreTile
from cuteflash.kernels.common.mla_parts import LatentParts


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaTiles:
    """Shared-memory tensors."""

    sQ: cute.Tensor  # (tile_m, 576)
    sK: cute.Tensor  # (tile_n, columns of 16 bits, kv_stage)
    sP: cute.Tensor  # (tile_m, tile_n)
    halves: cute.Tensor | None  # (4, threads, n) fp32: of S, what a warp has for the one with the other columns
    by_warps: cute.Tensor  # (tile_m, key_groups) fp32: what each warp found of a row, its largest score or its sum
    of_rows: cute.Tensor  # (tile_m,) fp32: factors of O, in the end the rows' maxima


@dataclasses.dataclass(frozen=True)
class MlaBlock:
    """The values that all warps of a block use."""

    gQ: cute.Tensor  # (rows, 576, batch)
    gK: cute.Tensor  # (rows of an entry, columns of 16 bits, entries)
    gO: cute.Tensor  # (rows, 512, batch)
    mLSE: cute.Tensor  # (batch, 1, (heads, tokens))
    descale: cute.Tensor | None  # (batch,) of e4m3 rows
    launch: LatentLaunch
    pages: LatentPages
    parts: LatentParts | None  # of split keys
    tiles: MlaTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaFragments:
    """One thread's operands, accumulators and running softmax.

    Attributes:
        thread: index in the block.
        row_group, key_group: of the thread's warp in S.
        k_part: which of Q's and K's columns the warp multiplies.
        mma_qk, mma_pv: the products; rQ, rP fragments of their operands.
        copy_p: ldmatrix slice of P; tOsP what it reads.
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
    bounds: cute.Tensor
