"""Lone tiles of the sm80 backward: a block that has all keys of its sequence needs no other kernel.

It loads O and LSE, computes delta (`bwd_delta.py`), and stores dQ itself, rounded, by way of the place of Q. So each
operand and each gradient crosses memory once, where sums in memory are cleared, added to and read in fp32.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cuteflash.arguments import BwdTensors
from cuteflash.core.views import rows_first
from cuteflash.kernels.sm80.bwd_barriers import sync_warps
from cuteflash.kernels.sm80.bwd_bundles import Gradients, KeyWork, LoneRows, QuerySources
from cuteflash.kernels.sm80.bwd_load import store_rows
from cuteflash.kernels.sm80.bwd_products import stage_rows


def lone_rows(kernel, tensors: BwdTensors) -> LoneRows:
    """See `LoneRows`; `tensors` as `batched` returns them."""

    def statistic(mX: cute.Tensor | None) -> cute.Tensor | None:
        return None if mX is None else cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 1, 0]))

    if kernel.has_delta:
        return LoneRows(rows_first(tensors.dq), None, None, None)
    return LoneRows(rows_first(tensors.dq), rows_first(tensors.o), statistic(tensors.lse), statistic(tensors.dlse))


@cute.jit
def store_dq(kernel: cutlass.Constexpr, g: Gradients, loads: QuerySources, work: KeyWork, place: tuple):
    """Store dQ of a query block, rounded; `place` is its (query head, block, stage of Q, which is lost, thread)."""
    head, m_block, stage, thread = place
    sdQ = loads.tiles.sQ[None, None, stage]
    sync_warps(kernel)  # every warp has read Q
    stage_rows(kernel, g.mma_dq, thread, (g.acc_dQ, work.launch.softmax_scale), sdQ)
    sync_warps(kernel)
    gdQ = loads.lone.gdQ[None, None, loads.first_head + head]
    rows = loads.seqlen_q - m_block * kernel.traits.tile_m
    store_rows(kernel, sdQ, gdQ, m_block, rows, kernel.problem.operands.head_dim, thread)
