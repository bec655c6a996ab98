"""The two products of the main loop: S = Q K^T and O += P V, issued alone or together."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.core.softmax import scale_rows
from cuteflash.kernels.sm90.bundles import Rings
from cuteflash.kernels.sm90.warpgroup import Warpgroup, pass_turn, take_turn


def product_qk(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Issue S = Q K^T for the K tile at `position`."""
    atoms.gemm(wg.mma_qk, wg.acc_S, wg.tSrQ, wg.tSrK[None, None, None, rings.k.stage(position)], accumulate=False)


def product_pv(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Issue O += P V for the V tile at `position`, or P V alone if it is accumulated apart."""
    apart = wg.acc_PV is not None
    acc = wg.acc_PV if apart else wg.acc_O
    atoms.gemm(wg.mma_pv, acc, wg.tOrP, wg.tOrV[None, None, None, rings.v.stage(position)], accumulate=not apart)


def await_pv(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Wait for the PV product at `position`, the last one that was issued; V is free, and O has all of it."""
    warpgroup.wait_group(0)
    rings.v.release(position)
    if wg.acc_PV is not None:
        scale = None if wg.block_scales is None else wg.block_scales.last_v[0]
        for i in range(cute.size(wg.acc_O)):
            wg.acc_O[i] = wg.acc_O[i] + (wg.acc_PV[i] if scale is None else wg.acc_PV[i] * scale)


def finish_qk(kernel, wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """S of the K tile at `position`, in this warpgroup's turn, with nothing beside it."""
    rings.k.wait(position)
    take_turn(kernel, wg)
    product_qk(wg, rings, position)
    pass_turn(kernel, wg)
    warpgroup.wait_group(0)
    rings.k.release(position)


def finish_pv(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """O += P V for the V tile at `position`, with nothing beside it."""
    rings.v.wait(position)
    product_pv(wg, rings, position)
    await_pv(wg, rings, position)


@cute.jit
def product_both(kernel: cutlass.Constexpr, wg: Warpgroup, rings: Rings, position: Int32):
    """O += P V for the V tile at `position`, still running, beside S of the K tile after it, finished."""
    rings.k.wait(position + 1)
    take_turn(kernel, wg)
    product_qk(wg, rings, position + 1)
    if const_expr(kernel.traits.rescale_in_product):
        scale_rows(wg.out, wg.softmax.row_scale)
    rings.v.wait(position)
    product_pv(wg, rings, position)
    pass_turn(kernel, wg)
    warpgroup.wait_group(1)
    rings.k.release(position + 1)
