"""Is an output right? Against fp32 on a few heads, and against another implementation everywhere.

The rule is the project's, and compares with the same computation done by torch in the low precision: the largest error
against fp32 is at most twice torch's, plus the rounding of an addition at 0.3, and the root mean square of all errors
is at most one and a half times torch's. A few large errors show in the one, many small ones in the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from cuteflash.problem import UNBOUNDED
from cuteflash.tune.cells import Cell, Inputs

CHUNK_ROWS = 2048  # query rows at a time: 16k keys make 128 MB of fp32 scores
AGREEMENT = 0.02  # two correct bf16 outputs differ by less, relatively
AGREEMENT_OF_V = 0.005  # plus this much of the channel's largest value
HEADS_CHECKED = 2
TIMES_MAXIMUM, TIMES_RMS = 2.0, 1.5  # how many times torch's errors may be
# Rounding costs about a quarter of the type's epsilon, in root mean squares. If one key takes all the weight, torch
# copies a value and has no error; a fifth of that cost then counts as its error, half an epsilon as its largest one.
EXACT_RMS, EXACT_MAXIMUM = 0.05, 0.5


Place = tuple[int | slice, ...]  # the subscript of one head's rows, (rows, columns), in Q, K, V and O alike


@dataclasses.dataclass(frozen=True, slots=True)
class Errors:
    """Of some outputs: the largest absolute error, and the root mean square of all."""

    maximum: float
    rms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What outputs are judged by."""

    index: tuple[Place, ...]  # the checked heads
    out: torch.Tensor  # their fp32 outputs one after the other, (rows, head_dim_v)
    low_precision: Errors  # torch's errors in the low precision, not below those of `torchs_errors`
    tolerance: Errors  # what is allowed
    agreement: torch.Tensor  # (heads, head_dim_v), by how much two right outputs may differ, beside `AGREEMENT` of them

    def rms_ratio(self, errors: Errors) -> float:
        """The rms error in torch's."""
        return errors.rms / self.low_precision.rms if errors.rms else 0.0


def attention_of_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Attention of one head, (rows, columns) each, all steps in `dtype`, query rows in chunks; returns fp32.

    `window`: keys a query sees before and after its own, `UNBOUNDED` for all; bottom-right aligned.
    """
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    chunks = [torch.softmax(masked_scores(q, k, rows, window), dim=-1) @ v for rows in row_chunks(q)]
    return torch.cat(chunks).float()


def row_chunks(q: torch.Tensor) -> list[slice]:
    """The rows of a head's queries in parts that a score matrix in memory is made for."""
    return [slice(start, start + CHUNK_ROWS) for start in range(0, q.shape[0], CHUNK_ROWS)]


def masked_scores(q: torch.Tensor, k: torch.Tensor, rows: slice, window: tuple[int, int]) -> torch.Tensor:
    """Scores of some query rows of a head with all keys, -inf for those that the window hides."""
    left, right = window
    scores: torch.Tensor = (q[rows] * q.shape[1] ** -0.5) @ k.T
    if min(left, right) < UNBOUNDED:
        keys = torch.arange(k.shape[0], device=q.device)
        own = torch.arange(q.shape[0], device=q.device)[rows] + (k.shape[0] - q.shape[0])
        distance = keys[None, :] - own[:, None]
        scores = scores.masked_fill((distance > right) | (distance < -left), float("-inf"))
    return scores


def make_reference(inputs: Inputs, heads: int = HEADS_CHECKED) -> Reference:
    """The reference of `heads` heads of a cell, spread from the first to the last."""
    _, k, v = (inputs.q, inputs.k, inputs.v) if inputs.scales is None else inputs.values()
    cell = inputs.cell
    return reference_of((inputs.q, k, v), chosen_heads(cell, heads), cell.window, cell.group)


def reference_of(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    index: tuple[Place, ...],
    window: tuple[int, int],
    group: int = 1,
) -> Reference:
    """The reference of the heads at some places of Q, K and V, whose last two dimensions are heads and columns.

    `group` query heads share one of K and V. Places are Q's; torch's precision is Q's, whatever K and V have.
    """
    q, k, v = tensors
    pairs = [(place, (*place[:-1], int(place[-1]) // group)) for place in index]  # type: ignore[arg-type]  # a head

    def attention(dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([attention_of_head(q[own], k[shared], v[shared], window, dtype) for own, shared in pairs])

    out = attention(torch.float32)
    torchs = torchs_errors(attention(q.dtype), out, q.dtype)
    rounding = (out + 0.3 - 0.3 - out).abs().max().item()
    tolerance = Errors(TIMES_MAXIMUM * torchs.maximum + 2 * rounding, TIMES_RMS * torchs.rms)
    agreement = AGREEMENT_OF_V * v.abs().flatten(0, -3).amax(dim=0).float().repeat_interleave(group, dim=0)
    return Reference(index, out, torchs, tolerance, agreement)


def chosen_heads(cell: Cell, heads: int = HEADS_CHECKED) -> tuple[Place, ...]:
    """`heads` heads of a cell, spread from the first to the last."""
    count = cell.batch * cell.heads
    chosen = [count - 1 - index * (count - 1) // max(1, heads - 1) for index in range(heads)] if heads < count else None
    pairs = (divmod(index, cell.heads) for index in sorted(set(chosen or range(count))))
    return tuple((batch, slice(None), head) for batch, head in pairs)


def torchs_errors(low: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> Errors:
    """Errors of what torch computed in `dtype`, or what counts as such if it has next to none."""
    found, eps = errors_of(low - exact), torch.finfo(dtype).eps
    least = EXACT_RMS * eps * rms(exact)
    if found.rms >= least:
        return found
    return Errors(max(found.maximum, EXACT_MAXIMUM * eps * exact.abs().max().item()), least)


def errors(out: torch.Tensor, reference: Reference) -> Errors:
    """Errors of the checked heads; NaN and infinities count as infinite."""
    return errors_of(rows_at(out, reference.index) - reference.out)


def rows_at(tensor: torch.Tensor, index: Iterable[Place]) -> torch.Tensor:
    """The rows at some places, one after the other, in fp32."""
    return torch.cat([tensor[place] for place in index]).float()


def errors_of(difference: torch.Tensor) -> Errors:
    """Of what outputs differ by from the reference; NaN counts as infinite."""
    size = torch.nan_to_num(difference.abs(), nan=float("inf"))
    return Errors(float(size.max().item()), rms(size))


def rms(values: torch.Tensor) -> float:
    """Root mean square."""
    return float(values.double().square().mean().sqrt().item())


def complaint(out: torch.Tensor, reference: Reference, other: torch.Tensor | None) -> str | None:
    """None for a right output, else what is wrong with it; `other` is a full output believed right."""
    if not bool(torch.isfinite(out).all()):
        return "output has NaN or infinite elements"
    found, allowed = errors(out, reference), reference.tolerance
    if found.maximum > allowed.maximum:
        return f"error {found.maximum:.2e} over {allowed.maximum:.2e}"
    if other is not None:
        excess = ((out.float() - other.float()).abs() - AGREEMENT * other.float().abs() - reference.agreement).max()
        if excess > 0:
            return (
                f"differs from another implementation by {excess.item():.2e} too much on a head not compared with fp32"
            )
    return None


def imprecision(out: torch.Tensor, reference: Reference) -> str | None:
    """None if the rms error is small enough, else by how much it is too large.

    Apart from `complaint` because it holds for our kernels alone: a peer's precision is its own affair.
    """
    found, allowed = errors(out, reference), reference.tolerance
    if found.rms <= allowed.rms:
        return None
    return f"rms error {found.rms:.2e} over {allowed.rms:.2e}, {reference.rms_ratio(found):.1f} times torch's own"


def poison(*like: torch.Tensor) -> None:
    """Leave NaN in the memory that the allocator will hand to the next tensors of these sizes."""
    _ = [torch.full_like(tensor, float("nan")) for tensor in like]
