"""The polynomial exponential, the kernels' own source evaluated in numpy's fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuteflash.core import exp2 as module
from cuteflash.core.exp2 import OUT_OF, SMALLEST, exp2_polynomial, uses_polynomial

RELATIVE_ERROR = 7.5e-5  # what the module documents
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fmax(a: np.ndarray, b: float, *, nan: bool) -> np.ndarray:
        return np.maximum(a, np.float32(b)) if nan else np.fmax(a, np.float32(b))

    def inline_ptx(text: str, *, write_only_types: list[Any], read_only_args: list[np.ndarray]) -> np.ndarray:
        assert text == "shl.b32 {$w0}, {$r0}, 23;"
        (value,) = read_only_args
        assert value.dtype == np.float32
        return (value.view(np.uint32) << np.uint32(23)).view(np.float32)

    monkeypatch.setattr(module, "Float32", np.float32)
    monkeypatch.setattr(module.cute.arch, "fmax", fmax)
    monkeypatch.setattr(module.cute.arch, "inline_ptx", inline_ptx)


def relative_error(x: np.ndarray) -> float:
    got = exp2_polynomial(x)
    assert got.dtype == np.float32
    exact = np.exp2(x.astype(np.float64))
    return float(np.max(np.abs(got / exact - 1)))


def test_the_error_is_below_the_documented_bound_and_both_roundings() -> None:
    x = np.linspace(SMALLEST + 0.5, 0, 1 << 20, dtype=np.float32)
    tiny = -np.logspace(-30, 0, 1 << 12, dtype=np.float32)
    error = max(relative_error(x), relative_error(tiny))
    assert 0.99 * RELATIVE_ERROR < error <= 1.01 * RELATIVE_ERROR
    assert error < ROUNDING["bf16"] / 52 * 1.01 and error < ROUNDING["fp16"] / 6
    assert relative_error(np.linspace(0, 127.4, 1 << 16, dtype=np.float32)) <= 1.01 * RELATIVE_ERROR


def test_halfway_between_integers_both_neighbours_serve() -> None:
    halves = np.arange(-125.5, 0, dtype=np.float32)
    around = np.concatenate([np.nextafter(halves, -np.inf), halves, np.nextafter(halves, np.inf)], dtype=np.float32)
    assert relative_error(around) <= 1.01 * RELATIVE_ERROR


def test_what_is_too_small_becomes_the_smallest_normal_number_or_less() -> None:
    x = np.array([SMALLEST, -126.4, -127, -150, -1e30, -np.inf], dtype=np.float32)
    got = exp2_polynomial(x)
    assert np.all((got >= 0) & (got <= 2.0**SMALLEST * (1 + RELATIVE_ERROR)))
    assert np.all(got[1:] == got[0])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0xFFC00000])  # the first is what a GPU's arithmetic returns
def test_nan_is_not_hidden(bits: int) -> None:
    assert np.isnan(exp2_polynomial(np.array([bits], dtype=np.uint32).view(np.float32))).all()


@pytest.mark.parametrize("share", range(OUT_OF + 1))
def test_polynomials_are_spread_evenly(share: int) -> None:
    chosen = [uses_polynomial(column, share) for column in range(4 * OUT_OF)]
    for width in range(1, OUT_OF + 1):
        counts = {sum(chosen[start : start + width]) for start in range(len(chosen) - width + 1)}
        assert max(counts) - min(counts) <= 1
        assert share * width // OUT_OF in counts
