"""FlashAttention forward for Hopper: TMA loads, WGMMA products, one producer and 1-3 consumer warpgroups.

    producer warp      consumer warpgroups (64 query rows each)
    Q ──TMA──► sQ      S = Q K^T            WGMMA, K from shared memory, Q too or from registers
    K ──TMA──► sK[s]   mask, online softmax registers
    V ──TMA──► sV[s]   O += P V             WGMMA, P from registers (or through shared memory)
                       O / row sum ──► sO ──TMA──► global

The S product of the next key block is issued before the P V product of this one (`overlap`), and named barriers make
the warpgroups take turns at the tensor cores (`pingpong`). Blocks are persistent: the producer runs ahead into the next
tile while the consumers finish this one. With `fixed_max` unmasked key blocks do not update the row maxima; a block
whose scores exceed them by too much is repaired (`fixed_max.py`). Without `warp_specialized` the first consumer warp
issues the loads instead, to measure the gain of the producer. Of packed sequences a second producer warp finds the
tiles (`handout.py`), and the descriptors clip boxes at a sequence's end (`ragged.py`). K and V of a cache are loaded
page by page, or row by row (`paged_load.py`); those of an e4m3 cache are made into fp16 tiles by further warpgroups
(`convert.py`), but for few query rows, which `few.py` attends to. Not here: dropout, ALiBi, gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.arguments import FwdArguments, FwdTensors
from cuteflash.atoms import sm90 as atoms
from cuteflash.core.gqa import query_view
from cuteflash.core.launch import Launch, batched
from cuteflash.core.scales import Scales
from cuteflash.core.signature import CUTE_DTYPES, fwd_fake_args
from cuteflash.core.views import columns_first, rows_first, with_batch, words_of
from cuteflash.kernels.common.partials import Partials
from cuteflash.kernels.sm90.bundles import Block, Tiles, Tma
from cuteflash.kernels.sm90.convert import convert
from cuteflash.kernels.sm90.fp8_load import load_and_turn
from cuteflash.kernels.sm90.fwd_mma import consume
from cuteflash.kernels.sm90.handout import Handout, await_taken, hand_out
from cuteflash.kernels.sm90.load import await_block_and_launch, load
from cuteflash.kernels.sm90.memory import make_rings, make_tiles
from cuteflash.kernels.sm90.paged_load import copying_threads, loading_warps, wide_tma_load
from cuteflash.kernels.sm90.ragged import ragged, ragged_columns
from cuteflash.problem import SHARED_COLUMNS, FwdProblem
from cuteflash.traits.fp8_sm90 import TURNING_WARPS
from cuteflash.traits.sm90 import HANDED_TILES, SWIZZLE_ALIGN, WARPGROUP, WGMMA_M, FwdTraitsSm90


@dataclasses.dataclass(frozen=True)
class FlashFwdSm90:
    """The sm90 forward kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[FwdTraitsSm90]
    problem: cutlass.Constexpr[FwdProblem]

    family: ClassVar[str] = "sm90"

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of Q, K and V as the products read them."""
        return CUTE_DTYPES[self.problem.operands.product_dtype]

    @property
    def p_dtype(self) -> type[cutlass.Numeric]:
        """Element type of P as the PV product reads it: of 8 bits that with the longer mantissa."""
        return cutlass.Float8E4M3FN if self.problem.operands.is_fp8 else self.dtype

    @property
    def out_dtype(self) -> type[cutlass.Numeric]:
        """Element type of O."""
        return CUTE_DTYPES[self.problem.operands.o_dtype]

    @property
    def turns_v(self) -> bool:
        """Whether the producer warpgroup turns V: of 8 bits the product only reads Vᵀ."""
        return self.problem.operands.is_fp8 and not self.problem.operands.transposed_v

    @property
    def converts(self) -> bool:
        """Whether warpgroups of their own convert tiles of an 8-bit cache; these move as pairs of bytes."""
        return self.problem.operands.cache_dtype is not None

    @property
    def fits_q(self) -> bool:
        """Whether Q is made into the element type of the products."""
        return self.problem.operands.qk_dtype != self.problem.operands.product_dtype

    @property
    def loaded_columns(self) -> tuple[int, int]:
        """Columns of the tiles of K and of V as they are loaded, in elements of `dtype`."""
        columns = self.traits.head_dim, self.traits.head_dim_v
        return (columns[0] // 2, columns[1] // 2) if self.converts else columns

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer warpgroup, and of a consumer warpgroup."""
        traits = self.traits
        if self.problem.storage.k == "paged":
            return traits.paged_regs
        return traits.packed_regs if self.problem.storage.q == "varlen" else (traits.producer_regs, traits.mma_regs)

    @property
    def copying_threads(self) -> range:
        """See `paged_load.copying_threads`."""
        return copying_threads(self, self.problem.storage.q == "dense")

    @property
    def loading_warps(self) -> tuple[int, ...]:
        """The warps of the producer that load."""
        return loading_warps(self)

    @property
    def longest_first(self) -> bool:
        """Whether tiles differ so much in length that their order matters; a window's first tiles are short, too."""
        return self.traits.longest_first and self.problem.scores.mask != "full"

    @property
    def first_keys_first(self) -> bool:
        """Whether a tile begins with the block of key 0, which every row that sees any key sees."""
        return self.traits.fixed_max and not self.problem.scores.has_left_edge

    @property
    def tokens_per_warpgroup(self) -> int:
        """Queries in a warpgroup's 64 rows."""
        return self.traits.warpgroup_tokens(self.problem.operands.packed_heads)

    @property
    def tile_tokens(self) -> int:
        """Queries of one tile."""
        return self.traits.tile_tokens(self.problem.operands.packed_heads)

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with: fakes of `FwdArguments`."""
        return fwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self) -> cute.TiledMma:
        """S = Q K^T: (64, step_keys), both operands K-major, K in shared memory.

        An instruction reads rows at even distances, and so no more than a wide box has.
        """
        storage = self.problem.storage
        keys = min(storage.page_rows, self.traits.step_keys) if storage.wide_boxes else self.traits.step_keys
        return atoms.tiled_mma(self.dtype, keys, OperandMajorMode.K, a_from_regs=self.traits.q_in_regs)

    def tiled_mma_pv(self) -> cute.TiledMma:
        """O += P V: (64, head_dim_v), V MN-major in shared memory, of 8 bits K-major."""
        major = OperandMajorMode.K if self.problem.operands.is_fp8 else OperandMajorMode.MN
        return atoms.tiled_mma(
            self.dtype, self.traits.head_dim_v, major, a_from_regs=self.traits.p_in_regs, a_dtype=self.p_dtype
        )

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(64, head_dim, warpgroups x q_stage)"""
        tiles = self.traits.mma_warpgroups * self.traits.q_stage
        return atoms.smem_tile_layout(self.dtype, WGMMA_M, self.traits.head_dim, tiles)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, head_dim, kv_stage)"""
        return self._smem_layout_kv(self.traits.head_dim)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, kv_stage)"""
        return self._smem_layout_kv(self.traits.head_dim_v)

    def _smem_layout_kv(self, cols: int) -> cute.ComposedLayout:
        rows, stages = self.traits.tile_n, self.traits.kv_stage
        if self.problem.storage.wide_boxes:
            return atoms.banded_tile_layout(self.dtype, rows, cols, self.problem.storage.page_rows, stages)
        return atoms.smem_tile_layout(self.dtype, rows, cols, stages)

    def smem_layout_stored_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, stored_v_stage), of 8 bits that are turned"""
        traits = self.traits
        return atoms.smem_tile_layout(self.dtype, traits.tile_n, traits.head_dim_v, traits.stored_v_stage)

    def smem_layout_loaded(self, columns: int) -> cute.ComposedLayout:
        """(tile_n, columns, stored_stage), of K or V that are converted; `columns` as of `loaded_columns`"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, columns, self.traits.stored_stage)

    def smem_layout_vt(self) -> cute.ComposedLayout:
        """(head_dim_v, tile_n, kv_stage), Vᵀ of 8 bits"""
        return atoms.smem_tile_layout(self.dtype, self.traits.head_dim_v, self.traits.tile_n, self.traits.kv_stage)

    def smem_layout_o(self) -> cute.ComposedLayout:
        """(64, head_dim_v, warpgroups)"""
        return atoms.smem_tile_layout(self.out_dtype, WGMMA_M, self.traits.head_dim_v, self.traits.mma_warpgroups)

    def smem_layout_p(self) -> cute.ComposedLayout:
        """(64, tile_n, warpgroups), used if P goes through shared memory."""
        return atoms.smem_tile_layout(self.dtype, WGMMA_M, self.traits.tile_n, self.traits.mma_warpgroups)

    def query_box(self, cols: int) -> cute.Tiler:
        """The box of Q or O that one warpgroup owns: (tokens, cols), or ((packed heads, tokens), cols)."""
        heads, tokens = self.problem.operands.packed_heads, self.tokens_per_warpgroup
        return (tokens, cols) if heads == 1 else ((heads, tokens), cols)

    def smem_box_layout(self, layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """The shared-memory layout of Q or O in the shape of its boxes: (box rows, cols, warpgroups)."""
        heads = self.problem.operands.packed_heads
        return layout if heads == 1 else atoms.packed_rows(layout, heads, self.tokens_per_warpgroup)

    def copy_q(self) -> cute.TiledCopy:
        """sQ to the A fragments of the QK product, used if Q stays in registers."""
        return atoms.load_copy_a(self.dtype, self.tiled_mma_qk())

    def copy_p(self) -> cute.TiledCopy:
        """The S accumulators to sP, used if P goes through shared memory."""
        return atoms.store_copy(self.dtype, self.tiled_mma_qk())

    def copy_o(self) -> cute.TiledCopy:
        """The O accumulators to sO."""
        return atoms.store_copy(self.out_dtype, self.tiled_mma_pv())

    def make_tma(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mShared_k: cute.Tensor | None = None
    ) -> Tma:
        """TMA descriptors over (batch, seqlen, heads, head_dim) tensors and a (batch, heads, head_dim_v, keys) Vᵀ."""
        traits, packed, storage = self.traits, self.problem.operands.packed_heads, self.problem.storage
        queries = functools.partial(query_view if storage.q == "dense" else ragged, packed_heads=packed)
        d, dv = traits.head_dim, traits.head_dim_v
        smem_q, smem_o = (
            cute.select(self.smem_box_layout(layout), mode=[0, 1])
            for layout in (self.smem_layout_q(), self.smem_layout_o())
        )
        load_q, gQ = atoms.tma_load(queries(mQ), smem_q, self.query_box(d))
        load_k, gK, load_v, gV = self.make_kv_tma(mK, mV)
        store_o, gO = None, query_view(mO, packed)
        if traits.stages_o:
            store_o, gO = atoms.tma_store(queries(mO), smem_o, self.query_box(dv))
        return Tma(load_q, load_k, load_v, store_o, gQ, gK, gV, gO, *self.make_shared_k_tma(mShared_k))

    def make_kv_tma(self, mK: cute.Tensor, mV: cute.Tensor) -> tuple:
        """Descriptor and coordinate tensor of K, and of V; without descriptors if rows are looked up one by one."""
        traits, storage = self.traits, self.problem.storage
        d, dv = self.loaded_columns
        if storage.gathers:
            return None, rows_first(mK), None, rows_first(mV)
        rows = storage.page_rows or traits.tile_n
        keys = rows_first if storage.k == "dense" else functools.partial(ragged, packed_heads=1)
        if self.problem.operands.shares_k:
            load_k = self.part_of_k_tma(keys(mK), d - SHARED_COLUMNS)
            return *load_k, *atoms.tma_load(keys(mV), cute.select(self.smem_layout_v(), mode=[0, 1]), (rows, dv))
        layout_k, layout_v = self.smem_layout_k(), self.smem_layout_v()
        if self.converts:
            layout_k, layout_v = (self.smem_layout_loaded(columns) for columns in (d, dv))
        if storage.wide_boxes:
            return *wide_tma_load(mK, layout_k, rows), *wide_tma_load(mV, layout_v, rows)
        values, box_v = keys, (rows, dv)
        if self.problem.operands.transposed_v:
            values = columns_first if storage.k == "dense" else ragged_columns
            layout_v, box_v = self.smem_layout_vt(), (dv, rows)
        smem_k, smem_v = (
            atoms.rows_of_tile(layout, rows) if storage.page_rows else cute.select(layout, mode=[0, 1])
            for layout in (layout_k, layout_v)
        )
        return *atoms.tma_load(keys(mK), smem_k, (rows, d)), *atoms.tma_load(values(mV), smem_v, box_v)

    def make_shared_k_tma(self, mShared_k: cute.Tensor | None) -> tuple:
        """Descriptor and coordinate tensor of the columns of K that all heads share; None of each if there are none."""
        if mShared_k is None:
            return None, None
        if self.problem.storage.k == "dense":
            return self.part_of_k_tma(rows_first(mShared_k), SHARED_COLUMNS)
        return self.part_of_k_tma(ragged(with_batch(mShared_k), packed_heads=1), SHARED_COLUMNS)

    def part_of_k_tma(self, keys: cute.Tensor, cols: int) -> tuple:
        """Descriptor and coordinate tensor of columns of K, which are whole slabs of its tile."""
        part = cute.select(atoms.smem_tile_layout(self.dtype, self.traits.tile_n, cols), mode=[0, 1])
        return atoms.tma_load(keys, part, (self.traits.tile_n, cols))

    def as_products_read(self, tensors: FwdTensors) -> FwdTensors:
        """The tensors with Q, K and V in the element type that memory is moved in, which is that of the products."""
        if not self.converts:
            return tensors
        q = cute.make_tensor(cute.recast_ptr(tensors.q.iterator, dtype=self.dtype), tensors.q.layout)
        return tensors._replace(q=q, k=words_of(tensors.k, self.dtype), v=words_of(tensors.v, self.dtype))

    @cute.jit
    def __call__(self, *arguments):
        scores, shares_k = self.problem.scores, self.problem.operands.shares_k
        tensors, packed_tensors, scales, scalars, sinks, stream, split, tree, shared_k = FwdArguments.of(
            arguments, self.problem.is_split, scores.sink is not None, shares_k, scores.tree
        )
        traits = self.traits
        tensors = self.as_products_read(batched(tensors, self.problem.storage))
        tma = self.make_tma(tensors.q, tensors.k, tensors.v, tensors.o, shared_k)
        launch = Launch.of(self, tensors, packed_tensors, scalars, traits.persistent, sinks, split, tree)
        partials = Partials.of(self, tensors, split, launch.sinks)
        if const_expr(self.problem.is_split):
            blocks = partials.arrivals.shape[0]
        else:
            blocks = launch.order.size()
            if const_expr(traits.persistent):
                blocks = cutlass.min(blocks, scalars.num_sms * traits.blocks_per_sm)
        self.kernel(tma, tensors.lse, Scales.of(scales, self.problem.storage), launch, partials).launch(
            grid=(blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.blocks_per_sm,  # without it setmaxnreg is dropped
            use_pdl=self.problem.is_split or self.problem.operands.transposed_before,
            cooperative=self.problem.is_split,  # its blocks may wait for each other
            preferred_smem_carveout=100 if traits.blocks_per_sm > 1 else None,
        )

    @cute.kernel
    def kernel(
        self,
        tma: Tma,
        mLSE: cute.Tensor | None,
        scales: Scales | None,
        launch: Launch,
        partials: Partials | None,
    ):
        traits = self.traits
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(cutlass.Uint8, traits.smem_bytes, byte_alignment=SWIZZLE_ALIGN)
        rings = make_rings(self, base)
        handout = None
        if const_expr(self.problem.storage.q == "varlen" and not self.problem.is_split):
            most_ahead = HANDED_TILES - 1 if self.turns_v else HANDED_TILES
            handout = Handout.create(base, traits.smem_handout, most_ahead=most_ahead)
        arrival = None
        if const_expr(partials is not None):
            word = cute.recast_ptr(base + traits.smem_arrival.start, dtype=Int32)
            arrival = cute.make_tensor(word, cute.make_layout(1))
        block = Block(tma, self.make_tiles(base), rings, launch, handout, mLSE, scales, partials, arrival)
        # Where a producer splits keys, its warps look for their first tile meanwhile.
        apart = self.problem.is_split and traits.warp_specialized
        sets_up = WARPGROUP // 32 if apart else 0
        if warp == sets_up:
            for atom in (tma.load_q, tma.load_k, tma.load_v, tma.store_o, tma.load_shared_k):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                consumer_warps = traits.consumer_warpgroups * WARPGROUP // 32
                rings.init(consumer_warps, len(self.copying_threads))
                if const_expr(handout is not None):
                    readers = TURNING_WARPS - 1 if self.turns_v else len(self.loading_warps)
                    readers += (traits.producer_warpgroups - 1) * WARPGROUP // 32  # those that convert
                    handout.init(readers=consumer_warps + readers)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.problem.is_split):  # the next launch may begin where blocks end; this one has, perhaps
            if warp > sets_up:
                launch.fetch_ahead(sets_up + 1)
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(apart):
            if not self.loads(warp):
                await_block_and_launch()
        else:
            cute.arch.sync_threads()
            if const_expr(self.problem.is_split):
                cute.arch.griddepcontrol_wait()

        if const_expr(not traits.warp_specialized):
            consume(self, block)
        elif warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if const_expr(self.turns_v):
                load_and_turn(self, block)
            else:
                if self.loads(warp):
                    load(self, block)
                if const_expr(handout is not None):
                    if warp == 1:
                        hand_out(handout, launch, functools.partial(await_taken, handout), Int32(0))
        elif const_expr(self.converts):
            self.convert_or_consume(warp, block)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consume(self, block)

    @cute.jit
    def convert_or_consume(self, warp: Int32, block: Block):
        """The role of a warp that does not load, if tiles are converted."""
        if warp < self.traits.first_consumer // 32:
            cute.arch.setmaxregister_decrease(self.traits.converter_regs)
            convert(self, block)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consume(self, block)

    def loads(self, warp: Int32) -> Boolean:
        """Whether a warp of the producer is one of `loading_warps`."""
        return functools.reduce(operator.or_, (warp == loading for loading in self.loading_warps))

    def make_tiles(self, base: cute.Pointer) -> Tiles:
        """See `memory.make_tiles`."""
        return make_tiles(self, base)
