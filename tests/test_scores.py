"""Which elements of a score tile a thread holds, of S and of Sᵀ, on the host: the coordinates are static."""

from __future__ import annotations

from typing import Any

import pytest

from layouts.dsl import context

SHAPE = 64, 32  # of the accumulator's tile: (rows, keys) of S, (keys, rows) of Sᵀ


def held(family: str, is_transposed: bool) -> tuple[list[int], list[int]]:
    """The rows of queries and the keys that thread 0 holds elements of, in the order of the view."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.nvgpu import OperandMajorMode

    from cuteflash.atoms import sm80, sm90
    from cuteflash.core.scores import ScoreTile

    mma: Any = (
        sm80.tiled_mma(cutlass.BFloat16, 4)
        if family == "sm80"
        else sm90.tiled_mma(cutlass.BFloat16, SHAPE[1], OperandMajorMode.K, a_from_regs=False)
    )
    acc = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C(SHAPE), Float32)
    tile = ScoreTile.of(mma, Int32(0), acc, SHAPE, Float32(1), 1, is_transposed=is_transposed)
    rows, columns = (cute.size(tile.values.shape[mode]) for mode in (0, 1))
    at = 1 if is_transposed else 0
    assert all(tile.column(r, c) == tile.column(0, c) for r in range(rows) for c in range(columns))
    assert all(tile.coords[r, c][at] == tile.coords[r, 0][at] for r in range(rows) for c in range(columns))
    return [tile.coords[r, 0][at] for r in range(rows)], [tile.column(0, c) for c in range(columns)]


@pytest.mark.parametrize(("family", "target"), [("sm80", "sm_80"), ("sm90", "sm_90a")])
def test_a_thread_holds_rows_eight_apart_and_pairs_of_keys(family: str, target: str) -> None:
    pairs = [column + i for column in range(0, SHAPE[1], 8) for i in (0, 1)]
    with context(target):
        assert held(family, is_transposed=False) == ([0, 8], pairs)
        assert held(family, is_transposed=True) == (pairs, [0, 8])
