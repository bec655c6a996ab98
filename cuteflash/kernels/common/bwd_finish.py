"""What a backward does after its main kernel: dQ = the fp32 sum times the scale, rounded.

The sum lies in memory as the main kernel's threads hold it: a dQ tile is made of parts, each the accumulator of one
product by one group of threads, and element i of a thread's accumulator lies at (i // 4, thread, i % 4) of its part,
the last running fastest. So the main kernel's additions and the loads here are 16 bytes of neighbouring threads.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.memory import SmemAllocator

from cuteflash.arguments import BwdTensors, PackedTensors
from cuteflash.atoms import sm80 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.signature import ALIGN_ELEMENTS, CUTE_DTYPES
from cuteflash.core.views import rows_first, transposed
from cuteflash.core.workspace import Workspace
from cuteflash.kernels.common.turns import ROUNDED
from cuteflash.kernels.common.workspace import WorkspacePlace, WorkspaceTensors, WorkspaceTile, WorkspaceTiles
from cuteflash.problem import BwdProblem
from cuteflash.traits.base import BwdTraits

GROUP = 4  # fp32 elements of 16 bytes


@dataclasses.dataclass(frozen=True)
class DqParts:
    """How the accumulators of a main kernel make up a (tile_m, head_dim) tile of dQ.

    Attributes:
        mma: the product of one part.
        threads: that hold one part.
        shape: (rows, columns) of a part in the tile.
        origins: (row, column) of each part's first element in the tile, multiples of `shape`. Parts follow each other
            in memory.
        is_transposed: the accumulators hold (columns, rows).
    """

    mma: cute.TiledMma
    threads: int
    shape: tuple[int, int]
    origins: tuple[tuple[int, int], ...]
    is_transposed: bool = False

    def fragment(self, thread: Int32) -> cute.Tensor:
        """An fp32 accumulator of a part."""
        rows, cols = self.shape
        shape = (cols, rows) if self.is_transposed else (rows, cols)
        return cute.make_rmem_tensor(self.mma.get_slice(thread).partition_shape_C(shape), Float32)

    def groups(self, dq: cute.Tensor, part: Int32 | int, thread: Int32) -> cute.Tensor:
        """(4, groups) what a thread holds of a part of `dq`, a tile as `WorkspaceTile` has it."""
        rows, cols = self.shape
        layout = cute.make_layout(
            (GROUP, self.threads, len(self.origins), rows * cols // self.threads // GROUP),
            stride=(1, GROUP, rows * cols, GROUP * self.threads),
        )
        return cute.make_tensor(dq.iterator, layout)[None, thread, part, None]

    def of_part(self, row: Int32, column: Int32, values: tuple[Boolean, ...]) -> Boolean:
        """Of one value for each part, that of the part with an element."""
        found = values[0]
        for (first_row, first_column), value in zip(self.origins[1:], values[1:]):
            found = cutlass.select_((row >= first_row) & (column >= first_column), value, found)
        return found


class BwdKernel(Protocol):
    """What the kernels before and after a main kernel ask of it."""

    traits: BwdTraits
    problem: BwdProblem

    def dq_parts(self) -> DqParts:
        """The dQ accumulators."""
        ...


class BwdFinish:
    """The kernel after a main kernel that sums dQ in memory."""

    def __init__(self, main: BwdKernel) -> None:
        self.main = main
        self.traits = main.traits
        self.dtype = CUTE_DTYPES[main.problem.operands.qk_dtype]
        self.head_dim = main.problem.operands.head_dim

    def launch(self, tensors: BwdTensors, packed: PackedTensors, workspace: Workspace, scale: Float32, stream) -> None:
        """Launch it; `scale` is the factor of dQ, `tensors` are as `batched` returns them."""
        parts = self.main.dq_parts()
        views = WorkspaceTensors.of(tensors.workspace, workspace, packed.cu_seqlens_q)
        tiles = WorkspaceTiles.of(self.traits, self.main.problem, tensors, packed, workspace, skips_lone=True)
        self.kernel.set_name_prefix("flash_bwd_finish", remove_cutlass_symbol=True)
        self.kernel(rows_first(tensors.dq), views, tiles, scale).launch(
            grid=(tiles.blocks(), 1, 1),
            block=(len(parts.origins) * parts.threads, 1, 1),
            stream=stream,
            use_pdl=self.traits.early_launch,
        )

    @cute.kernel
    def kernel(self, gDQ: cute.Tensor, views: WorkspaceTensors, tiles: WorkspaceTiles, scale: Float32):
        place = tiles.place(cute.arch.block_idx()[0])
        layout = atoms.swizzled_tile(self.traits.tile_m, self.traits.head_dim)
        stage = SmemAllocator().allocate_tensor(self.dtype, layout, byte_alignment=1024)
        if const_expr(self.traits.early_launch):
            cute.arch.griddepcontrol_wait()  # all blocks: the launch after this one waits for no other
        if place.has_sum:
            tiles.each_head(place, functools.partial(self.finish, gDQ, views, scale, stage))

    @cute.jit
    def finish(
        self, gDQ: cute.Tensor, views: WorkspaceTensors, scale: Float32, stage: cute.Tensor, place: WorkspacePlace
    ):
        """The tile at `place`, whose sum is in memory, but for parts that a block of the main kernel has rounded."""
        tile = views.tile(place.m_block, place.head, place.sequence)
        is_left = self.is_left(tile)
        if functools.reduce(operator.or_, is_left):
            self.round(gDQ, scale, stage, place, tile, is_left)

    def is_left(self, tile: WorkspaceTile) -> tuple[Boolean, ...]:
        """Whether each part of a tile has not been rounded yet."""
        parts = range(len(self.main.dq_parts().origins))
        if not self.traits.last_rounds:
            return tuple(Boolean(True) for _ in parts)
        return tuple(tile.turns[part] != ROUNDED for part in parts)

    @cute.jit
    def round(
        self,
        gDQ: cute.Tensor,
        scale: Float32,
        stage: cute.Tensor,
        place: WorkspacePlace,
        tile: WorkspaceTile,
        is_left: tuple[Boolean, ...],
    ):
        """The parts of a tile for which `is_left` is true."""
        thread = cute.arch.thread_idx()[0]
        parts = self.main.dq_parts()
        part, member = thread // parts.threads, thread % parts.threads
        acc = parts.fragment(member)
        source = parts.groups(tile.dq, part, member)
        target = cute.make_tensor(acc.iterator, cute.make_layout(source.shape))
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=GROUP * Float32.width)
        for i in cutlass.range_constexpr(cute.size(source.shape[1])):
            cute.copy(atom, source[None, i], target[None, i])
        acc.store(acc.load() * scale)
        if const_expr(self.traits.first_stores):
            if tile.turns[0] == 0:  # no key block has come to the tile
                acc.fill(0.0)
        rounded = rounded_fragment(acc, self.dtype)
        for index in cutlass.range_constexpr(len(parts.origins)):
            if part == index:
                self.put(parts, parts.origins[index], rounded, stage, member)
        cute.arch.sync_threads()
        rows = cutlass.min(self.traits.tile_m, place.rows)
        self.store(stage, gDQ[None, None, place.head, place.batch], (place.first_row, rows), thread, is_left)

    def put(self, parts: DqParts, origin: tuple[int, int], rounded: cute.Tensor, stage: cute.Tensor, thread: Int32):
        """Write a part's fragment into its place of the tile."""
        place = cute.local_tile(stage, parts.shape, tuple(at // size for at, size in zip(origin, parts.shape)))
        if const_expr(parts.is_transposed):
            mine = parts.mma.get_slice(thread).partition_C(transposed(place))
            for i in range(cute.size(rounded)):
                mine[i] = rounded[i]
        else:
            copy = atoms.store_pairs(self.dtype, parts.mma).get_slice(thread)
            cute.copy(copy, copy.retile(rounded), copy.partition_D(place))

    @cute.jit
    def store(
        self,
        stage: cute.Tensor,
        gDQ: cute.Tensor,
        rows_of_tile: tuple[Int32, Int32],
        thread: Int32,
        is_left: tuple[Boolean, ...],
    ):
        """Store the rows of a tile that exist, 16 bytes a thread, of the parts that are left."""
        first, rows = rows_of_tile
        parts = self.main.dq_parts()
        threads = len(parts.origins) * parts.threads
        chunks = self.head_dim // ALIGN_ELEMENTS
        atom = cute.make_copy_atom(CopyUniversalOp(), self.dtype, num_bits_per_copy=ALIGN_ELEMENTS * self.dtype.width)
        staged = cute.zipped_divide(stage, (1, ALIGN_ELEMENTS))
        for i in cutlass.range_constexpr(-(-self.traits.tile_m * chunks // threads)):
            index = thread + i * threads
            row, chunk = index // chunks, index % chunks
            if (row < rows) & parts.of_part(row, chunk * ALIGN_ELEMENTS, is_left):
                line = cute.zipped_divide(gDQ[first + row, None], (ALIGN_ELEMENTS,))
                piece = cute.make_rmem_tensor(ALIGN_ELEMENTS, self.dtype)
                cute.copy(atom, cute.group_modes(staged[None, (row, chunk)], 0), piece)
                cute.copy(atom, piece, line[None, chunk])
