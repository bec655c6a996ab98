"""Launches of a backward begin where those before them end: each of them still sees all of what it reads, and no more.

Inputs are made by the kernels right before a call, and are gone by those right after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.gpu import packed_gradients
from tests.gpu.checks import Case
from tests.gpu.gradients import upstream
from tests.gpu.packed import Packed

pytestmark = pytest.mark.gpu

BWD, VARLEN_BWD = torch.ops.cuteflash.bwd, torch.ops.cuteflash.varlen_bwd
SETS = 3  # of inputs, which follow each other
ROUNDS = 20
# Many blocks of one pass and few of the other, which is over first; and as many of both.
LENGTHS = [(64, 4096), (4096, 64), (777, 777)]


def in_a_row(call: Callable[..., tuple[Tensor, ...]], sets: list[tuple[Tensor, ...]], deterministic: bool) -> None:
    """Calls without a gap give what each gives alone: the same bits, or nearly so for sums in any order."""
    expected = []
    for tensors in sets:
        torch.cuda.synchronize()
        expected.append(call(*tensors))
        torch.cuda.synchronize()
    place, found = tuple(torch.empty_like(x) for x in sets[0]), []
    for tensors in sets * ROUNDS:
        for target, x in zip(place, tensors, strict=True):
            target.copy_(x)
        found.append(call(*place))
        for target in place:
            target.fill_(float("nan"))
    for gradients, wanted in zip(found, itertools.cycle(expected), strict=False):
        for name, mine, alone in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
            if name == "dq" and not deterministic:
                torch.testing.assert_close(mine, alone, rtol=0.02, atol=1e-3 * alone.abs().max().item())
            else:
                assert torch.equal(mine, alone), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_dense(
    lengths: tuple[int, int], head_dim: int, causal: bool, deterministic: bool, family: str, cuda: torch.device
) -> None:
    case = Case(*lengths, batch=1, heads=4, head_dim=head_dim, causal=causal, lse=True)
    options = None, None, -1, 0 if causal else -1, 0.0, family
    sets = []
    for seed in range(SETS):
        q, k, v = case.inputs(cuda, seed)
        out, lse = cuteflash.flash_attn_func(q, k, v, **case.options(), family=family)
        sets.append((upstream((q, k, v), case, seed).out, q, k, v, out, lse))
    in_a_row(lambda *x: BWD(*x, *options, deterministic=deterministic), sets, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [(0, 0, 0), (300, 0, 2100)], ids=str)
def test_packed(keys: tuple[int, ...], head_dim: int, deterministic: bool, family: str, cuda: torch.device) -> None:
    case = Case(heads=4, head_dim=head_dim, causal=True, lse=True)
    packed = Packed((700, 5, 900), keys, case, rest_k=max(500 - sum(keys), 0))  # rows of K that belong to none, too
    sets = []
    for seed in range(SETS):
        inputs = packed.inputs(cuda, seed)
        dout = packed_gradients.upstream(packed, inputs, seed).out
        sets.append((dout, *inputs, *packed.call(inputs, family)))
    options = packed.vectors(cuda) | {"window_right": 0, "family": family, "deterministic": deterministic}
    in_a_row(lambda *x: VARLEN_BWD(*x, **options), sets, deterministic)
