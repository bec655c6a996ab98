"""Attention of few query rows to an e4m3 cache: TMA loads, mma.sync products, one producer and two consumer warpgroups.

    producer warp      8 consumer warps, which share the keys of each block
    Q ──TMA──► sQ      Q: fp16 in registers
    K ──TMA──► sK[s]   ldmatrix, e4m3 → fp16 in registers, Sᵀ = K Qᵀ
                       mask, online softmax of the warp's keys
    V ──TMA──► sV[s]   ldmatrix, e4m3 → fp16 in registers, Oᵀ += Vᵀ Pᵀ
                       the warps' O, maxima and sums ──► shared memory ──► O, or a part of it

What few rows need is that memory stays busy. A product of m64 by WGMMA would have fp16 tiles of K and V in shared
memory, written by one warpgroup and read by others: six times the bytes that TMA brings, where each byte is read once
here. K and V are the operands with 16 rows, so that the eight columns of the other one hold all queries of a tile.

The keys of tiles are split between blocks (`cuteflash.core.split`). More rows and calls that do not split keys are for
`fwd.py`, with the same tensors and the same results.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from cuteflash.arguments import FwdArguments, FwdTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import CopyRing, TmaRing
from cuteflash.core.gqa import query_view
from cuteflash.core.launch import Launch, batched
from cuteflash.core.scales import Scales
from cuteflash.core.signature import CUTE_DTYPES, fwd_fake_args
from cuteflash.core.views import rows_first, words_of
from cuteflash.kernels.common.partials import Partials
from cuteflash.kernels.sm90.bundles import Rings
from cuteflash.kernels.sm90.few_bundles import FewBlock, FewTiles, FewTma
from cuteflash.kernels.sm90.few_mma import consume
from cuteflash.kernels.sm90.load import await_block_and_launch, load
from cuteflash.kernels.sm90.paged_load import copying_threads, loading_warps
from cuteflash.kernels.sm90.ragged import ragged
from cuteflash.problem import FwdProblem
from cuteflash.traits.few_sm90 import MMA_KEYS, MMA_ROWS, WARPS, FwdTraitsFewSm90
from cuteflash.traits.sm90 import SWIZZLE_ALIGN, WARPGROUP, WGMMA_K


@dataclasses.dataclass(frozen=True)
class FlashFewSm90:
    """The sm90 kernel for few query rows, one problem and one set of traits."""

    traits: cutlass.Constexpr[FwdTraitsFewSm90]
    problem: cutlass.Constexpr[FwdProblem]

    family: ClassVar[str] = "sm90"
    longest_first: ClassVar[bool] = False  # keys are split: tiles have no order
    first_keys_first: ClassVar[bool] = False

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of Q, K and V as the products read them."""
        return CUTE_DTYPES[self.problem.operands.product_dtype]

    @property
    def fits_q(self) -> bool:
        """Whether Q is made into the element type of the products."""
        return self.problem.operands.qk_dtype != self.problem.operands.product_dtype

    @property
    def loaded_columns(self) -> tuple[int, int]:
        """Columns of the tiles of K and of V as they are loaded, pairs of bytes."""
        return self.traits.head_dim // 2, self.traits.head_dim_v // 2

    @property
    def copying_threads(self) -> range:
        """See `paged_load.copying_threads`."""
        return copying_threads(self, True)

    @property
    def loading_warps(self) -> tuple[int, ...]:
        """The warps of the producer that load."""
        return loading_warps(self)

    @property
    def tile_tokens(self) -> int:
        """Queries of one tile."""
        return self.traits.tile_tokens(self.problem.operands.packed_heads)

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with: fakes of `FwdArguments`."""
        return fwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma(self) -> cute.TiledMma:
        """Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ of a warp: m16n8k16, all operands in registers."""
        op = warp.MmaF16BF16Op(self.dtype, cutlass.Float32, (MMA_KEYS, MMA_ROWS, WGMMA_K))
        return cute.make_tiled_mma(op)

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(tile_m, head_dim, 1)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_m, self.traits.head_dim)

    def smem_layout_loaded(self, columns: int) -> cute.ComposedLayout:
        """(tile_n, columns, kv_stage), of K or V; `columns` as of `loaded_columns`"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, columns, self.traits.kv_stage)

    def query_box(self, cols: int) -> cute.Tiler:
        """The box of a tile of Q: (tokens, cols), or ((packed heads, tokens), cols)."""
        heads = self.problem.operands.packed_heads
        return (self.tile_tokens, cols) if heads == 1 else ((heads, self.tile_tokens), cols)

    def smem_boxes_q(self) -> cute.ComposedLayout:
        """The shared-memory layout of Q in the shape of its boxes: (box rows, head_dim, 1)."""
        heads, layout = self.problem.operands.packed_heads, self.smem_layout_q()
        return layout if heads == 1 else atoms.packed_rows(layout, heads, self.tile_tokens)

    def make_tma(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor) -> FewTma:
        """TMA descriptors over (batch, seqlen, heads, head_dim) tensors; without those of rows that are looked up."""
        storage, packed = self.problem.storage, self.problem.operands.packed_heads
        queries = query_view if storage.q == "dense" else ragged
        smem_q = cute.select(self.smem_boxes_q(), mode=[0, 1])
        load_q, gQ = atoms.tma_load(queries(mQ, packed_heads=packed), smem_q, self.query_box(self.traits.head_dim))
        if storage.gathers:
            return FewTma(load_q, None, None, gQ, rows_first(mK), rows_first(mV))
        rows = storage.page_rows or self.traits.tile_n
        keys = rows_first if storage.k == "dense" else functools.partial(ragged, packed_heads=1)
        (load_k, gK), (load_v, gV) = (
            atoms.tma_load(keys(tensor), atoms.rows_of_tile(self.smem_layout_loaded(columns), rows), (rows, columns))
            for tensor, columns in zip((mK, mV), self.loaded_columns, strict=True)
        )
        return FewTma(load_q, load_k, load_v, gQ, gK, gV)

    def make_rings(self, base: cute.Pointer) -> Rings:
        """Q, K and V rings over the mbarriers at the start of the block's shared memory."""
        traits = self.traits
        barriers = cute.recast_ptr(base + traits.smem_plan["barriers"].start, dtype=cutlass.Int64)
        q_bytes = self.tile_tokens * self.problem.operands.packed_heads * traits.head_dim * traits.element_bytes
        q, kv = traits.q_stage, traits.kv_stage
        starts = barriers + 2 * q, barriers + 2 * (q + kv)
        if self.problem.storage.gathers:
            k, v = (CopyRing.create(start, kv) for start in starts)
        else:
            sizes = (traits.tile_n * columns for columns in (traits.head_dim, traits.head_dim_v))
            k, v = (TmaRing.create(start, kv, nbytes) for start, nbytes in zip(starts, sizes, strict=True))
        return Rings(TmaRing.create(barriers, q, q_bytes), k, v)

    def make_tiles(self, base: cute.Pointer) -> FewTiles:
        """The shared-memory tensors, laid out by the traits' plan."""
        plan = self.traits.smem_plan

        def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
            start = cute.recast_ptr(base + plan[name].start, layout.inner, dtype=self.dtype)
            return cute.make_tensor(start, layout.outer)

        k, v = (self.smem_layout_loaded(columns) for columns in self.loaded_columns)
        return FewTiles(tile("q", self.smem_boxes_q()), tile("k", k), tile("v", v), base)

    def as_products_read(self, tensors: FwdTensors) -> FwdTensors:
        """The tensors with Q, K and V in the element type that memory is moved in, which is that of the products."""
        q = cute.make_tensor(cute.recast_ptr(tensors.q.iterator, dtype=self.dtype), tensors.q.layout)
        return tensors._replace(q=q, k=words_of(tensors.k, self.dtype), v=words_of(tensors.v, self.dtype))

    @cute.jit
    def __call__(self, *arguments):
        has_sinks = self.problem.scores.sink is not None
        tensors, packed_tensors, scales, scalars, sinks, stream, split, _, _ = FwdArguments.of(
            arguments, True, has_sinks, False, False
        )
        tensors = self.as_products_read(batched(tensors, self.problem.storage))
        launch = Launch.of(self, tensors, packed_tensors, scalars, True, sinks, split)
        partials = Partials.of(self, tensors, split, launch.sinks)
        tma = self.make_tma(tensors.q, tensors.k, tensors.v)
        self.kernel(tma, tensors.lse, Scales.of(scales, self.problem.storage), launch, partials).launch(
            grid=(partials.arrivals.shape[0], 1, 1),
            block=(self.traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
            cooperative=True,  # its blocks may wait for each other
        )

    @cute.kernel
    def kernel(self, tma: FewTma, mLSE: cute.Tensor | None, scales: Scales, launch: Launch, partials: Partials):
        traits = self.traits
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(cutlass.Uint8, traits.smem_bytes, byte_alignment=SWIZZLE_ALIGN)
        rings = self.make_rings(base)
        word = cute.recast_ptr(base + traits.smem_arrival.start, dtype=Int32)
        arrival = cute.make_tensor(word, cute.make_layout(1))
        block = FewBlock(tma, self.make_tiles(base), rings, launch, mLSE, scales, partials, arrival)
        sets_up = WARPGROUP // 32  # the producer's warps look for their first tile meanwhile
        if warp_index == sets_up:
            for atom in (tma.load_q, tma.load_k, tma.load_v):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                rings.init(WARPS, len(self.copying_threads))
            cute.arch.mbarrier_init_fence()
        if warp_index > sets_up:
            launch.fetch_ahead(sets_up + 1)
        cute.arch.griddepcontrol_launch_dependents()  # the next launch may begin where blocks end
        if not self.loads(warp_index):
            await_block_and_launch()

        if warp_index < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(traits.producer_regs)
            if self.loads(warp_index):
                load(self, block)
        else:
            cute.arch.setmaxregister_increase(traits.mma_regs)
            consume(self, block)

    def loads(self, warp_index: Int32) -> Boolean:
        """Whether a warp of the producer is one of `loading_warps`."""
        return functools.reduce(operator.or_, (warp_index == loading for loading in self.loading_warps))
