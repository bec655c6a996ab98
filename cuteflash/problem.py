"""What a kernel computes: everything that changes the generated code, and nothing that does not.

A problem never holds a length, a batch size, a stride, a scale or a window size: those are run-time
arguments of the compiled kernel, so calls that differ only in them share one compilation.

Problems are composed: `Operands` describes the matrices of the two products, `Scores` what happens to the scores
between them, `Storage` how sequences lie in memory. An operation's problem adds what only that operation needs.
`Operands` and what it is made of are in `cuteflash.operands`; others import them from here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import ClassVar, Literal, Self, cast, get_args

from cuteflash.operands import (
    DTYPE_BYTES,
    DTYPES,
    FP8_DTYPES,
    FP8_OPERANDS,
    FP8_OUT,
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    PACK_GQA_MAX,
    Dtype,
    Fp8Dtype,
    HalfDtype,
    Operands,
    check_choice,
    packs_block_scales,
)

__all__ = [  # what others import from here though it is not defined here
    "DTYPES",
    "DTYPE_BYTES",
    "FP8_DTYPES",
    "FP8_OPERANDS",
    "FP8_OUT",
    "HEAD_DIM_MAX",
    "HEAD_DIM_STEP",
    "PACK_GQA_MAX",
    "Dtype",
    "Fp8Dtype",
    "HalfDtype",
    "Operands",
    "packs_block_scales",
]

Operation = Literal["fwd", "bwd"]
MaskKind = Literal["full", "causal", "window"]
StorageKind = Literal["dense", "varlen", "paged"]
SinkDtype = Literal["fp32", "fp16", "bf16"]
Feature = Literal[
    "softcap",
    "lse",
    "varlen",
    "deterministic",
    "turned_v",
    "v_mean",
    "block_scales",
    "split",
    "sink",
    "e4m3_cache",
    "tree",
]

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
MASK_KINDS: tuple[str, ...] = get_args(MaskKind)
STORAGE_KINDS: tuple[str, ...] = get_args(StorageKind)
FEATURES: tuple[Feature, ...] = get_args(Feature)
SINK_DTYPES: tuple[SinkDtype, ...] = get_args(SinkDtype)

E4M3_MAX = 448.0  # the largest number of e4m3
FP8_MAX: dict[str, float] = {"e4m3": E4M3_MAX, "e5m2": 57344.0}
TRANSPOSED_KEYS = 128  # Vᵀ holds a sequence's keys in whole blocks of so many
TREE_TOKENS_MAX = 64  # new tokens of a sequence that form a tree: bits of a mask
UNBOUNDED = 1 << 30  # a window side without an edge, as kernels get it: beyond every length, and sums stay in 32 bits
LENGTH_MAX = UNBOUNDED - 1024  # rows or keys of one call: a tile reaches past the end, and its indices are 32-bit
CACHE_ROWS_MAX = (1 << 31) - (1 << 16)  # that a TMA descriptor counts in one mode
SHARED_COLUMNS = 64  # of K that all heads share, if they are given apart: one slab of a swizzled tile
PAGE_ROWS_STEP = 8  # rows that a swizzled tile repeats after: boxes of several pages fill it in such bands


def has_left_edge(mask: MaskKind) -> bool:
    """Whether the mask may hide keys before the first visible one."""
    return mask == "window"


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """The steps between scores and softmax.

    Attributes:
        mask: ``"full"``, ``"causal"`` (bottom-right aligned) or ``"window"`` (both edges at run time).
        softcap: scores pass through ``softcap * tanh(score / softcap)`` before the mask.
        chunked: a query sees only keys of its own chunk of positions, whose length a kernel gets; of a ``"window"``.
        sink: each query head has a logit that joins the softmax of its rows and has no value: its element type; None
            is none.
        tree: of the last keys of a sequence, those of its queries, a query sees only those that its bits say. Its mask
            has a right edge, the query's own position.
    """

    mask: MaskKind = "full"
    softcap: bool = False
    chunked: bool = False
    sink: SinkDtype | None = None
    tree: bool = False

    def __post_init__(self) -> None:
        check_choice("mask", self.mask, MASK_KINDS)
        if self.tree and self.mask == "full":
            raise ValueError("tree is True; allowed with mask 'full': False, a tree has a right edge")
        if self.chunked and not self.has_left_edge:
            raise ValueError(f"chunked is True; allowed with mask {self.mask!r}: False, a chunk has both edges")
        if self.sink is not None:
            check_choice("sink", self.sink, SINK_DTYPES)

    def asking(self, features: Collection[Feature]) -> Self:
        """The same mask with just these optional features; sinks are fp32."""
        sink = SINK_DTYPES[0] if "sink" in features else None
        return dataclasses.replace(self, softcap="softcap" in features, sink=sink, tree="tree" in features)

    @property
    def has_left_edge(self) -> bool:
        """See `has_left_edge`."""
        return has_left_edge(self.mask)


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """How the sequences of a batch lie in memory.

    Attributes:
        q: of Q and O. ``"dense"``: one length for all, in a batch mode. ``"varlen"``: one after the other, each with
            its own length.
        k: of K and V, likewise. ``"paged"``: a cache (pages, page size, heads, columns). Without a page table each
            sequence has one page.
        used_q, used_k: of each sequence only so many of its first rows count as a tensor says (``seqused_q``,
            ``seqused_k``).
        page_rows: of paged K and V, the rows of one TMA box, all in one page; 0 if each row is looked up by itself.
        wide_boxes: such a box holds all columns, which then lie together in shared memory; otherwise a slab of them, as
            wide as the swizzle.
        has_page_table: the pages of each cache entry are in a table.
        has_cache_batch_idx: the cache entry of each sequence is in a vector; otherwise it is the sequence's number.
        has_leftpad: how many of a cache entry's first rows do not count is in a vector.
    """

    q: StorageKind = "dense"
    k: StorageKind = "dense"
    used_q: bool = False
    used_k: bool = False
    page_rows: int = 0
    wide_boxes: bool = False
    has_page_table: bool = False
    has_cache_batch_idx: bool = False
    has_leftpad: bool = False

    def __post_init__(self) -> None:
        check_choice("storage of q", self.q, STORAGE_KINDS[:2])
        check_choice("storage of k", self.k, STORAGE_KINDS)
        if self.page_rows % PAGE_ROWS_STEP:
            raise ValueError(f"page_rows is {self.page_rows}; allowed: multiples of {PAGE_ROWS_STEP}")
        of_caches = self.page_rows or self.has_page_table or self.has_cache_batch_idx or self.has_leftpad
        if of_caches and self.k != "paged":
            raise ValueError(f"storage of k is {self.k!r}; allowed with what only a cache has: 'paged'")
        if self.page_rows and self.has_page_table and self.has_leftpad:
            raise ValueError(f"page_rows is {self.page_rows}; allowed with has_leftpad: 0, as blocks begin in a page")
        if self.wide_boxes and not self.page_rows:
            raise ValueError("wide_boxes is True; allowed with page_rows 0: False, as rows have no boxes")

    @property
    def gathers(self) -> bool:
        """Whether rows of K and V are looked up one by one."""
        return self.k == "paged" and self.page_rows == 0


DENSE = Storage()
PACKED = Storage("varlen", "varlen", used_q=True, used_k=True)  # what asks the most of a kernel of packed sequences


@dataclasses.dataclass(frozen=True, slots=True)
class FwdProblem:
    """The problem that a forward kernel is generated for.

    Attributes:
        operands, scores, storage: see these classes.
        has_lse: the log-sum-exp of each row is written, fp32, natural log.
        is_split: the keys of a tile may be dealt to several blocks, see `cuteflash.core.split`.
        is_scheduled: where each block's share of them begins is in a tensor, computed before the launch.
    """

    operation: ClassVar[Operation] = "fwd"

    operands: Operands
    scores: Scores = Scores()
    storage: Storage = DENSE
    has_lse: bool = False
    is_split: bool = False
    is_scheduled: bool = False

    def __post_init__(self) -> None:
        if self.is_split and self.operands.is_fp8:
            raise ValueError(f"is_split is True; allowed with {self.operands.qk_dtype!r}: False")
        if self.is_scheduled and not self.is_split:
            raise ValueError("is_scheduled is True; allowed without is_split: False")

    @classmethod
    def dense(
        cls,
        dtype: Dtype,
        head_dim: int,
        head_dim_v: int,
        mask: MaskKind = "full",
        *,
        softcap: bool = False,
        chunked: bool = False,
        sink: SinkDtype | None = None,
        lse: bool = False,
        packed_heads: int = 1,
    ) -> Self:
        """A problem whose operands are `Operands.of` one element type and whose sequences have one length."""
        operands = Operands.of(dtype, head_dim, head_dim_v, packed_heads)
        return cls(operands, Scores(mask, softcap, chunked, sink), has_lse=lse)

    @property
    def features(self) -> frozenset[Feature]:
        """The features in use, beyond a mask, which not every row serves."""
        return _features(
            softcap=self.scores.softcap,
            lse=self.has_lse,
            varlen=self.storage != DENSE,
            turned_v=self.operands.is_fp8 and not self.operands.transposed_v,
            v_mean=self.operands.has_v_mean,
            block_scales=self.operands.has_block_scales,
            split=self.is_split,
            sink=self.scores.sink is not None,
            e4m3_cache=self.operands.cache_dtype is not None,
            tree=self.scores.tree,
        )

    @property
    def takes_split_rows(self) -> bool:
        """Whether rows that split keys serve it: they are shaped for few queries, which is what a tree has."""
        return self.is_split or self.scores.tree

    @property
    def may_be_empty(self) -> bool:
        """Whether a block that a tile visits may have no visible key for some query of the tile."""
        return self.scores.mask != "full" or self.storage != DENSE

    def packed(self, heads: int) -> Self:
        """The same problem with `heads` query heads of one KV head in the rows of a tile."""
        return dataclasses.replace(self, operands=dataclasses.replace(self.operands, packed_heads=heads))

    def asking(self, features: Collection[Feature]) -> Self:
        """The same with just these optional features."""
        is_fp8 = self.operands.is_fp8
        operands = dataclasses.replace(
            self.operands,
            transposed_v=is_fp8 and "turned_v" not in features,
            transposed_before=False,
            has_v_mean=is_fp8 and "v_mean" in features,
            cache_dtype="e4m3" if "e4m3_cache" in features else None,
            has_block_scales=is_fp8 and "block_scales" in features,
        )
        scores = self.scores.asking(features)
        storage = PACKED if "varlen" in features else DENSE
        return dataclasses.replace(
            self,
            operands=operands,
            scores=scores,
            storage=storage,
            has_lse="lse" in features,
            is_split="split" in features,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BwdProblem:
    """The problem that a backward kernel is generated for.

    Attributes:
        operands, scores, storage: of the forward; the gradients have the types and the storage of what they belong to.
        has_dlse: a gradient flows into the log-sum-exp.
        is_deterministic: two runs give the same bits.
    """

    operation: ClassVar[Operation] = "bwd"
    is_split: ClassVar[bool] = False
    takes_split_rows: ClassVar[bool] = False

    operands: Operands
    scores: Scores = Scores()
    storage: Storage = DENSE
    has_dlse: bool = False
    is_deterministic: bool = False

    def __post_init__(self) -> None:
        check_choice("dtype of a backward", self.operands.qk_dtype, DTYPES)
        check_choice("storage of k of a backward", self.storage.k, STORAGE_KINDS[:2])

    @classmethod
    def dense(
        cls,
        dtype: Dtype,
        head_dim: int,
        head_dim_v: int,
        mask: MaskKind = "full",
        *,
        softcap: bool = False,
        chunked: bool = False,
        sink: SinkDtype | None = None,
        dlse: bool = False,
        deterministic: bool = False,
    ) -> Self:
        """A problem whose operands have one element type and whose sequences have one length."""
        operands = Operands.of(dtype, head_dim, head_dim_v)
        return cls(operands, Scores(mask, softcap, chunked, sink), has_dlse=dlse, is_deterministic=deterministic)

    @property
    def features(self) -> frozenset[Feature]:
        """The features in use, beyond a mask, which not every row serves."""
        return _features(
            softcap=self.scores.softcap,
            varlen=self.storage != DENSE,
            deterministic=self.is_deterministic,
            sink=self.scores.sink is not None,
        )

    def asking(self, features: Collection[Feature]) -> Self:
        """The same with just these optional features."""
        scores = self.scores.asking(features)
        storage = PACKED if "varlen" in features else DENSE
        return dataclasses.replace(self, scores=scores, storage=storage, is_deterministic="deterministic" in features)


Problem = FwdProblem | BwdProblem


@functools.cache  # a table is searched with every row asking for them
def _features(**asked: bool) -> frozenset[Feature]:
    return frozenset(cast(Feature, name) for name, there in asked.items() if there)
