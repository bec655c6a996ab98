"""The probe of the 8-bit accumulator without a GPU: its kernel compiles, and it tells accumulators apart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import accumulator
from benchmarks.accumulator import CHAINS, Findings, probe
from cuteflash.reference import fp8_accumulator
from tests.kernel_store import KernelStore


def modelled(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return fp8_accumulator.accumulate(c, a.float(), b.float()).float()


def test_an_accumulator_like_the_model_is_recognised() -> None:
    found = probe(modelled)
    assert found == Findings(13, True, True, 32, (1.0,) * len(CHAINS))
    assert found.as_modelled
    text = accumulator.describe(found)
    assert "largest term: 13" in text and "describes these tensor cores" in text


def test_an_exact_accumulator_is_told_apart() -> None:
    found = probe(lambda c, a, b: (c.double() + a.double() @ b.double().T).float())
    assert (found.fraction_bits, found.truncates, found.cuts_c, found.as_modelled) == (23, False, False, False)
    assert found.equal[0] < 0.1 and "DOES NOT describe" in accumulator.describe(found)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [("FRACTION_BITS", 14, "fraction_bits", 14), ("PRODUCTS", 16, "products", 16)],
)
def test_another_width_is_measured(
    name: str, value: int, field: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fp8_accumulator.accumulate

    def other(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(fp8_accumulator, name, value)
            return right(c, a.float(), b.float()).float()

    found = probe(other)
    assert getattr(found, field) == expected and not found.as_modelled


def test_rounding_is_no_cut() -> None:
    def rounded(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        exact = c.double() + a.double() @ b.double().T
        unit = torch.exp2(fp8_accumulator.exponents_of(exact) - 13)
        return ((exact / unit).round() * unit).float()

    assert not probe(rounded).truncates


@pytest.mark.slow
def test_the_kernel_is_one_instruction_a_step(kernels: KernelStore) -> None:
    from benchmarks.accumulator_kernel import AccumulatorProbe, Shape

    shape = Shape(accumulator.ROWS, accumulator.COLUMNS)
    compiled: Any = kernels(AccumulatorProbe, shape, shape, "sm_90a")
    compiled.assert_no_complaint()
    assert len(re.findall(r"wgmma\.mma_async\S*m64n8k32\.f32\.e4m3\.e4m3", compiled.ptx)) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert accumulator.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
