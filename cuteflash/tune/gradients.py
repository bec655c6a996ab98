"""Are gradients right? Against fp32 on a few heads, and against another implementation everywhere.

As `accuracy` judges outputs, except that the largest error may be three times torch's: gradients sum over products of
rounded factors. Torch's errors are those of its autograd in the low precision, or of the formula that every flash
attention uses, which takes the row sums of dO * O from the rounded O; of each figure the larger one counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cuteflash.tune import accuracy
from cuteflash.tune.accuracy import Errors, Place
from cuteflash.tune.cells import Cell, Inputs, make_inputs

TIMES_MAXIMUM = 3.0  # how many times torch's largest error
TILE_ROWS = 16
# Two right gradients differ by less over such a tile of rows of a head, as a share of its root mean square. Single
# elements have no such bound: what cancels within a row leaves the rounding of its parts.
AGREEMENT = 0.05
CANCELLED = 2e-6  # what fp32 leaves of sums that cancel, as a share of the largest input


class Gradients(NamedTuple):
    """Of Q, K and V, of their shapes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Saved(NamedTuple):
    """What a forward leaves for its backward."""

    out: Tensor  # (batch, seqlen_q, heads, head_dim_v), rounded
    lse: Tensor  # (batch, heads, seqlen_q), fp32, natural log


Forward = TypeVar("Forward")  # what a forward reads: an object with q, k and v


@dataclasses.dataclass(frozen=True)
class BwdInputs(Generic[Forward]):
    """What a backward of a cell starts from.

    Attributes:
        forward: Q, K and V.
        dout: gradient of O, of O's shape.
    """

    forward: Forward
    dout: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What gradients are judged by; the mappings are by the fields of `Gradients`."""

    index: tuple[Place, ...]  # the checked heads
    exact: Gradients  # theirs in fp32 one after the other, (rows, columns)
    low_precision: Mapping[str, Errors]  # torch's errors
    tolerance: Mapping[str, Errors]  # what is allowed

    def errors(self, gradients: Gradients) -> dict[str, Errors]:
        """Of each gradient, over the checked heads."""
        return {
            name: accuracy.errors_of(accuracy.rows_at(found, self.index) - getattr(self.exact, name))
            for name, found in gradients._asdict().items()
        }


def make_bwd_inputs(cell: Cell, device: torch.device, seed: int = 0) -> BwdInputs[Inputs]:
    """Fresh inputs of the cell's kind, and a normal gradient of O."""
    forward = make_inputs(cell, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    shape = (*forward.q.shape[:3], cell.head_dim_v)
    return BwdInputs(forward, torch.randn(shape, device=device, dtype=forward.q.dtype, generator=generator))


def saved_forward(inputs: Inputs) -> Saved:
    """The forward of a cell, all steps in fp32, head by head."""
    q, k, v = inputs.q, inputs.k, inputs.v
    saved = Saved(inputs.empty_out(), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))
    for batch, head in itertools.product(range(q.shape[0]), range(q.shape[2])):
        queries, keys, values = (tensor[batch, :, head].float() for tensor in (q, k, v))
        for rows in accuracy.row_chunks(queries):
            scores = accuracy.masked_scores(queries, keys, rows, inputs.cell.window)
            saved.lse[batch, head, rows] = torch.logsumexp(scores, dim=-1)
            saved.out[batch, rows, head] = (torch.softmax(scores, dim=-1) @ values).to(q.dtype)
    return saved


def gradients_of_head(
    tensors: tuple[Tensor, ...], window: tuple[int, int], dtype: torch.dtype, rounded: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """dQ, dK and dV of one head by autograd, all steps in `dtype`, sums over chunks of queries in fp32; returns fp32.

    Args:
        tensors: Q, K, V and dO of the head, (rows, columns) each.
        window: see `accuracy.attention_of_head`.
        dtype: of every step.
        rounded: what O is rounded to before its product with dO; None leaves it.
    """
    *inputs, dout = (tensor.detach().to(dtype) for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    q, k, v = leaves
    sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
    for rows in accuracy.row_chunks(q):
        with torch.enable_grad():
            scores = accuracy.masked_scores(q, k, rows, window)
            results = [torch.softmax(scores, dim=-1) @ v]
            given = [dout[rows]]
            if rounded is not None:  # a gradient of LSE shifts the row sums of dO * O by as much
                (out,) = results
                given.append((dout[rows] * (out - out.to(rounded).to(dtype))).sum(dim=-1).detach())
                results.append(torch.logsumexp(scores, dim=-1))
            parts = torch.autograd.grad(results, leaves, given)
        for total, part in zip(sums, parts, strict=True):
            total += part.float()
    return tuple(sums)


def make_reference(inputs: BwdInputs[Inputs], heads: int = accuracy.HEADS_CHECKED) -> Reference:
    """The reference of `heads` heads of a cell, spread from the first to the last."""
    cell = inputs.forward.cell
    tensors = inputs.forward.q, inputs.forward.k, inputs.forward.v, inputs.dout
    return reference_of(tensors, accuracy.chosen_heads(cell, heads), cell.window)


def reference_of(tensors: tuple[Tensor, ...], index: tuple[Place, ...], window: tuple[int, int]) -> Reference:
    """The reference of the heads at some places of Q, K, V and dO, whose last two dimensions are heads and columns."""
    dtype = tensors[0].dtype
    found: list[list[tuple[Tensor, ...]]] = [[], [], []]
    for place in index:
        own = tuple(tensor[place] for tensor in tensors)
        ways = ((torch.float32, None), (dtype, None), (torch.float32, dtype))
        for kept, (steps, rounded) in zip(found, ways, strict=True):
            kept.append(gradients_of_head(own, window, steps, rounded))
    exact, *others = (Gradients(*map(torch.cat, zip(*kept, strict=True))) for kept in found)
    largest = max(tensor.abs().max().item() for tensor in tensors)
    torchs, tolerance = {}, {}
    for name, wanted in exact._asdict().items():
        both = [accuracy.errors_of(getattr(other, name) - wanted) for other in others]
        least = CANCELLED * largest + accuracy.EXACT_RMS * torch.finfo(dtype).eps * accuracy.rms(wanted)
        torchs[name] = Errors(max(least, *(one.maximum for one in both)), max(least, *(one.rms for one in both)))
        rounding = (wanted + 0.3 - 0.3 - wanted).abs().max().item()
        most = TIMES_MAXIMUM * torchs[name].maximum + 2 * rounding
        tolerance[name] = Errors(most, accuracy.TIMES_RMS * torchs[name].rms)
    return Reference(index, exact, torchs, tolerance)


def complaint(gradients: Gradients, reference: Reference, other: Gradients | None) -> str | None:
    """None for right gradients, else what is wrong with them; `other` are gradients believed right, of all heads."""
    errors = reference.errors(gradients)
    for name, found in gradients._asdict().items():
        if not bool(torch.isfinite(found).all()):
            return f"{name} has NaN or infinite elements"
        most, allowed = errors[name].maximum, reference.tolerance[name].maximum
        if most > allowed:
            return f"error of {name} {most:.2e} over {allowed:.2e}"
        if other is not None:
            difference = largest_tile_difference(found, getattr(other, name))
            if difference > AGREEMENT:
                return (
                    f"{name} differs from another implementation's by {difference:.2f} of {TILE_ROWS} rows' root mean "
                    f"square, more than {AGREEMENT:g}, on a head not compared with fp32"
                )
    return None


def imprecision(gradients: Gradients, reference: Reference) -> str | None:
    """None if the rms errors are small enough, else by how much one is too large; for our kernels alone."""
    for name, found in reference.errors(gradients).items():
        allowed = reference.tolerance[name].rms
        if found.rms > allowed:
            times = found.rms / reference.low_precision[name].rms
            return f"rms error of {name} {found.rms:.2e} over {allowed:.2e}, {times:.1f} times torch's own"
    return None


def largest_tile_difference(found: Tensor, other: Tensor) -> float:
    """The largest difference of two (.., rows, heads, columns) tensors over `TILE_ROWS` rows of a head, relative."""

    def squares(tensor: Tensor) -> Tensor:
        of_rows = tensor.float().square().mean(dim=-1).transpose(-2, -1)  # (.., heads, rows)
        return torch.nn.functional.avg_pool1d(of_rows, TILE_ROWS, ceil_mode=True)

    least = torch.finfo(torch.float32).tiny  # equal zeros do not differ
    ratios = squares(found - other) / squares(other).clamp(min=least)
    return float(ratios.max().sqrt().item())
