"""Which part of Q, K and V a block of the quantising kernels works on, and how Q and K get there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.kernels.common.quantize_signature import TABLE_DTYPES
from cuteflash.kernels.common.quantize_tile import Rotary, Rows, Tile, mix, widened
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class Place:
    """One block's part: some heads' tiles (or parts, or whatever is numbered) of one batch entry."""

    batch: Int32
    tile: Int32
    head: Int32


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """The tiles of all heads of a tensor, numbered: heads run fastest, since they are neighbours in memory."""

    batch: Int32
    tiles: Int32
    heads: Int32

    def size(self) -> Int32:
        """How many there are."""
        return self.batch * self.tiles * self.heads

    def number(self, batch: Int32, tile: Int32, head: Int32) -> Int32:
        """The number of a tile."""
        return (batch * self.tiles + tile) * self.heads + head

    def place(self, number: Int32) -> Place:
        """The tile of a number."""
        rest = number // self.heads
        return Place(rest // self.tiles, rest % self.tiles, number % self.heads)


@dataclasses.dataclass(frozen=True)
class Work:
    """The blocks of a launch: those of Q, then those of K, then those of V."""

    q: HeadTiles
    k: HeadTiles
    v: HeadTiles

    def size(self) -> Int32:
        """How many there are."""
        return self.q.size() + self.k.size() + self.v.size()

    def first_v(self) -> Int32:
        """The number of V's first block."""
        return self.q.size() + self.k.size()

    def place(self, number: Int32) -> tuple[Boolean, Place]:
        """Of a block of Q or K whether it is one of Q, and its part."""
        is_q = number < self.q.size()
        tiles = HeadTiles(self.q.batch, *(choose(is_q, *x) for x in zip(self._sizes(self.q), self._sizes(self.k))))
        return is_q, tiles.place(choose(is_q, number, number - self.q.size()))

    def _sizes(self, tiles: HeadTiles) -> tuple[Int32, Int32]:
        return tiles.tiles, tiles.heads


def choose(is_first: Boolean, first, second):
    """One of two values, or one of two `Rows`, without a branch."""
    if isinstance(first, Rows):
        return Rows(choose(is_first, first.address, second.address), choose(is_first, first.stride, second.stride))
    return cutlass.select_(is_first, first, second)


def seqlen_of(tensors: QuantizeTensors, is_q: Boolean) -> Int32:
    """The length of Q's or of K's sequences."""
    return choose(is_q, Int32(tensors.q.shape[1]), Int32(tensors.k.shape[1]))


def rotated(
    problem: QuantizeProblem, tensors: QuantizeTensors, is_q: Boolean, place: Place, tile: Tile
) -> Iterator[cute.Tensor]:
    """A thread's rows of a tile of Q or K, one after the other, with all rotations: fp32.

    A Hadamard rotation is left without its factor, `problem.hadamard_scale`.
    """
    dtype = CUTE_DTYPES[problem.dtype]
    rows = choose(is_q, *(Rows.of(x, place.batch, place.head) for x in (tensors.q, tensors.k)))
    elements, rotary = tile.elements(rows, dtype), None
    if problem.rotary_dim:
        tables = (Rows.of_table(x) for x in (tensors.cos, tensors.sin))
        rotary = Rotary(problem, *tables, TABLE_DTYPES[problem.rotary_dtype])
    for i in range(ROWS):
        values = widened(elements[None, i])
        if rotary is not None:
            rotary.rotate(values, rows, dtype, tile, i)
        if problem.hadamard:
            mix(values, tile, problem.hadamard)
        yield values


def smoothed(
    problem: QuantizeProblem, tensors: QuantizeTensors, place: Place, tile: Tile, mean: cute.Tensor | None = None
) -> Iterator[cute.Tensor]:
    """A thread's rows of a tile of V, one after the other, minus a mean (head_dim_v,) if there is one: fp32."""
    elements = tile.elements(Rows.of(tensors.v, place.batch, place.head), CUTE_DTYPES[problem.dtype])
    for i in range(ROWS):
        values = widened(elements[None, i])
        if mean is not None:
            for e in range(COLUMNS):
                values[e] = values[e] - mean[tile.lane * COLUMNS + e]
        yield values
