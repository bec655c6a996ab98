"""The run-time side of a problem: which tiles there are, in which order, under which mask and scale."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import BwdScalars, FwdScalars
from cuteflash.core.lengths import Lengths
from cuteflash.core.mask import IntervalMask
from cuteflash.core.schedule import TileOrder
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.tile import KeyTile, QueryTile
from cuteflash.problem import MaskKind


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
        mask_kind, tile_tokens, tile_n, packed_heads: of the kernel.
    """

    order: TileOrder
    heads_per_kv: Int32
    lengths: Lengths
    window_left: Int32
    window_right: Int32
    scale_log2: Float32
    inner_scale: Float32
    mask_kind: cutlass.Constexpr[MaskKind]
    tile_tokens: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    packed_heads: cutlass.Constexpr[int]

    @staticmethod
    def of(kernel, mQ: cute.Tensor, mK: cute.Tensor, scalars: FwdScalars, whole_waves: bool) -> Launch:
        """The launch of a kernel.

        Args:
            kernel: for its problem, traits, `tile_tokens` and `longest_first`.
            mQ, mK: (b, s_q, h_q, d) and (b, s_k, h_k, d).
            scalars: the kernel's.
            whole_waves: groups of heads fill whole waves of `num_sms` persistent blocks.
        """
        operands, scores = kernel.problem.operands, kernel.problem.scores
        batch, seqlen_q, heads_q, _ = mQ.shape
        _, seqlen_k, heads_k, _ = mK.shape
        heads = heads_q // operands.packed_heads
        heads_per_kv = heads // heads_k
        m_blocks = cute.ceil_div(seqlen_q, kernel.tile_tokens)
        group = TileOrder.head_group(seqlen_k, heads_per_kv, operands.kv_row_bytes)
        if whole_waves:
            group = TileOrder.even_group(group, m_blocks, scalars.num_sms)
        scale, inner_scale = score_scales(scores.softcap, scalars)
        return Launch(
            order=TileOrder(m_blocks, heads, batch, cutlass.min(group, heads * batch), kernel.longest_first),
            heads_per_kv=heads_per_kv,
            lengths=Lengths(seqlen_q, seqlen_k),
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            scale_log2=scale * LOG2_E,
            inner_scale=inner_scale,
            mask_kind=scores.mask,
            tile_tokens=kernel.tile_tokens,
            tile_n=kernel.traits.tile_n,
            packed_heads=operands.packed_heads,
        )

    def tile(self, index: Int32) -> QueryTile:
        """The tile with number `index` of the order: what a role works on."""
        m_block, head, batch = self.order.tile(index)
        sequence = self.lengths.sequence(batch)
        mask = IntervalMask(self.mask_kind, sequence.seqlen_q, sequence.seqlen_k, self.window_left, self.window_right)
        return QueryTile(
            m_block=m_block,
            head=head,
            batch=batch,
            heads_per_kv=self.heads_per_kv,
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
