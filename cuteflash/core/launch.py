"""The run-time side of a forward problem: which tiles there are, in which order, under which mask and scale."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import FwdScalars
from cuteflash.core.lengths import Lengths
from cuteflash.core.mask import IntervalMask
from cuteflash.core.schedule import TileOrder
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.tile import QueryTile
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
        if scores.softcap:
            scale, inner_scale = scalars.softcap, scalars.softmax_scale / scalars.softcap
        else:
            scale, inner_scale = scalars.softmax_scale, Float32(0.0)
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
