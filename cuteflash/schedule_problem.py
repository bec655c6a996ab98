"""The schedule of launches that split keys: options, what its kernel is generated for, and the kernel's arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from cuteflash.problem import DTYPES, MASK_KINDS, MaskKind


class ScheduleOptions(NamedTuple):
    """The arguments of the operator that schedules, after its tensors: what of the calls decides their launches.

    Attributes:
        rows: queries of a sequence, or with `cu_seqlens_q` of all together.
        capacity: rows of a cache entry.
        heads, kv_heads, head_dim, head_dim_v: of q and of the caches.
        dtype: element type, "bf16" or "fp16".
        window_left, window_right, attention_chunk, num_splits, pack_gqa, family, lengths: of the calls, see
            `cuteflash.arguments.FwdOptions`.
    """

    rows: int = 1
    capacity: int = 0
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = DTYPES[-1]
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    num_splits: int = 0
    pack_gqa: bool | None = None
    family: str | None = None
    lengths: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """What the kernel is generated for.

    Attributes:
        mask: of the calls.
        is_packed: queries are packed.
        has_leftpad: how many of a cache entry's first rows do not count is in a vector.
    """

    mask: MaskKind = "full"
    is_packed: bool = False
    has_leftpad: bool = False

    def __post_init__(self) -> None:
        if self.mask not in MASK_KINDS:
            raise ValueError(f"mask is {self.mask!r}; allowed: {', '.join(MASK_KINDS)}")


class ScheduleTensors(NamedTuple):
    """The tensors of the kernel, int32; inside it CuTe tensors, outside torch's. What a problem lacks is None."""

    metadata: Any  # (n,), see `cuteflash.core.split_slots`
    seqused_k: Any  # (batch,)
    cu_seqlens_q: Any = None  # (batch + 1,)
    cache_leftpad: Any = None  # (batch,)


class ScheduleScalars(NamedTuple):
    """The numbers of the kernel, Int32."""

    seqlen_q: Any  # of a dense batch, or the rows of all packed sequences
    seqlen_k: Any  # rows of a cache entry
    heads: Any  # as the tiles of the calls see them
    lanes: Any  # lines of tiles, see `cuteflash.core.split`
    tile_tokens: Any  # of the kernel that attends
    tile_n: Any
    window_left: Any
    window_right: Any
    most_parts: Any  # of a tile, at least 2
