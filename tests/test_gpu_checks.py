"""The GPU tests' own judge, on the CPU: it accepts right outputs and notices each kind of wrong one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.checks import Case, assert_right, call, low_precision_errors, poisoned, reference, visible

CPU = torch.device("cpu")
CASE = Case(40, 70, heads=4, kv_heads=2, causal=True, lse=True)


def scale_one_row(out: Tensor) -> None:
    out[1, 39, 3] *= 1.1


def leave_one_out(out: Tensor) -> None:
    out[0, 5, 1, 7] = float("nan")


def swap_heads(out: Tensor) -> None:
    out[:, :, [0, 1]] = out[:, :, [1, 0]]


def shift_rows(out: Tensor) -> None:
    out.copy_(out.roll(1, dims=1))


@pytest.mark.parametrize("spoil", [scale_one_row, leave_one_out, swap_heads, shift_rows])
def test_a_wrong_output_fails(spoil: Callable[[Tensor], None]) -> None:
    inputs = CASE.inputs(CPU)
    out, lse = call(*inputs, CASE, "sm80")
    assert_right(inputs, CASE, out, lse)
    spoil(out)
    with pytest.raises(AssertionError):
        assert_right(inputs, CASE, out, lse)


@pytest.mark.parametrize(("times", "right"), [(1.0, True), (2.0, False)])
def test_many_small_errors_fail_although_none_is_large(times: float, right: bool) -> None:
    inputs = CASE.inputs(CPU)
    exact, _ = reference(*inputs, CASE, torch.float32)
    low, _ = reference(*inputs, CASE, torch.bfloat16)
    largest, rms = low_precision_errors(low, exact, torch.bfloat16)
    signs = torch.randint(0, 2, exact.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    out = (exact + times * rms * signs).to(inputs[0].dtype)
    assert (out.float() - exact).abs().max() < 2 * largest
    with contextlib.nullcontext() if right else pytest.raises(AssertionError, match=r"rms error .* times torch's own"):
        assert_right(inputs, CASE, out)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_dominant_key_whose_weight_is_rounded_fails(dtype: str) -> None:
    """Torch copies the key's value, as a kernel does that shifts scores by their maximum."""
    case = Case(200, kind="sink:30", dtype=dtype)
    q, k, v = case.inputs(CPU)
    assert_right((q, k, v), case, v[:, :1].expand(q.shape).contiguous())
    scores = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)) / 8
    stale = scores.amax(-1, keepdim=True) - torch.linspace(3, 8, 200)[:, None]  # maxima of other keys
    weights = torch.exp(scores - stale)
    out = (weights.to(q.dtype).float() @ v.float().transpose(1, 2) / weights.sum(-1, keepdim=True)).transpose(1, 2)
    with pytest.raises(AssertionError, match="rms error"):
        assert_right((q, k, v), case, out.to(q.dtype))


def test_a_wrong_log_sum_exp_fails() -> None:
    inputs = CASE.inputs(CPU)
    out, lse = call(*inputs, CASE, "sm80")
    assert lse is not None
    with pytest.raises(AssertionError):
        assert_right(inputs, CASE, out, lse / 0.6931)  # base 2 in place of e


def test_the_reference_is_torchs_where_torch_has_one() -> None:
    case = Case(50, heads=2, causal=True)
    q, k, v = (x.float() for x in case.inputs(CPU))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(reference(q, k, v, case, torch.float32)[0], expected)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (Case(causal=True), ["111000", "111100", "111110", "111111"][1:]),
        (Case(window=(1, 0)), ["001100", "000110", "000011"]),
        (Case(window=(-1, 1)), ["111110", "111111", "111111"]),
        (Case(window=(0, -1)), ["000111", "000011", "000001"]),
    ],
)
def test_masks_align_at_the_bottom_right(case: Case, rows: list[str]) -> None:
    seen = visible(3, 6, case, CPU)
    assert ["".join(str(int(x)) for x in row) for row in seen] == rows


def test_poison_fills_and_is_undone() -> None:
    with poisoned():
        assert torch.isnan(torch.empty(4)).all()
    assert not torch.are_deterministic_algorithms_enabled()
