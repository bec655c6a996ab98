"""How gradients are judged, on any device: torch's autograd through a textbook reference, and every element compared.

As `tests.gpu.checks`: errors against fp32 are compared with those of the same computation done by torch in the low
precision. A gradient passes if its largest error is at most three times torch's, plus the rounding of an addition at
0.3, and the root mean square of its errors is at most one and a half times torch's. The same computation is done in
two ways, by autograd and by the formula that every flash attention uses, which takes the row sums of dO * O from the
rounded O; of each figure the larger one counts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

import cuteflash
from tests.gpu.checks import Case, poisoned, rms, visible

Tensors = tuple[Tensor, Tensor, Tensor]


class Upstream(NamedTuple):
    """The gradients that flow into O and LSE; `lse` is None if none flows there."""

    out: Tensor
    lse: Tensor | None


def upstream(inputs: Tensors, case: Case, seed: int = 0) -> Upstream:
    """Fresh gradients of the results; of LSE if the case asks for LSE."""
    q, _, v = inputs
    generator = torch.Generator(q.device).manual_seed(seed + 1000)
    out = torch.randn((*q.shape[:3], v.shape[3]), device=q.device, generator=generator).to(q.dtype)
    lse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device, generator=generator)
    return Upstream(out, lse if case.lse else None)


def gradients(
    inputs: Tensors, given: Upstream, case: Case, family: str | None, deterministic: bool = False
) -> tuple[Tensor, ...]:
    """dQ, dK and dV from the public function, with every new tensor poisoned."""
    leaves = [x.detach().requires_grad_() for x in inputs]  # with the strides of the inputs
    options = case.options() | {"family": family, "deterministic": deterministic}
    with poisoned():
        result = cuteflash.flash_attn_func(*leaves, **options)
        if given.lse is None:
            return torch.autograd.grad(result[0] if case.lse else result, leaves, given.out)
        return torch.autograd.grad(result, leaves, (given.out, given.lse))


def _attention(inputs: Tensors, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves' O and LSE in `dtype`, differentiable, and which queries see a key at all."""
    q, k, v = inputs
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # (b, h, s, d)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q * scale) @ k.transpose(2, 3)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    seen = visible(q.shape[2], k.shape[2], case, q.device)
    some = seen.any(dim=1)
    scores = scores.masked_fill(~seen & some[:, None], float("-inf"))  # an empty row would make NaN of its gradients
    out = (torch.softmax(scores, dim=-1) @ v) * some[:, None]
    return out.transpose(1, 2), torch.logsumexp(scores.float(), dim=-1), some


def reference(inputs: Tensors, given: Upstream, case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dQ, dK and dV as fp32, from autograd with every step in `dtype`."""
    leaves = tuple(x.detach().to(dtype).requires_grad_() for x in inputs)
    out, lse, some = _attention(leaves, case, dtype)
    loss = (out * given.out.to(dtype)).sum()
    if given.lse is not None:
        loss = loss + (lse[..., some] * given.lse[..., some]).sum().to(dtype)
    return tuple(x.float() for x in torch.autograd.grad(loss, leaves))


def by_rounded_outputs(inputs: Tensors, given: Upstream, case: Case) -> tuple[Tensor, ...]:
    """The same in fp32, but for O, which has the inputs' precision: rowsum(dO * O) stands for what P dP sums to.

    The gradient of LSE shifts that sum, so that rounding O is a gradient into LSE of what dO * O lost.
    """
    out, _, _ = _attention(inputs, case, torch.float32)
    lost = (given.out.float() * (out - out.to(inputs[0].dtype).float())).sum(dim=-1).transpose(1, 2)
    return reference(inputs, Upstream(given.out, lost if given.lse is None else given.lse + lost), case, torch.float32)


def assert_right(inputs: Tensors, given: Upstream, case: Case, got: tuple[Tensor, ...]) -> None:
    """Shapes, dtypes and every element of the gradients, of which the last may be left out."""
    assert_near(inputs, given, got, references(inputs, given, case))


def references(inputs: Tensors, given: Upstream, case: Case) -> tuple[tuple[Tensor, ...], ...]:
    """The gradients that `got` is compared with: exact, then the two with torch's errors."""
    return (
        reference(inputs, given, case, torch.float32),
        reference(inputs, given, case, inputs[0].dtype),
        by_rounded_outputs(inputs, given, case),
    )


def assert_near(
    inputs: Tensors, given: Upstream, got: tuple[Tensor, ...], expected: tuple[tuple[Tensor, ...], ...]
) -> None:
    """Likewise with given `references`."""
    largest = max(x.float().abs().max().item() for x in (*inputs, given.out))
    for name, x, mine, wanted, *others in zip(("dq", "dk", "dv"), inputs, got, *expected, strict=False):
        assert mine.shape == x.shape and mine.dtype == x.dtype, name
        assert torch.isfinite(mine).all(), f"{(~torch.isfinite(mine)).sum().item()} elements of {name} are not finite"
        # Sums that cancel, as dS of a row with one key does, leave what fp32 rounds.
        least = 2e-6 * largest + torch.finfo(x.dtype).eps / 20 * rms(wanted)
        low_error = max((other - wanted).abs().max().item() for other in others)
        low_rms = max(least, *(rms(other - wanted) for other in others))
        tolerance = 3 * max(low_error, least) + 2 * (wanted + 0.3 - 0.3 - wanted).abs().max().item()
        difference = (mine.float() - wanted).abs()
        worst = difference.max().item()
        where = tuple(i.item() for i in torch.unravel_index(difference.argmax(), difference.shape))
        assert worst <= tolerance, f"{name}: error {worst:.3e} at {where}, allowed {tolerance:.3e}"
        error = rms(difference)
        assert error <= 1.5 * low_rms, f"{name}: rms error {error:.3e}, {error / low_rms:.2f} times torch's own"


def check(case: Case, family: str | None, device: torch.device, seed: int = 0, deterministic: bool = False) -> None:
    """Run a case on fresh inputs and judge its gradients."""
    inputs = case.inputs(device, seed)
    given = upstream(inputs, case, seed)
    assert_right(inputs, given, case, gradients(inputs, given, case, family, deterministic))


def small(device: torch.device, case: Case) -> Case:
    """A case of one batch entry and of one KV head, two if several query heads share them, if it runs on a CPU.

    The CPU's reference treats all heads and batch entries alike, and has tests of its own.
    """
    if device.type == "cuda":
        return case
    if case.kv_heads is None:
        return dataclasses.replace(case, batch=1, heads=1)
    kv_heads = min(case.kv_heads, 2)
    return dataclasses.replace(case, batch=1, heads=case.heads // case.kv_heads * kv_heads, kv_heads=kv_heads)
