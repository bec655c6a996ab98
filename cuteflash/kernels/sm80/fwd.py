"""FlashAttention-2 forward for Ampere and everything after it: cp.async loads, ldmatrix, mma.sync.

    all warps (16 query rows of each, or a multiple)
    Q ──cp.async──► sQ       S = Q K^T             mma.sync; Q and K by ldmatrix, or Q kept in registers
    K ──cp.async──► sK[s]    mask, online softmax  registers
    V ──cp.async──► sV[s]    O += P V              mma.sync; V by transposing ldmatrix
                             O / row sum ──► sO ──► global, 16 bytes a thread

With one stage, K of the next block is loaded while the PV product runs and V while the QK product runs; with more,
whole blocks are loaded ahead and a step needs one barrier instead of two. Several blocks on one multiprocessor overlap
the softmax of one with the products of another. Rows of a cache are looked up in its pages
(`cuteflash.kernels.common.gather`). Not here: dropout, ALiBi, gradients.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.arguments import FwdArguments
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.finish import normalize
from cuteflash.core.gqa import query_view
from cuteflash.core.launch import Launch, batched
from cuteflash.core.signature import CUTE_DTYPES, fwd_fake_args
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_first, transposed
from cuteflash.kernels.common.gather import make_gather
from cuteflash.kernels.sm80.bundles import KvSources, Operands, Tiles
from cuteflash.kernels.sm80.epilogue import write_output
from cuteflash.kernels.sm80.fwd_mma import attend, make_fragments
from cuteflash.kernels.sm80.load import load_q, make_kv_source
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80

SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle, so that a tile's offset never carries into it


class FlashFwdSm80:
    """The sm80 forward kernel for one problem and one set of traits."""

    family = "sm80"

    def __init__(self, traits: FwdTraitsSm80, problem: FwdProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.dtype = CUTE_DTYPES[problem.operands.qk_dtype]
        # A tile holds whole tokens: with packed heads that do not divide tile_m, the last rows stay unused.
        self.tile_tokens = traits.tile_m // problem.operands.packed_heads
        # If few keys lie left of a window, its first tiles are short, as under a causal mask.
        self.longest_first = traits.longest_first and problem.scores.mask != "full"

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with: fakes of `FwdArguments`."""
        return fwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma(self) -> cute.TiledMma:
        """Both products: warps stacked along the query rows."""
        return atoms.tiled_mma(self.dtype, self.traits.num_warps)

    tiled_mma_qk = tiled_mma_pv = tiled_mma

    def smem_tile(self, rows: int, cols: int, *stages: int) -> cute.ComposedLayout:
        """A (rows, cols) tile, or a (rows, cols, stages) one, swizzled as the traits say."""
        return atoms.swizzled_tile(rows, cols, *stages, most_bits=self.traits.swizzle_bits)

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(tile_m, head_dim)"""
        return self.smem_tile(self.traits.tile_m, self.traits.head_dim)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, head_dim, kv_stage)"""
        return self.smem_tile(self.traits.tile_n, self.traits.head_dim, self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, kv_stage)"""
        return self.smem_tile(self.traits.tile_n, self.traits.head_dim_v, self.traits.kv_stage)

    def smem_layout_o(self) -> cute.ComposedLayout:
        """(tile_m, head_dim_v)"""
        return self.smem_tile(self.traits.tile_m, self.traits.head_dim_v)

    def copy_q(self) -> cute.TiledCopy:
        """sQ to the A fragments of the QK product."""
        return cute.make_tiled_copy_A(atoms.ldmatrix(self.dtype), self.tiled_mma_qk())

    def copy_k(self) -> cute.TiledCopy:
        """sK to the B fragments of the QK product."""
        return cute.make_tiled_copy_B(atoms.ldmatrix(self.dtype), self.tiled_mma_qk())

    def copy_v(self) -> cute.TiledCopy:
        """sVt to the B fragments of the PV product."""
        return cute.make_tiled_copy_B(atoms.ldmatrix(self.dtype, transpose=True), self.tiled_mma_pv())

    def copy_o(self) -> cute.TiledCopy:
        """The O accumulators to sO."""
        return atoms.store_pairs(self.dtype, self.tiled_mma_pv())

    def load_copy(self, cols: int) -> cute.TiledCopy:
        """Global memory to a shared tile of `cols` columns, by all threads of the block."""
        return atoms.load_copy(self.dtype, self.traits.num_threads, cols, self.traits.async_copy)

    def store_copy(self, cols: int) -> cute.TiledCopy:
        """A shared tile of `cols` columns to registers and global memory, by all threads of the block."""
        return atoms.store_copy(self.dtype, self.traits.num_threads, cols)

    @cute.jit
    def __call__(self, *arguments):
        tensors, packed_tensors, _, scalars, stream = FwdArguments.of(arguments)
        tensors = batched(tensors, self.problem.storage)
        traits, packed = self.traits, self.problem.operands.packed_heads
        operands = Operands(
            query_view(tensors.q, packed), rows_first(tensors.k), rows_first(tensors.v), query_view(tensors.o, packed)
        )
        launch = Launch.of(self, tensors, packed_tensors, scalars, persistent=False)
        self.kernel.set_name_prefix("flash_fwd_sm80", remove_cutlass_symbol=not traits.cutlass_symbol)
        self.kernel(operands, tensors.lse, launch).launch(
            grid=(launch.order.size(), 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, operands: Operands, mLSE: cute.Tensor | None, launch: Launch):
        tile = launch.tile(cute.arch.block_idx()[0])
        if const_expr(self.problem.storage.q == "dense"):
            self.compute(operands, mLSE, launch, tile)
        elif tile.exists():
            self.compute(operands, mLSE, launch, tile)

    @cute.jit
    def compute(self, operands: Operands, mLSE: cute.Tensor | None, launch: Launch, tile: QueryTile):
        """Attend and write one tile."""
        thread = cute.arch.thread_idx()[0]
        kv_head = tile.head  # packed, it is a KV head
        if const_expr(tile.packed_heads == 1):
            kv_head = tile.kv_head
        base = SmemAllocator().allocate_array(cutlass.Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        tiles = self.make_tiles(base)
        f = make_fragments(self, tiles, launch, thread)
        sources = self.kv_sources(operands, kv_head, tiles, launch, tile)
        load_q(self, operands.gQ[None, None, tile.head, tile.batch], tiles.sQ, tile, thread)
        attend(self, f, sources, tile)
        normalize(f.softmax, f.scores, f.out, tile, mLSE)
        write_output(self, f, operands.gO[None, None, tile.head, tile.batch], tiles.sO, tile)

    def kv_sources(
        self, operands: Operands, kv_head: Int32, tiles: Tiles, launch: Launch, tile: QueryTile
    ) -> KvSources:
        """Where this thread's share of K and V comes from."""
        thread = cute.arch.thread_idx()[0]
        if self.problem.storage.k == "paged":
            return KvSources(
                *(
                    make_gather(self.load_copy(cols), thread, g[None, None, kv_head, None], sX, launch, tile)
                    for g, sX, cols in (
                        (operands.gK, tiles.sK, self.traits.head_dim),
                        (operands.gV, tiles.sV, self.traits.head_dim_v),
                    )
                )
            )
        gK, gV = (
            cute.domain_offset((tile.first_k, 0), g[None, None, kv_head, tile.kv_batch])
            for g in (operands.gK, operands.gV)
        )
        k = make_kv_source(self, gK, tiles.sK, self.problem.operands.head_dim, thread)
        v = make_kv_source(self, gV, tiles.sV, self.problem.operands.head_dim_v, thread)
        return KvSources(k, v)

    def make_tiles(self, base: cute.Pointer) -> Tiles:
        """The shared-memory tensors, laid out by the traits' plan; V also as the operand that the product reads."""
        plan = self.traits.smem_plan

        def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=self.dtype), layout)

        sV = tile("v", self.smem_layout_v())
        return Tiles(
            sQ=tile("q", self.smem_layout_q()),
            sK=tile("k", self.smem_layout_k()),
            sV=sV,
            sVt=transposed(sV),
            sO=tile("o", self.smem_layout_o()),
        )
