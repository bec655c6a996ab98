"""Traits from written values: what is right comes back, and all else is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cuteflash.problem import DTYPES, FP8_DTYPES
from cuteflash.traits import row as vocabulary
from cuteflash.traits.row import KINDS, Row, kind_of, kinds_of
from cuteflash.traits.values import field_types, make_traits, values_of
from cuteflash.tune.cells import Cell
from cuteflash.tune.variants import parse_variants

TILE = {"tile_m": 64, "tile_n": 128, "head_dim": 64, "head_dim_v": 64}
BACKWARD = Cell(64, "full", 512, operation="bwd")
STORED, GIVEN = (Cell(64, "full", 512, "e4m3", transposed_v=is_transposed) for is_transposed in (False, True))


@pytest.mark.parametrize("kind", KINDS)
def test_values_come_back_as_the_traits_and_the_makers_rows_are_of_the_kind(kind: str) -> None:
    traits = make_traits(kind, {name: size for name, size in TILE.items() if name in field_types(kind)})
    assert type(traits) is KINDS[kind] and kind_of(traits) == kind
    assert values_of(traits) == {"kind": kind, **dataclasses.asdict(traits)}
    assert make_traits(kind, dataclasses.asdict(traits)) == traits
    if traits.operation == "mla":
        return  # whose rows are traits alone
    sizes = (64, 64, 128, 4) if traits.family == "sm80" or kind == "fwd_few_sm90" else (64, 64, 128)
    made: Row = getattr(vocabulary, kind)(*(sizes[:2] if kind.startswith("bwd") and len(sizes) == 3 else sizes))
    assert kind_of(made.traits) == kind


def test_an_operation_and_family_may_have_several_kinds() -> None:
    assert list(kinds_of("bwd", "sm90")) == ["bwd_sm90", "bwd_two_pass_sm90"]
    assert list(kinds_of("fwd", "sm90")) == ["fwd_sm90", "fwd_fp8_sm90", "fwd_cache_sm90", "fwd_few_sm90"]
    assert list(kinds_of("fwd", "sm90", DTYPES)) == ["fwd_sm90", "fwd_cache_sm90", "fwd_few_sm90"]
    assert list(kinds_of("fwd", "sm90", DTYPES, of_cache=False)) == ["fwd_sm90"]
    assert list(kinds_of("fwd", "sm90", of_cache=True)) == ["fwd_cache_sm90", "fwd_few_sm90"]
    assert list(kinds_of("mla", "sm90")) == ["mla_sm90"]
    assert list(kinds_of("fwd", "sm90", FP8_DTYPES)) == ["fwd_fp8_sm90"]


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        (
            "bwd_sm70",
            {},
            "kind is 'bwd_sm70'; allowed: fwd_sm80, fwd_sm90, fwd_fp8_sm90, fwd_cache_sm90, fwd_few_sm90, bwd_sm80, "
            "bwd_sm90, bwd_two_pass_sm90, mla_sm80, mla_sm90",
        ),
        ("bwd_sm90", {"dq": "both"}, "dq is 'both'; allowed: 'rows', 'columns'"),
        ("bwd_sm90", {"pingpong": 1}, "pingpong is 1; allowed: bool"),
        ("bwd_sm90", {"q_stage": True}, "q_stage is True; allowed: int"),
        ("mla_sm90", {"groups": [1, 2.0, 6]}, r"groups is \[1, 2.0, 6\]; allowed: list of int"),
        ("mla_sm90", {"groups": 9}, "groups is 9; allowed: list of int"),
        ("mla_sm90", {"headroom": 8}, "headroom is 8; allowed: float"),
        ("bwd_sm90", {"stages": 1}, "bwd_sm90 does not have stages; fields of bwd_sm90: tile_m, tile_n"),
    ],
)
def test_what_is_wrong_is_named(kind: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_traits(kind, ({} if kind == "mla_sm90" else TILE) | changes)


def test_traits_of_an_unknown_class_are_of_no_kind() -> None:
    unknown: Any = Cell(64, "full", 512)
    with pytest.raises(TypeError, match="traits are Cell, which no kind of rows is made of; kinds: fwd_sm80"):
        kind_of(unknown)


def test_variants_are_of_the_kind_that_has_their_fields_or_of_the_one_they_name() -> None:
    text = '[{"tile_m": 64, "tile_n": 128, "dq": "turns"}, {"kind": "bwd_two_pass_sm90", "tile_m": 64, "tile_n": 64}]'
    one, two = (variant.traits(BACKWARD) for variant in parse_variants(text, "sm90"))
    assert (kind_of(one), kind_of(two)) == ("bwd_sm90", "bwd_two_pass_sm90")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"tile_m": 64, "tile_n": 64}]', "several kinds have these fields, name one as `kind`; fields of bwd_sm90"),
        ('[{"tile_m": 64, "tile_n": 64, "tile_k": 2}]', "no kind has these fields; fields of bwd_sm90"),
        ('[{"kind": "fwd_sm90", "tile_m": 64, "tile_n": 64}]', "kind is 'fwd_sm90'; allowed for bwd sm90: bwd_sm90"),
        ('[{"kind": "bwd_sm90", "tile_m": 64, "tile_n": 64, "k_stage": 1}]', "bwd_sm90 does not have k_stage; fields"),
        ('[{"kind": "fwd", "tile_m": 64, "tile_n": 64}]', "kind is 'fwd' in .*; allowed: fwd_sm80"),
        ('[{"tile_m": 64, "tile_n": 64, "dq": "both"}]', "dq is 'both'; allowed: 'rows'"),
        ('[{"tile_m": 64, "dq": "rows"}]', "tile_n is missing; fields of bwd_sm90"),
    ],
)
def test_what_is_wrong_with_variants_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _ = [variant.traits(BACKWARD) for variant in parse_variants(text, "sm90")]


def test_variants_of_8_bit_operands_turn_v_if_it_is_stored() -> None:
    (variant,) = parse_variants('[{"tile_m": 128, "tile_n": 128, "two_level": true}]', "sm90")
    made = {cell: variant.traits(cell) for cell in (STORED, GIVEN)}
    assert [(kind_of(one), one.turns_v, one.two_level) for one in made.values()] == [  # type: ignore[union-attr]
        ("fwd_fp8_sm90", True, True),
        ("fwd_fp8_sm90", False, True),
    ]
    (turning,) = parse_variants('[{"tile_m": 128, "tile_n": 128, "turns_v": true}]', "sm90")
    assert turning.traits(STORED) == dataclasses.replace(made[STORED], two_level=False)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="turns_v is True; allowed for D64 full 512 e4m3 vt: False"):
        turning.traits(GIVEN)
