"""Decoding latent attention on Ampere and after: one cached head of 576 columns is K, its first 512 columns are V, too.

    all warps
    Q    ──cp.async──► sQ      S = Q Kᵀ     warps share query rows and keys; Q by ldmatrix, or kept in registers
    keys ──cp.async──► sK[s]   maxima ──► shared memory ──► every warp with the same rows
                               P ──► sP
                               O += P V     every warp all query rows, and its part of the 512 columns

A tile is 16, 32 or 64 rows of (token, head). Its fp32 output takes up to half of the registers, so that each warp has
some of its columns: P has to pass through shared memory, and a step has three barriers: keys loaded, maxima known, P
written. The next step's keys arrive meanwhile.

Keys of all sequences are shared between the blocks, as in the sm90 family (`cuteflash.core.split`), which merge what
they computed of a tile (`cuteflash.kernels.common.mla_parts`). Not here: other widths, pages that are not a multiple of
64 rows, 8-bit caches, gradients.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import transposed
from cuteflash.kernels.sm80 import mla_decode_mma as products
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_decode_bundles import DecodeFragments, DecodeTiles
from cuteflash.kernels.sm80.mla_decode_epilogue import finish
from cuteflash.kernels.sm80.mla_kernel import MlaKernel
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaTensors
from cuteflash.traits.mla_sm80 import MlaTraitsSm80

COLUMNS = 32  # of O, neighbours that a warp has: four lanes have, row by row, a pair of each 8


@dataclasses.dataclass(frozen=True)
class FlashMlaDecodeSm80(MlaKernel):
    """The decoding kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[MlaTraitsSm80]

    name: ClassVar[str] = "flash_mla_decode_sm80"

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of Q, the cache and O."""
        return CUTE_DTYPES[self.problem.dtype]

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self) -> cute.TiledMma:
        """S = Q Kᵀ: warps along query rows and keys, those of one part of the columns."""
        traits = self.traits
        return atoms.tiled_mma_by_columns(
            self.dtype, traits.warps_m, traits.warps_n, traits.tile_n // traits.warps_n, traits.fetch
        )

    def tiled_mma_pv(self) -> cute.TiledMma:
        """O += P V: warps along the columns."""
        return atoms.tiled_mma_by_columns(self.dtype, 1, self.traits.num_warps, COLUMNS)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, 576, kv_stage)"""
        return atoms.swizzled_tile(self.traits.tile_n, LATENT_DIM, self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, 512, kv_stage), the first columns of K: whole slabs, one after the other."""
        page = atoms.swizzled_tile(self.traits.tile_n, LATENT_DIM_V)
        stages = cute.make_layout(self.traits.kv_stage, stride=self.traits.tile_n * LATENT_DIM)
        return cute.make_composed_layout(page.inner, 0, cute.append(page.outer, stages))

    def copy_q(self) -> cute.TiledCopy:
        """sQ to the A fragments of the product with K."""
        return cute.make_tiled_copy_A(atoms.ldmatrix(self.dtype), self.tiled_mma_qk())

    def copy_k(self) -> cute.TiledCopy:
        """sK to the B fragments of the product with K."""
        return cute.make_tiled_copy_B(atoms.ldmatrix(self.dtype), self.tiled_mma_qk())

    def copy_v(self) -> cute.TiledCopy:
        """sVt to the B fragments of the product with V."""
        return cute.make_tiled_copy_B(atoms.ldmatrix(self.dtype, transpose=True), self.tiled_mma_pv())

    def make_tiles(self, base: cute.Pointer) -> DecodeTiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        return DecodeTiles(
            **self.common_tiles(base),
            sK=self.tile(base, "pages", self.smem_layout_k()),
            sVt=transposed(self.tile(base, "pages", self.smem_layout_v())),
        )

    # What a tile passes through.

    def views(self, tensors: MlaTensors) -> tuple[cute.Tensor, cute.Tensor]:
        """Q and the cached rows."""
        return tensors.q, tensors.kv_cache

    def make_fragments(self, block: MlaBlock) -> DecodeFragments:
        """Partition the block's tiles for this thread."""
        return products.make_fragments(self, block)

    def keep_q(self, block: MlaBlock, f: DecodeFragments, tile: QueryTile) -> None:
        """Fetch what is kept of Q in registers."""
        products.keep_q(self, f)

    def product_qk(self, block: MlaBlock, f: DecodeFragments, stage: Int32) -> None:
        """S = Q Kᵀ for the keys in `stage`."""
        products.product_qk(self, f, stage)

    def product_pv(self, block: MlaBlock, f: DecodeFragments, stage: Int32) -> None:
        """O += P V for the keys in `stage`."""
        products.product_pv(f, stage)

    def finish(self, block: MlaBlock, f: DecodeFragments, tile: QueryTile) -> None:
        """Write O and the log-sum-exp of a tile."""
        finish(self, block, f, tile)
