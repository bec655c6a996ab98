"""Calls of the latent-attention decode, and what is right for them: the definition, one sequence after the other."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.traits.arch import Family
from tests.gpu.checks import DTYPES, assert_close_to, poisoned

SCALE = 0.1  # of scores: with normal rows their standard deviation is 2.4


@dataclasses.dataclass(frozen=True)
class LatentCase:
    """One call. Rows past every length, and pages of no sequence, are NaN.

    Attributes:
        lengths: keys of each sequence.
        page_size: rows of a page; 0 is a cache without a table.
        spare: rows, or pages, of a sequence that it does not use, at least.
        logits: what Q is multiplied with.
    """

    lengths: tuple[int, ...]
    heads: int = 16
    seqlen_q: int = 1
    page_size: int = PAGE_ROWS
    dtype: str = "bf16"
    causal: bool = True
    num_splits: int = 0
    spare: int = 1
    logits: float = 1.0

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Q, the cache, the table, the lengths."""
        generator = torch.Generator(device).manual_seed(seed)
        batch, longest, dtype = len(self.lengths), max(self.lengths), DTYPES[self.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        q = (normal(batch, self.seqlen_q, self.heads, LATENT_DIM) * self.logits).to(dtype)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        if not self.page_size:
            cache = normal(batch, longest + self.spare, 1, LATENT_DIM)
            for row, length in zip(cache, self.lengths, strict=True):
                row[length:] = torch.nan
            return q, cache.to(dtype), None, lengths
        counts = [-(-length // self.page_size) for length in self.lengths]
        pages = sum(counts) + 2
        cache = normal(pages, self.page_size, 1, LATENT_DIM)
        order = torch.randperm(pages, device=device, generator=generator).to(torch.int32)
        table = torch.full((batch, max(counts) + self.spare), 1 << 20, dtype=torch.int32, device=device)
        first = 0
        for i, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
            table[i, :count] = order[first : first + count]
            first += count
            if length % self.page_size:
                cache[table[i, count - 1].item(), length % self.page_size :] = torch.nan
        cache[order[first:].long()] = torch.nan
        return q, cache.to(dtype), table, lengths


def reference(
    q: Tensor, cache: Tensor, table: Tensor | None, case: LatentCase, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """O and LSE, every step in `dtype`, as fp32."""
    outs, lses = [], []
    for i, length in enumerate(case.lengths):
        rows = cache[i] if table is None else cache[table[i, : -(-length // case.page_size)].long()].flatten(0, 1)
        keys = rows[:length, 0].to(dtype)
        scores = (q[i].to(dtype) * SCALE) @ keys.T  # (tokens, heads, keys)
        if case.causal:
            token = torch.arange(case.seqlen_q, device=q.device)[:, None]
            seen = torch.arange(length, device=q.device) <= length - case.seqlen_q + token
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row without a key
        outs.append((weights @ keys[:, :LATENT_DIM_V]).float())
        lses.append(torch.logsumexp(scores.float(), dim=-1).T)
    return torch.stack(outs), torch.stack(lses)


def run(
    case: LatentCase, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], family: Family | None
) -> tuple[Tensor, Tensor]:
    """O and LSE from a family's kernel, into poisoned memory."""
    from cuteflash.mla_planning import CudaMlaDecode

    options = {"softmax_scale": SCALE, "causal": case.causal, "num_splits": case.num_splits}
    with poisoned():
        return CudaMlaDecode()(*inputs, **options, family=family)


def check(case: LatentCase, device: torch.device, family: Family | None, seed: int = 0) -> None:
    """Run a case on fresh inputs and judge every element."""
    q, cache, table, lengths = case.inputs(device, seed)
    out, lse = run(case, (q, cache, table, lengths), family)
    exact, exact_lse = reference(q, cache, table, case, torch.float32)
    low, _ = reference(q, cache, table, case, q.dtype)
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert_close_to(out, exact, low)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-4)
