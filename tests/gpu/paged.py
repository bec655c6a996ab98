"""Caches of given lengths and pages, and what attention of each sequence by itself gives."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

from cuteflash.arguments import FwdOptions
from tests.gpu.checks import Case, assert_close_to, assert_lse_close_to, poisoned, reference

GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)  # in entries of a page table that no key needs
NAN = float("nan")
E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Paged:
    """One call of `torch.ops.cuteflash.kvcache_fwd_lse`.

    Attributes:
        keys: of each sequence, from its entry's first row on, `leftpad` included.
        page_size: rows of a page; None is a dense cache.
        case: dtype, heads, mask and the like; its `seqlen_q` is that of a dense batch.
        queries: of each sequence, packed; None is a dense batch.
        leftpad: rows of each entry before its first key; None is none.
        indexed: the sequences' entries are shuffled.
        all_used: lengths are not given: all sequences fill their entries.
        num_splits: the option.
        e4m3: the caches have 8 bits, with a scale for each sequence and KV head.
    """

    keys: tuple[int, ...]
    page_size: int | None = 16
    case: Case = dataclasses.field(default_factory=lambda: Case(lse=True))
    queries: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    indexed: bool = False
    all_used: bool = False
    slack: int = 3
    num_splits: int = 1
    e4m3: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[begin, end) of each sequence's keys in its entry."""
        return list(zip(self.leftpad or (0,) * len(self.keys), self.keys, strict=True))

    def build(self, device: torch.device, seed: int = 0) -> tuple[dict[str, Any], list[tuple[Tensor, ...]]]:
        """The operator's tensors, by name, and (q, k, v) of each sequence, (1, length, heads, columns)."""
        choose, batch, case = random.Random(seed), len(self.keys), self.case
        total = sum(self.queries) if self.queries else batch * case.seqlen_q
        longest = max(self.keys)
        flat = dataclasses.replace(case, batch=1, seqlen_q=max(total, 1), seqlen_k=max(sum(self.keys), 1))
        q, k, v = (x[0] for x in flat.inputs(device, seed))
        q = q[:total]
        room = longest if self.all_used else longest + self.slack
        entries = batch + (2 if self.indexed else 0)
        order = choose.sample(range(entries), batch) if self.indexed else list(range(batch))
        table: list[list[int]] | None = None
        page_size = self.page_size
        if page_size is None:
            caches = [self._empty(x, entries, room) for x in (k, v)]
        else:
            slots = -(-room // page_size)
            pages = sum(-(-n // page_size) for n in self.keys) + 3
            numbers = choose.sample(range(pages), pages)
            table = [[choose.choice(GARBAGE) for _ in range(slots)] for _ in range(entries)]
            caches = [self._empty(x, pages, page_size) for x in (k, v)]
        descales = [torch.rand(batch, x.shape[1], device=device) + 0.1 for x in (k, v)]
        alone, at_q, at_k = [], 0, 0
        for i, (begin, end) in enumerate(self.spans):
            rows_q = self.queries[i] if self.queries else case.seqlen_q
            of_q, of_k = slice(at_q, at_q + rows_q), slice(at_k, at_k + end - begin)
            tokens, meant = [k[of_k], v[of_k]], [k[of_k], v[of_k]]
            if self.e4m3:
                scales = [x[i, :, None] for x in descales]
                tokens = [(x / scale).to(E4M3).view(torch.uint8) for x, scale in zip(tokens, scales, strict=True)]
                meant = [x.view(E4M3).float() * scale for x, scale in zip(tokens, scales, strict=True)]
            alone.append((q[None, of_q], *(x[None] for x in meant)))
            at_q, at_k = of_q.stop, of_k.stop
            if end <= begin:
                continue
            rows = torch.arange(begin, end, device=device)
            if table is None or page_size is None:
                where: Any = (order[i], rows)
            else:
                for slot in range(begin // page_size, -(-end // page_size)):
                    table[order[i]][slot] = numbers.pop()
                found = torch.tensor(table[order[i]], device=device)[rows // page_size]
                where = (found, rows % page_size)
            for cache, x in zip(caches, tokens, strict=True):
                (cache.view(torch.uint8) if self.e4m3 else cache)[where] = x
        named = self._named(q, caches, table, order)
        if self.e4m3:
            named |= dict(zip(("k_descale", "v_descale"), descales, strict=True))
        return named, alone

    def _empty(self, like: Tensor, entries: int, rows: int) -> Tensor:
        """A cache of NaN."""
        cache = torch.full((entries, rows, *like.shape[1:]), NAN, device=like.device, dtype=like.dtype)
        return cache.to(E4M3) if self.e4m3 else cache

    def _named(
        self, q: Tensor, caches: list[Tensor], table: list[list[int]] | None, order: list[int]
    ) -> dict[str, Any]:
        def vector(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=q.device)

        ends = None
        if self.queries is None:
            q = q.view(len(self.keys), self.case.seqlen_q, *q.shape[1:])
        else:
            ends = vector([sum(self.queries[:i]) for i in range(len(self.queries) + 1)])
        return {
            "q": q,
            "k_cache": caches[0],
            "v_cache": caches[1],
            "cu_seqlens_q": ends,
            "seqused_k": None if self.all_used else vector(self.keys),
            "page_table": None if table is None else vector(table),
            "cache_batch_idx": vector(order) if self.indexed else None,
            "cache_leftpad": None if self.leftpad is None else vector(self.leftpad),
            "sinks": None,
            "k_descale": None,
            "v_descale": None,
            "scheduler_metadata": None,
            "tree_mask": None,
        }

    def options(self, family: str | None) -> FwdOptions:
        """The operator's options."""
        case = self.case
        left, right = case.window
        options = FwdOptions(case.scale, left, 0 if case.causal else right, case.softcap, case.pack_gqa, family)
        return options._replace(num_splits=self.num_splits)

    def call(self, tensors: dict[str, Any], family: str | None) -> tuple[Tensor, Tensor]:
        """O and LSE, into poisoned memory."""
        with poisoned(), torch.no_grad():
            result: tuple[Tensor, Tensor] = torch.ops.cuteflash.kvcache_fwd_lse(
                *tensors.values(), *self.options(family)
            )
        return result

    def assert_right(self, alone: list[tuple[Tensor, ...]], out: Tensor, lse: Tensor) -> None:
        """Every element of a result."""
        exact, low = ([reference(*parts, self.case, dtype) for parts in alone] for dtype in (torch.float32, out.dtype))
        rows = out.flatten(0, 1) if self.queries is None else out
        lse = lse.transpose(0, 1).flatten(1, 2) if self.queries is None else lse
        assert_close_to(rows, *(torch.cat([o[0] for o, _ in results]) for results in (exact, low)))
        assert_lse_close_to(lse, torch.cat([x[0] for _, x in exact], dim=1), self.case)

    def check(self, family: str | None, device: torch.device, seed: int = 0) -> None:
        """Run it on fresh inputs and judge it."""
        tensors, alone = self.build(device, seed)
        self.assert_right(alone, *self.call(tensors, family))
