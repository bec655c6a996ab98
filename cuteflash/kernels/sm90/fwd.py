"""FlashAttention forward for Hopper: TMA loads, WGMMA products, one producer and 1-3 consumer warpgroups.

    producer warp      consumer warpgroups (64 query rows each)
    Q ──TMA──► sQ      S = Q K^T            WGMMA, both operands in shared memory
    K ──TMA──► sK[s]   mask, online softmax registers
    V ──TMA──► sV[s]   O += P V             WGMMA, P from registers (or through shared memory)
                       O / row sum ──► sO ──TMA──► global

The S product of the next key block is issued before the P V product of this one (`overlap`), and named barriers make
the warpgroups take turns at the tensor cores (`pingpong`). Blocks are persistent: the producer runs ahead into the next
tile while the consumers finish this one. Not here: dropout, ALiBi, variable lengths, paged K/V, gradients.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.gqa import query_view
from cuteflash.core.mask import IntervalMask
from cuteflash.core.schedule import TileOrder
from cuteflash.core.signature import CUTE_DTYPES, fwd_fake_args
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.views import rows_first, transposed
from cuteflash.kernels.sm90.bundles import Problem90, Rings, Scores, Tiles, Tma
from cuteflash.kernels.sm90.fwd_mma import consume_tiles
from cuteflash.kernels.sm90.load import load_tiles
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M, FwdTraitsSm90

SWIZZLE_ALIGN = 1024  # bytes: the period of the 128-byte swizzle


@dataclasses.dataclass(frozen=True)
class FlashFwdSm90:
    """The sm90 forward kernel for one problem and one set of traits."""

    traits: cutlass.Constexpr[FwdTraitsSm90]
    problem: cutlass.Constexpr[FwdProblem]

    family: ClassVar[str] = "sm90"

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of Q, K, V, O and of P as the PV product reads it."""
        return CUTE_DTYPES[self.problem.dtype]

    @property
    def longest_first(self) -> bool:
        """Whether tiles differ so much in length that their order matters."""
        return self.problem.mask == "causal"

    @property
    def tokens_per_warpgroup(self) -> int:
        """Queries in a warpgroup's 64 rows. Rows hold whole tokens: heads that do not divide 64 leave some unused."""
        return WGMMA_M // self.problem.packed_heads

    @property
    def tile_tokens(self) -> int:
        """Queries of one tile."""
        return self.tokens_per_warpgroup * self.traits.mma_warpgroups

    def fake_args(self) -> tuple:
        """The arguments this kernel is compiled with, in the order of `__call__`."""
        return fwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma_qk(self) -> cute.TiledMma:
        """S = Q K^T: (64, tile_n), both operands K-major, K in shared memory."""
        return atoms.tiled_mma(self.dtype, self.traits.tile_n, OperandMajorMode.K, a_from_regs=self.traits.q_in_regs)

    def tiled_mma_pv(self) -> cute.TiledMma:
        """O += P V: (64, head_dim_v), V MN-major in shared memory."""
        return atoms.tiled_mma(
            self.dtype, self.traits.head_dim_v, OperandMajorMode.MN, a_from_regs=self.traits.p_in_regs
        )

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(64, head_dim, warpgroups)"""
        return atoms.smem_tile_layout(self.dtype, WGMMA_M, self.traits.head_dim, self.traits.mma_warpgroups)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, head_dim, kv_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, self.traits.head_dim, self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, kv_stage)"""
        return atoms.smem_tile_layout(self.dtype, self.traits.tile_n, self.traits.head_dim_v, self.traits.kv_stage)

    def smem_layout_o(self) -> cute.ComposedLayout:
        """(64, head_dim_v, warpgroups)"""
        return atoms.smem_tile_layout(self.dtype, WGMMA_M, self.traits.head_dim_v, self.traits.mma_warpgroups)

    def smem_layout_p(self) -> cute.ComposedLayout:
        """(64, tile_n, warpgroups), used where P goes through shared memory."""
        return atoms.smem_tile_layout(self.dtype, WGMMA_M, self.traits.tile_n, self.traits.mma_warpgroups)

    def query_box(self, cols: int) -> cute.Tiler:
        """The box of Q or O that one warpgroup owns: (tokens, cols), or ((packed heads, tokens), cols)."""
        heads, tokens = self.problem.packed_heads, self.tokens_per_warpgroup
        return (tokens, cols) if heads == 1 else ((heads, tokens), cols)

    def smem_box_layout(self, layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """The shared-memory layout of Q or O in the shape of its boxes: (box rows, cols, warpgroups)."""
        heads = self.problem.packed_heads
        return layout if heads == 1 else atoms.packed_rows(layout, heads, self.tokens_per_warpgroup)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, s_q, h_q, d)
        mK: cute.Tensor,  # (b, s_k, h_k, d)
        mV: cute.Tensor,  # (b, s_k, h_k, d_v)
        mO: cute.Tensor,  # (b, s_q, h_q, d_v)
        mLSE: cute.Tensor | None,  # (b, h_q, s_q)
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        num_sms: Int32,
        stream,
    ):
        traits, problem = self.traits, self.problem
        d, dv = traits.head_dim, traits.head_dim_v
        smem_k, smem_v = (cute.select(layout, mode=[0, 1]) for layout in (self.smem_layout_k(), self.smem_layout_v()))
        smem_q, smem_o = (
            cute.select(self.smem_box_layout(layout), mode=[0, 1])
            for layout in (self.smem_layout_q(), self.smem_layout_o())
        )
        tma_q, gQ = atoms.tma_load(query_view(mQ, problem.packed_heads), smem_q, self.query_box(d))
        tma_k, gK = atoms.tma_load(rows_first(mK), smem_k, (traits.tile_n, d))
        tma_v, gV = atoms.tma_load(rows_first(mV), smem_v, (traits.tile_n, dv))
        tma_o, gO = atoms.tma_store(query_view(mO, problem.packed_heads), smem_o, self.query_box(dv))
        tma = Tma(tma_q, tma_k, tma_v, tma_o, gQ, gK, gV, gO)

        batch, seqlen_q, heads_q, _ = mQ.shape
        _, seqlen_k, heads_k, _ = mK.shape
        heads = heads_q // problem.packed_heads
        heads_per_kv = heads // heads_k
        kv_row_bytes = (problem.head_dim + problem.head_dim_v) * self.dtype.width // 8
        m_blocks = cute.ceil_div(seqlen_q, self.tile_tokens)
        group = TileOrder.head_group(seqlen_k, heads_per_kv, kv_row_bytes)
        if const_expr(traits.persistent):
            group = TileOrder.even_group(group, m_blocks, num_sms)
        order = TileOrder(m_blocks, heads, batch, cutlass.min(group, heads * batch))
        if const_expr(problem.has_softcap):
            scores = Scores(softcap * LOG2_E, softmax_scale / softcap)
        else:
            scores = Scores(softmax_scale * LOG2_E, Float32(0.0))
        mask = IntervalMask(problem.mask, seqlen_q, seqlen_k, window_left, window_right)
        blocks = order.size()
        if const_expr(traits.persistent):
            blocks = cutlass.min(blocks, num_sms)
        self.kernel(tma, mLSE, order, heads_per_kv, mask, scores).launch(
            grid=(blocks, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
        )

    @cute.kernel
    def kernel(
        self,
        tma: Tma,
        mLSE: cute.Tensor | None,
        order: TileOrder,
        heads_per_kv: Int32,
        mask: IntervalMask,
        scores: Scores,
    ):
        traits = self.traits
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        rings, tiles = self.make_rings(smem), self.make_tiles(smem)
        if warp == 0:
            for atom in (tma.load_q, tma.load_k, tma.load_v, tma.store_o):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                consumer_warps = traits.mma_warpgroups * WARPGROUP // 32
                for ring in (rings.q, rings.k, rings.v):
                    ring.init(consumer_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        problem = Problem90(order, heads_per_kv, mask, scores)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(traits.producer_regs)
            if warp == 0:
                load_tiles(self, tma, tiles, rings, problem)
        else:
            cute.arch.setmaxregister_increase(traits.mma_regs)
            consume_tiles(self, tma, tiles, rings, problem, mLSE)

    def make_rings(self, smem: SmemAllocator) -> Rings:
        """Q, K and V rings over fresh mbarriers."""
        traits = self.traits
        element = self.dtype.width // 8
        q_bytes = self.tile_tokens * self.problem.packed_heads * traits.head_dim * element
        k_bytes, v_bytes = (traits.tile_n * d * element for d in (traits.head_dim, traits.head_dim_v))

        def ring(stages: int, tile_bytes: int) -> TmaRing:
            return TmaRing.create(smem.allocate_array(cutlass.Int64, 2 * stages, byte_alignment=8), stages, tile_bytes)

        return Rings(ring(1, q_bytes), ring(traits.kv_stage, k_bytes), ring(traits.kv_stage, v_bytes))

    def make_tiles(self, smem: SmemAllocator) -> Tiles:
        """The shared-memory tensors; V also as the (head_dim_v, tile_n) operand that the product reads."""

        def tile(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(self.dtype, layout.outer, SWIZZLE_ALIGN, layout.inner)

        def boxed(tensor: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
            return cute.make_tensor(tensor.iterator, self.smem_box_layout(layout).outer)

        sQ, sK, sV = tile(self.smem_layout_q()), tile(self.smem_layout_k()), tile(self.smem_layout_v())
        sO = sQ if self.traits.share_q_o else tile(self.smem_layout_o())
        sP = None if self.traits.p_in_regs else tile(self.smem_layout_p())
        sQ_boxes, sO_boxes = boxed(sQ, self.smem_layout_q()), boxed(sO, self.smem_layout_o())
        return Tiles(sQ, sQ_boxes, sK, sV, transposed(sV), sO, sO_boxes, sP)
