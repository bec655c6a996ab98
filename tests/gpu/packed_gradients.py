"""Gradients of packed sequences, judged as `tests.gpu.gradients` judges those of each sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cuteflash
from tests.gpu import gradients as dense
from tests.gpu.checks import poisoned
from tests.gpu.gradients import Tensors, Upstream
from tests.gpu.packed import Packed


def upstream(packed: Packed, inputs: Tensors, seed: int = 0) -> Upstream:
    """Fresh gradients of the results, of LSE if the case asks for LSE; NaN flows into rows that do not count."""
    given = dense.upstream(tuple(x.detach()[None] for x in inputs), packed.case, seed)
    out, lse = given.out[0], None if given.lse is None else given.lse[0]
    counts = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    for span in packed.spans("q"):
        counts[span] = True
    out[~counts] = float("nan")
    if lse is not None:
        lse[:, ~counts] = float("nan")
    return Upstream(out, lse)


def gradients(
    packed: Packed,
    inputs: Tensors,
    given: Upstream,
    family: str | None,
    deterministic: bool = False,
    vectors: dict[str, Any] | None = None,
) -> tuple[Tensor, ...]:
    """dQ, dK and dV from the public function, with every new tensor poisoned."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    options = packed.case.options() | {"family": family, "deterministic": deterministic}
    with poisoned():
        result = cuteflash.flash_attn_varlen_func(*leaves, **(vectors or packed.vectors(given.out.device)), **options)
        if given.lse is None:
            return torch.autograd.grad(result, leaves, given.out)
        return torch.autograd.grad(result, leaves, (given.out, given.lse))


def assert_right(
    packed: Packed,
    inputs: Tensors,
    given: Upstream,
    got: tuple[Tensor, ...],
    sequences: Sequence[int] | None = None,
) -> None:
    """Every row of the gradients that counts, and that all others are 0.

    Args:
        packed, inputs, given: what `got` are the gradients of.
        got: dQ, dK and dV.
        sequences: those to look at, with the rows that count in none; None is all.
    """
    spans = list(zip(packed.spans("q"), packed.spans("k"), strict=True))
    for gradient, side in zip(got, (0, 1, 1), strict=True):
        rest = torch.ones(gradient.shape[0], dtype=torch.bool, device=gradient.device)
        for span in spans:
            rest[span[side]] = False
        assert (gradient[rest] == 0).all()
    chosen = [spans[i] for i in (range(len(spans)) if sequences is None else sequences)]
    chosen = [(of_q, of_k) for of_q, of_k in chosen if of_q.start < of_q.stop or of_k.start < of_k.stop]
    if not chosen:
        return
    parts = [_part(inputs, given, *span) for span in chosen]
    expected = zip(*(_references(*part, packed) for part in parts), strict=True)  # by kind of reference
    dense.assert_near(
        tuple(_joined(column) for column in zip(*(tensors for tensors, _ in parts), strict=True)),
        Upstream(_joined([upstream.out for _, upstream in parts]), None),
        tuple(
            _joined([gradient[None, span[side]] for span in chosen])
            for gradient, side in zip(got, (0, 1, 1), strict=True)
        ),
        tuple(tuple(_joined(column) for column in zip(*kind, strict=True)) for kind in expected),
    )


def _part(inputs: Tensors, given: Upstream, of_q: slice, of_k: slice) -> tuple[Tensors, Upstream]:
    """One sequence as a batch of its own."""
    q, k, v = (x.detach() for x in inputs)
    lse = None if given.lse is None else given.lse[None, :, of_q]
    return (q[None, of_q], k[None, of_k], v[None, of_k]), Upstream(given.out[None, of_q], lse)


def _references(inputs: Tensors, given: Upstream, packed: Packed) -> tuple[tuple[Tensor, ...], ...]:
    q, k, _ = inputs
    if not q.shape[1] or not k.shape[1]:
        return (tuple(torch.zeros_like(x, dtype=torch.float32) for x in inputs),) * 3
    return dense.references(inputs, given, packed.case)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors), dim=1)


def check(packed: Packed, family: str, device: torch.device, seed: int = 0, deterministic: bool = False) -> None:
    """Run it on fresh inputs and judge its gradients."""
    inputs = packed.inputs(device, seed)
    given = upstream(packed, inputs, seed)
    assert_right(packed, inputs, given, gradients(packed, inputs, given, family, deterministic))
