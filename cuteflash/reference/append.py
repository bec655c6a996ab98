"""Appending to a KV cache and rotating by position, by definition, in torch: what the operators do on a CPU."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cuteflash.problem import E4M3_MAX

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Which sequence each token of a call belongs to.

    Attributes:
        sequence: (tokens,) its number.
        index: (tokens,) the token's number in it.
        exists: (tokens,) whether there is one: tokens may follow the last packed sequence.
    """

    sequence: Tensor
    index: Tensor
    exists: Tensor

    @classmethod
    def of(cls, x: Tensor, ends: Tensor | None) -> Tokens:
        """Of (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with the sequences' `ends`."""
        if ends is None:
            batch, seqlen = x.shape[:2]
            numbers = torch.arange(batch * seqlen, device=x.device)
            return cls(numbers // max(seqlen, 1), numbers % max(seqlen, 1), torch.ones_like(numbers, dtype=torch.bool))
        numbers = torch.arange(x.shape[0], device=x.device)
        sequence = torch.bucketize(numbers, ends[1:].long(), right=True)
        exists = sequence < ends.shape[0] - 1
        sequence = torch.where(exists, sequence, 0)
        return cls(sequence, numbers - ends.long()[sequence], exists)


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """The angles of a rotary embedding.

    Attributes:
        cos, sin: (positions, rotary_dim / 2).
        interleaved: a pair is two neighbouring columns, not two that are ``rotary_dim / 2`` apart.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def rotated(rows: Tensor, positions: Tensor, tables: Tables) -> Tensor:
    """(tokens, heads, head_dim) in fp32, or fp64, rotated by the angles of `positions` (tokens,)."""
    wide = rows.double() if rows.dtype == torch.float64 else rows.float()
    positions = positions.clamp(0, tables.cos.shape[0] - 1)
    cos, sin = (table.to(wide.dtype)[positions][:, None] for table in (tables.cos, tables.sin))
    turned, rest = wide.tensor_split([2 * cos.shape[-1]], dim=-1)
    shape, dim = ((-1, 2), -1) if tables.interleaved else ((2, -1), -2)
    a, b = turned.unflatten(-1, shape).unbind(dim)
    return torch.cat((torch.stack((a * cos - b * sin, a * sin + b * cos), dim).flatten(-2), rest), -1)


def rotate(x: Tensor, ends: Tensor | None, begins: Tensor, tables: Tables, fixed: bool) -> Tensor:
    """A new tensor: each token at its position, which is ``begins[sequence]``, plus its number unless `fixed`.

    Tokens after the last packed sequence stay as they are.
    """
    tokens = Tokens.of(x, ends)
    if begins.numel() == 0 or x.numel() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    rows = x.reshape(-1, *x.shape[-2:])
    positions = begins.long()[tokens.sequence] + (0 if fixed else tokens.index)
    result = torch.where(tokens.exists[:, None, None], rotated(rows, positions, tables).to(x.dtype), rows)
    return result.reshape(x.shape)


def append(cache: Tensor, new: Tensor, tokens: Tokens, entries: Tensor, slots: Tensor, descale: Tensor | None) -> None:
    """Write tokens to a cache.

    Args:
        cache: (entries, slots, kv_heads, head_dim).
        new: (tokens, kv_heads, head_dim), possibly wider than the cache.
        tokens: of `new`.
        entries, slots: (tokens,) the place of each; one that is outside of the cache is not written.
        descale: (batch, kv_heads), of an e4m3 cache: what is too large becomes 448, NaN stays what it is.
    """
    inside = (entries >= 0) & (entries < cache.shape[0]) & (slots >= 0) & (slots < cache.shape[1]) & tokens.exists
    values = new[inside]
    if descale is None:
        cache[entries[inside], slots[inside]] = values.to(cache.dtype)
        return
    scaled = values.float() * (1 / descale[tokens.sequence[inside]])[..., None]
    bits = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(FP8).view(torch.uint8)
    cache.view(torch.uint8)[entries[inside], slots[inside]] = bits


def places(
    tokens: Tokens, positions: Tensor, page_table: Tensor | None, batch_idx: Tensor | None, slots: int
) -> tuple[Tensor, Tensor]:
    """The (entry, slot) of each token's position in its sequence; -1 is an entry that does not exist."""
    if page_table is None:
        return tokens.sequence if batch_idx is None else batch_idx.long()[tokens.sequence], positions
    pages = positions.div(slots, rounding_mode="floor")
    exists = (pages >= 0) & (pages < page_table.shape[1])
    if page_table.numel() == 0:
        return torch.full_like(pages, -1), positions
    found = page_table.long()[tokens.sequence, pages.clamp(0, page_table.shape[1] - 1)]
    return torch.where(exists, found, -1), positions - pages * slots
