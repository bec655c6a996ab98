"""The parts of a backward's workspace (`cuteflash.core.workspace`) as tensors."""

from __future__ import annotations

import dataclasses
from typing import Self

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cuteflash.core.workspace import Workspace


@dataclasses.dataclass(frozen=True)
class WorkspaceTile:
    """The parts of one query tile of one head."""

    lse_log2: cute.Tensor  # (tile_m,)
    delta: cute.Tensor  # (tile_m,)
    dq: cute.Tensor | None  # (tile_m * head_dim,), in the order of the main kernel's fragments
    turn: cute.Pointer  # int32


@dataclasses.dataclass(frozen=True)
class WorkspaceTensors:
    """A workspace, fp32; rows are those of all sequences, each padded to whole tiles.

    Attributes:
        lse_log2, delta: (rows, heads)
        dq: (tile_m * head_dim, tiles of all sequences, heads); None if dQ needs no sum in memory.
        turns: (tiles of all sequences, heads), int32.
        tiles: query tiles of one sequence.
        tile_m: rows of a tile.
    """

    lse_log2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor | None
    turns: cute.Tensor
    tiles: Int32
    tile_m: cutlass.Constexpr[int]

    @classmethod
    def of(cls, mW: cute.Tensor, workspace: Workspace) -> Self:
        """The parts of `mW` (n,), as `workspace` places them. Offsets between heads and parts have 64 bits."""
        tile_m, head_dim = workspace.tile_m, workspace.head_dim
        tiles = workspace.batch * workspace.tiles
        rows = Int64(tiles) * tile_m
        statistic = cute.make_layout((tiles * tile_m, workspace.heads), stride=(1, cute.assume(rows, divby=tile_m)))
        part = cute.assume(rows * workspace.heads, divby=tile_m)
        dq = None
        if const_expr(head_dim > 0):
            elements = tile_m * head_dim
            strides = (cute.assume(stride, divby=elements) for stride in (Int64(elements), rows * head_dim))
            layout = cute.make_layout((elements, tiles, workspace.heads), stride=(1, *strides))
            dq = cute.make_tensor(mW.iterator + 2 * part, layout)
        turns = cute.recast_ptr(mW.iterator + (2 + head_dim) * part, dtype=Int32)
        return cls(
            lse_log2=cute.make_tensor(mW.iterator, statistic),
            delta=cute.make_tensor(mW.iterator + part, statistic),
            dq=dq,
            turns=cute.make_tensor(turns, cute.make_layout((tiles, workspace.heads), stride=(1, Int64(tiles)))),
            tiles=workspace.tiles,
            tile_m=tile_m,
        )

    def tile(self, m_block: Int32, head: Int32, batch: Int32) -> WorkspaceTile:
        """The parts of query tile `m_block` of a head of a sequence."""
        index = batch * self.tiles + m_block
        lse_log2, delta = (
            cute.local_tile(part[None, head], (self.tile_m,), (index,)) for part in (self.lse_log2, self.delta)
        )
        turn = cute.domain_offset((index, head), self.turns).iterator
        return WorkspaceTile(lse_log2, delta, None if self.dq is None else self.dq[None, index, head], turn)
