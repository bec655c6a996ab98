"""The reference's backward against torch's autograd through a materialised softmax in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cuteflash.reference import bwd, flash_attention_2, flash_attention_2_backward
from tests.test_reference import WINDOWS, inputs, sees


def materialised(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = -1, right: int = -1, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """O and LSE, differentiable; rows without a key are cut out of the graph."""
    s_q, s_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    s = q @ k.mT * scale
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    mask = torch.tensor([[sees(i, j, s_q, s_k, left, right) for j in range(s_k)] for i in range(s_q)]).view(s_q, s_k)
    some = mask.any(dim=1)
    s = s.masked_fill(~mask & some[:, None], -math.inf)
    o = torch.softmax(s, dim=-1) @ v * some[:, None]
    lse = torch.where(some, torch.logsumexp(s, dim=-1), -math.inf)
    return o.transpose(1, 2), lse


def expected_gradients(
    tensors: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, *options: float
) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in tensors]
    o, lse = materialised(*leaves, *options)
    loss = (o * dout.double()).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * dlse.double()).sum()
    return torch.autograd.grad(loss, leaves)


def upstream(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    b, s_q, h, _ = q.shape
    dout, dlse = (torch.randn(shape, generator=generator) for shape in ((b, s_q, h, v.shape[3]), (b, h, s_q)))
    return dout.to(q.dtype), dlse.double() if q.dtype == torch.float64 else dlse


def gradients(tensors: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, *options: float) -> tuple[Tensor, ...]:
    out, lse = flash_attention_2(*tensors, *options)
    names = ("softmax_scale", "window_left", "window_right", "softcap")
    return flash_attention_2_backward(dout, *tensors, out, lse, dlse, **dict(zip(names, options)))


def check(tensors: tuple[Tensor, ...], *options: float, with_dlse: bool = True, tolerance: float = 1e-11) -> None:
    dout, dlse = upstream(tensors[0], tensors[2])
    given = dout, dlse if with_dlse else None
    got, expected = gradients(tensors, *given, *options), expected_gradients(tensors, *given, *options)
    for x, mine, wanted in zip(tensors, got, expected, strict=True):
        assert mine.shape == x.shape and mine.dtype == x.dtype and mine.is_contiguous()
        torch.testing.assert_close(mine.double(), wanted, atol=tolerance, rtol=tolerance)


def fp64(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(*sizes, dtype=torch.float64)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize(("left", "right"), WINDOWS)
@pytest.mark.parametrize(("s_q", "s_k"), [(7, 7), (4, 11), (11, 4), (1, 5)])
def test_masks_and_softcap(
    s_q: int, s_k: int, left: int, right: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bwd, "TILE_M", 3)
    monkeypatch.setattr(bwd, "TILE_N", 4)
    check(fp64(2, s_q, s_k, 4, 2, 8, 16), 0.4, left, right, softcap)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(("h_q", "h_k"), [(1, 1), (6, 2), (5, 1)])
def test_heads(h_q: int, h_k: int, with_dlse: bool) -> None:
    check(fp64(2, 6, 9, h_q, h_k, 16, 8), 0.3, with_dlse=with_dlse)


def test_several_blocks_of_the_real_tiles() -> None:
    check(fp64(1, 2 * bwd.TILE_M + 3, 2 * bwd.TILE_N + 5, 1, 1, 8, 8), 0.3, -1, 0)


def test_blocks_that_no_query_sees_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwd, "TILE_M", 4)
    monkeypatch.setattr(bwd, "TILE_N", 4)
    visited = []
    scores = bwd.scores
    monkeypatch.setattr(bwd, "scores", lambda *given: visited.append(given) or scores(*given))
    tensors = fp64(1, 16, 16, 1, 1, 8, 8)
    gradients(tensors, *upstream(tensors[0], tensors[2]), 0.3, -1, 0, 0.0)
    assert len(visited) == 4 + 3 + 2 + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_low_precision_is_accumulated_in_fp32(dtype: torch.dtype) -> None:
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    check(inputs(1, 40, 50, 2, 1, 16, 16, dtype), 0.25, -1, 0, tolerance=tolerance)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_without_a_key_get_and_give_nothing(poison: float) -> None:
    q, k, v = fp64(2, 9, 4, 4, 2, 8, 8)
    dout, dlse = upstream(q, v)
    blind = 9 - 4
    expected = gradients((q, k, v), dout, dlse, 0.3, -1, 0)
    dlse[:, :, :blind] = poison  # of lse.square(), say
    dout[:, :blind] = 1e9
    got = gradients((q, k, v), dout, dlse, 0.3, -1, 0)
    assert (got[0][:, :blind] == 0).all()
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("b", "s_q", "s_k", "h"), [(0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 0, 2), (2, 3, 3, 0), (1, 0, 0, 1)]
)
def test_empty(b: int, s_q: int, s_k: int, h: int) -> None:
    tensors = inputs(b, s_q, s_k, h, h, 8, 16)
    got = gradients(tensors, *upstream(tensors[0], tensors[2]), 0.3)
    assert [x.shape for x in got] == [x.shape for x in tensors]
    assert all((x == 0).all() for x in got)


def test_strided_and_expanded_inputs() -> None:
    q, k, v = fp64(2, 6, 5, 4, 2, 16, 8)
    dout, dlse = upstream(q, v)
    expected = gradients((q, k[[0, 0]], v), dout[:1, :1].repeat(2, 6, 1, 1), dlse, 0.3)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    got = gradients((strided, k[:1].expand(2, -1, -1, -1), v), dout[:1, :1].expand(2, 6, -1, -1), dlse, 0.3)
    assert all(torch.allclose(mine, wanted, atol=1e-14) for mine, wanted in zip(got, expected, strict=True))
