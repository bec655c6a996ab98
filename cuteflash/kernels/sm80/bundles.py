"""What the functions of the sm80 forward kernel pass to each other, by subject."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import OnlineSoftmax
from cuteflash.kernels.common.gather import RowGather


@dataclasses.dataclass(frozen=True)
class Operands:
    """Global tensors as (rows, columns, heads, batch); a query row may be (packed head, token)."""

    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gO: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors; O overlaps the others, which are no longer needed when it is written."""

    sQ: cute.Tensor  # (tile_m, head_dim)
    sK: cute.Tensor  # (tile_n, head_dim, kv_stage)
    sV: cute.Tensor  # (tile_n, head_dim_v, kv_stage)
    sVt: cute.Tensor  # (head_dim_v, tile_n, kv_stage), the same data
    sO: cute.Tensor  # (tile_m, head_dim_v)


@dataclasses.dataclass(frozen=True)
class KvSource:
    """Where K or V comes from: one thread's share of its loads, of one head and sequence.

    Attributes:
        copy: 16 bytes a thread, by cp.async or through registers.
        tXgX: (chunk, passes over rows, column slabs, key block) in global memory.
        tXsX: (chunk, passes over rows, column slabs, stage) in shared memory.
        columns: (1, passes, slabs) whether the chunk lies inside the head dim; None if all do.
        pass_rows: (passes,) static first row of each pass for thread 0.
        first_row: this thread's row in the first pass.
    """

    copy: cute.TiledCopy
    tXgX: cute.Tensor
    tXsX: cute.Tensor
    columns: cute.Tensor | None
    pass_rows: cute.Tensor
    first_row: Int32


@dataclasses.dataclass(frozen=True)
class KvSources:
    """One thread's share of the K and V loads."""

    k: KvSource | RowGather
    v: KvSource | RowGather


@dataclasses.dataclass(frozen=True)
class Fragments:
    """One thread's operands, accumulators and running softmax.

    Attributes:
        thread: index in the block.
        rQ, rK, rVt: fragments of the products' operands.
        copy_q, copy_k, copy_v: ldmatrix slices; tSsQ, tSsK, tOsVt what they read.
        acc_S, acc_O: accumulators; `scores.values` and `out` are the same as (rows, columns).
        sQ: see `Tiles`.
        row_scales: of an e4m3 cache the scale of each row's scores, which `scores` or `softmax` have as theirs.
    """

    thread: Int32
    mma: cute.TiledMma
    rQ: cute.Tensor
    rK: cute.Tensor
    rVt: cute.Tensor
    copy_q: cute.TiledCopy
    copy_k: cute.TiledCopy
    copy_v: cute.TiledCopy
    tSsQ: cute.Tensor
    tSsK: cute.Tensor
    tOsVt: cute.Tensor
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: ScoreTile
    out: cute.Tensor
    softmax: OnlineSoftmax
    sQ: cute.Tensor
    row_scales: cute.Tensor | None = None
