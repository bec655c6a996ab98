"""Q of the latent-attention decode from an e4m3 cache, made into what the products read."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from cuteflash.core.convert import round_pair, unpack_pair
from cuteflash.core.fit_half import TOP, bits_of, exponent_of, power_of_two
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_e4m3_bundles import E4m3Fragments
from cuteflash.mla_problem import LATENT_DIM
from cuteflash.traits.sm80 import MMA_K, WARP

CHUNK_BYTES = 16
SLAB_BYTES_Q = 128  # of a row of Q, that a swizzle permutes: one word for each lane of a warp
SLABS_Q = 2 * LATENT_DIM // SLAB_BYTES_Q
PAIRS_OF_STEP = MMA_K // 2


@cute.jit
def prepare_q(kernel: cutlass.Constexpr, block: MlaBlock, f: E4m3Fragments, tile: QueryTile):
    """Sort the columns of Q as those of K come from ldmatrix, make them into fp16, and write the rows' scales.

    A warp has a row at a time, a lane nine of its words. Of eight words, those of a product's 16 columns, the even ones
    come first: lane t of a product reads words t and t + 4, and has four neighbouring bytes of K.
    """
    traits, dtype = kernel.traits, block.gO.element_type
    descale = block.descale[tile.batch]
    pair = f.lane % PAIRS_OF_STEP
    target = f.lane - pair + pair // 2 + pair % 2 * (PAIRS_OF_STEP // 2)
    for row in cutlass.range(f.warp, traits.tile_m, traits.num_warps, unroll=1):
        words = cute.make_rmem_tensor(SLABS_Q, Uint32)
        peak = Float32(0.0)
        for slab in cutlass.range_constexpr(SLABS_Q):
            words[slab] = word_of_q(kernel, block, row, slab, f.lane)[0]
            low, high = unpack_pair(words[slab], dtype)
            peak = cute.arch.fmax(peak, cute.arch.fmax(cute.arch.fmax(low, -low), cute.arch.fmax(high, -high)))
        peak = cute.arch.warp_reduction_max(peak)
        exponent = exponent_of(bits_of(peak))
        into = power_of_two(TOP - exponent)
        for slab in cutlass.range_constexpr(SLABS_Q):
            low, high = unpack_pair(words[slab], dtype)
            words[slab] = round_pair(low * into, high * into, Float16)
        cute.arch.sync_warp()  # every lane has read its words
        for slab in cutlass.range_constexpr(SLABS_Q):
            word_of_q(kernel, block, row, slab, target)[0] = words[slab]
        if f.lane == 0:
            block.tiles.scales[row] = power_of_two(exponent - TOP) * descale


def word_of_q(kernel, block: MlaBlock, row: Int32, slab: int, word: Int32) -> cute.Tensor:
    """One of the words of a slab of a row of Q."""
    words = CHUNK_BYTES // 4
    chunk = word // words ^ row % (WARP // words)
    at = slab * kernel.traits.tile_m * SLAB_BYTES_Q + row * SLAB_BYTES_Q + chunk * CHUNK_BYTES + word % words * 4
    pointer = cute.recast_ptr(aligned(block.tiles.start_q + at, 4), dtype=Uint32)
    return cute.make_tensor(pointer, cute.make_layout(1))
