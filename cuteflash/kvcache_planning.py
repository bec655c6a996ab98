"""From a call with caches on a GPU to its launch, see `cuteflash.planning`.

The host does not know lengths or pages: which kernel runs depends on sizes, on strides and on the class of lengths.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import empty_like

from cuteflash.arguments import FwdOptions, PackedTensors, ScaleTensors, mask_of_window
from cuteflash.compile import compiled
from cuteflash.dispatch import choose, current_target
from cuteflash.packed_planning import SEVERAL, counted_rows, counters, packs_heads
from cuteflash.planning import DTYPE_NAMES, Result, fwd_scalars, sink_dtype, target_of
from cuteflash.problem import (
    CACHE_ROWS_MAX,
    DENSE,
    PAGE_ROWS_STEP,
    FwdProblem,
    MaskKind,
    Operands,
    Scores,
    Storage,
)
from cuteflash.schedule_planning import Schedule, check_metadata_size
from cuteflash.schedule_problem import ScheduleScalars
from cuteflash.split_planning import MOST_PARTS, ROWS, SplitKernels, Tiles, grid_of
from cuteflash.strides import fp32_template, is_like_new, usable_strides
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.cache_sm80 import CONVERTING_CAPABILITY
from cuteflash.traits.chunks import swizzle_width
from cuteflash.traits.length_class import LengthClass, length_class_of, length_class_of_packed
from cuteflash.traits.sm90 import WGMMA_K
from cuteflash.validate import ALIGNMENT, reads_values
from cuteflash.validate_kvcache import KvCacheInputs, check_kvcache
from cuteflash.validate_packed import PackedInputs

# Elements of a box of one slab up to which wide ones are faster, by whether Q is in registers: K's products then are of
# one page each, and each reads Q.
WIDE_UP_TO = {True: 1024, False: 512}
GATHERED_BYTES_MAX = ALIGNMENT << 32  # a row that is looked up by itself is counted in 16 bytes, in 32 bits

Launch = Callable[[KvCacheInputs], Result]
Strides = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """The sizes of a call.

    Attributes:
        batch: sequences.
        rows: queries of a sequence, or of all together if they are packed.
        capacity: rows of a cache entry.
        heads, kv_heads: of q, and of the caches.
        is_packed: queries are packed.
    """

    batch: int
    rows: int
    capacity: int
    heads: int
    kv_heads: int
    is_packed: bool

    @classmethod
    def of(cls, inputs: KvCacheInputs) -> CacheSizes:
        """Those of a call."""
        q, kv_heads = inputs.q, inputs.k_cache.shape[2]
        is_packed = inputs.cu_seqlens_q is not None
        return cls(inputs.batch, q.shape[-3], inputs.capacity, q.shape[-2], kv_heads, is_packed)

    @property
    def length(self) -> int:
        """Queries of a sequence, of packed ones the mean."""
        return -(-self.rows // self.batch) if self.is_packed else self.rows

    @property
    def heads_per_kv(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def tiles(self) -> Tiles:
        """What decides whether keys are split."""
        return Tiles(self.batch, self.kv_heads, self.heads_per_kv, self.length, self.capacity)

    def mask(self, options: FwdOptions, has_tree: bool = False) -> tuple[MaskKind, int, int]:
        """The mask as a kernel has it, see `mask_of_window`. Even a single query of a tree may not see itself."""
        several = SEVERAL if self.is_packed or has_tree else self.rows
        return mask_of_window(options.window_left, options.window_right, several, options.attention_chunk)

    def class_of_lengths(self, options: FwdOptions) -> LengthClass:
        """The class that the options name, or that of the mean queries and whole cache entries."""
        if options.lengths is not None:
            return cast(LengthClass, options.lengths)
        if not self.is_packed:
            return length_class_of(self.rows, self.capacity)
        return length_class_of_packed(self.rows, self.batch * self.capacity, self.batch)


class CachePlan:
    """What decides the launch of a call with caches, but for where they lie.

    Attributes:
        problem: without packed heads, and as if no keys were split.
        choice: the row if none are.
        split: the kernels that split keys.
    """

    def __init__(
        self, sizes: CacheSizes, problem: FwdProblem, options: FwdOptions, device: torch.device, is_scheduled: bool
    ) -> None:
        self.sizes, self.problem, self.options = sizes, problem, options
        self.target = current_target(device.index)
        lengths = sizes.class_of_lengths(options)
        self.choice = choose(problem, self.target, cast(Family | None, options.family), lengths)
        _, *window = sizes.mask(options)
        self.scalars = fwd_scalars(options, (window[0], window[1]), problem.operands.head_dim, device)
        self.split = SplitKernels(
            problem, self.target, self.choice.family, lengths, options.num_splits, self.scalars.num_sms, device,
            is_scheduled=is_scheduled,
        )  # fmt: skip

    def packs(self, tile_m: int) -> bool:
        """Whether the query heads of a KV head share tiles of `tile_m` rows."""
        return packs_heads(self.options, self.sizes.length, self.sizes.heads_per_kv, tile_m)

    def schedule(self) -> Schedule:
        """Where the blocks of launches that split keys begin."""
        sizes, mask = self.sizes, self.problem.scores.mask
        packed_heads = sizes.heads_per_kv if self.packs(ROWS) else 1
        row = self.split.choice(sizes.tiles, packed_heads) if sizes.batch and sizes.rows else None
        if row is None:
            return Schedule(0, mask, ScheduleScalars(*(0 for _ in ScheduleScalars._fields)), self.target)
        traits: Any = row.traits
        blocks, lanes = grid_of(traits, sizes.tiles, packed_heads, self.scalars.num_sms)
        scalars = ScheduleScalars(
            seqlen_q=sizes.rows,
            seqlen_k=sizes.capacity,
            heads=sizes.heads // packed_heads,
            lanes=lanes,
            tile_tokens=traits.tile_tokens(packed_heads),
            tile_n=traits.tile_n,
            window_left=self.scalars.window_left,
            window_right=self.scalars.window_right,
            most_parts=self.split.num_splits or MOST_PARTS,
        )
        return Schedule(blocks, mask, scalars, self.target)


class Planner:
    """The launches of one operator on caches.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.has_lse = has_lse

    def launch(self, inputs: KvCacheInputs, options: FwdOptions) -> Launch:
        """A checked launch for calls with the same sizes, strides and options; what it keeps holds no tensor.

        Raises:
            TypeError, ValueError, NotImplementedError: as `check_kvcache`, `target_of`, `choose` and
                `check_metadata_size` do.
        """
        check_kvcache(inputs, options)
        q, k, v = inputs[:3]
        shapes = result_shapes(inputs)
        if is_empty(inputs):
            target_of(q.device, options.family)  # as `choose` does for the others
            return functools.partial(self._without_kernel, shapes=shapes)
        restrides = [usable_strides(x.stride(), ALIGNMENT // x.element_size()) for x in (q, k, v)]
        strides = [new or x.stride() for new, x in zip(restrides[1:], (k, v), strict=True)]
        if inputs.is_e4m3:
            check_target(current_target(q.device.index))
        plan = self._plan(inputs, options)
        fitted = plan.split.fitted = functools.partial(with_boxes, inputs, strides)
        split = plan.split.of(plan.sizes.tiles, plan.packs(ROWS))
        schedule = plan.schedule() if inputs.scheduler_metadata is not None else None
        check_metadata_size(inputs.scheduler_metadata, 0 if schedule is None else schedule.size)
        if split is None:
            choice = plan.choice
            problem = plan.problem.packed(plan.sizes.heads_per_kv if plan.packs(choice.traits.tile_m) else 1)
            kernel = compiled(choice.kernel_cls, choice.traits, fitted(problem, choice.traits), plan.target)
        else:
            kernel = split[0]
        is_dense, scalars, is_e4m3 = plan.problem.storage == DENSE, plan.scalars, inputs.is_e4m3
        restride, is_split = any(restrides), split is not None
        o_shape, like_q = shapes[0], is_like_new(q, shapes[0])
        like_lse = fp32_template(shapes[1], q.device) if self.has_lse else None

        def launch(inputs: KvCacheInputs) -> Result:
            metadata = inputs.scheduler_metadata
            if schedule is not None and metadata is not None and inputs.seqused_k is not None and reads_values():
                schedule.check(metadata, inputs.seqused_k, inputs.cu_seqlens_q, inputs.cache_leftpad)
            q, k, v = inputs[:3]
            o = empty_like(q) if like_q else q.new_empty(o_shape)
            lse = None if like_lse is None else empty_like(like_lse)
            if restride:
                q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip((q, k, v), restrides, strict=True))
            vectors = () if is_dense else vectors_of(inputs, is_split)
            scales = ScaleTensors(None, *inputs.descales) if is_e4m3 else ()
            parts = () if split is None else split[1].arguments(metadata)
            sinks = () if inputs.sinks is None else (inputs.sinks,)
            tree = () if inputs.tree_mask is None else (inputs.tree_mask.view(torch.int32).flatten(),)
            kernel(q, k, v, o, lse, *vectors, *scales, *parts, *scalars, *sinks, *tree)
            return o if lse is None else (o, lse)

        return launch

    def _plan(self, inputs: KvCacheInputs, options: FwdOptions) -> CachePlan:
        """The plan of a call."""
        q, sizes = inputs.q, CacheSizes.of(inputs)
        dtype = DTYPE_NAMES[q.dtype]
        cache_dtype: Literal["e4m3"] | None = "e4m3" if inputs.is_e4m3 else None
        operands = Operands(dtype, dtype, dtype, q.shape[-1], inputs.v_cache.shape[3], cache_dtype=cache_dtype)
        has_tree = inputs.tree_mask is not None
        mask = sizes.mask(options, has_tree)[0]
        scores = Scores(mask, options.softcap > 0, options.attention_chunk > 0, sink_dtype(inputs.sinks), has_tree)
        problem = FwdProblem(operands, scores, storage_of(inputs), self.has_lse)
        return CachePlan(sizes, problem, options, q.device, inputs.scheduler_metadata is not None)

    def _without_kernel(self, inputs: KvCacheInputs, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Result:
        """What queries get that see no key."""
        o_shape, lse_shape = shapes
        o = inputs.q.new_zeros(o_shape)
        if not self.has_lse:
            return o
        lse = inputs.q.new_full(lse_shape, float("-inf"), dtype=torch.float32)
        if inputs.sinks is not None:
            counts = inputs.q.new_ones(lse.shape[-1:], dtype=torch.bool)
            if inputs.cu_seqlens_q is not None:
                counts = counted_rows(PackedInputs(*inputs[:3], inputs.cu_seqlens_q, inputs.cu_seqlens_q))
            torch.where(counts, inputs.sinks[:, None].float(), lse, out=lse)
        return o, lse


def check_target(target: str) -> None:
    """NotImplementedError if a target has no kernels of e4m3 caches."""
    if get_arch(target).capability < CONVERTING_CAPABILITY:
        raise NotImplementedError(
            f"the GPU's target is {target}; attention to e4m3 caches needs sm_89 or later, which converts e4m3"
        )


def vectors_of(inputs: KvCacheInputs, is_split: bool) -> PackedTensors:
    """The vectors and the table of a launch."""
    q, _, _, cu_seqlens_q, seqused_k, page_table, cache_batch_idx, cache_leftpad, *_ = inputs
    counter = None if cu_seqlens_q is None or is_split else counters.of(q.device)
    return PackedTensors(cu_seqlens_q, None, None, seqused_k, counter, page_table, cache_batch_idx, cache_leftpad)


def result_shapes(inputs: KvCacheInputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of O and of LSE."""
    *rows, heads, _ = inputs.q.shape
    o_shape = (*inputs.q.shape[:-1], inputs.v_cache.shape[3])
    return o_shape, (*rows[:-1], heads, rows[-1])


def storage_of(inputs: KvCacheInputs) -> Storage:
    """How the sequences of a call lie in memory. Whole caches, one for each sequence of a dense batch, are dense."""
    places = inputs.cu_seqlens_q, inputs.seqused_k, inputs.page_table, inputs.cache_batch_idx, inputs.cache_leftpad
    if all(x is None for x in places):
        return DENSE
    return Storage(
        "dense" if inputs.cu_seqlens_q is None else "varlen",
        "paged",
        used_k=inputs.seqused_k is not None,
        has_page_table=inputs.page_table is not None,
        has_cache_batch_idx=inputs.cache_batch_idx is not None,
        has_leftpad=inputs.cache_leftpad is not None,
    )


def with_boxes(inputs: KvCacheInputs, strides: Sequence[Strides], problem: FwdProblem, traits: Any) -> FwdProblem:
    """The problem with the boxes that a kernel with these traits loads, if its K and V are paged.

    ValueError: as `check_reach`.
    """
    if problem.storage.k != "paged":
        return problem
    rows = box_rows(inputs, strides, traits.tile_n) if traits.family == "sm90" else 0
    if rows == 0:
        check_reach(inputs, strides)
    wide = problem.is_split and takes_wide_boxes(inputs, strides, traits, rows)
    return dataclasses.replace(problem, storage=dataclasses.replace(problem.storage, page_rows=rows, wide_boxes=wide))


def box_rows(inputs: KvCacheInputs, strides: Sequence[Strides], tile_n: int) -> int:
    """The rows of a TMA box, of key blocks of `tile_n` rows; 0 if rows are to be looked up one by one.

    A descriptor counts the rows of a cache through all pages, so that pages have to lie a multiple of rows apart, and
    a box lies in one page.

    Args:
        inputs: the call's.
        strides: of the caches, as the kernel gets them.
    """
    pages, page_size = inputs.k_cache.shape[:2]
    for page_stride, row_stride, *_ in strides:
        if row_stride == 0:
            return 0
        step, rest = divmod(page_stride, row_stride)
        if pages > 1 and (rest or (pages - 1) * step + page_size > CACHE_ROWS_MAX):
            return 0
    if inputs.page_table is None:
        return tile_n
    if inputs.cache_leftpad is not None:
        return 0
    rows = math.gcd(page_size, tile_n)
    return 0 if rows % PAGE_ROWS_STEP else rows


def takes_wide_boxes(inputs: KvCacheInputs, strides: Sequence[Strides], traits: Any, rows: int) -> bool:
    """Whether a TMA box of `rows` rows is to hold all columns of K, and one all of V: it can, and is faster.

    A descriptor has no mode for slabs beside that for heads: it counts slabs through all heads, which have to lie whole
    slabs apart, and no box ends with a head's columns. Arguments as of `box_rows`.
    """
    if inputs.is_e4m3 or not 0 < rows < traits.tile_n or rows % WGMMA_K:  # what converts tiles reads slabs
        return False
    columns = traits.head_dim, traits.head_dim_v
    slabs = [swizzle_width(count) for count in columns]
    most = max(count // slab for count, slab in zip(columns, slabs, strict=True))
    if rows * max(slabs) > WIDE_UP_TO[traits.q_in_regs] or most == 1:
        return False
    return all(
        cache.shape[3] == count and (cache.shape[2] == 1 or head_stride % slab == 0)
        for cache, (_, _, head_stride, _), count, slab in zip(inputs[1:3], strides, columns, slabs, strict=True)
    )


def check_reach(inputs: KvCacheInputs, strides: Sequence[Strides]) -> None:
    """Raise ValueError if a cache is too large for its rows to be looked up one by one."""
    for name, cache, cache_strides in zip(("k_cache", "v_cache"), inputs[1:3], strides, strict=True):
        last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache_strides, strict=True))
        if last * cache.element_size() >= GATHERED_BYTES_MAX:
            raise ValueError(
                f"{name} reaches over {last * cache.element_size()} bytes; allowed for pages of "
                f"{cache.shape[1]} rows: fewer than {GATHERED_BYTES_MAX}"
            )


def is_empty(inputs: KvCacheInputs) -> bool:
    """Whether no query sees a key, whatever the lengths and the mask."""
    return inputs.q.numel() == 0 or inputs.k_cache.numel() == 0 or inputs.capacity == 0 or inputs.batch == 0
