"""The run-time side of a problem: which tiles there are, in which order, under which mask and scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import BwdScalars, BwdTensors, FwdScalars, FwdTensors, PackedTensors, SplitTensors
from cuteflash.core.ahead import fetch_table, fetch_vectors
from cuteflash.core.lengths import Lengths, Sequence
from cuteflash.core.mask import IntervalMask
from cuteflash.core.paged import Pages, seqlen_of_caches
from cuteflash.core.schedule import Order, RaggedOrder, TileOrder
from cuteflash.core.sinks import Sinks
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.split import Line, arrivals_of, starts_of
from cuteflash.core.tile import QueryTile
from cuteflash.core.tree import Tree
from cuteflash.core.views import with_batch
from cuteflash.problem import MaskKind, Storage

QUERY_TENSORS = ("q", "o", "lse", "do", "dlse", "dq")  # that have a row for each query
KEY_TENSORS = ("k", "v", "dk", "dv")
LONGER_THAN_MEAN = 4  # sequences that are longer than this times the mean are few


def batched(tensors: Any, storage: Storage) -> Any:
    """The tensors of a kernel with a batch mode, also those of packed sequences, which have one entry."""
    packed = QUERY_TENSORS * (storage.q == "varlen") + KEY_TENSORS * (storage.k == "varlen")
    there = [name for name in packed if getattr(tensors, name, None) is not None]
    return tensors._replace(**{name: with_batch(getattr(tensors, name)) for name in there})


def live_rows(rows: Int32, batch: Int32, longest: int = LONGER_THAN_MEAN) -> Int32:
    """How many rows of a head are in use at the same time, of packed sequences whose lengths the host does not know.

    `longest` is what a sequence is reckoned to be long at most, in mean lengths.
    """
    return cutlass.min(rows, rows // batch * longest)


def ragged_order(
    kernel, tensors: FwdTensors, packed: PackedTensors, heads: Int32, heads_per_kv: Int32, persistent: bool
) -> RaggedOrder:
    """The order of a kernel's tiles of packed sequences, whose lengths the host does not know: it goes by the mean.

    Without `persistent` blocks a second pass would cost a block for each tile of the first one.
    """
    rows, batch = tensors.q.shape[1], packed.cu_seqlens_q.shape[0] - 1
    if kernel.problem.storage.k == "paged":
        keys = seqlen_of_caches(tensors.k, packed.page_table)
    else:
        keys = live_rows(tensors.k.shape[1], batch)
    group = TileOrder.head_group(keys, heads_per_kv, kernel.problem.operands.kv_row_bytes)
    passes = Int32(1)
    if kernel.longest_first:
        group = RaggedOrder.wide_group(group, heads_per_kv)
        if persistent:
            passes = RaggedOrder.best_passes(rows // batch, kernel.tile_tokens)
    return RaggedOrder(
        cu_q=packed.cu_seqlens_q,
        counter=packed.tile_counter,
        rows=rows,
        heads=heads,
        batch=batch,
        group=cutlass.min(group, heads),
        passes=passes,
        tile_tokens=kernel.tile_tokens,
        longest_first=kernel.longest_first,
        spares_registers=kernel.problem.operands.transposed_v,
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the blocks of one launch share.

    Attributes:
        order: all query tiles, in the order in which they are handed out; None if keys are split.
        heads_per_kv: heads, as the tiles see them, that read one KV head.
        lengths: of the sequences.
        window_left, window_right: keys visible before and after a query's own position.
        attention_chunk: positions of a chunk; None for a problem without chunks.
        sinks: those of the query heads; None if there are none.
        scale_log2, inner_scale: exp2 is taken of `scale_log2 * s`, with `s = tanh(inner_scale * q k)` under a softcap
            and `s = q k` otherwise.
        mask_kind, storage, tile_tokens, tile_n, packed_heads: of the kernel.
        pages: where the rows of paged K and V lie; None of others.
        line: all query tiles, if keys are split.
        tree: which new tokens each query sees, if these form a tree.
    """

    order: Order | None
    heads_per_kv: Int32
    lengths: Lengths
    window_left: Int32
    window_right: Int32
    attention_chunk: Int32 | None
    scale_log2: Float32
    inner_scale: Float32
    sinks: Sinks | None
    mask_kind: cutlass.Constexpr[MaskKind]
    storage: cutlass.Constexpr[Storage]
    tile_tokens: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    packed_heads: cutlass.Constexpr[int]
    pages: Pages | None = None
    line: Line | None = None
    tree: Tree | None = None

    @staticmethod
    def of(
        kernel,
        tensors: FwdTensors,
        packed: PackedTensors,
        scalars: FwdScalars,
        persistent: bool,
        sinks: cute.Tensor | None = None,
        split: SplitTensors | None = None,
        tree: cute.Tensor | None = None,
    ) -> Launch:
        """The launch of a kernel.

        Args:
            kernel: for its problem, traits, `tile_tokens` and `longest_first`.
            tensors: the kernel's, as `batched` returns them.
            packed, scalars: the kernel's.
            persistent: there are `num_sms` blocks; groups of heads of a dense batch then fill whole waves of them.
            sinks: (heads_q,), the kernel's.
            split: the kernel's, if keys are split.
            tree: see `cuteflash.core.tree`.
        """
        operands, scores, storage = kernel.problem.operands, kernel.problem.scores, kernel.problem.storage
        batch, seqlen_q, heads_q, _ = tensors.q.shape
        heads_k = tensors.k.shape[2]
        lengths = lengths_of(tensors, packed)
        heads = heads_q // operands.packed_heads
        heads_per_kv = heads // heads_k
        order: Order | None
        is_split = kernel.problem.is_split
        if is_split:
            order = None
        elif storage.q == "varlen":
            order = ragged_order(kernel, tensors, packed, heads, heads_per_kv, persistent)
        else:
            m_blocks = cute.ceil_div(seqlen_q, kernel.tile_tokens)
            group = TileOrder.head_group(lengths.seqlen_k, heads_per_kv, operands.kv_row_bytes)
            if persistent:
                group = TileOrder.even_group(group, m_blocks, scalars.num_sms * kernel.traits.blocks_per_sm)
            group, longest_first = cutlass.min(group, heads * batch), kernel.longest_first
            order = TileOrder(m_blocks, heads, batch, group, longest_first, zigzag=longest_first)
        scale, inner_scale = score_scales(scores.softcap, scalars)
        launch = Launch(
            order=order,
            heads_per_kv=heads_per_kv,
            lengths=lengths,
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            attention_chunk=scalars.attention_chunk if scores.chunked else None,
            scale_log2=scale * LOG2_E,
            inner_scale=inner_scale,
            sinks=None if sinks is None else Sinks(sinks, lengths.batch),
            mask_kind=scores.mask,
            storage=storage,
            tile_tokens=kernel.tile_tokens,
            tile_n=kernel.traits.tile_n,
            packed_heads=operands.packed_heads,
            pages=Pages.of(tensors, packed, storage) if storage.k == "paged" else None,
            tree=None if tree is None else Tree(tree),
        )
        return launch.with_line(kernel, tensors, packed, split) if is_split else launch

    def with_line(self, kernel, tensors: FwdTensors, packed: PackedTensors, split: SplitTensors) -> Launch:
        """The launch of a kernel that splits keys, with all of its tiles; `tensors` as `batched` returns them."""
        sequences = tensors.q.shape[0]
        if self.storage.q == "varlen":
            sequences = packed.cu_seqlens_q.shape[0]  # one more than there are: the rows after the last one
        heads = tensors.q.shape[2] // self.packed_heads
        heads, shares = (n // split.lanes for n in (heads, arrivals_of(split, kernel.problem).shape[0]))
        starts = starts_of(split, kernel.problem)
        heads_per_kv = self.heads_per_kv if self.packed_heads == 1 else None
        line = Line.of(sequences, heads, split.lanes, shares, split.most_parts, starts, heads_per_kv)
        is_known = self.lengths.are_known and starts is None
        return dataclasses.replace(self, line=line.of_one_length(self) if is_known else line)

    def tile(self, index: Int32) -> QueryTile:
        """The tile with number `index` of the order: what a role works on."""
        m_block, head, batch = self.order.tile(index)
        return self.tile_of(m_block, head, batch, self.sequence(batch))

    def fetch_ahead(self, first_warp: int) -> None:
        """Bring into L2 what says where keys lie, before the wait for the launch ahead, by warps from this one on."""
        lengths = self.lengths
        entries, table = (None, None) if self.pages is None else (self.pages.entries, self.pages.table)
        vectors = lengths.cu_q, lengths.used_q, lengths.cu_k, lengths.used_k, lengths.left_k, entries
        fetch_vectors(vectors, first_warp)
        fetch_table(table, first_warp)

    def sequence(self, batch: Int32) -> Sequence:
        """The sequence of a batch entry, or the rows of Q after the last one."""
        return self.lengths.sequence(batch)

    def rows_visited(self, tile: QueryTile) -> Int32:
        """How many rows of K a tile's head and sequence have: what a tile costs at most."""
        return tile.mask.seqlen_k

    def mask_of(self, sequence: Sequence) -> IntervalMask:
        """The keys that each query of a sequence sees."""
        window = self.window_left, self.window_right
        lengths, has_tree = (sequence.seqlen_q, sequence.seqlen_k), self.tree is not None
        return IntervalMask(self.mask_kind, *lengths, *window, self.attention_chunk, has_tree)

    def tile_of(self, m_block: Int32, head: Int32, batch: Int32, sequence: Sequence) -> QueryTile:
        """Query tile `m_block` of a head of batch entry `batch`, which is `sequence`."""
        mask = self.mask_of(sequence)
        return QueryTile(
            m_block=m_block,
            head=head,
            sequence=batch,
            batch=0 if self.storage.q == "varlen" else batch,
            kv_batch=batch if self.storage.k == "dense" else 0,
            heads_per_kv=self.heads_per_kv if self.line is None else self.line.by_heads_per_kv,
            first_q=sequence.first_q,
            first_k=sequence.first_k,
            first_token=m_block * self.tile_tokens,
            mask=mask,
            tile_n=self.tile_n,
            tokens=self.tile_tokens,
            packed_heads=self.packed_heads,
        )


def lengths_of(tensors: FwdTensors | BwdTensors, packed: PackedTensors) -> Lengths:
    """The lengths of a call; `tensors` as `batched` returns them."""
    return Lengths(
        seqlen_q=tensors.q.shape[1],
        seqlen_k=seqlen_of_caches(tensors.k, packed.page_table),
        cu_q=packed.cu_seqlens_q,
        cu_k=packed.cu_seqlens_k,
        used_q=packed.seqused_q,
        used_k=packed.seqused_k,
        batch=None if packed.cu_seqlens_q is None else packed.cu_seqlens_q.shape[0] - 1,
        left_k=packed.cache_leftpad,
    )


def score_scales(has_softcap: bool, scalars: FwdScalars | BwdScalars) -> tuple[Float32, Float32]:
    """(factor of what the exponential is taken of, factor of a score before tanh), see `Launch`."""
    if has_softcap:
        return scalars.softcap, scalars.softmax_scale / scalars.softcap
    return scalars.softmax_scale, Float32(0.0)
