"""From a call of the latent-attention decode on a GPU to its launch: kernel, shares of keys, workspace.

The host knows how long a sequence can be, not how long it is: lengths that lie on the device may make a plan slower,
never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuteflash.compile import compiled
from cuteflash.core.split_slots import partials_size
from cuteflash.dispatch import MlaTraits, choose_mla, current_target, kernel_class
from cuteflash.mla_problem import (
    HEADS_MAX,
    LATENT_DIM,
    LATENT_DIM_V,
    PAGE_ROWS,
    MlaProblem,
    MlaScalars,
    MlaTensors,
)
from cuteflash.problem import HalfDtype
from cuteflash.split_planning import MOST_PARTS, arrivals
from cuteflash.strides import compacted, usable_strides
from cuteflash.traits.arch import Family
from cuteflash.validate import ALIGNMENT

DTYPE_NAMES: dict[torch.dtype, HalfDtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
PART_COST = 4  # pages that are read in the time that a part of a tile takes to be written and merged
PLANS_MAX = 4096

Result = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """How the keys of all sequences are dealt to the blocks of a launch.

    Attributes:
        count: shares of a query tile's keys of all sequences.
        is_split: a tile may have several parts; otherwise a block computes whole tiles.
        most_parts: of a tile.
    """

    count: int
    is_split: bool
    most_parts: int = MOST_PARTS

    @classmethod
    def of(cls, batch: int, m_blocks: int, pages: int, num_splits: int, num_sms: int) -> Shares:
        """Those of `batch` sequences of up to `pages` pages and `m_blocks` query tiles each.

        All multiprocessors get equal shares, unless tiles of equal lengths fit as well into fewer without being cut,
        or being cut at their ends only. `num_splits` limits the parts of a tile; 0 does not.
        """
        most = max(num_sms // m_blocks, 1)  # query tiles of the same keys run at the same time
        whole = -(-batch // -(-batch // most))
        if num_splits == 1:
            return cls(whole, is_split=False)
        cut = max((n for n in range(2, most // batch + 1) if pages % n == 0), default=0)
        costs = {whole: -(-batch // whole) * pages, most: -(-batch * pages // most) + 2 * PART_COST}
        if cut:
            costs[batch * cut] = min(pages // cut + PART_COST, costs.get(batch * cut, MOST_PARTS))
        count = min(costs, key=lambda n: (costs[n], n))
        return cls(count, is_split=count > 1, most_parts=num_splits or MOST_PARTS)


def row_strides(q: Tensor) -> tuple[int, int] | None:
    """Strides of (batch, rows) if a row is (token, head) of Q (batch, seqlen_q, heads, 576); None if no stride fits."""
    _, seqlen_q, heads, _ = q.shape
    of_batch, of_token, of_head, _ = q.stride()
    if seqlen_q > 1 and heads > 1 and of_token != heads * of_head:
        return None
    return of_batch, of_head if heads > 1 else of_token


def check_served(q: Tensor, kv_cache: Tensor, page_table: Tensor | None, head_dim_v: int) -> None:
    """Raise ValueError if the kernel does not serve these sizes; it names those that it serves."""
    heads = q.shape[2]
    if (q.shape[3], kv_cache.shape[2:], head_dim_v) != (LATENT_DIM, (1, LATENT_DIM), LATENT_DIM_V):
        raise ValueError(
            f"q has {q.shape[3]} columns, kv_cache {tuple(kv_cache.shape[2:])} heads and columns, and V {head_dim_v}; "
            f"allowed: {LATENT_DIM}, (1, {LATENT_DIM}), {LATENT_DIM_V}"
        )
    if not 1 <= heads <= HEADS_MAX:
        raise ValueError(f"q.shape[2] (heads) is {heads}; allowed: 1 to {HEADS_MAX}")
    if page_table is not None and kv_cache.shape[1] % PAGE_ROWS:
        raise ValueError(f"kv_cache.shape[1] (page_size) is {kv_cache.shape[1]}; allowed: multiples of {PAGE_ROWS}")


@dataclasses.dataclass(frozen=True)
class MlaPlan:
    """The launch of calls whose tensors look the same.

    Attributes:
        kernel: compiled.
        q_strides: of (batch, rows, 576); None if Q is copied.
        kv_strides: of (entries, rows, 576).
        shares: of the keys.
        scalars: the kernel's.
        blocks: of the launch.
        partials: fp32 elements of its partial results.
    """

    kernel: Callable[..., object]
    q_strides: tuple[int, ...] | None
    kv_strides: tuple[int, ...]
    shares: Shares
    scalars: MlaScalars
    blocks: int
    partials: int

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        page_table: Tensor | None,
        cache_seqlens: Tensor,
        descale: Tensor | None,
        out: Tensor | None = None,
    ) -> Result:
        """O, which is written to `out` if that is given, and LSE."""
        batch, seqlen_q, heads, _ = q.shape
        rows = seqlen_q * heads
        shape = batch, rows, LATENT_DIM
        q_rows = compacted(q).view(shape) if self.q_strides is None else q.as_strided(shape, self.q_strides)
        entries, entry_rows = kv_cache.shape[:2]
        out = q.new_empty(batch, seqlen_q, heads, LATENT_DIM_V) if out is None else out
        tensors = MlaTensors(
            q=q_rows,
            kv_cache=kv_cache.as_strided((entries, entry_rows, LATENT_DIM), self.kv_strides),
            page_table=page_table,
            cache_seqlens=cache_seqlens,
            out=out.view(batch, rows, LATENT_DIM_V),
            lse=q.new_empty((batch, heads, seqlen_q), dtype=torch.float32),
            descale=None if descale is None else descale.expand(batch),
            **(self._workspace(q) if self.shares.is_split else {}),
        )
        self.kernel(*tensors, *self.scalars)
        return out, tensors.lse

    def _workspace(self, q: Tensor) -> dict[str, Tensor]:
        return {
            "partials": q.new_empty(self.partials, dtype=torch.float32),
            "arrivals": arrivals.of(q.device, self.blocks),
        }


class CudaMlaDecode:
    """Decoding of latent attention on a GPU. Arguments are as `cuteflash.validate_mla` allows them."""

    def __init__(self) -> None:
        self._plans: dict[Any, MlaPlan] = {}

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        page_table: Tensor | None,
        cache_seqlens: Tensor,
        *,
        head_dim_v: int = LATENT_DIM_V,
        softmax_scale: float,
        causal: bool,
        num_splits: int,
        family: Family | None = None,
        descale: Tensor | None = None,
    ) -> Result:
        """Attention to the first rows of each sequence's cache.

        Args:
            q: (batch, seqlen_q, heads, 576), fp16 or bf16, 1 to 128 heads.
            kv_cache: (pages, page_size, 1, 576) with a table, page_size a multiple of 64; else (batch, seqlen, 1, 576).
            page_table: (batch, pages of a sequence) int32; entries past a sequence's last page may be anything.
            cache_seqlens: (batch,) int32, rows of each sequence; what lies beyond may be anything, NaN too.
            head_dim_v: 512.
            softmax_scale: factor of the scores, positive.
            causal: the last query is aligned with the last row, and a query sees no row after its own.
            num_splits: parts of a sequence at most, each read by another block; 1 is none, 0 as many as are useful.
            family: kernel family; None is the best of the GPU.
            descale: () or (1,) or (batch,) fp32, what elements of an e4m3 cache are multiplied with; else None.

        Returns:
            O (batch, seqlen_q, heads, 512) and LSE (batch, heads, seqlen_q) fp32; 0 and -inf if a query sees no row.

        Raises:
            ValueError: sizes that the kernel does not serve.
            NotImplementedError: the GPU does not run the family, or no kernel at all.
        """
        options = softmax_scale, causal, num_splits, family
        tables = None if page_table is None else (page_table.shape, page_table.stride())
        cache = kv_cache.shape, kv_cache.stride(), kv_cache.dtype
        kind = q.shape, q.stride(), q.dtype, q.device, cache, tables, head_dim_v, options
        plan = self._plans.get(kind)
        if plan is None:
            check_served(q, kv_cache, page_table, head_dim_v)
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._plans[kind] = plan_of(q, kv_cache, page_table, options)
        return plan(q, kv_cache, page_table, cache_seqlens.contiguous(), descale)


def plan_of(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor | None,
    options: tuple[float, bool, int, Family | None],
    traits: MlaTraits | None = None,
) -> MlaPlan:
    """The plan of a call whose sizes are served, with at least a query and a key; errors as of `CudaMlaDecode`.

    `traits`: of the kernel; None are those that dispatch chooses.
    """
    softmax_scale, causal, num_splits, family = options
    batch, seqlen_q, heads, _ = q.shape
    entry_rows = kv_cache.shape[1]
    is_e4m3 = kv_cache.dtype == torch.float8_e4m3fn
    problem = MlaProblem(DTYPE_NAMES[q.dtype], page_table is not None, num_splits != 1, is_e4m3)
    target = current_target(q.device.index)
    capacity = entry_rows if page_table is None else page_table.shape[1] * entry_rows
    pages, num_sms = -(-capacity // PAGE_ROWS), _multiprocessors(q.device)
    traits = traits or choose_mla(problem, seqlen_q * heads, target, family)
    m_blocks = -(-seqlen_q * heads // traits.tile_m)
    shares = Shares.of(batch, m_blocks, pages, num_splits, num_sms * traits.blocks_per_sm)
    step, cache_step = (ALIGNMENT // x.element_size() for x in (q, kv_cache))
    found = row_strides(q)
    q_strides = None if found is None else usable_strides((*found, 1), step) or (*found, 1)
    of_rows = kv_cache.stride()[:2]
    problem = dataclasses.replace(problem, is_split=shares.is_split)
    return MlaPlan(
        kernel=compiled(kernel_class(traits), traits, problem, target),
        q_strides=q_strides,
        kv_strides=usable_strides((*of_rows, 1), cache_step) or (*of_rows, 1),
        shares=shares,
        scalars=MlaScalars(
            softmax_scale=softmax_scale,
            causal=int(causal),
            shares=shares.count,
            # Of few sequences equal lengths matter more, and they are cut into equal parts only if it does not count.
            tile_cost=traits.tile_cost * PAGE_ROWS // traits.tile_n if 2 * batch > shares.count else 0,
            most_parts=shares.most_parts,
        ),
        blocks=shares.count * m_blocks,
        partials=partials_size(shares.count * m_blocks, traits.tile_m, traits.part_words),
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
