"""What a backward needs of each query row, before its main kernel.

    lse_log2 = LSE * log2(e)             the main kernel's P is exp2(scores * scale * log2(e) - lse_log2)
    delta    = rowsum(dO * O) - dLSE     and its dS is P * (dP - delta)
    dQ       = 0                         the sum that its blocks add to, in fp32, if the first one does not store
    turns    = 0                         how many of them have come to a tile

With sinks it also gives their gradient, in parts that the host adds up:

    dsinks   = -sum(exp(sink - LSE) * delta)  of the rows of one head that a warp has seen

Rows without a key and rows that pad the last tile get +inf and 0, with which P is 0. The kernel does nothing but move
memory: a block loads the rows of a whole tile before it adds up the first.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.arguments import BwdTensors, PackedTensors, SinkTensors
from cuteflash.core.signature import ALIGN_ELEMENTS, CUTE_DTYPES
from cuteflash.core.softmax import LOG2_E, exp2
from cuteflash.core.views import rows_first
from cuteflash.core.workspace import PARTS, PREPARE_WARPS, Workspace
from cuteflash.kernels.common.workspace import WorkspacePlace, WorkspaceTensors, WorkspaceTiles
from cuteflash.problem import BwdProblem
from cuteflash.traits.base import BwdTraits

THREADS = 32 * PREPARE_WARPS
ROW_LANES = (16, 8, 4)  # neighbouring threads that may share a row: at least a sector of 32 bytes
STORE = 4  # fp32 elements of 16 bytes


def lanes_of_row(chunks: int) -> int:
    """How many neighbouring threads load a row of `chunks` chunks together: those that idle least, then the most."""
    if chunks < min(ROW_LANES):
        return 1 << (chunks - 1).bit_length()
    return min(ROW_LANES, key=lambda lanes: (-chunks % lanes, -lanes))


class BwdPrepare:
    """The kernel before the main one, for a problem and the tiles of the main kernel's traits."""

    def __init__(self, traits: BwdTraits, problem: BwdProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.chunks = problem.operands.head_dim_v // ALIGN_ELEMENTS
        self.lanes = lanes_of_row(self.chunks)
        self.skips_lone = traits.lone_blocks and problem.scores.sink is None  # a sink's gradient needs all rows

    def launch(
        self, tensors: BwdTensors, packed: PackedTensors, sinks: SinkTensors, workspace: Workspace, stream
    ) -> None:
        """Launch it; `workspace` says where the results go, `tensors` are as `batched` returns them."""
        views = WorkspaceTensors.of(tensors.workspace, workspace, packed.cu_seqlens_q)
        tiles = WorkspaceTiles.of(self.traits, self.problem, tensors, packed, workspace, self.skips_lone)
        self.kernel.set_name_prefix("flash_bwd_prepare", remove_cutlass_symbol=True)
        self.kernel(
            rows_first(tensors.o), rows_first(tensors.do), tensors.lse, tensors.dlse, views, tiles, sinks
        ).launch(
            grid=(tiles.blocks(), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=self.traits.early_launch,
        )

    @cute.kernel
    def kernel(
        self,
        gO: cute.Tensor,
        gDO: cute.Tensor,
        mLSE: cute.Tensor,
        mDLSE: cute.Tensor | None,
        views: WorkspaceTensors,
        tiles: WorkspaceTiles,
        sinks: SinkTensors,
    ):
        if const_expr(self.traits.early_launch):
            cute.arch.griddepcontrol_wait()  # for whatever is launched before, which may make what is read here
            cute.arch.griddepcontrol_launch_dependents()  # the main kernel may read all inputs but this one's results
        place = tiles.place(cute.arch.block_idx()[0])
        if tiles.has_work(place):
            tiles.each_head(place, functools.partial(self.prepare, gO, gDO, (mLSE, mDLSE), views, sinks))

    @cute.jit
    def prepare(
        self,
        gO: cute.Tensor,
        gDO: cute.Tensor,
        statistics: tuple,
        views: WorkspaceTensors,
        sinks: SinkTensors,
        place: WorkspacePlace,
    ):
        """The tile at `place`, which has a row."""
        mLSE, mDLSE = statistics
        thread = cute.arch.thread_idx()[0]
        tile = views.tile(place.m_block, place.head, place.sequence)
        first = place.first_row
        row0, lane = thread // self.lanes, thread % self.lanes
        passes = -(-self.traits.tile_m * self.lanes // THREADS)
        last = place.rows - 1  # the tile's last row that exists, or a later one
        gO, gDO = (x[None, None, place.head, place.batch] for x in (gO, gDO))
        rO, rDO = (self.load(x, first, last, (row0, lane, passes)) for x in (gO, gDO))
        origin = place.batch, place.head, first
        lse, dlse = (self.load_statistic(x, origin, last, row0, passes) for x in (mLSE, mDLSE))
        if const_expr(tile.dq is not None and not self.traits.first_stores):
            if place.has_sum:
                self.clear(tile.dq, thread)
        if const_expr(tile.turns is not None and (self.problem.is_deterministic or self.traits.first_stores)):
            if thread < PARTS:
                tile.turns[thread] = Int32(0)
        sink, dsink = Float32(0.0), Float32(0.0)
        if const_expr(sinks.sinks is not None):
            sink = sinks.sinks[place.head].to(Float32) * LOG2_E
        for i in cutlass.range_constexpr(passes):
            row = row0 + i * (THREADS // self.lanes)
            delta = self.row_sum(rO[None, None, i], rDO[None, None, i], lane)
            if const_expr(mDLSE is not None):
                delta = delta - dlse[i]
            hidden = row > last or lse[i] == -Float32.inf
            if lane == 0 and row < self.traits.tile_m:
                tile.delta[row] = Float32(0.0) if hidden else delta
                tile.lse_log2[row] = Float32.inf if hidden else lse[i] * LOG2_E
                if const_expr(sinks.sinks is not None):
                    dsink -= Float32(0.0) if hidden else exp2(sink - lse[i] * LOG2_E) * delta
        if const_expr(sinks.sinks is not None):
            self.store_part(sinks.dsinks, views, place, cute.arch.warp_reduction_sum(dsink))

    @cute.jit
    def store_part(self, dsinks: cute.Tensor, views: WorkspaceTensors, place: WorkspacePlace, part: Float32):
        """Store a warp's part of the gradient of its head's sink."""
        thread = cute.arch.thread_idx()[0]
        if thread % 32 == 0:
            tile = views.first_tile(place.sequence) + place.m_block
            dsinks[place.head, tile * PREPARE_WARPS + thread // 32] = part

    def load(self, gX: cute.Tensor, first: Int32, last: Int32, place: tuple[Int32, Int32, int]) -> cute.Tensor:
        """This thread's chunks of its rows: (chunk, chunks of a row, rows).

        A row or chunk past the end is loaded as the last one and not used: without branches all loads are in flight
        together.
        """
        row0, lane, passes = place
        per_row = -(-self.chunks // self.lanes)
        dtype = CUTE_DTYPES[self.problem.operands.pv_dtype]
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=ALIGN_ELEMENTS * dtype.width)
        loaded = cute.make_rmem_tensor((ALIGN_ELEMENTS, per_row, passes), dtype)
        for i in range(passes):
            row = cutlass.min(row0 + i * (THREADS // self.lanes), last)
            line = cute.zipped_divide(gX[first + row, None], (ALIGN_ELEMENTS,))
            for c in range(per_row):
                chunk = lane + c * self.lanes
                if (c + 1) * self.lanes > self.chunks:
                    chunk = cutlass.min(chunk, self.chunks - 1)
                cute.copy(atom, line[None, chunk], loaded[None, c, i])
        return loaded

    def load_statistic(
        self, mX: cute.Tensor | None, origin: tuple[Int32, Int32, Int32], last: Int32, row0: Int32, passes: int
    ) -> cute.Tensor | None:
        """(passes,) the statistic of this thread's rows; None if there is none."""
        if mX is None:
            return None
        batch, head, first = origin
        loaded = cute.make_rmem_tensor(passes, Float32)
        for i in range(passes):
            loaded[i] = mX[batch, head, first + cutlass.min(row0 + i * (THREADS // self.lanes), last)]
        return loaded

    def clear(self, dq: cute.Tensor, thread: Int32) -> None:
        """Zero a tile of dQ."""
        zeros = cute.make_rmem_tensor(STORE, Float32)
        zeros.fill(0.0)
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=STORE * Float32.width)
        pieces = cute.zipped_divide(dq, (STORE,))
        count = cute.size(dq) // STORE
        for i in range(-(-count // THREADS)):
            piece = thread + i * THREADS
            if (i + 1) * THREADS > count:  # past the end: the last piece again
                piece = cutlass.min(piece, count - 1)
            cute.copy(atom, zeros, pieces[None, piece])

    def row_sum(self, rO: cute.Tensor, rDO: cute.Tensor, lane: Int32) -> Float32:
        """The sum of dO * O over a row, of which this thread has (chunk, chunks)."""
        total = Float32(0.0)
        for c in range(cute.size(rO.shape[1])):
            products = rO[None, c].load().to(Float32) * rDO[None, c].load().to(Float32)
            part = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            if (c + 1) * self.lanes > self.chunks:
                part = cutlass.select_(lane + c * self.lanes < self.chunks, part, Float32(0.0))
            total = total + part
        return cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes) if self.lanes > 1 else total
