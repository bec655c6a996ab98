"""Is an output right? Against fp32 on a few heads, and against another implementation everywhere.

The rule is the project's: the largest error against fp32 is at most twice that of the same computation done by
torch in the low precision, plus the rounding of an addition at 0.3.
"""

from __future__ import annotations

import dataclasses

import torch

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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Attention of one head, (seqlen, head_dim) each, all steps in `dtype`, rows in chunks; returns fp32."""
    seqlen, head_dim = q.shape
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    positions = torch.arange(seqlen, device=q.device)
    chunks = []
    for start in range(0, seqlen, CHUNK_ROWS):
        rows = q[start : start + CHUNK_ROWS]
        scores = (rows * head_dim**-0.5) @ k.T
        if causal:
            hidden = positions[None, :] > positions[start : start + CHUNK_ROWS, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        chunks.append((torch.softmax(scores, dim=-1) @ v).float())
    return torch.cat(chunks)


def make_reference(inputs: Inputs) -> Reference:
    """The reference of the first and the last head of a cell."""
    cell = inputs.cell
    pairs = ((0, 0), (cell.batch - 1, cell.heads - 1))[: min(HEADS_CHECKED, cell.batch * cell.heads)]
    exact, low = [], []
    for batch, head in pairs:
        q, k, v = (tensor[batch, :, head] for tensor in (inputs.q, inputs.k, inputs.v))
        exact.append(attention_of_head(q, k, v, cell.causal, torch.float32))
        low.append(attention_of_head(q, k, v, cell.causal, inputs.q.dtype))
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
