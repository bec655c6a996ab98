"""One row of a table, and the helpers that tables are written with.

A row serves the head dims, padded up to `ROW_HEAD_DIMS`, that its traits are made for, and the mask kinds, dtypes,
length classes and numbers of query rows it names. A table holds the rows of one operation, compile target and kernel
family.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cuteflash.mla_problem import AnyOperation, AnyProblem
from cuteflash.problem import DTYPES, FEATURES, FP8_DTYPES, MASK_KINDS, UNBOUNDED
from cuteflash.traits.arch import Family
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

Traits = (
    FwdTraitsSm80
    | FwdTraitsCacheSm80
    | FwdTraitsSm90
    | FwdTraitsFp8Sm90
    | FwdTraitsCacheSm90
    | FwdTraitsFewSm90
    | BwdTraitsSm80
    | BwdTraitsSm90
    | BwdTwoPassTraitsSm90
    | MlaTraitsSm80
    | MlaTraitsSm90
)
# The kinds of traits, as databases and users' tables call them; but for those of latent attention, whose shipped rows
# are traits alone, each is called as the function below that makes its rows.
KINDS: dict[str, type[Traits]] = {
    "fwd_sm80": FwdTraitsSm80,
    "fwd_sm90": FwdTraitsSm90,
    "fwd_fp8_sm90": FwdTraitsFp8Sm90,
    "fwd_cache_sm90": FwdTraitsCacheSm90,
    "fwd_few_sm90": FwdTraitsFewSm90,
    "bwd_sm80": BwdTraitsSm80,
    "bwd_sm90": BwdTraitsSm90,
    "bwd_two_pass_sm90": BwdTwoPassTraitsSm90,
    "mla_sm80": MlaTraitsSm80,
    "mla_sm90": MlaTraitsSm90,
}
OF_CACHES = (FwdTraitsCacheSm90, FwdTraitsFewSm90)  # of these, those of e4m3 caches alone

ROW_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)

ALL = MASK_KINDS
FULL = ("full",)  # every query sees every key: one loop, with registers to spare
CAUSAL = ("causal",)
WINDOW = ("window",)  # two masked loops beside the plain one: the most registers
FP16, BF16 = ("fp16",), ("bf16",)
E4M3, E5M2 = ("e4m3",), ("e5m2",)
DECODE, TINY, SMALL, BRIEF = ("decode",), ("tiny",), ("small",), ("brief",)
SHORT, MODERATE, MEDIUM, LONG = ("short",), ("moderate",), ("medium",), ("long",)
# What classes of the other operation are to this one.
CLASSES = {"fwd": {"small": "tiny", "moderate": "short", "medium": "long"}}
SOFTCAP, LSE, VARLEN, DETERMINISTIC = ("softcap",), ("lse",), ("varlen",), ("deterministic",)
TURNED_V, V_MEAN, BLOCK_SCALES = ("turned_v",), ("v_mean",), ("block_scales",)
SPLIT, SINK, E4M3_CACHE, TREE = ("split",), ("sink",), ("e4m3_cache",), ("tree",)
ANY_ROWS = 1, UNBOUNDED
DECISIVE = ("turned_v", "e4m3_cache")  # features that a row's kernel either always or never has


class TableKey(NamedTuple):
    """Which table: its operation, compile target and kernel family."""

    operation: AnyOperation
    target: str
    family: Family

    def __str__(self) -> str:
        return "/".join(self)


class Measurement(NamedTuple):
    """What a sweep found for a row.

    Attributes:
        gpu: the GPU's name.
        date: day, "2026-01-31".
        tflops: speed over what the row serves, TFLOP/s.
    """

    gpu: str
    date: str
    tflops: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row; its head dims are those of its traits.

    Attributes:
        traits: the tunable numbers that its kernels are compiled with.
        masks, dtypes, lengths: what it serves, kept in the order of `MASK_KINDS`, the traits' `dtypes` and
            `LENGTH_CLASSES`.
        without: of `FEATURES`, those that it does not serve: each takes registers that not every tile has left.
        query_rows: the fewest and the most query rows, of a tile or of a sequence of latent attention, for which it was
            measured; its traits may hold fewer (`serves`).
        waves: of a backward, the fewest blocks for each multiprocessor that a call with a batch dimension must have; 0
            is any. One with fewer takes the next row that serves it.
        filled: likewise the smallest share of the multiprocessors that must have a block, over all waves of blocks: 133
            blocks on 132 of them are two waves, and fill half.
        measurement: how fast a GPU ran it, if a sweep chose it; rows that differ in nothing else are equal.

    Raises:
        ValueError: masks, dtypes or lengths is empty, or a field contains an unknown name; query_rows is no interval;
            waves is no number, or negative; filled is no share; either is of a forward.
    """

    traits: Traits
    masks: tuple[str, ...] = MASK_KINDS
    dtypes: tuple[str, ...] = DTYPES
    lengths: tuple[str, ...] = LENGTH_CLASSES
    without: tuple[str, ...] = ()
    query_rows: tuple[int, int] = ANY_ROWS
    waves: float = 0
    filled: float = 0
    measurement: Measurement | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        choices = (("masks", MASK_KINDS), ("dtypes", self.traits.dtypes), ("lengths", LENGTH_CLASSES))
        for name, allowed in choices:
            given = getattr(self, name)
            if not given or not set(given) <= set(allowed):
                raise ValueError(f"{name} is {given!r}; allowed: one or more of {', '.join(allowed)}")
            object.__setattr__(self, name, tuple(item for item in allowed if item in given))
        if not set(self.without) <= set(FEATURES):
            raise ValueError(f"without is {self.without!r}; allowed: any of {', '.join(FEATURES)}")
        object.__setattr__(self, "without", tuple(name for name in FEATURES if name in self.without))
        ends = self.query_rows
        if len(ends) != 2 or any(type(end) is not int for end in ends) or not 1 <= ends[0] <= ends[1] <= UNBOUNDED:
            raise ValueError(f"query_rows is {ends!r}; allowed: the fewest and the most, from 1 on")
        for name, most, what in (("waves", math.inf, "a number from 0 on"), ("filled", 1, "a number from 0 to 1")):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= most or value == math.inf:
                raise ValueError(f"{name} is {value!r}; allowed: {what}")
            if value and self.traits.operation != "bwd":
                raise ValueError(f"{name} is {value}, but the row is of a {self.traits.operation}, not of a backward")

    def serves(self, problem: AnyProblem, lengths: str, query_rows: int = UNBOUNDED) -> bool:
        """Whether the row serves this problem at lengths of this class; head dims are not compared.

        To a forward small sequences are tiny ones, moderate ones short, and medium ones long. A row that turns V is not
        given Vᵀ.

        Args:
            query_rows: of the call's tiles, or of a sequence of latent attention; by default as many as there may be.
        """
        if not self.query_rows[0] <= query_rows <= self.query_rows[1] or not holds(self.traits, query_rows):
            return False
        lengths = CLASSES.get(problem.operation, {}).get(lengths, lengths)
        if (
            problem.scores.mask not in self.masks
            or problem.operands.row_dtype not in self.dtypes
            or lengths not in self.lengths
        ):
            return False
        asked, served = problem.features, self.traits.features
        return (
            asked.isdisjoint(self.without)
            and asked <= served
            and all((name in asked) == (name in served) for name in DECISIVE)
            and problem.takes_split_rows == ("split" in served)
        )

    @property
    def serves_any_number(self) -> bool:
        """Whether calls may have any number of blocks."""
        return not (self.waves or self.filled)

    def is_filled(self, kv_heads: int, seqlen_k: int, num_sms: int) -> bool:
        """Whether a call has as many blocks as the row asks for.

        Args:
            kv_heads: of all batch entries.
            seqlen_k: keys of each.
            num_sms: multiprocessors of the GPU.
        """
        holds_dq = getattr(self.traits, "held_dq", 0) > 0  # one block for all keys of a head
        blocks = kv_heads if holds_dq else kv_heads * -(-seqlen_k // self.traits.tile_n)
        waves = -(-blocks // num_sms)
        return blocks >= num_sms * max(self.waves, self.filled * waves)

    def measured(self, gpu: str, date: str, tflops: int) -> Row:
        """The same row with what was measured of it, see `Measurement`."""
        return dataclasses.replace(self, measurement=Measurement(gpu, date, tflops))

    @property
    def title(self) -> str:
        """Its head dims and, if it does not serve all of them, masks, dtypes and lengths: "64x64 (causal; long)"."""
        served = ((self.masks, MASK_KINDS), (self.dtypes, DTYPES), (self.lengths, LENGTH_CLASSES))  # 8 bits are named
        words = [", ".join(some) for some, every in served if some != every]
        words += [rows_title(self.query_rows)] if self.query_rows != ANY_ROWS else []
        words += [f"no {name}" for name in self.without]
        words += [f"from {self.waves:g} waves of blocks"] if self.waves else []
        words += [f"blocks fill {self.filled:g} of waves"] if self.filled else []
        return f"{self.traits.head_dim}x{self.traits.head_dim_v}" + (f" ({'; '.join(words)})" if words else "")


def rows_title(query_rows: tuple[int, int]) -> str:
    """`"up to 8 rows"`, `"9 to 16 rows"` or `"from 17 rows"`."""
    least, most = query_rows
    if most == UNBOUNDED:
        return f"from {least} rows"
    return f"up to {most} rows" if least == 1 else f"{least} to {most} rows"


def holds(traits: Traits, query_rows: int) -> bool:
    """Whether a kernel with these traits runs calls with so many query rows; most kinds run any number."""
    serves = getattr(traits, "serves", None)
    return serves is None or bool(serves(query_rows))


def kind_of(traits: Traits) -> str:
    """The name in `KINDS` of traits' class. TypeError: it is not there."""
    for name, kind in KINDS.items():
        if type(traits) is kind:
            return name
    raise TypeError(f"traits are {type(traits).__name__}, which no kind of rows is made of; kinds: {', '.join(KINDS)}")


def kinds_of(
    operation: AnyOperation, family: Family, dtypes: tuple[str, ...] | None = None, of_cache: bool | None = None
) -> dict[str, type[Traits]]:
    """Those of `KINDS` that rows of an operation and kernel family may have.

    Args:
        dtypes: also of these.
        of_cache: also those of e4m3 caches alone, or the others; None is both.
    """
    return {
        name: kind
        for name, kind in KINDS.items()
        if (kind.operation, kind.family) == (operation, family)
        and dtypes in (None, kind.dtypes)
        and of_cache in (None, kind in OF_CACHES)
    }


def fwd_sm80(head_dim: int, tile_m: int, tile_n: int, num_warps: int, masks: tuple[str, ...] = ALL, **more: Any) -> Row:
    """An sm80 row; `more` are keyword arguments of `_row`: what the row serves, and fields of its traits."""
    tile = head_dim, tile_m, tile_n
    return _row(FwdTraitsSm80, tile, masks, num_warps=num_warps, **more)


def fwd_cache_sm80(head_dim: int, tile_m: int, tile_n: int, num_warps: int, **more: Any) -> Row:
    """An sm80 row of e4m3 caches; `more` are keyword arguments of `_row`."""
    return _row(FwdTraitsCacheSm80, (head_dim, tile_m, tile_n), more.pop("masks", ALL), num_warps=num_warps, **more)


def fwd_sm90(
    head_dim: int,
    tile_m: int,
    tile_n: int,
    masks: tuple[str, ...] = ALL,
    *,
    exp_rows_before_wait: int = 1,
    **more: Any,
) -> Row:
    """An sm90 row; `more` are keyword arguments of `_row`: what the row serves, and fields of its traits."""
    tile = head_dim, tile_m, tile_n
    return _row(FwdTraitsSm90, tile, masks, exp_rows_before_wait=exp_rows_before_wait, **more)


def fwd_fp8_sm90(
    head_dim: int,
    tile_m: int,
    tile_n: int,
    masks: tuple[str, ...] = ALL,
    *,
    dtypes: tuple[str, ...] = FP8_DTYPES,
    **more: Any,
) -> Row:
    """An sm90 row of 8-bit operands; `more` are keyword arguments of `_row`."""
    return _row(FwdTraitsFp8Sm90, (head_dim, tile_m, tile_n), masks, dtypes=dtypes, **more)


def fwd_cache_sm90(
    head_dim: int, tile_m: int, tile_n: int, masks: tuple[str, ...] = ALL, *, exp_rows_before_wait: int = 1, **more: Any
) -> Row:
    """An sm90 row of e4m3 caches; `more` are keyword arguments of `_row`."""
    tile = head_dim, tile_m, tile_n
    return _row(FwdTraitsCacheSm90, tile, masks, exp_rows_before_wait=exp_rows_before_wait, **more)


def fwd_few_sm90(
    head_dim: int, tile_m: int, tile_n: int, kv_stage: int, masks: tuple[str, ...] = ALL, **more: Any
) -> Row:
    """An sm90 row of few query rows and e4m3 caches; `more` are keyword arguments of `_row`."""
    return _row(FwdTraitsFewSm90, (head_dim, tile_m, tile_n), masks, kv_stage=kv_stage, **more)


def bwd_sm80(head_dim: int, tile_m: int, tile_n: int, num_warps: int, masks: tuple[str, ...] = ALL, **more: Any) -> Row:
    """A row of the sm80 backward; `more` are keyword arguments of `_row`."""
    tile = head_dim, tile_m, tile_n
    return _row(BwdTraitsSm80, tile, masks, num_warps=num_warps, **more)


def bwd_sm90(head_dim: int, tile_m: int, masks: tuple[str, ...] = ALL, *, tile_n: int = 128, **more: Any) -> Row:
    """A row of the sm90 backward in one pass; `more` are keyword arguments of `_row`."""
    return _row(BwdTraitsSm90, (head_dim, tile_m, tile_n), masks, **more)


def bwd_two_pass_sm90(
    head_dim: int, tile_m: int, masks: tuple[str, ...] = ALL, *, tile_n: int = 64, **more: Any
) -> Row:
    """A row of the sm90 backward in two passes; `more` are keyword arguments of `_row`."""
    return _row(BwdTwoPassTraitsSm90, (head_dim, tile_m, tile_n), masks, **more)


def _row(
    traits: Callable[..., Traits],
    tile: tuple[int, int, int],
    masks: tuple[str, ...],
    *,
    dtypes: tuple[str, ...] = DTYPES,
    lengths: tuple[str, ...] = LENGTH_CLASSES,
    without: tuple[str, ...] = (),
    waves: float = 0,
    filled: float = 0,
    head_dim_v: int | None = None,
    **fields: Any,
) -> Row:
    """A row of (head_dim, tile_m, tile_n) and further `fields` of its traits; `head_dim_v` None is `head_dim`."""
    head_dim, tile_m, tile_n = tile
    made = traits(tile_m, tile_n, head_dim, head_dim_v or head_dim, **fields)
    return Row(made, masks, dtypes, lengths, without, waves=waves, filled=filled)
