"""Two warpgroups that share the rows of a tile: one hands its part of O over, of half of the keys, the other merges.

Threads of both that have the same number hold the same elements of O, so that each hands its registers to the other:
neighbouring threads write neighbouring words. The memory is that in which O is staged afterwards.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cuteflash.core.softmax import exp2
from cuteflash.core.views import rows_view
from cuteflash.kernels.sm90.bundles import NamedBarrier, Tiles
from cuteflash.kernels.sm90.warpgroup import ROWS, Warpgroup
from cuteflash.traits.sm90 import WARPGROUP


def handed_words(kernel, wg: Warpgroup, tiles: Tiles) -> cute.Tensor:
    """What a thread hands over: (elements of O, then maxima and sums of its rows)."""
    words = cute.size(wg.acc_O) + 2 * ROWS
    start = cute.recast_ptr(tiles.base + kernel.traits.smem_plan["handed"].start, dtype=Float32)
    return cute.make_tensor(start + wg.thread, cute.make_layout(words, stride=WARPGROUP))


def meet(kernel) -> None:
    """Wait for the other warpgroup."""
    threads = kernel.traits.key_warpgroups * WARPGROUP
    cute.arch.barrier(barrier_id=NamedBarrier.HANDED, number_of_threads=threads)


@cute.jit
def hand_over(kernel: cutlass.Constexpr, wg: Warpgroup, tiles: Tiles):
    """Hand over a part of a tile, once the last tile's O has left the memory."""
    words = handed_words(kernel, wg, tiles)
    size = cute.size(wg.acc_O)
    meet(kernel)
    for i in cutlass.range_constexpr(size):
        words[i] = wg.acc_O[i]
    for r in cutlass.range_constexpr(ROWS):
        words[size + r], words[size + ROWS + r] = wg.softmax.row_max[r], wg.softmax.row_sum[r]
    meet(kernel)


@cute.jit
def take_part(kernel: cutlass.Constexpr, wg: Warpgroup, tiles: Tiles):
    """Add the other warpgroup's part of a tile to this one's O, maxima and sums.

    A part without a key that a row sees has the maximum -inf and zeros.
    """
    words = handed_words(kernel, wg, tiles)
    softmax, size = wg.softmax, cute.size(wg.acc_O)
    if wg.thread < 32:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    meet(kernel)
    meet(kernel)
    own, other = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(2))
    for r in cutlass.range_constexpr(ROWS):
        scale = softmax.scale_of(r)
        mine, others = softmax.row_max[r], words[size + r]
        softmax.row_max[r] = cute.arch.fmax(mine, others)
        shift = softmax.shift(r)
        own[r], other[r] = exp2(mine * scale - shift), exp2(others * scale - shift)
        softmax.row_sum[r] = softmax.row_sum[r] * own[r] + words[size + ROWS + r] * other[r]
    theirs = cute.make_rmem_tensor_like(wg.acc_O)
    for i in cutlass.range_constexpr(size):
        theirs[i] = words[i]
    added = rows_view(theirs)
    for r in cutlass.range_constexpr(ROWS):
        for c in cutlass.range_constexpr(cute.size(added.shape[1])):
            wg.out[r, c] = wg.out[r, c] * own[r] + added[r, c] * other[r]
