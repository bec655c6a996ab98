"""Decoding latent attention: its sizes, what a kernel is generated for, and its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar, Literal, NamedTuple, Self

from cuteflash.problem import DTYPES, OPERATIONS, Feature, HalfDtype, Operation, Problem, Scores

LATENT_DIM = 576  # columns of Q and of the cache, whose one head is K
LATENT_DIM_V = 512  # of these, the first are V, too
PAGE_ROWS = 64  # rows of a page, or a divisor of them; a step of a kernel reads as many, or a divisor of these
HEADS_MAX = 128  # query heads


@dataclasses.dataclass(frozen=True, slots=True)
class LatentOperands:
    """What tables of rows ask of the matrices; for the others see `cuteflash.operands.Operands`."""

    head_dim: ClassVar[int] = LATENT_DIM
    head_dim_v: ClassVar[int] = LATENT_DIM_V
    packed_heads: ClassVar[int] = 1
    transposed_v: ClassVar[bool] = False

    qk_dtype: HalfDtype

    @property
    def row_dtype(self) -> str:
        """The element type by which rows know these operands."""
        return self.qk_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class MlaProblem:
    """What the decoding kernel of latent attention is generated for.

    Attributes:
        dtype: element type of Q and O, and of the cache unless that is e4m3.
        is_paged: a table says where a sequence's pages lie; otherwise an entry of the cache is a sequence.
        is_split: the keys of a sequence may be dealt to several blocks, see `cuteflash.core.split`.
        is_e4m3: the cache is e4m3, with a descale of each sequence.
    """

    operation: ClassVar[Literal["mla"]] = "mla"
    scores: ClassVar[Scores] = Scores()  # whether a call is causal is a scalar
    takes_split_rows: ClassVar[bool] = True

    dtype: HalfDtype
    is_paged: bool = True
    is_split: bool = True
    is_e4m3: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")

    @property
    def operands(self) -> LatentOperands:
        """The matrices, as tables of rows know them."""
        return LatentOperands(self.dtype)

    @property
    def features(self) -> frozenset[Feature]:
        """The features in use, as tables of rows know them: sequences that lie in pages are `varlen`."""
        asked: tuple[tuple[Feature, bool], ...] = (
            ("varlen", self.is_paged),
            ("split", self.is_split),
            ("e4m3_cache", self.is_e4m3),
        )
        return frozenset(name for name, there in asked if there)

    def asking(self, features: Collection[Feature]) -> Self:
        """The same with just these features."""
        paged, split, e4m3 = (name in features for name in ("varlen", "split", "e4m3_cache"))
        return dataclasses.replace(self, is_paged=paged, is_split=split, is_e4m3=e4m3)


# What tables have rows of.
AnyProblem = Problem | MlaProblem
AnyOperation = Operation | Literal["mla"]
TABLE_OPERATIONS: tuple[AnyOperation, ...] = (*OPERATIONS, MlaProblem.operation)


class MlaTensors(NamedTuple):
    """The tensors of the kernel; inside it CuTe tensors, outside torch's. What a problem lacks is None.

    A row of Q and O is (token, query head), the head running fastest.
    """

    q: Any  # (batch, rows, 576)
    kv_cache: Any  # (pages, page rows, 576), or (batch, rows of the cache, 576) without a table
    page_table: Any  # (batch, pages of a sequence) int32
    cache_seqlens: Any  # (batch,) int32
    out: Any  # (batch, rows, 512)
    lse: Any  # (batch, query heads, tokens) fp32
    partials: Any = None  # (n,) fp32, of split keys: see `cuteflash.core.split_slots`
    arrivals: Any = None  # (blocks,) int32, of split keys: 0 before a launch and after it
    descale: Any = None  # (batch,) fp32, of an e4m3 cache: what its elements are multiplied with


class MlaScalars(NamedTuple):
    """The numbers of the kernel."""

    softmax_scale: Any  # Float32
    causal: Any  # Int32: 1 if a query sees the keys up to its own position only, else 0
    shares: Any  # Int32: blocks between which the keys of a query tile of all sequences are shared
    tile_cost: Any  # Int32: what a query tile costs beside its keys, in steps of the kernel, as shares count it
    most_parts: Any  # Int32: parts of a query tile's keys at most, 2 or more; of split keys
