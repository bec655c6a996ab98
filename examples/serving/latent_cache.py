"""Pages of latent attention: one row of 576 numbers a token, whatever the number of heads, and its two forms.

A row has one of the two forms of docs/mla.md, by how many new tokens it has:

- absorbed, up to `ABSORBED` tokens: the queries attend to the cached rows themselves, each token as a sequence of its
  own. It reads and computes nothing but attention, but 3.4 times the products of the plain form for a pair of a query
  and a key.
- plain, beyond: the new tokens attend to the keys and values that are projected from their own rows, as without a
  cache. To the rows of earlier chunks or of a prefix they attend a block at a time, whose keys and values exist only
  then, and the results are put together by their log-sum-exps. Memory is bounded by the block, whatever the length.

To project a cached row takes 2 * 512 * 256 operations a head, and the absorbed form takes 1536 more than the plain one
for each query that sees it: with 171 queries both are equal.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from cuteflash import append_latents, flash_mla_decode, flash_mla_prefill, merge_attn_states
from cuteflash.nn import MultiHeadLatentAttention
from serving.caches import Step

COLUMNS = 576
PAGE_STEP = 64
ABSORBED = 128  # new tokens of a row
BLOCK = 4096  # cached rows whose keys and values exist at the same time


@dataclasses.dataclass(frozen=True, slots=True)
class LatentLayout:
    """A latent and a rotated key, which all heads share."""

    dtype: torch.dtype
    captures_prompts: ClassVar[bool] = False  # chunks are cut by their lengths

    @property
    def bytes_per_token(self) -> int:
        return COLUMNS * self.dtype.itemsize

    def check(self, page_size: int, device: torch.device) -> None:
        if page_size % PAGE_STEP:
            raise ValueError(f"page_size is {page_size}; allowed for latent attention: multiples of {PAGE_STEP}")

    def make(self, pages: int, page_size: int, device: torch.device) -> LatentPages:
        return LatentPages(torch.zeros(pages, page_size, 1, COLUMNS, dtype=self.dtype, device=device))


@dataclasses.dataclass(frozen=True, slots=True)
class LatentCall:
    """One layer's latent attention.

    Attributes:
        layer: its index.
        attention: projects.
        q_nope, q_rope: (tokens, heads, columns without rotation), and (tokens, heads, 64).
        rows: (tokens, 1, 576), the new tokens'.
    """

    layer: int
    attention: MultiHeadLatentAttention
    q_nope: Tensor
    q_rope: Tensor
    rows: Tensor

    @property
    def layout(self) -> LatentLayout:
        return LatentLayout(self.rows.dtype)

    def nothing(self) -> Tensor:
        return self.q_nope.new_zeros(*self.q_nope.shape[:2], self.attention.v_head_dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a row in the plain form: the first and the end of those in this form, the row, its earlier ones."""

    begin: int
    end: int
    row: int
    past: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share.

    Attributes:
        page_table: (tokens, pages), of each token.
        absorbed: tokens in the absorbed form, the first ones.
        lengths: (absorbed,), the rows that each sees.
        chunks: in the plain form.
        cu_seqlens: (chunks + 1,), where each begins among them.
    """

    page_table: Tensor
    absorbed: int
    lengths: Tensor
    chunks: tuple[Chunk, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, step: Step) -> Plan:
        counts, tokens, table = step.counts, sum(step.counts), step.page_table
        if tokens > len(counts):
            rows = torch.arange(len(counts), device=table.device)
            table = table[rows.repeat_interleave(step.cu_seqlens.diff(), output_size=tokens)]
        short = sum(count <= ABSORBED for count in counts)
        absorbed = sum(counts[:short])
        chunks, end = [], 0
        for row in range(short, len(counts)):
            begin, end = end, end + counts[row]
            chunks.append(Chunk(begin, end, row, step.starts[row]))
        return cls(table, absorbed, step.positions[:absorbed] + 1, tuple(chunks), step.cu_seqlens[short:] - absorbed)


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPages:
    """The rows of one layer, (pages, page_size, 1, 576)."""

    rows: Tensor

    def attend(self, call: LatentCall, step: Step) -> Tensor:
        plan = step.once(Plan, lambda: Plan.of(step))
        append_latents(self.rows, call.rows[:, None], step.positions, page_table=plan.page_table)
        parts = []
        if plan.absorbed:
            parts.append(self._absorbed(call, plan))
        if plan.chunks:
            parts.append(self._plain(call, plan, step))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _absorbed(self, call: LatentCall, plan: Plan) -> Tensor:
        """O of the first tokens."""
        own, count = call.attention, plan.absorbed
        w_k, w_v = own.kv_b_proj.weight.unflatten(0, (own.num_heads, -1)).split(
            (own.qk_nope_head_dim, own.v_head_dim), dim=1
        )
        q = torch.cat((torch.einsum("thn,hnr->thr", call.q_nope[:count], w_k), call.q_rope[:count]), dim=-1)
        out = flash_mla_decode(
            q[:, None],
            self.rows,
            plan.lengths,
            page_table=plan.page_table[:count],
            softmax_scale=own.softmax_scale,
        )
        return torch.einsum("thr,hvr->thv", out[:, 0], w_v)

    def _plain(self, call: LatentCall, plan: Plan, step: Step) -> Tensor:
        """O of the other tokens."""
        own, scale = call.attention, call.attention.softmax_scale
        q = torch.cat((call.q_nope[plan.absorbed :], call.q_rope[plan.absorbed :]), dim=-1)
        out, lse = flash_mla_prefill(
            q,
            *own.keys_values(call.rows[plan.absorbed :]),
            cu_seqlens_q=plan.cu_seqlens,
            cu_seqlens_k=plan.cu_seqlens,
            max_seqlen_q=step.longest_q,
            max_seqlen_k=step.longest_q,
            softmax_scale=scale,
            causal=True,
            return_lse=True,
        )
        for chunk in plan.chunks:
            its = slice(chunk.begin, chunk.end)
            whole = out[its], lse[:, its]
            for first in range(0, chunk.past, BLOCK):
                past = own.keys_values(self._past(step, chunk, first)[None])
                part, part_lse = flash_mla_prefill(q[None, its], *past, softmax_scale=scale, return_lse=True)
                whole = merge_attn_states(*whole, part[0], part_lse[0])
            if chunk.past:
                out[its] = whole[0]
        return out

    def _past(self, step: Step, chunk: Chunk, first: int) -> Tensor:
        """A block of the rows before a chunk, (rows, 1, 576)."""
        size = self.rows.shape[1]
        end = min(first + BLOCK, chunk.past)
        pages = step.page_table[chunk.row, first // size : -(-end // size)]
        skipped = first % size
        rows: Tensor = self.rows[pages].flatten(0, 1)
        return rows[skipped : skipped + end - first]
