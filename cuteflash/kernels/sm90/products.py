"""The two products of the main loop: S = Q K^T and O += P V, issued alone or together."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.core.softmax import scale_rows
from cuteflash.kernels.sm90.bundles import Rings
from cuteflash.kernels.sm90.warpgroup import Warpgroup, pass_turn, take_turn


def product_qk(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Issue S = Q K^T for the K tile at `position`."""
    atoms.gemm(wg.mma_qk, wg.acc_S, wg.tSrQ, wg.tSrK[None, None, None, rings.k.stage(position)], accumulate=False)


def product_pv(wg: Warpgroup, rings: Rings, position: Int32, part: int = 0) -> None:
    """Issue O += P V for the V tile at `position`, or P V alone, of one slice of columns, if it is accumulated apart."""
    apart = wg.acc_PV is not None
    acc = wg.acc_PV if apart else wg.acc_O
    v = wg.tOrV[None, None, None, rings.v.stage(position)]
    if slices(wg) > 1:
        v = cute.local_tile(v, (cute.size(v, mode=[0]), 1, cute.size(v, mode=[2])), (0, part, 0))
    atoms.gemm(wg.mma_slice, acc, wg.tOrP, v, accumulate=not apart)


def slices(wg: Warpgroup) -> int:
    """How many products a tile of V takes, one after the other."""
    return 1 if wg.acc_PV is None else cute.size(wg.acc_O) // cute.size(wg.acc_PV)


def await_pv(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Wait for the PV product at `position`, the last one that was issued; V is free, and O has all of it."""
    for part in range(slices(wg)):
        await_slice(wg, rings, position, part)


def await_slice(wg: Warpgroup, rings: Rings, position: Int32, part: int) -> None:
    """Wait for one slice of the PV product at `position` and add it to O; then issue the next one, or V is free."""
    warpgroup.wait_group(0)
    is_last = part == slices(wg) - 1
    if is_last:
        rings.v.release(position)
    if wg.acc_PV is not None:
        scale = None if wg.block_scales is None else wg.block_scales.last_v[0]
        size = cute.size(wg.acc_PV)
        for i in range(size):
            at = part * size + i
            if is_last:
                wg.acc_O[at] = wg.acc_O[at] + (wg.acc_PV[i] if scale is None else wg.acc_PV[i] * scale)
            else:
                wg.acc_O[at] = add_now(wg.acc_O[at], wg.acc_PV[i], scale)
    if not is_last:
        product_pv(wg, rings, position, part + 1)


def add_now(total: Float32, part: Float32, scale: Float32 | None) -> Float32:
    """The sum of `total` and `part`, or `part * scale`, at this place of the program.

    An ordinary addition may move past the product that `part`'s registers are for next, which then are copied.
    """
    code, given = ("add.rn.f32 {$w0}, {$r0}, {$r1};", [total, part])
    if scale is not None:
        code, given = ("fma.rn.f32 {$w0}, {$r1}, {$r2}, {$r0};", [total, part, scale])
    return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=given)


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
