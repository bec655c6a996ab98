"""FlashAttention-2 forward for Ampere and everything after it: cp.async loads, ldmatrix, mma.sync.

    all warps (16 query rows of each, or a multiple)
    Q ──cp.async──► sQ       S = Q K^T             mma.sync; Q and K by ldmatrix, or Q kept in registers
    K ──cp.async──► sK[s]    mask, online softmax  registers
    V ──cp.async──► sV[s]    O += P V              mma.sync; V by transposing ldmatrix
                             O / row sum ──► sO ──► global, 16 bytes a thread

With one stage, K of the next block is loaded while the PV product runs and V while the QK product runs; with more,
whole blocks are loaded ahead and a step needs one barrier instead of two. Several blocks on one multiprocessor overlap
the softmax of one with the products of another. Rows of a cache are looked up in its pages
(`cuteflash.kernels.common.gather`). Of an e4m3 cache sK and sV hold bytes, of which fragments of fp16 are made in
registers (`cache_mma.py`). Not here: dropout, ALiBi, gradients.
"""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.arguments import FwdArguments, FwdTensors
from cuteflash.atoms import row_copies
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.finish import finish_rows, normalize, write_lse
from cuteflash.core.gqa import query_view
from cuteflash.core.launch import Launch, batched
from cuteflash.core.scales import Scales
from cuteflash.core.scores import ScoreTile, computed_here
from cuteflash.core.signature import CUTE_DTYPES, fwd_fake_args
from cuteflash.core.softmax import scale_rows
from cuteflash.core.split import each_part
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_first, rows_view, transposed, words_of
from cuteflash.kernels.common.gather import make_gather
from cuteflash.kernels.common.partials import Partials
from cuteflash.kernels.sm80 import cache_mma
from cuteflash.kernels.sm80.bundles import Fragments, KvSources, Operands, Tiles
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
        self.dtype = CUTE_DTYPES[problem.operands.product_dtype]
        self.out_dtype = CUTE_DTYPES[problem.operands.o_dtype]
        self.converts = problem.operands.cache_dtype is not None  # K and V, which move as pairs of bytes,
        self.fits_q = problem.operands.qk_dtype != problem.operands.product_dtype  # and Q
        self.tile_tokens = traits.tile_tokens(problem.operands.packed_heads)
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
        """(tile_n, columns, kv_stage), as of the traits' `loaded_columns`"""
        return self.smem_tile(self.traits.tile_n, self.traits.loaded_columns[0], self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, columns, kv_stage), likewise"""
        return self.smem_tile(self.traits.tile_n, self.traits.loaded_columns[1], self.traits.kv_stage)

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
        return atoms.store_pairs(self.out_dtype, self.tiled_mma_pv())

    def load_copy(self, cols: int) -> cute.TiledCopy:
        """Global memory to a shared tile of `cols` columns, by all threads of the block."""
        return row_copies.load_copy(self.dtype, self.traits.num_threads, cols, self.traits.async_copy)

    def store_copy(self, cols: int) -> cute.TiledCopy:
        """A shared tile of `cols` columns to registers and global memory, by all threads of the block."""
        return row_copies.store_copy(self.out_dtype, self.traits.num_threads, cols)

    def as_moved(self, tensors: FwdTensors) -> FwdTensors:
        """The tensors with Q, K and V in the element type of the products: of a cache pairs of bytes."""
        if not self.converts:
            return tensors
        q = cute.make_tensor(cute.recast_ptr(tensors.q.iterator, dtype=self.dtype), tensors.q.layout)
        return tensors._replace(q=q, k=words_of(tensors.k, self.dtype), v=words_of(tensors.v, self.dtype))

    @cute.jit
    def __call__(self, *arguments):
        scores = self.problem.scores
        tensors, packed_tensors, scales, scalars, sinks, stream, split, tree, _ = FwdArguments.of(
            arguments, self.problem.is_split, scores.sink is not None, has_tree=scores.tree
        )
        tensors = self.as_moved(batched(tensors, self.problem.storage))
        traits, packed = self.traits, self.problem.operands.packed_heads
        operands = Operands(
            query_view(tensors.q, packed), rows_first(tensors.k), rows_first(tensors.v), query_view(tensors.o, packed)
        )
        launch = Launch.of(self, tensors, packed_tensors, scalars, False, sinks, split, tree)
        partials = Partials.of(self, tensors, split, launch.sinks)
        blocks = partials.arrivals.shape[0] if const_expr(self.problem.is_split) else launch.order.size()
        self.kernel.set_name_prefix("flash_fwd_sm80", remove_cutlass_symbol=not traits.cutlass_symbol)
        self.kernel(operands, tensors.lse, Scales.of(scales, self.problem.storage), launch, partials).launch(
            grid=(blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.blocks_per_sm,
            cooperative=self.problem.is_split,  # its blocks may wait for each other
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        mLSE: cute.Tensor | None,
        scales: Scales | None,
        launch: Launch,
        partials: Partials | None,
    ):
        base = SmemAllocator().allocate_array(cutlass.Uint8, self.traits.smem_bytes, byte_alignment=SMEM_ALIGN)
        if const_expr(self.problem.is_split):
            each_part(launch, functools.partial(self.compute_share, operands, scales, partials, launch, base))
        else:
            tile = launch.tile(cute.arch.block_idx()[0])
            if const_expr(self.problem.storage.q == "dense"):
                self.compute(operands, mLSE, scales, launch, base, tile)
            elif tile.exists():
                self.compute(operands, mLSE, scales, launch, base, tile)

    @cute.jit
    def compute(
        self,
        operands: Operands,
        mLSE: cute.Tensor | None,
        scales: Scales | None,
        launch: Launch,
        base: cute.Pointer,
        tile: QueryTile,
    ):
        """Attend and write one tile."""
        f, tiles = self.attend_tile(operands, scales, launch, base, tile)
        if const_expr(self.traits.late_addresses):
            f, tile = (
                dataclasses.replace(self.with_late_rows(f, launch), thread=computed_here(f.thread)),
                found_late(tile),
            )
        normalize(f.softmax, f.scores, f.out, tile, mLSE, scale_of_v(scales, tile), launch.sinks)
        write_output(self, f, operands.gO[None, None, tile.head, tile.batch], tiles.sO, tile)

    @cute.jit
    def compute_share(
        self,
        operands: Operands,
        scales: Scales | None,
        partials: Partials,
        launch: Launch,
        base: cute.Pointer,
        tile: QueryTile,
        q_pos: Int32,
        kv_pos: Int32,
    ):
        """Attend and write a tile, or this block's share of its keys, and merge what is due."""
        cute.arch.sync_threads()  # every warp is done with the shared memory of the tile before
        f, tiles = self.attend_tile(operands, scales, launch, base, tile)
        if const_expr(self.traits.late_addresses):
            f = self.with_late_rows(f, launch)
        lse = finish_rows(f.softmax, f.scores, tile, scale_of_v(scales, tile), launch.sinks)
        scale_rows(f.out, f.softmax.row_scale)
        if tile.share.is_whole():
            write_lse(lse, f.scores, tile, partials.mLSE)
            write_output(self, f, operands.gO[None, None, tile.head, tile.batch], tiles.sO, tile)
        else:
            partials.write(f.scores, f.out, self.columns_of_out(f), lse, tile)
            word = cute.recast_ptr(base + self.traits.smem_plan["arrival"].start, dtype=Int32)
            arrival = cute.make_tensor(word, cute.make_layout(1))
            warps, is_scheduled = self.traits.num_warps, self.problem.is_scheduled
            partials.merge_if_due(tile, f.thread, warps, arrival, cute.arch.sync_threads, is_scheduled)
        return kv_pos

    def with_late_rows(self, f: Fragments, launch: Launch) -> Fragments:
        """The fragments; which rows are the thread's is computed after this."""
        shape = self.traits.tile_m, self.traits.tile_n
        here = ScoreTile.of(f.mma, computed_here(f.thread), f.acc_S, shape, launch.inner_scale, launch.packed_heads)
        return dataclasses.replace(f, scores=dataclasses.replace(f.scores, first_row=here.first_row))

    def columns_of_out(self, f: Fragments) -> cute.Tensor:
        """The coordinates of `f.out`'s elements in the tile."""
        identity = cute.make_identity_tensor((self.traits.tile_m, self.traits.head_dim_v))
        if self.converts:
            return cache_mma.columns_of_out(f, identity)
        return rows_view(f.mma.get_slice(f.thread).partition_C(identity))

    @cute.jit
    def attend_tile(
        self, operands: Operands, scales: Scales | None, launch: Launch, base: cute.Pointer, tile: QueryTile
    ):
        """Attend to a tile's keys; (fragments, shared-memory tensors)."""
        thread = cute.arch.thread_idx()[0]
        kv_head = tile.head  # packed, it is a KV head
        if const_expr(tile.packed_heads == 1):
            kv_head = tile.kv_head
        if const_expr(self.problem.is_split):  # or of wide heads ptxas spills addresses of K, or row sums
            kv_head, thread = computed_here(kv_head), computed_here(thread)
        tiles = self.make_tiles(base)
        f = make_fragments(self, tiles, launch, thread)
        if const_expr(self.converts):
            f = cache_mma.with_row_scales(self, f, scales, tile)
        loading = cute.arch.thread_idx()[0] if self.converts else thread  # the same; otherwise ptxas spills
        sources = self.kv_sources(operands, kv_head, tiles, launch, tile, loading)
        load_q(self, operands.gQ[None, None, tile.head, tile.batch], tiles.sQ, tile, thread)
        attend(self, f, sources, tile)
        return f, tiles

    def kv_sources(
        self, operands: Operands, kv_head: Int32, tiles: Tiles, launch: Launch, tile: QueryTile, thread: Int32
    ) -> KvSources:
        """Where the share of K and V of a thread comes from."""
        if self.problem.storage.k == "paged":
            return KvSources(
                *(
                    make_gather(self.load_copy(cols), thread, g[None, None, kv_head, None], sX, launch, tile)
                    for g, sX, cols in zip(
                        (operands.gK, operands.gV), (tiles.sK, tiles.sV), self.traits.loaded_columns, strict=True
                    )
                )
            )
        gK, gV = (
            cute.domain_offset((tile.first_k, 0), g[None, None, kv_head, tile.kv_batch])
            for g in (operands.gK, operands.gV)
        )
        return KvSources(*(make_kv_source(self, g, sX, thread) for g, sX in ((gK, tiles.sK), (gV, tiles.sV))))

    def make_tiles(self, base: cute.Pointer) -> Tiles:
        """The shared-memory tensors, laid out by the traits' plan; V also as the operand that the product reads."""
        plan = self.traits.smem_plan

        def tile(name: str, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric] = self.dtype) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + plan[name].start, dtype=dtype), layout)

        sV = tile("v", self.smem_layout_v())
        return Tiles(
            sQ=tile("q", self.smem_layout_q()),
            sK=tile("k", self.smem_layout_k()),
            sV=sV,
            sVt=transposed(sV),
            sO=tile("o", self.smem_layout_o(), self.out_dtype),
        )


def found_late(tile: QueryTile) -> QueryTile:
    """The tile; nothing that depends on its place is computed before this for what comes after."""
    place = {name: getattr(tile, name) for name in ("m_block", "head", "batch", "first_token")}
    # Of packed sequences the entry of the batch mode is 0.
    return dataclasses.replace(tile, **{k: computed_here(v) for k, v in place.items() if not isinstance(v, int)})


def scale_of_v(scales: Scales | None, tile: QueryTile) -> Float32 | None:
    """The factor of a tile's V; None if it has none."""
    return None if scales is None else scales.of_v(tile)
