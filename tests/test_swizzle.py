"""Addresses of swizzled tiles that kernels compute from one of a lane's, on host integers."""

from __future__ import annotations

import itertools

import pytest

from cuteflash.kernels.sm90.swizzle import CHUNK, beside, swizzle_bytes, swizzled
from cuteflash.traits.fp8_sm90 import TURNED_COLUMNS, TURNED_KEYS, TURNING_WARPS, FwdTraitsFp8Sm90
from cuteflash.traits.rows_few_sm90 import ROWS as FEW_ROWS
from cuteflash.traits.rows_fp8_sm90 import ROWS as FP8_ROWS

BASE = 5 * 1024  # on a multiple of every pattern
TURNING = {
    (traits.tile_n, traits.head_dim_v, traits.turning_columns)
    for traits in (row.traits for row in FP8_ROWS)
    if isinstance(traits, FwdTraitsFp8Sm90) and traits.turns_v
}


def agrees(lane: tuple[int, int], step: tuple[int, int], shape: tuple[int, int]) -> None:
    """`beside` a lane's (row, chunk) is what `swizzled` says of the place `step` further."""
    address = BASE + swizzled(*lane, *shape)  # type: ignore[arg-type]
    row, chunk = (a + b for a, b in zip(lane, step, strict=True))
    assert beside(address, *step, shape) == BASE + swizzled(row, chunk, *shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(("keys", "columns", "over_columns"), sorted(TURNING))
def test_a_warp_that_turns_v_finds_its_parts(keys: int, columns: int, over_columns: int) -> None:
    """All rows of matrices of all lanes of all warps, in V as it is stored and in its transpose."""
    step_keys, step_columns = TURNING_WARPS // over_columns * TURNED_KEYS, over_columns * TURNED_COLUMNS
    parts = list(itertools.product(range(0, keys, step_keys), range(0, columns, step_columns)))
    for warp, row, half in itertools.product(range(TURNING_WARPS), range(16), range(2)):
        key, column = warp // over_columns * TURNED_KEYS, warp % over_columns * TURNED_COLUMNS
        for further in parts:
            agrees((key + row, column // CHUNK + half), (further[0], further[1] // CHUNK), (keys, columns))
            agrees((column + 16 * half + row, key // CHUNK), (further[1], further[0] // CHUNK), (columns, keys))


@pytest.mark.parametrize("row", FEW_ROWS, ids=lambda row: row.title)
def test_a_warp_of_few_rows_finds_its_matrices(row: object) -> None:
    traits = row.traits  # type: ignore[attr-defined]
    keys = range(0, traits.warp_keys, 16)
    for columns in {traits.head_dim, traits.head_dim_v}:
        for first, lane, key in itertools.product(range(0, traits.tile_n, traits.warp_keys), range(32), keys):
            for pair in range(columns // 32):
                agrees((first + lane % 16, lane // 16), (key, 2 * pair), (traits.tile_n, columns))


def test_a_pattern_is_as_wide_as_rows_allow() -> None:
    assert [swizzle_bytes(columns) for columns in (32, 64, 96, 128, 160, 192, 256)] == [32, 64, 32, 128, 32, 64, 128]
