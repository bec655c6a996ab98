"""FlashAttention-2 forward for Ampere and everything after it: cp.async loads, ldmatrix, mma.sync.

    all warps (16 query rows of each, or a multiple)
    Q ──cp.async──► sQ       S = Q K^T             mma.sync; Q and K by ldmatrix, or Q kept in registers
    K ──cp.async──► sK[s]    mask, online softmax  registers
    V ──cp.async──► sV[s]    O += P V              mma.sync; V by transposing ldmatrix
                             O / row sum ──► sO ──► global, 16 bytes a thread

With one stage, K of the next block is loaded while the PV product runs and V while the QK product runs; with more,
whole blocks are loaded ahead and a step needs one barrier instead of two. Several blocks on one multiprocessor overlap
the softmax of one with the products of another. Not here: dropout, ALiBi, variable lengths, paged K/V, gradients.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.gqa import query_view
from cuteflash.core.mask import IntervalMask
from cuteflash.core.schedule import TileOrder
from cuteflash.core.signature import CUTE_DTYPES, fwd_fake_args
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_first, transposed
from cuteflash.kernels.sm80.bundles import Loads, Operands, Problem80, Tiles
from cuteflash.kernels.sm80.epilogue import normalise, write_output
from cuteflash.kernels.sm80.fwd_mma import attend, make_fragments
from cuteflash.kernels.sm80.load import load_q, make_kv_load
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80

SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle, so that a tile's offset never carries into it


class FlashFwdSm80:
    """The sm80 forward kernel for one problem and one set of traits."""

    family = "sm80"

    def __init__(self, traits: FwdTraitsSm80, problem: FwdProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.dtype = CUTE_DTYPES[problem.dtype]
        # A tile holds whole tokens: with packed heads that do not divide tile_m, the last rows stay unused.
        self.tile_tokens = traits.tile_m // problem.packed_heads
        self.longest_first = problem.mask == "causal"

    def fake_args(self) -> tuple:
        """The arguments this kernel is compiled with, in the order of `__call__`."""
        return fwd_fake_args(self.problem)

    # Layouts and atoms, callable without a launch.

    def tiled_mma(self) -> cute.TiledMma:
        """Both products: warps stacked along the query rows."""
        return atoms.tiled_mma(self.dtype, self.traits.num_warps)

    tiled_mma_qk = tiled_mma_pv = tiled_mma

    def smem_layout_q(self) -> cute.ComposedLayout:
        """(tile_m, head_dim)"""
        return atoms.swizzled_tile(self.traits.tile_m, self.traits.head_dim)

    def smem_layout_k(self) -> cute.ComposedLayout:
        """(tile_n, head_dim, kv_stage)"""
        return atoms.swizzled_tile(self.traits.tile_n, self.traits.head_dim, self.traits.kv_stage)

    def smem_layout_v(self) -> cute.ComposedLayout:
        """(tile_n, head_dim_v, kv_stage)"""
        return atoms.swizzled_tile(self.traits.tile_n, self.traits.head_dim_v, self.traits.kv_stage)

    def smem_layout_o(self) -> cute.ComposedLayout:
        """(tile_m, head_dim_v)"""
        return atoms.swizzled_tile(self.traits.tile_m, self.traits.head_dim_v)

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
        batch, seqlen_q, heads_q, _ = mQ.shape
        _, seqlen_k, heads_k, _ = mK.shape
        heads = heads_q // problem.packed_heads
        heads_per_kv = heads // heads_k
        kv_row_bytes = (problem.head_dim + problem.head_dim_v) * self.dtype.width // 8
        group = TileOrder.head_group(seqlen_k, heads_per_kv, kv_row_bytes)
        m_blocks = cute.ceil_div(seqlen_q, self.tile_tokens)
        order = TileOrder(m_blocks, heads, batch, cutlass.min(group, heads * batch))
        mask = IntervalMask(problem.mask, seqlen_q, seqlen_k, window_left, window_right)
        if const_expr(problem.has_softcap):
            scale, inner_scale = softcap, softmax_scale / softcap
        else:
            scale, inner_scale = softmax_scale, Float32(0.0)
        packed = problem.packed_heads
        operands = Operands(query_view(mQ, packed), rows_first(mK), rows_first(mV), query_view(mO, packed))
        work = Problem80(order, heads_per_kv, mask, scale * LOG2_E, inner_scale)
        self.kernel.set_name_prefix("flash_fwd_sm80", remove_cutlass_symbol=not traits.cutlass_symbol)
        self.kernel(operands, mLSE, work).launch(
            grid=(order.size(), 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, operands: Operands, mLSE: cute.Tensor | None, work: Problem80):
        thread = cute.arch.thread_idx()[0]
        m_block, head, batch = work.order.tile(cute.arch.block_idx()[0], self.longest_first)
        tile = QueryTile(m_block * self.tile_tokens, head, batch, self.tile_tokens)
        kv_head = head
        if const_expr(self.problem.packed_heads == 1):
            kv_head = head // work.heads_per_kv
        tiles = self.make_tiles(SmemAllocator())
        fragments = make_fragments(self, tiles, work, thread)
        load_k = make_kv_load(self, operands.gK[None, None, kv_head, batch], tiles.sK, self.problem.head_dim, thread)
        load_v = make_kv_load(self, operands.gV[None, None, kv_head, batch], tiles.sV, self.problem.head_dim_v, thread)

        load_q(self, operands.gQ[None, None, head, batch], tiles.sQ, tile, work.mask, thread)
        attend(self, fragments, Loads(load_k, load_v), tile, work)
        normalise(self, fragments, tile, work.mask, mLSE)
        write_output(self, fragments, operands.gO[None, None, head, batch], tiles.sO, tile, work.mask)

    def make_tiles(self, smem: SmemAllocator) -> Tiles:
        """The shared-memory tensors in one allocation: Q, V (over Q where they share), K; O over all of them."""
        traits = self.traits
        base = smem.allocate_array(self.dtype, traits.smem_bytes // (self.dtype.width // 8), byte_alignment=SMEM_ALIGN)
        layout_q, layout_k, layout_v = self.smem_layout_q(), self.smem_layout_k(), self.smem_layout_v()
        q, v = cute.cosize(layout_q), cute.cosize(layout_v)
        at_v = 0 if traits.share_q_v_smem else q
        at_k = max(q, v) if traits.share_q_v_smem else q + v
        sV = cute.make_tensor(base + at_v, layout_v)
        return Tiles(
            sQ=cute.make_tensor(base, layout_q),
            sK=cute.make_tensor(base + at_k, layout_k),
            sV=sV,
            sVt=transposed(sV),
            sO=cute.make_tensor(base, self.smem_layout_o()),
        )
