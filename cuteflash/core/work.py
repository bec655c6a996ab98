"""The run-time side of a forward problem: which tiles there are, in which order, under which mask and scale."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import FwdScalars
from cuteflash.core.mask import IntervalMask
from cuteflash.core.schedule import TileOrder
from cuteflash.core.softmax import LOG2_E


@dataclasses.dataclass(frozen=True)
class Work:
    """What the blocks of one launch share.

    Attributes:
        order: all query tiles, in the order in which they are handed out.
        heads_per_kv: heads, as the tiles see them, that read one KV head.
        mask: the keys each query sees.
        scale_log2, inner_scale: exp2 is taken of `scale_log2 * s`, with `s = tanh(inner_scale * q k)` under a softcap
            and `s = q k` otherwise.
    """

    order: TileOrder
    heads_per_kv: Int32
    mask: IntervalMask
    scale_log2: Float32
    inner_scale: Float32

    @staticmethod
    def of(kernel, mQ: cute.Tensor, mK: cute.Tensor, scalars: FwdScalars, whole_waves: bool) -> Work:
        """The work of a launch.

        Args:
            kernel: for its problem, `tile_tokens` and `dtype`.
            mQ, mK: (b, s_q, h_q, d) and (b, s_k, h_k, d).
            scalars: the kernel's.
            whole_waves: groups of heads fill whole waves of `num_sms` persistent blocks.
        """
        problem = kernel.problem
        batch, seqlen_q, heads_q, _ = mQ.shape
        _, seqlen_k, heads_k, _ = mK.shape
        heads = heads_q // problem.operands.packed_heads
        heads_per_kv = heads // heads_k
        kv_row_bytes = (problem.operands.head_dim + problem.operands.head_dim_v) * kernel.dtype.width // 8
        m_blocks = cute.ceil_div(seqlen_q, kernel.tile_tokens)
        group = TileOrder.head_group(seqlen_k, heads_per_kv, kv_row_bytes)
        if whole_waves:
            group = TileOrder.even_group(group, m_blocks, scalars.num_sms)
        order = TileOrder(m_blocks, heads, batch, cutlass.min(group, heads * batch))
        mask = IntervalMask(problem.scores.mask, seqlen_q, seqlen_k, scalars.window_left, scalars.window_right)
        if problem.scores.softcap:
            scale, inner_scale = scalars.softcap, scalars.softmax_scale / scalars.softcap
        else:
            scale, inner_scale = scalars.softmax_scale, Float32(0.0)
        return Work(order, heads_per_kv, mask, scale * LOG2_E, inner_scale)
