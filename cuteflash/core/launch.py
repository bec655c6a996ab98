"""The run-time side of a problem: which tiles there are, in which order, under which mask and scale."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import BwdScalars, FwdScalars, FwdTensors, PackedTensors
from cuteflash.core.lengths import Lengths, Sequence
from cuteflash.core.mask import IntervalMask
from cuteflash.core.schedule import Order, RaggedOrder, TileOrder
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.tile import KeyTile, QueryTile
from cuteflash.core.views import with_batch
from cuteflash.problem import MaskKind, Storage

LONGER_THAN_MEAN = 4  # sequences that are longer than this times the mean are few


def batched(tensors: FwdTensors, storage: Storage) -> FwdTensors:
    """The tensors with a batch mode, also those of packed sequences, which have one entry."""
    views = {}
    if storage.q == "varlen":
        views = {name: with_batch(getattr(tensors, name)) for name in ("q", "o")}
        if tensors.lse is not None:
            views["lse"] = with_batch(tensors.lse)
    if storage.k == "varlen":
        views |= {name: with_batch(getattr(tensors, name)) for name in ("k", "v")}
    return tensors._replace(**views)


def ragged_order(
    kernel, tensors: FwdTensors, packed: PackedTensors, heads: Int32, heads_per_kv: Int32, persistent: bool
) -> RaggedOrder:
    """The order of a kernel's tiles of packed sequences, whose lengths the host does not know: it goes by the mean.

    Without `persistent` blocks a second pass would cost a block for each tile of the first one.
    """
    rows, keys, batch = tensors.q.shape[1], tensors.k.shape[1], packed.cu_seqlens_q.shape[0] - 1
    live_keys = cutlass.min(keys, keys // batch * LONGER_THAN_MEAN)
    group = TileOrder.head_group(live_keys, heads_per_kv, kernel.problem.operands.kv_row_bytes)
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
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the blocks of one launch share.

    Attributes:
        order: all query tiles, in the order in which they are handed out.
        heads_per_kv: heads, as the tiles see them, that read one KV head.
        lengths: of the sequences.
        window_left, window_right: keys visible before and after a query's own position.
        scale_log2, inner_scale: exp2 is taken of `scale_log2 * s`, with `s = tanh(inner_scale * q k)` under a softcap
            and `s = q k` otherwise.
        mask_kind, storage, tile_tokens, tile_n, packed_heads: of the kernel.
    """

    order: Order
    heads_per_kv: Int32
    lengths: Lengths
    window_left: Int32
    window_right: Int32
    scale_log2: Float32
    inner_scale: Float32
    mask_kind: cutlass.Constexpr[MaskKind]
    storage: cutlass.Constexpr[Storage]
    tile_tokens: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    packed_heads: cutlass.Constexpr[int]

    @staticmethod
    def of(kernel, tensors: FwdTensors, packed: PackedTensors, scalars: FwdScalars, persistent: bool) -> Launch:
        """The launch of a kernel.

        Args:
            kernel: for its problem, traits, `tile_tokens` and `longest_first`.
            tensors: the kernel's, as `batched` returns them.
            packed, scalars: the kernel's.
            persistent: there are `num_sms` blocks; groups of heads of a dense batch then fill whole waves of them.
        """
        operands, scores, storage = kernel.problem.operands, kernel.problem.scores, kernel.problem.storage
        batch, seqlen_q, heads_q, _ = tensors.q.shape
        _, seqlen_k, heads_k, _ = tensors.k.shape
        heads = heads_q // operands.packed_heads
        heads_per_kv = heads // heads_k
        sequences = None
        order: Order
        if storage.q == "varlen":
            order = ragged_order(kernel, tensors, packed, heads, heads_per_kv, persistent)
            sequences = order.batch
        else:
            m_blocks = cute.ceil_div(seqlen_q, kernel.tile_tokens)
            group = TileOrder.head_group(seqlen_k, heads_per_kv, operands.kv_row_bytes)
            if persistent:
                group = TileOrder.even_group(group, m_blocks, scalars.num_sms)
            order = TileOrder(m_blocks, heads, batch, cutlass.min(group, heads * batch), kernel.longest_first)
        lengths = Lengths(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            cu_q=packed.cu_seqlens_q,
            cu_k=packed.cu_seqlens_k,
            used_q=packed.seqused_q,
            used_k=packed.seqused_k,
            batch=sequences,
        )
        scale, inner_scale = score_scales(scores.softcap, scalars)
        return Launch(
            order=order,
            heads_per_kv=heads_per_kv,
            lengths=lengths,
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            scale_log2=scale * LOG2_E,
            inner_scale=inner_scale,
            mask_kind=scores.mask,
            storage=storage,
            tile_tokens=kernel.tile_tokens,
            tile_n=kernel.traits.tile_n,
            packed_heads=operands.packed_heads,
        )

    def tile(self, index: Int32) -> QueryTile:
        """The tile with number `index` of the order: what a role works on."""
        m_block, head, batch = self.order.tile(index)
        return self.tile_of(m_block, head, batch, self.lengths.sequence(batch))

    def tile_of(self, m_block: Int32, head: Int32, batch: Int32, sequence: Sequence) -> QueryTile:
        """Query tile `m_block` of a head of batch entry `batch`, which is `sequence`."""
        mask = IntervalMask(self.mask_kind, sequence.seqlen_q, sequence.seqlen_k, self.window_left, self.window_right)
        return QueryTile(
            m_block=m_block,
            head=head,
            batch=0 if self.storage.q == "varlen" else batch,
            kv_batch=0 if self.storage.k == "varlen" else batch,
            heads_per_kv=self.heads_per_kv,
            first_q=sequence.first_q,
            first_k=sequence.first_k,
            first_token=m_block * self.tile_tokens,
            mask=mask,
            tile_n=self.tile_n,
            tokens=self.tile_tokens,
            packed_heads=self.packed_heads,
        )


TURNS_AT_ONCE = 4  # blocks of a head that run at the same time in a deterministic backward, if there are enough heads


@dataclasses.dataclass(frozen=True)
class BwdLaunch:
    """What the blocks of one launch of a backward share.

    Attributes:
        order: all key tiles, in the order in which they are handed out.
        heads_per_kv: query heads that read one KV head.
        lengths, window_left, window_right, scale_log2, inner_scale, mask_kind: see `Launch`.
        softmax_scale: factor of dQ and dK.
        tile_m, tile_n: of the kernel.
    """

    order: TileOrder
    heads_per_kv: Int32
    lengths: Lengths
    window_left: Int32
    window_right: Int32
    scale_log2: Float32
    inner_scale: Float32
    softmax_scale: Float32
    mask_kind: cutlass.Constexpr[MaskKind]
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    @staticmethod
    def of(kernel, mQ: cute.Tensor, mK: cute.Tensor, scalars: BwdScalars) -> BwdLaunch:
        """The launch of a kernel; mQ (b, s_q, h_q, d) and mK (b, s_k, h_k, d)."""
        scores, traits = kernel.problem.scores, kernel.traits
        batch, seqlen_q, heads_q, _ = mQ.shape
        _, seqlen_k, heads_k, _ = mK.shape
        heads_per_kv = heads_q // heads_k
        n_blocks = cute.ceil_div(seqlen_k, traits.tile_n)
        # What a head's blocks read and add to again and again: Q, dO and the fp32 sum of dQ.
        row_bytes = kernel.problem.operands.kv_row_bytes + 4 * traits.head_dim
        group = TileOrder.head_group(seqlen_q * heads_per_kv, Int32(1), row_bytes)
        scale_log2, inner_scale = score_scales(scores.softcap, scalars)
        by_block = scores.mask != "full" or kernel.problem.is_deterministic
        if kernel.problem.is_deterministic:
            # Blocks of a head take turns at its dQ, and wait least if few of them run at the same time.
            group = cutlass.max(group, scalars.num_sms // TURNS_AT_ONCE)
        return BwdLaunch(
            order=TileOrder(n_blocks, heads_k, batch, cutlass.min(group, heads_k * batch), by_block),
            heads_per_kv=heads_per_kv,
            lengths=Lengths(seqlen_q, seqlen_k),
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            scale_log2=scale_log2 * LOG2_E,
            inner_scale=inner_scale,
            softmax_scale=scalars.softmax_scale,
            mask_kind=scores.mask,
            tile_m=traits.tile_m,
            tile_n=traits.tile_n,
        )

    def tile(self, index: Int32) -> KeyTile:
        """The tile with number `index` of the order. The first keys of a head come first: the most queries see them."""
        block, head, batch = self.order.tile(index)
        n_block = self.order.m_blocks - 1 - block
        sequence = self.lengths.sequence(batch)
        mask = IntervalMask(self.mask_kind, sequence.seqlen_q, sequence.seqlen_k, self.window_left, self.window_right)
        return KeyTile(n_block, head, batch, n_block * self.tile_n, mask, self.tile_m, self.tile_n)


def score_scales(has_softcap: bool, scalars: FwdScalars | BwdScalars) -> tuple[Float32, Float32]:
    """(factor of what the exponential is taken of, factor of a score before tanh), see `Launch`."""
    if has_softcap:
        return scalars.softcap, scalars.softmax_scale / scalars.softcap
    return scalars.softmax_scale, Float32(0.0)
