"""Which traits a sweep considers for decoding of latent attention: as `cuteflash.traits.candidates`.

The head dims are given. What traits do not have any more is not varied: each field is looked up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from cuteflash.mla_problem import PAGE_ROWS
from cuteflash.traits.candidates import AMPERE
from cuteflash.traits.mla_sm80 import STEPS, MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90

AnyTraits = TypeVar("AnyTraits")

SM90_FIELDS: dict[str, tuple[Any, ...]] = {
    # Slabs of a page that arrive together: fewer waits, or products that begin earlier.
    "groups": (
        (1, 2, 2, 2, 2),
        (1, 4, 4),
        (1, 2, 2, 4),
        (2, 2, 2, 2, 1),
        (1, 3, 5),
        (3, 2, 2, 2),
        (3, 2, 4),
        (1, 2, 6),
        (1, 8),
        (3, 6),
        (5, 4),
        (9,),
        (1,) * 9,
    ),
    "headroom": (8.0, 6.0, 4.0, 0.0),
}
SM90_REGS = tuple((producer, 252 - producer // 2) for producer in (24, 40, 56, 72))  # with those of two consumers
SM80_FIELDS: dict[str, tuple[Any, ...]] = {
    "tile_n": (16, 32, PAGE_ROWS),
    "num_warps": (4, 8),
    "kv_stage": (2, 3, 4),
    "blocks_per_sm": (1, 2),
    "k_parts": (1, 2),
    "q_kept": (0, 4, 5, 6, 9, 12, 14, STEPS),
    "chains": (1, 2, 4),
    "early_launch": (False, True),
}
# Rows of a tile, with those of a sequence from which on it is considered: fewer would leave half of it empty.
SM80_TILES = ((16, 1), (32, 17), (64, 33))


def mla_candidates_sm90(head_dim: int, head_dim_v: int) -> Iterator[MlaTraitsSm90]:
    """Candidates of the sm90 family, those most like the default first."""
    found = [
        dataclasses.replace(one, producer_regs=producer, mma_regs=consumer)
        for one in _product(MlaTraitsSm90(), SM90_FIELDS)
        for producer, consumer in SM90_REGS
    ]
    yield from sorted(found, key=_distance)


def mla_candidates_sm80(head_dim: int, head_dim_v: int) -> Iterator[MlaTraitsSm80]:
    """Candidates of the sm80 family; of those that no architecture holds one for each tile, warps and stages."""
    hopeless = set()
    for tile_m, least_rows in SM80_TILES:
        for traits in _product(MlaTraitsSm80(tile_m, PAGE_ROWS, least_rows), SM80_FIELDS):
            tile = tile_m, traits.tile_n, traits.num_warps, traits.kv_stage
            reason = dataclasses.replace(traits, early_launch=False).check(AMPERE)
            if reason is None or tile not in hopeless:
                yield traits
            if reason is not None:
                hopeless.add(tile)


def _product(base: AnyTraits, choices: dict[str, tuple[Any, ...]]) -> Iterator[AnyTraits]:
    """Traits with every combination of the values of those fields that they have."""
    own: Any = base
    names = [field.name for field in dataclasses.fields(own) if field.name in choices]
    for values in itertools.product(*(choices[name] for name in names)):
        yield dataclasses.replace(own, **dict(zip(names, values, strict=True)))


def _distance(traits: Any) -> int:
    """In how many fields traits differ from the default."""
    return sum(getattr(traits, field.name) != field.default for field in dataclasses.fields(traits))
