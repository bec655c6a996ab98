"""Decoding latent attention from an e4m3 cache: cp.async loads, mma.sync products in fp16, from compute capability 8.9.

    all warps
    Q    ──cp.async──► sQ      made into fp16, its columns in the order in which K's come
    keys ──cp.async──► sK[s]   ldmatrix, e4m3 → fp16 in registers, S = Q Kᵀ
                               maxima ──► shared memory ──► every warp with the same rows
                               P ──► sP
                               ldmatrix, e4m3 → fp16 in registers, O += P V

The plan is that of `mla_decode.py`: a tile is 16, 32 or 64 rows of (token, head), and each warp has all rows and some
columns of O. Pairs of bytes are what ldmatrix moves: of K they are neighbours in the columns, in whose order Q's are
sorted; of V, transposed, two columns of two keys, so that a thread has four neighbouring columns of O in the end.

The descale of a sequence multiplies the scores and O: K and V are the same elements. Keys are shared between the blocks
and merged as in `mla_decode.py`. It is made for up to 32 heads: with more, WGMMA on 16-bit rows is faster on Hopper.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import words_of
from cuteflash.kernels.common.mla_parts import LatentParts
from cuteflash.kernels.sm80 import mla_e4m3_mma as products
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_e4m3_bundles import E4m3Fragments, E4m3Tiles
from cuteflash.kernels.sm80.mla_e4m3_epilogue import NeighbourParts, finish
from cuteflash.kernels.sm80.mla_kernel import MlaKernel
from cuteflash.mla_problem import MlaTensors
from cuteflash.traits.mla_e4m3 import PAIRS, MlaTraitsE4m3


@dataclasses.dataclass(frozen=True)
class FlashMlaDecodeE4m3(MlaKernel):
    """The decoding kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[MlaTraitsE4m3]

    name: ClassVar[str] = "flash_mla_decode_e4m3"
    parts: ClassVar[type[LatentParts]] = NeighbourParts
    dtype: ClassVar[type[cutlass.Numeric]] = Float16  # of the products' operands

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self) -> cute.TiledMma:
        """S = Q Kᵀ: warps along query rows and keys, those of one part of the columns."""
        traits = self.traits
        return atoms.tiled_mma_by_columns(self.dtype, traits.product_warps_m, traits.warps_n, traits.warp_keys)

    def tiled_mma_pv(self) -> cute.TiledMma:
        """O += P V: warps along the columns."""
        return atoms.tiled_mma_by_columns(self.dtype, 1, self.traits.num_warps, self.traits.warp_columns)

    def make_tiles(self, base: cute.Pointer) -> E4m3Tiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan, traits = self.traits.smem_plan, self.traits
        return E4m3Tiles(
            **self.common_tiles(base),
            sK=self.tile(base, "pages", atoms.swizzled_tile(traits.tile_n, PAIRS, traits.kv_stage)),
            start_q=base + plan["q"].start,
            start_k=base + plan["pages"].start,
            scales=self.statistic(base, "scales", cute.make_layout(traits.tile_m)),
        )

    # What a tile passes through.

    def views(self, tensors: MlaTensors) -> tuple[cute.Tensor, cute.Tensor]:
        """Q, as fp16 whatever it is, and the cached rows as pairs of bytes."""
        q = cute.make_tensor(cute.recast_ptr(tensors.q.iterator, dtype=self.dtype), tensors.q.layout)
        return q, words_of(tensors.kv_cache, self.dtype)

    def make_fragments(self, block: MlaBlock) -> E4m3Fragments:
        """Partition the block's tiles for this thread."""
        return products.make_fragments(self, block)

    def keep_q(self, block: MlaBlock, f: E4m3Fragments, tile: QueryTile) -> None:
        """Make Q into fp16, and fetch what is kept of it in registers."""
        products.keep_q(self, block, f, tile)

    def product_qk(self, block: MlaBlock, f: E4m3Fragments, stage: Int32) -> None:
        """S = Q Kᵀ for the keys in `stage`."""
        products.product_qk(self, block, f, stage)

    def product_pv(self, block: MlaBlock, f: E4m3Fragments, stage: Int32) -> None:
        """O += P V for the keys in `stage`."""
        products.product_pv(self, block, f, stage)

    def finish(self, block: MlaBlock, f: E4m3Fragments, tile: QueryTile) -> None:
        """Write O and the log-sum-exp of a tile."""
        finish(self, block, f, tile)
