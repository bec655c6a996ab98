"""One row of a table, and the words in which tables are written.

A row serves the head dims, padded up to `ROW_HEAD_DIMS`, that its traits are made for, and the mask kinds, dtypes and
shape classes it names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cuteflash.problem import DTYPES, MASK_KINDS
from cuteflash.traits.arch import Family
from cuteflash.traits.shapes import SHAPES
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

Traits = FwdTraitsSm80 | FwdTraitsSm90
FWD_TRAITS: dict[Family, type[FwdTraitsSm80] | type[FwdTraitsSm90]] = {"sm80": FwdTraitsSm80, "sm90": FwdTraitsSm90}

ROW_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)

ALL = MASK_KINDS
EVEN = ("full",)  # every query sees every key: one loop, with registers to spare
CAUSAL = ("causal",)
WINDOW = ("window",)  # two masked loops beside the plain one: the most registers
FP16, BF16 = ("fp16",), ("bf16",)
DECODE, SHORT, LONG = ("decode",), ("short",), ("long",)


@dataclasses.dataclass(frozen=True, slots=True)
class FwdRow:
    """One row; its head dims are those of its traits.

    Attributes:
        traits: how it runs.
        masks, dtypes, shapes: what it serves, kept in the order of `MASK_KINDS`, `DTYPES` and `SHAPES`.
        softcap, lse: whether it also serves problems with a softcap, or whose log-sum-exp is asked for; both take
            registers that not every tile has left.

    Raises:
        ValueError: one of them is empty or names what there is not.
    """

    traits: Traits
    masks: tuple[str, ...] = MASK_KINDS
    dtypes: tuple[str, ...] = DTYPES
    shapes: tuple[str, ...] = SHAPES
    softcap: bool = True
    lse: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("masks", MASK_KINDS), ("dtypes", DTYPES), ("shapes", SHAPES)):
            given = getattr(self, name)
            if not given or not set(given) <= set(allowed):
                raise ValueError(f"{name} is {given!r}; allowed: one or more of {', '.join(allowed)}")
            object.__setattr__(self, name, tuple(item for item in allowed if item in given))

    @property
    def title(self) -> str:
        """Its head dims and, where it does not serve all of them, masks, dtypes and shapes: "64x64 (causal; long)"."""
        served = ((self.masks, MASK_KINDS), (self.dtypes, DTYPES), (self.shapes, SHAPES))
        words = [", ".join(some) for some, every in served if some != every]
        words += [f"no {name}" for name in ("softcap", "lse") if not getattr(self, name)]
        return f"{self.traits.head_dim}x{self.traits.head_dim_v}" + (f" ({'; '.join(words)})" if words else "")


def fwd_sm80(
    head_dim: int, tile_m: int, tile_n: int, num_warps: int, masks: tuple[str, ...] = ALL, **more: Any
) -> FwdRow:
    """An sm80 row; `more` is what `_fwd_row` takes by name: what the row serves, and fields of its traits."""
    tile = head_dim, tile_m, tile_n
    return _fwd_row(FwdTraitsSm80, tile, masks, num_warps=num_warps, **more)


def fwd_sm90(
    head_dim: int,
    tile_m: int,
    tile_n: int,
    masks: tuple[str, ...] = ALL,
    *,
    exp_rows_before_wait: int = 1,
    **more: Any,
) -> FwdRow:
    """An sm90 row; `more` is what `_fwd_row` takes by name: what the row serves, and fields of its traits."""
    tile = head_dim, tile_m, tile_n
    return _fwd_row(FwdTraitsSm90, tile, masks, exp_rows_before_wait=exp_rows_before_wait, **more)


def _fwd_row(
    traits: type[FwdTraitsSm80] | type[FwdTraitsSm90],
    tile: tuple[int, int, int],
    masks: tuple[str, ...],
    *,
    dtypes: tuple[str, ...] = DTYPES,
    shapes: tuple[str, ...] = SHAPES,
    softcap: bool = True,
    lse: bool = True,
    head_dim_v: int | None = None,
    **fields: Any,
) -> FwdRow:
    """A row of (head_dim, tile_m, tile_n) and further `fields` of its traits; `head_dim_v` None is `head_dim`."""
    head_dim, tile_m, tile_n = tile
    made = traits(tile_m, tile_n, head_dim, head_dim_v or head_dim, **fields)
    return FwdRow(made, masks, dtypes, shapes, softcap, lse)
