"""Which part of Q, K and V a block of the quantising kernels works on."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Int32, Int64, const_expr

from cuteflash.core.schedule import owner_of
from cuteflash.core.tile_numbers import count_tiles, first_tile
from cuteflash.kernels.common.quantize_tile import Rows, Tile
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import QuantizeTraits


@dataclasses.dataclass(frozen=True)
class Place:
    """One block's part: some heads' tiles (or parts, or whatever is numbered) of one batch entry."""

    batch: Int32
    tile: Int32
    head: Int32


@dataclasses.dataclass(frozen=True)
class Span:
    """The rows that a block looks at.

    Attributes:
        entry: the batch entry.
        origin: what `Rows.of` begins at: the batch entry, or the row at which a packed sequence begins.
        first: the first row of the block's part, counted from the sequence's first one.
        rows: how many rows of the sequence count.
        end: of packed sequences how many rows there are, with those that do not count; otherwise None.
    """

    entry: Int32
    origin: Int32
    first: Int32
    rows: Int32
    end: Int32 | None = None

    def tile(self, first: Int32, head_dim: int, quads: int, thread: Int32 | None = None) -> Tile:
        """The calling thread's part of a tile of `head_dim` columns that begins at row `first` of the sequence.

        `thread` is the thread's number, if it is at hand.
        """
        return dataclasses.replace(Tile.of(first, self.rows, head_dim, quads, thread), end=self.end)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How packed sequences lie in a tensor of so many rows.

    Attributes:
        cu_seqlens: (batch + 1,) the first row of each, then the end of the last one.
        used: (batch,) how many rows of each count; None is all.
        rows: of the tensor.
    """

    cu_seqlens: cute.Tensor
    used: cute.Tensor | None
    rows: Int32

    @property
    def batch(self) -> Int32:
        """How many sequences there are."""
        return Int32(self.cu_seqlens.shape[0]) - 1

    @cute.jit
    def span(self, part: Int32, part_rows: cutlass.Constexpr[int], unit: cutlass.Constexpr[int]):
        """The rows of a part; a whole warp calls it.

        Parts are numbered by `first_tile` in units of `unit` rows, each of which has `unit // part_rows` parts. The
        rows after the last sequence are those of one more, none of which counts.
        """
        each = unit // part_rows
        sequence = owner_of(part // each, self.cu_seqlens, self.batch, unit)
        begin, end = self.cu_seqlens[sequence], self.rows
        if sequence < self.batch:
            end = self.cu_seqlens[sequence + 1]
        counted = Int32(0)
        if sequence < self.batch:
            counted = end - begin
            if const_expr(self.used is not None):
                counted = self.used[sequence]
        first = (part - first_tile(begin, sequence, unit) * each) * part_rows
        last_row = cutlass.max(self.rows - 1, 0)
        return Span(cutlass.min(sequence, self.batch - 1), cutlass.min(begin, last_row), first, counted, end - begin)


def packing_of(tensors: QuantizeTensors, is_q: Boolean) -> Packing:
    """How Q's or K's packed sequences lie."""
    vectors = [(tensors.cu_q, tensors.cu_k), (tensors.used_q, tensors.used_k)]
    cu_seqlens, used = (None if a is None else choose(is_q, a, b) for a, b in vectors)
    return Packing(cu_seqlens, used, seqlen_of(tensors, is_q))


def packing_of_keys(tensors: QuantizeTensors) -> Packing:
    """How V's packed sequences lie."""
    return Packing(tensors.cu_k, tensors.used_k, Int32(tensors.v.shape[-3]))


def batch_of(tensors: QuantizeTensors) -> Int32:
    """How many batch entries numbers of tiles go by: packed sequences are one entry."""
    return Int32(1) if tensors.cu_q is not None else tensors.q.shape[0]


def tiles_of(tensors: QuantizeTensors, rows: Int32, tile_rows: int, unit: int) -> Int32:
    """How many tiles a head has in a tensor with `rows` rows (of packed sequences `unit` rows come together)."""
    if tensors.cu_q is None:
        return cute.ceil_div(rows, tile_rows)
    return count_tiles(rows, tensors.cu_q.shape[0] - 1, unit) * (unit // tile_rows)


def fast(divisor: Any) -> Any:
    """Of a value of the host's code something that a kernel divides by in a few instructions; an int stays one.

    Nothing is divided by a zero, which becomes 1.
    """
    return divisor if isinstance(divisor, int) else cute.fast_divmod_create_divisor_v2(cutlass.max(divisor, 1))


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """The tiles of all heads of a tensor, numbered: heads run fastest, since they are neighbours in memory.

    `per_tile` and `per_entry` are what numbers are divided by, see `fast`: heads, and tiles of a head.
    """

    batch: Int32
    tiles: Int32
    heads: Int32
    per_tile: Any
    per_entry: Any

    @classmethod
    def of(cls, batch: Any, tiles: Any, heads: Any) -> HeadTiles:
        """Of values of the host's code."""
        return cls(batch, tiles, heads, fast(heads), fast(tiles))

    def size(self) -> Int32:
        """How many there are."""
        return self.batch * self.tiles * self.heads

    def number(self, batch: Int32, tile: Int32, head: Int32) -> Int32:
        """The number of a tile."""
        return (batch * self.tiles + tile) * self.heads + head

    def place(self, number: Int32) -> Place:
        """The tile of a number."""
        rest, head = divmod(number, self.per_tile)
        batch, tile = divmod(rest, self.per_entry)
        return Place(batch, tile, head)


@dataclasses.dataclass(frozen=True)
class Mix:
    """An order of two kinds of blocks in which both come at an even pace: groups of a few of each, then the rest.

    Attributes:
        first, second: how many of each kind are in a group.
        groups: how many groups there are.
        per_group: what places are divided by, see `fast`.
    """

    first: Int32
    second: Int32
    groups: Int32
    per_group: Any

    @classmethod
    def of(cls, first: Any, second: Any) -> Mix:
        """Of so many of each kind; for Python ints or values of the host's code."""
        each_first, each_second = (at_least_one(a // at_least_one(b)) for a, b in ((first, second), (second, first)))
        groups = cutlass.min(first // each_first, second // each_second)
        return cls(each_first, each_second, groups, fast(each_first + each_second))

    def number(self, place: Int32, first: Int32) -> Int32:
        """The number of the block at a place of the order, if `first` blocks of the first kind have the lowest.

        Without comparisons, so that Python ints do, too.
        """
        group = cutlass.min(divmod(place, self.per_group)[0], self.groups)
        offset = place - group * (self.first + self.second)  # in the group, or in the rest
        in_group = cutlass.min(self.groups - group, 1)  # 1 if it is a group
        rest = first - self.groups * self.first
        of_first = rest + in_group * (self.first - rest)
        is_first = cutlass.min(cutlass.max(of_first - offset, 0), 1)
        after = first + group * self.second + offset - of_first
        return after + is_first * (group * self.first + offset - after)


def at_least_one(value: Any) -> Any:
    """A count, or 1."""
    return cutlass.max(value, 1)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How heads of Q and K of all batch entries are numbered, if blocks share them.

    By batch entry and KV head: those of Q that share it, then that of K. In a cluster only KV heads have numbers.

    Attributes:
        count: how many there are.
        of_group: heads that share a KV head, with that of K.
        per_group, per_entry: what numbers are divided by, see `fast`: these, and the KV heads of a batch entry.
    """

    count: Int32
    of_group: Int32
    per_group: Any
    per_entry: Any


@dataclasses.dataclass(frozen=True)
class Work:
    """The blocks of a launch: numbered are those of Q, then those of K, then those of V.

    `mix` is the order in which they run; None is that of their numbers. With `sharing` see `SharedHeads`. `parts` are
    those that were measured, if blocks put them together.
    """

    q: HeadTiles
    k: HeadTiles
    v: HeadTiles
    mix: Mix | None = None
    sharing: Sharing | None = None
    parts: Work | None = None

    def shared(self, found: tuple[HeadTiles, HeadTiles, Sharing]) -> Work:
        """With other blocks of Q and K."""
        q, k, sharing = found
        return dataclasses.replace(self, q=q, k=k, sharing=sharing)

    def mixed(self) -> Work:
        """With blocks of V among those of Q and K."""
        return dataclasses.replace(self, mix=Mix.of(self.first_v(), self.v.size()))

    def number(self, place: Int32, is_backwards: bool = False) -> Int32:
        """The number of the block that runs at a place of the order, or at that place from its end on."""
        place = self.size() - 1 - place if is_backwards else place
        return place if self.mix is None else self.mix.number(place, self.first_v())

    def size(self) -> Int32:
        """How many there are."""
        return self.q.size() + self.k.size() + self.v.size()

    def first_v(self) -> Int32:
        """The number of V's first block."""
        return self.q.size() + self.k.size()

    def place(self, number: Int32) -> tuple[Boolean, Place]:
        """Of a block of Q or K whether it is one of Q, and its part."""
        is_q = number < self.q.size()
        of_q, of_k = self.q.place(number), self.k.place(number - self.q.size())
        both = ((of_q.batch, of_k.batch), (of_q.tile, of_k.tile), (of_q.head, of_k.head))
        return is_q, Place(*(choose(is_q, *x) for x in both))

    def number_of(self, is_q: Boolean, place: Place) -> Int32:
        """The number of the block of Q or K that has a part."""
        of_q, of_k = (tiles.number(place.batch, place.tile, place.head) for tiles in (self.q, self.k))
        return choose(is_q, of_q, self.q.size() + of_k)


def choose(is_first: Boolean, first, second):
    """One of two values, of two `Rows` or of two contiguous vectors of one length, without a branch."""
    if isinstance(first, cute.Tensor):
        address = choose(is_first, first.iterator.toint(), second.iterator.toint())
        pointer = cute.make_ptr(first.element_type, address, AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(pointer, first.layout)
    if isinstance(first, Rows):
        return Rows(choose(is_first, first.address, second.address), choose(is_first, first.stride, second.stride))
    return cutlass.select_(is_first, first, second)


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """The rows of heads that follow each other: of the first one, and bytes from a head to the next."""

    rows: Rows
    step: Int64

    @classmethod
    def of(cls, is_q: Boolean, both: tuple[cute.Tensor, cute.Tensor], origin: Int32, first: Int32) -> HeadRows:
        """Of Q or K from head `first` on, see `Rows.of`."""
        rows = choose(is_q, *(Rows.of(x, origin, first) for x in both))
        return cls(rows, choose(is_q, *(Int64(x.stride[-2]) * (x.element_type.width // 8) for x in both)))

    def __getitem__(self, number: Int32) -> Rows:
        return Rows(self.rows.address + self.step * Int64(number), self.rows.stride)


def seqlen_of(tensors: QuantizeTensors, is_q: Boolean) -> Int32:
    """The length of Q's or of K's sequences; of packed ones all rows."""
    return choose(is_q, Int32(tensors.q.shape[-3]), Int32(tensors.k.shape[-3]))


def tile_span(
    problem: QuantizeProblem, traits: QuantizeTraits, tensors: QuantizeTensors, is_q: Boolean | None, place: Place
) -> Span:
    """The rows of a tile of Q or K; `is_q` is None for one of V."""
    if problem.is_packed:
        packing = packing_of_keys(tensors) if is_q is None else packing_of(tensors, is_q)
        return packing.span(place.tile, traits.tokens, BLOCK_TOKENS)
    seqlen = Int32(tensors.v.shape[1]) if is_q is None else seqlen_of(tensors, is_q)
    return Span(place.batch, place.batch, place.tile * traits.tokens, seqlen)
