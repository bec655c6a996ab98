"""The end of a tile whose keys are split: each block's part goes to memory, and the last block to come merges them.

A part is O of its keys, normalized, and their log-sum-exp, fp32. Nobody waits: a block that is not the last one goes on
with its next tile. Slots are those of `cuteflash.core.split_slots`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.arguments import FwdTensors, SplitTensors
from cuteflash.core.gqa import query_view, row_coord, row_token
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import LN_2, LOG2_E, exp2
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import QueryTile

PAIR, QUAD = 2, 4  # fp32 elements of a store and of a load
AT_ONCE = 8  # parts that a thread loads before it merges any of them


@dataclasses.dataclass(frozen=True)
class Partials:
    """The partial results of a launch.

    Attributes:
        values: (2 blocks * tile_m * (head_dim_v + 1),) fp32: O of all slots, then the log-sum-exps of all.
        arrivals: (blocks,), parts that have come of the tile that begins in a block's share.
        gO: O as `query_view` has it.
        mLSE: (b, h_q, s_q); None if it is not asked for.
        head_dim_v: of the problem.
        rows, columns: of a slot, `tile_m` and the padded `head_dim_v`.
    """

    values: cute.Tensor
    arrivals: cute.Tensor
    gO: cute.Tensor
    mLSE: cute.Tensor | None
    head_dim_v: cutlass.Constexpr[int]
    rows: cutlass.Constexpr[int]
    columns: cutlass.Constexpr[int]

    @classmethod
    def of(cls, kernel, tensors: FwdTensors, split: SplitTensors) -> Partials | None:
        """Those of a kernel; None if it does not split. `tensors` as `batched` returns them."""
        if not kernel.problem.is_split:
            return None
        operands, traits = kernel.problem.operands, kernel.traits
        return cls(
            values=split.partials,
            arrivals=split.arrivals,
            gO=query_view(tensors.o, operands.packed_heads),
            mLSE=tensors.lse,
            head_dim_v=operands.head_dim_v,
            rows=traits.tile_m,
            columns=traits.head_dim_v,
        )

    def at(self, slot: Int32, row: Int32, column: Int32) -> cute.Pointer:
        """Where an element of a slot's O lies."""
        return self.values.iterator + ((slot * self.rows + row) * self.columns + column)

    def lse_at(self, slot: Int32, row: Int32) -> Int32:
        """The index of a row's log-sum-exp in `values`."""
        slots = 2 * self.arrivals.shape[0]
        return slots * self.rows * self.columns + slot * self.rows + row

    @cute.jit
    def write(self, scores: ScoreTile, out: cute.Tensor, columns: cute.Tensor, lse: cute.Tensor, tile: QueryTile):
        """Write a block's part of a tile.

        Args:
            scores: for the rows of this thread's elements.
            out: its elements of O, normalized, as (rows, columns).
            columns: likewise, the coordinates of its elements in the tile.
            lse: of its rows.
        """
        block = cute.arch.block_idx()[0]
        slot = slot_of(block, Int32(tile.share.owner == block))
        rows = tile.rows()
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=PAIR * Float32.width)
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = scores.row(r)
            if row < rows:
                for c in cutlass.range_constexpr(0, cute.size(out.shape[1]), PAIR):
                    pair = cute.make_rmem_tensor(PAIR, Float32)
                    for i in cutlass.range_constexpr(PAIR):
                        pair[i] = out[r, c + i]
                    target = self.at(slot, row, columns[0, c][1]).align(PAIR * Float32.width // 8)
                    cute.copy(atom, pair, cute.make_tensor(target, cute.make_layout(PAIR)))
                if scores.first_key == 0:
                    self.values[self.lse_at(slot, row)] = lse[r]

    @cute.jit
    def come(self, tile: QueryTile, thread: Int32, word: cute.Tensor, sync: cutlass.Constexpr[Callable[[], None]]):
        """Whether this block's part of a tile is the last one to come; all threads that wrote it call this.

        Args:
            word: (1,) Int32 in shared memory.
            sync: barrier of these threads.
        """
        sync()
        if thread == 0:
            share = tile.share
            counter = self.arrivals.iterator + share.owner
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            is_last = before == share.last_owner - share.owner
            word[0] = Int32(is_last)
            if is_last:
                self.arrivals[share.owner] = Int32(0)
        sync()
        return word[0] != 0

    @cute.jit
    def merge(self, tile: QueryTile, thread: Int32, threads: cutlass.Constexpr[int]):
        """Merge all parts of a tile, and write O and the log-sum-exp; `threads` threads call it."""
        chunks = self.head_dim_v // QUAD
        total = tile.rows() * chunks
        index = thread
        while index < total:
            self.merge_chunk(tile, index // chunks, index % chunks)
            index += threads

    @cute.jit
    def merge_chunk(self, tile: QueryTile, row: Int32, chunk: Int32):
        """Merge four columns of a row."""
        share = tile.share
        count = share.last_owner - share.owner + 1
        acc = cute.make_rmem_tensor(QUAD, Float32)
        acc.fill(0.0)
        peak, weight = -Float32.inf, Float32(0.0)
        for first in cutlass.range(0, count, AT_ONCE, unroll=1):
            values, lse = self.load_parts(share.owner, count, first, row, chunk)
            new = peak
            for i in cutlass.range_constexpr(AT_ONCE):
                new = cute.arch.fmax(new, lse[i])
            shift = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
            scale = exp2((peak - shift) * LOG2_E)
            peak, weight = new, weight * scale
            for e in cutlass.range_constexpr(QUAD):
                acc[e] = acc[e] * scale
            for i in cutlass.range_constexpr(AT_ONCE):
                factor = exp2((lse[i] - shift) * LOG2_E)
                weight += factor
                for e in cutlass.range_constexpr(QUAD):
                    acc[e] += cutlass.select_(lse[i] == -Float32.inf, Float32(0.0), factor * values[e, i])
        is_empty = weight == 0.0
        inverse = cutlass.select_(is_empty, Float32(0.0), 1.0 / weight)
        for e in cutlass.range_constexpr(QUAD):
            acc[e] = acc[e] * inverse
        self.write_chunk(tile, row, chunk, acc)
        if cutlass.const_expr(self.mLSE is not None):
            if chunk == 0:
                token, head = row_token(row, tile.packed_heads)
                lse_row = peak + cute.math.log2(weight, fastmath=True) * LN_2
                head += tile.head * tile.packed_heads
                self.mLSE[tile.batch, head, tile.first_row + token] = -Float32.inf if is_empty else lse_row

    @cute.jit
    def load_parts(self, owner: Int32, count: Int32, first: Int32, row: Int32, chunk: Int32):
        """(four columns of a row, its log-sum-exp) of the `first` and the following parts; -inf if there is none."""
        values = cute.make_rmem_tensor((QUAD, AT_ONCE), Float32)
        lse = cute.make_rmem_tensor(AT_ONCE, Float32)
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=QUAD * Float32.width)
        for i in cutlass.range_constexpr(AT_ONCE):
            part = cutlass.min(first + i, count - 1)
            slot = slot_of(owner + part, Int32(part == 0))
            source = self.at(slot, row, chunk * QUAD).align(QUAD * Float32.width // 8)
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(QUAD)), values[None, i])
            found = self.values[self.lse_at(slot, row)]
            lse[i] = -Float32.inf if first + i >= count else found
        return values, lse

    def write_chunk(self, tile: QueryTile, row: Int32, chunk: Int32, acc: cute.Tensor) -> None:
        """Round four columns of a row and store them."""
        dtype = self.gO.element_type
        rounded = cute.make_rmem_tensor(QUAD, dtype)
        rounded.store(acc.load().to(dtype))
        origin = tile.first_row if tile.packed_heads == 1 else (0, tile.first_row)
        rows = cute.domain_offset((origin, 0), self.gO[None, None, tile.head, tile.batch])
        line = rows[row_coord(row, tile.packed_heads), None]
        start = cute.zipped_divide(line, (QUAD,))[None, chunk].iterator.align(QUAD * dtype.width // 8)
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=QUAD * dtype.width)
        cute.copy(atom, rounded, cute.make_tensor(start, cute.make_layout(QUAD)))
