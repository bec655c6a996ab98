"""The model of 8-bit attention whose row maxima are those of a tile's first keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cuteflash import flash_attn_func
from cuteflash.reference.fp8_accumulator import FixedMaxima, KernelModel, modelled_attention
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.tune.fp8_accuracy import kernel_model

FP8 = torch.float8_e4m3fn
FIXED = FixedMaxima(64)
ALL, CAUSAL, WINDOW = (-1, -1), (-1, 0), (40, 0)


def operands(s_q: int, s_k: int, factor: float = 1.0) -> list[Tensor]:
    """Q, K and V of two query heads and one KV head, Q times `factor`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 32, generator=generator) for n, h in ((s_q, 2), (s_k, 1), (s_k, 1)))
    return [(q * factor).to(FP8), k.to(FP8), v.to(FP8)]


def modelled(tensors: list[Tensor], window: tuple[int, int], fixed: FixedMaxima | None) -> Tensor:
    return modelled_attention(*tensors, [torch.ones(1, 1)] * 3, (32**-0.5, *window), KernelModel(32, 4.0, True, fixed))


def error(tensors: list[Tensor], window: tuple[int, int], fixed: FixedMaxima | None) -> float:
    """The rms error, relative."""
    exact = flash_attn_func(*(x.double() for x in tensors), window_size=window)
    found = modelled(tensors, window, fixed)
    return ((found - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [ALL, CAUSAL])
def test_without_outgrown_scores_the_first_block_decides(window: tuple[int, int], masked: bool) -> None:
    """The same P under the same maxima, if key 0 has every row's largest score."""
    q, k, v = (x.float() for x in operands(70, 96))
    q[..., 0], k[..., 0], k[:, 0] = 4.0, 0.0, 0.0
    k[:, 0, :, 0] = 16.0
    tensors = [x.to(FP8) for x in (q, k, v)]
    assert torch.equal(modelled(tensors, window, None), modelled(tensors, window, FixedMaxima(64, masked)))


@pytest.mark.parametrize("window", [ALL, CAUSAL, WINDOW])
def test_scores_that_outgrow_the_maxima_do_not_saturate(window: tuple[int, int]) -> None:
    tensors = operands(70, 300, factor=16.0)
    assert error(tensors, window, FIXED) < 0.04


def test_a_key_that_outgrows_its_maximum_by_little_is_rounded() -> None:
    """It takes nearly all of the weight, and its P is no power of 2 then."""
    tensors = operands(64, 300, factor=8.0)
    moving, fixed = (error(tensors, ALL, one) for one in (None, FIXED))
    assert 1.2 * moving < fixed < 0.03


def test_order_and_blocks_that_move_maxima() -> None:
    assert FIXED.order(4, has_left_edge=False) == [0, 3, 2, 1]
    assert FIXED.order(4, has_left_edge=True) == [3, 2, 1, 0]
    causal = torch.ones(128, 128, dtype=torch.bool).tril()
    moving = FIXED.moving(causal, 32, has_left_edge=False)
    assert moving[0].tolist() == moving[63].tolist() == [True, True, True, True]
    assert moving[64].tolist() == moving[127].tolist() == [True, False, True, True]
    kept = FixedMaxima(64, masked=True).moving(causal, 32, has_left_edge=False)
    assert kept.tolist() == [[True, False, False, False]] * 128
    window = causal & ~torch.ones(128, 128, dtype=torch.bool).tril(-120)
    moving = FixedMaxima(64, masked=True).moving(window, 32, has_left_edge=True)
    assert moving[127].tolist() == [True, True, True, True] and moving[0].tolist() == [True] * 4
    assert FIXED.moving(torch.ones(5, 40, dtype=torch.bool), 32, False)[0].tolist() == [True, True]


def test_a_warp_redoes_a_block_together() -> None:
    p = torch.zeros(1, 40, 32)
    p[0, 17, [0, 1, 8, 9]] = 120.0  # all of one thread
    p[0, 3, [0, 2, 4, 6]] = 120.0  # of four threads
    assert FIXED.outgrown(p)[0].nonzero()[:, 0].tolist() == list(range(16, 32))


def test_the_model_follows_from_the_traits() -> None:
    traits = FwdTraitsFp8Sm90(128, 128, 64, 64, fixed_max=True, two_level=True, masked_by_fixed_max=True)
    assert kernel_model(traits) == KernelModel(128, 3, is_two_level=True, fixed=FixedMaxima(128, True))
    assert kernel_model(dataclasses.replace(traits, fixed_max=False, masked_by_fixed_max=False)).fixed is None
