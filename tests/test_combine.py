"""Attention over disjoint keys, put together, is that over all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import cuteflash

CUTS = (0, 7, 7, 30, 50)


def some_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator, dtype=dtype) for n, h in ((3, 4), (50, 2), (50, 2)))
    return q, k, v


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = cuteflash.flash_attn_func(q, k, v, return_lse=True)
    return out, lse


def parts() -> tuple[Tensor, Tensor]:
    """O and LSE of parts of the keys, one of them empty with NaN in O."""
    q, k, v = some_inputs()
    found = [attended(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(CUTS)]
    out, lse = torch.stack([out for out, _ in found]), torch.stack([lse.transpose(1, 2) for _, lse in found])
    out[1] = float("nan")
    return out, lse


def test_parts_of_the_keys() -> None:
    expected, expected_lse = attended(*some_inputs())
    out, lse = cuteflash.flash_attn_combine(*parts())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2))
    packed, packed_lse = cuteflash.flash_attn_combine(*(x.flatten(1, 2) for x in parts()))
    torch.testing.assert_close(packed, expected.flatten(0, 1))
    assert torch.equal(packed_lse, lse.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_type_of_the_result(dtype: torch.dtype) -> None:
    exact, _ = cuteflash.flash_attn_combine(*parts())
    given = torch.empty_like(exact, dtype=dtype)
    for options in ({"out_dtype": dtype}, {"out": given}, {"out": given, "out_dtype": dtype}):
        out, lse = cuteflash.flash_attn_combine(*parts(), **options)
        assert torch.equal(out, exact.to(dtype))
        assert ("out" in options) == (out is given)
        assert lse.dtype is torch.float32


def test_no_part_has_a_key() -> None:
    out, lse = parts()
    out, lse = cuteflash.flash_attn_combine(out, torch.full_like(lse, float("-inf")))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [0, 1, 20, 50])
def test_two_calls(cut: int, dtype: torch.dtype) -> None:
    q, k, v = some_inputs(dtype)
    a, b = attended(q, k[:, :cut], v[:, :cut]), attended(q, k[:, cut:], v[:, cut:])
    expected, expected_lse = attended(q, k, v)
    for first, second in ((a, b), (b, a)):
        out, lse = cuteflash.merge_attn_states(*first, *second)
        assert (out.dtype, lse.dtype) == (expected.dtype, expected_lse.dtype)
        torch.testing.assert_close(out, expected, **({"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else {}))
        torch.testing.assert_close(
            lse, expected_lse, **({"atol": 1e-2, "rtol": 1e-3} if dtype is torch.bfloat16 else {})
        )


def test_gradients() -> None:
    gradients = []
    for is_cut in (False, True):
        q, k, v = (x.requires_grad_() for x in some_inputs(torch.float64))
        if is_cut:
            out, lse = cuteflash.merge_attn_states(
                *attended(q, k[:, :20], v[:, :20]), *attended(q, k[:, 20:], v[:, 20:])
            )
        else:
            out, lse = attended(q, k, v)
        gradients.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), (q, k, v)))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_arguments() -> None:
    out, lse = parts()
    for wrong, error, name in (
        ((out.half(), lse), TypeError, "out_partial"),
        ((out, lse.double()), TypeError, "lse_partial"),
        ((out, lse.transpose(1, 2)), ValueError, "lse_partial"),
        ((out[0, 0], lse[0, 0]), ValueError, "out_partial"),
        ((out[:0], lse[:0]), ValueError, "out_partial"),
        ((out, lse, out), ValueError, "out"),
        ((out, lse, out[0].half(), torch.bfloat16), TypeError, "out"),
        ((out, lse, None, torch.float64), TypeError, "out_dtype"),
        ((out, None), TypeError, "lse_partial"),
    ):
        with pytest.raises(error, match=name):
            cuteflash.flash_attn_combine(*wrong)  # type: ignore[arg-type]
    a, b = out[0], lse[0].transpose(1, 2)
    for wrong, error, name in (
        ((a[0, 0], b, a, b), ValueError, "out_a"),
        ((a, b, a.half(), b), TypeError, "out_b"),
        ((a, b, a[:1], b), ValueError, "out_b"),
        ((a, b.transpose(1, 2), a, b), ValueError, "lse_a"),
        ((a, b, a, b.double()), TypeError, "lse_b"),
        ((1, b, a, b), TypeError, "out_a"),
    ):
        with pytest.raises(error, match=name):
            cuteflash.merge_attn_states(*wrong)  # type: ignore[arg-type]
