"""Is an output right? Against fp32 on a few heads, and against another implementation everywhere.

The rule is the project's: the largest error against fp32 is at most twice that of the same computation done by
torch in the low precision, plus the rounding of an addition at 0.3.
"""

from __future__ import annotations

import dataclasses

import torch

from cuteflash.problem import UNBOUNDED
from cuteflash.tune.cells import Inputs

CHUNK_ROWS = 2048  # query rows at a time: 16k keys make 128 MB of fp32 scores
AGREEMENT = 0.02  # two correct bf16 outputs differ by less, absolutely plus relatively
HEADS_CHECKED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """fp32 outputs of the checked heads, (heads checked, seqlen, head_dim), and the error that is allowed."""

    index: tuple[tuple[int, int], ...]  # (batch, head) of each
    out: torch.Tensor
    low_precision_error: float
    tolerance: float


def attention_of_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Attention of one head, (rows, columns) each, all steps in `dtype`, query rows in chunks; returns fp32.

    `window`: keys a query sees before and after its own, `UNBOUNDED` for all; bottom-right aligned.
    """
    (left, right), scale = window, q.shape[1] ** -0.5
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    keys = torch.arange(k.shape[0], device=q.device)
    own = torch.arange(q.shape[0], device=q.device) + (k.shape[0] - q.shape[0])
    chunks = []
    for start in range(0, q.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        scores = (q[rows] * scale) @ k.T
        if min(left, right) < UNBOUNDED:
            distance = keys[None, :] - own[rows, None]
            scores = scores.masked_fill((distance > right) | (distance < -left), float("-inf"))
        chunks.append((torch.softmax(scores, dim=-1) @ v).float())
    return torch.cat(chunks)


def make_reference(inputs: Inputs, heads: int = HEADS_CHECKED) -> Reference:
    """The reference of `heads` heads of a cell, spread from the first to the last."""
    cell = inputs.cell
    count = cell.batch * cell.heads
    chosen = [count - 1 - index * (count - 1) // max(1, heads - 1) for index in range(heads)] if heads < count else None
    pairs = tuple(divmod(index, cell.heads) for index in sorted(set(chosen or range(count))))
    exact, low = [], []
    for batch, head in pairs:
        q, k, v = (tensor[batch, :, head] for tensor in (inputs.q, inputs.k, inputs.v))
        exact.append(attention_of_head(q, k, v, cell.window, torch.float32))
        low.append(attention_of_head(q, k, v, cell.window, inputs.q.dtype))
    out = torch.stack(exact)
    low_error = (torch.stack(low) - out).abs().max().item()
    rounding = (out + 0.3 - 0.3 - out).abs().max().item()
    return Reference(pairs, out, low_error, 2 * low_error + 2 * rounding)


def error(out: torch.Tensor, reference: Reference) -> float:
    """Largest absolute error of the checked heads; NaN and infinities count as infinite."""
    checked = torch.stack([out[batch, :, head] for batch, head in reference.index]).float()
    difference = (checked - reference.out).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max().item())


def complaint(out: torch.Tensor, reference: Reference, other: torch.Tensor | None) -> str | None:
    """None for a right output, else what is wrong with it; `other` is a full output believed right."""
    if not bool(torch.isfinite(out).all()):
        return "output has NaN or infinite elements"
    found = error(out, reference)
    if found > reference.tolerance:
        return f"error {found:.2e} over {reference.tolerance:.2e}"
    if other is not None:
        excess = ((out.float() - other.float()).abs() - AGREEMENT * other.float().abs()).max().item()
        if excess > AGREEMENT:
            return f"differs from another implementation by {excess:.2e} on a head not compared with fp32"
    return None


def poison(like: torch.Tensor) -> None:
    """Leave NaN in the memory that the allocator will hand to the next tensor of this size."""
    torch.full_like(like, float("nan"))
