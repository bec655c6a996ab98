"""The judge of gradients, on the CPU: it accepts right ones and notices each kind of wrong one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu import packed_gradients
from tests.gpu.checks import Case, rms
from tests.gpu.gradients import Upstream, assert_right, gradients, reference, upstream
from tests.gpu.packed import Packed

CPU = torch.device("cpu")
CASE = Case(40, 70, heads=4, kv_heads=2, causal=True, lse=True)


def scale_one_row(gradient: Tensor) -> None:
    gradient[1, 39, 1] *= 1.1


def leave_one_out(gradient: Tensor) -> None:
    gradient[0, 5, 1, 7] = float("nan")


def swap_heads(gradient: Tensor) -> None:
    gradient[:, :, [0, 1]] = gradient[:, :, [1, 0]]


def shift_rows(gradient: Tensor) -> None:
    gradient.copy_(gradient.roll(1, dims=1))


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("spoil", [scale_one_row, leave_one_out, swap_heads, shift_rows])
def test_a_wrong_gradient_fails(spoil: Callable[[Tensor], None], which: int) -> None:
    inputs = CASE.inputs(CPU)
    given = upstream(inputs, CASE)
    got = gradients(inputs, given, CASE, "sm80")
    assert_right(inputs, given, CASE, got)
    spoil(got[which])
    with pytest.raises(AssertionError):
        assert_right(inputs, given, CASE, got)


WRONG = {
    "no gradient of LSE": {"lse": False},
    "no mask": {"causal": False},
    "one key more": {"causal": False, "window": (-1, 1)},
    "another scale": {"scale": 0.13},
    "no softcap": {"softcap": 0.0},
}


@pytest.mark.parametrize("name", WRONG)
def test_gradients_of_another_problem_fail(name: str) -> None:
    case = dataclasses.replace(CASE, softcap=3.0)
    inputs = case.inputs(CPU)
    given = upstream(inputs, case)
    other = dataclasses.replace(case, **WRONG[name])
    got = gradients(inputs, given if other.lse else Upstream(given.out, None), other, "sm80")
    with pytest.raises(AssertionError):
        assert_right(inputs, given, case, got)


@pytest.mark.parametrize(("times", "right"), [(1.0, True), (2.0, False)])
def test_many_small_errors_fail_although_none_is_large(times: float, right: bool) -> None:
    inputs = CASE.inputs(CPU)
    given = upstream(inputs, CASE)
    _, dk, dv = gradients(inputs, given, CASE, "sm80")
    exact, low = (reference(inputs, given, CASE, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    signs = torch.randint(0, 2, exact.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    dq = (exact + times * rms(low - exact) * signs).to(inputs[0].dtype)
    with contextlib.nullcontext() if right else pytest.raises(AssertionError, match=r"dq: rms error .* times torch's"):
        assert_right(inputs, given, CASE, (dq, dk, dv))


def packed_case() -> tuple[Packed, tuple[Tensor, ...], Upstream, tuple[Tensor, ...]]:
    """Gradients of packed sequences with all that they need to be judged."""
    packed = Packed((9, 0, 20), (12, 5, 20), CASE, used_q=(7, 0, 20), rest_k=3)
    inputs = packed.inputs(CPU)
    given = packed_gradients.upstream(packed, inputs)
    return packed, inputs, given, packed_gradients.gradients(packed, inputs, given, "sm80")


@pytest.mark.parametrize(("which", "row"), [(0, 8), (0, 15), (1, 11), (1, 13), (1, 38), (2, 20)])
def test_a_wrong_row_of_packed_sequences_fails(which: int, row: int) -> None:
    packed, inputs, given, got = packed_case()
    packed_gradients.assert_right(packed, inputs, given, got)
    got[which][row] += 0.3
    with pytest.raises(AssertionError):
        packed_gradients.assert_right(packed, inputs, given, got)


def test_only_the_sequences_asked_for_are_judged() -> None:
    packed, inputs, given, got = packed_case()
    got[0][:7] = float("nan")
    packed_gradients.assert_right(packed, inputs, given, got, [1, 2])
    with pytest.raises(AssertionError, match="not finite"):
        packed_gradients.assert_right(packed, inputs, given, got, [0, 1])
