"""The online softmax of a small case, step by step: the loop of `flash_attention_2` with its values kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash.reference import flash_attention_2
from cuteflash.reference.masks import block_bounds, visible
from cuteflash.reference.tiles import finite_or_zero, grouped, scores, weighted_values
from cuteflash.traits.row import TableKey
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import TABLES

from ..softmax_steps import REPAIR_LOG2
from .sources import source_of

S_Q, S_K, D = 8, 12, 4
TILE_N = 4  # keys of one block, few enough to show each of them (the reference takes 256)
SCALE = D**-0.5
DIGITS = 6
SEED = 7

FIXED_TABLE = TableKey("fwd", "sm_90a", "sm90")  # the table whose rows may have fixed maxima

MASKS = {"full": (-1, -1), "causal": (-1, 0), "window": (2, 0)}  # (left, right) as the reference takes them

# The name of each step of a block, and its line in `flash_attention_2`.
STEPS = {
    "scores": "s = scores(",
    "maximum": "m_new = torch.maximum(",
    "shift": "shift = finite_or_zero(",
    "exponentials": "p = torch.exp(",
    "rescale": "rescale = torch.exp(",
    "sum": "ell = rescale * ell",
    "output": "acc = rescale[..., None] * acc",
    "divide": "acc = acc / ell",
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Q (1, 8, 1, 4), K and V (1, 12, 1, 4) in fp64: multiples of 1/2, which a reader can check by hand."""
    generator = torch.Generator().manual_seed(SEED)

    def halves(rows: int) -> Tensor:
        drawn = torch.randint(-4, 5, (1, rows, 1, D), generator=generator)
        return drawn.to(torch.float64) / 2

    return halves(S_Q), halves(S_K), halves(S_K)


def trace(mask: str) -> dict[str, Any]:
    """Every block's values for all queries at once, under one of `MASKS`.

    Returns:
        "blocks": of each block its keys (first, last + 1) and, by query, scores, peak (their largest), maximum, shift,
        exponentials, rescale, sum and output after it; "o" and "lse", the results. None stands for -inf.
    """
    left, right = MASKS[mask]
    queries, keys, values = grouped(*inputs())
    acc = queries.new_zeros(*queries.shape[:-1], D)
    m = queries.new_full(queries.shape[:-1], float("-inf"))
    ell = torch.zeros_like(m)
    lo, hi = block_bounds(0, S_Q, S_Q, S_K, left, right)
    blocks = []
    for j0 in range(lo, hi, TILE_N):
        j1 = min(j0 + TILE_N, hi)
        seen = visible(0, S_Q, j0, j1, S_K - S_Q, left, right, queries.device)
        s = scores(queries, keys[:, :, j0:j1], SCALE, 0.0, seen)
        m_new = torch.maximum(m, s.amax(dim=-1))
        shift = finite_or_zero(m_new)
        p = torch.exp(s - shift[..., None])
        rescale = torch.exp(m - shift)
        ell = rescale * ell + p.sum(dim=-1)
        acc = rescale[..., None] * acc + weighted_values(p, values[:, :, j0:j1])
        m = m_new
        kept = {"scores": s, "peak": s.amax(dim=-1), "maximum": m, "shift": shift, "exponentials": p}
        kept |= {"rescale": rescale, "sum": ell, "output": acc}
        blocks.append({"keys": [j0, j1], **{name: _rows(value) for name, value in kept.items()}})
    o = acc / ell.masked_fill(ell == 0, 1.0)[..., None]
    return {"blocks": blocks, "o": _rows(o), "lse": _rows(m + torch.log(ell))}


def expected(mask: str) -> tuple[Tensor, Tensor]:
    """O (8, 4) and LSE (8,) of `flash_attention_2` itself."""
    o, lse = flash_attention_2(*inputs(), SCALE, *MASKS[mask])
    return o[0, :, 0], lse[0, 0]


def fixed_rows() -> dict[str, Any]:
    """The number of shipped rows with fixed maxima, and log2 of the sum beyond which they repair a block."""
    rows = [row.traits for row in TABLES[FIXED_TABLE] if isinstance(row.traits, FwdTraitsSm90)]
    fixed = sum(traits.fixed_max for traits in rows)
    return {
        "table": f"{FIXED_TABLE.target}/{FIXED_TABLE.family}",
        "rows": fixed,
        "of": len(rows),
        "repair_log2": REPAIR_LOG2,
    }


def softmax_data() -> dict[str, Any]:
    """The traces under each mask, Q, K and V, the reference's loop with the line of each step, and `fixed_rows`."""
    source = source_of(flash_attention_2, start="for i0 in range(0, s_q, TILE_M)")
    q, k, v = (_rows(x[:, :, 0]) for x in inputs())
    return {
        "q": q,
        "k": k,
        "v": v,
        "scale": SCALE,
        "tile_n": TILE_N,
        "masks": {name: {"left": left, "right": right, **trace(name)} for name, (left, right) in MASKS.items()},
        "fixed": fixed_rows(),
        "source": source.as_dict(),
        "lines": {step: source.line(text) for step, text in STEPS.items()},
    }


def _rows(value: Tensor) -> Any:
    """Nested lists of a tensor whose leading extents of 1 are dropped, -inf as None."""
    return _plain(value.flatten(0, -2 if value.shape[-1] == S_Q else -3).squeeze(0).tolist())


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if value == float("-inf") else round(value, DIGITS)
