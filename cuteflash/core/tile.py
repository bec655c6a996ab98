"""Tiles of queries and of keys: which rows of the problem they hold, and which blocks of the others they visit."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cuteflash.core.mask import Index, IntervalMask, blocks_of
from cuteflash.problem import UNBOUNDED, MaskKind


def all_see(seqlen_q: Index, seqlen_k: Index, mask: MaskKind) -> Boolean:
    """Whether every query of a sequence sees a key.

    A query sees the key at its own position under every mask. With fewer keys than queries the first ones may see none.
    """
    some = seqlen_k > 0
    return some if mask == "full" else some & (seqlen_q <= seqlen_k)


def is_lone(seqlen_q: Index, seqlen_k: Index, mask: MaskKind, tile_n: int) -> Boolean:
    """Whether the keys of a sequence are one tile, and its block visits all of its queries."""
    return all_see(seqlen_q, seqlen_k, mask) & (seqlen_k <= tile_n)


def holds_dq(seqlen_q: Index, seqlen_k: Index, mask: MaskKind, heads_per_kv: Index, tile_m: int, tiles: int) -> Boolean:
    """Whether dQ of a KV head's queries is `tiles` tiles at most, and all of them see a key."""
    return all_see(seqlen_q, seqlen_k, mask) & (heads_per_kv * blocks_of(seqlen_q, tile_m) <= tiles)


def stores_dq(
    seqlen_q: Index, seqlen_k: Index, mask: MaskKind, heads_per_kv: Index, tile: tuple[int, int], held_dq: int
) -> Boolean:
    """Whether one block has all that is added up to dQ of a sequence and a KV head, and stores it.

    Args:
        tile: `tile_m` and `tile_n` of the kernel, which has code for lone tiles.
        held_dq: as in `BwdTraits`; 0 of packed sequences.
    """
    tile_m, tile_n = tile
    if held_dq:
        return holds_dq(seqlen_q, seqlen_k, mask, heads_per_kv, tile_m, held_dq)
    return is_lone(seqlen_q, seqlen_k, mask, tile_n)


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """The key blocks `[lo, hi)` that some query of a tile sees; `hi <= lo` if there are none."""

    lo: Index
    hi: Index

    def visits(self, first_keys_first: bool) -> tuple[Index, Index, Index]:
        """(first, lo, hi): visit key block `first`, then `[lo, hi)` backwards; none of these if `lo > hi`.

        The first is the last block, or with `first_keys_first` the one of key 0.
        """
        return (self.lo, self.lo + 1, self.hi) if first_keys_first else (self.hi - 1, self.lo, self.hi - 1)


@dataclasses.dataclass(frozen=True)
class KeyShare:
    """The part of a tile's key blocks that one block computes, see `cuteflash.core.split`.

    Which seats have the others follows from a division that takes long, and is not needed before the end of a tile: it
    stands where they are asked for.

    Attributes:
        first, last: of the tile's units, `[first, last)`; unit i is the i-th key block that the tile visits.
        number: of the block's share in its line, whose first one has the seat `first_seat`.
        begin: the tile's first unit, counted along the line.
        width: its units, of which the last `cost` are no key blocks.
        share: units of a share, or what to divide by in their place.
    """

    first: Index
    last: Index
    number: Index
    first_seat: Index
    begin: Index
    width: Index
    cost: Index
    share: Any

    @property
    def seat(self) -> Index:
        """That of this block."""
        return self.first_seat + self.number

    @property
    def owner(self) -> Index:
        """The seat of the block with the tile's first part."""
        return self.first_seat + self.begin // self.share

    @property
    def last_owner(self) -> Index:
        """The seat of the block with the tile's last part."""
        return self.first_seat + (self.begin + self.width - self.cost - 1) // self.share

    def ends_with_share(self) -> Boolean:
        """Whether the share with the tile's last part ends where the tile does: it has no further tile."""
        return self.first_seat + (self.begin + self.width) // self.share > self.last_owner

    def is_whole(self) -> Boolean:
        """Whether the tile has one part."""
        return self.owner == self.last_owner

    def of(self, blocks: KeyBlocks) -> KeyBlocks:
        """Those of the tile's key blocks."""
        return KeyBlocks(cutlass.min(blocks.lo + self.first, blocks.hi), cutlass.min(blocks.lo + self.last, blocks.hi))


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """One work item: the queries `[first_token, first_token + tokens)` of a head, or of the heads packed with it.

    A row of the tile is (token, packed head), the head running fastest.

    Attributes:
        m_block: which tile of its head and sequence this is.
        head: query head, or KV head if query heads are folded into the rows.
        sequence: its sequence's number in the batch.
        batch, kv_batch: entry of the batch mode of Q and O, and of K and V; packed sequences have one entry.
        heads_per_kv: heads, as the tiles see them, that read one KV head, or what to divide by instead; None is 1.
        first_q, first_k: where its sequence begins in Q and O, and in K and V; 0 if these are not packed.
        first_token: first query of the tile, counted from the beginning of its sequence.
        mask: the keys that each query of the sequence sees.
        tile_n: keys of a block.
        tokens: queries of a whole tile; the last tile of a sequence may have fewer.
        packed_heads: query heads folded into the rows; 1 is none.
        share: the key blocks to compute; None is all.
    """

    m_block: Int32
    head: Int32
    sequence: Index
    batch: Index
    kv_batch: Index
    heads_per_kv: Any
    first_q: Index
    first_k: Index
    first_token: Int32
    mask: IntervalMask
    tile_n: cutlass.Constexpr[int]
    tokens: cutlass.Constexpr[int]
    packed_heads: cutlass.Constexpr[int]
    share: KeyShare | None = None

    @property
    def kv_head(self) -> Int32:
        """The head of K and V."""
        return self.head if self.heads_per_kv is None else self.head // self.heads_per_kv

    def exists(self) -> Boolean:
        """Whether the tile has a query. Those of a dense batch all do."""
        return self.first_token < self.mask.seqlen_q

    @property
    def first_row(self) -> Int32:
        """The tile's first query, counted as Q and O are."""
        return self.first_q + self.first_token

    def visited_blocks(self) -> KeyBlocks:
        """The key blocks that the tile visits, of its share."""
        blocks = KeyBlocks(*self.mask.n_blocks(self.first_token, self._last_token(), self.tile_n))
        return blocks if self.share is None else self.share.of(blocks)

    def full_blocks(self) -> tuple[Index, Index]:
        """The key blocks `[lo, hi)` that every query sees whole; none if `lo > hi`."""
        lo, hi = self.mask.full_n_blocks(self.first_token, self._last_token(), self.tile_n)
        return (lo, hi) if self.share is None else (cutlass.max(lo, self.visited_blocks().lo), hi)

    def rows(self) -> Int32:
        """How many rows of the tile exist."""
        return cutlass.min(self.tokens, self.mask.seqlen_q - self.first_token) * self.packed_heads

    def part(self, index: Int32, tokens: int) -> QueryTile:
        """A warpgroup's part: `tokens` queries from the `index * tokens`-th on."""
        return dataclasses.replace(self, first_token=self.first_token + index * tokens, tokens=tokens)

    def _last_token(self) -> Int32:
        return cutlass.min(self.first_token + self.tokens, self.mask.seqlen_q) - 1


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """The query blocks `[lo, hi)` that see some key of a tile; those of `[full_lo, full_hi)` need no mask.

    They are visited from `first` on, upwards or downwards, and around.
    """

    lo: Index
    hi: Index
    full_lo: Index
    full_hi: Index
    first: Index
    is_descending: cutlass.Constexpr[bool] = False

    @property
    def count(self) -> Index:
        """Number of blocks."""
        return self.hi - self.lo

    def following(self, m_block: Index) -> Index:
        """The block to visit after `m_block`; after the last one the first again, of another head."""
        if self.is_descending:
            return cutlass.select_(m_block == self.lo, self.hi - 1, m_block - 1)
        return cutlass.select_(m_block + 1 == self.hi, self.lo, m_block + 1)

    def is_cut(self, m_block: Index) -> Index:
        """Whether a block needs a mask."""
        return (m_block < self.full_lo) | (m_block >= self.full_hi)


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """One work item of a backward: the keys `[first_key, first_key + tile_n)` of a KV head.

    Attributes:
        n_block: which tile of its head and sequence this is.
        head: KV head.
        sequence: its sequence's number in the batch.
        batch: entry of the batch mode; packed sequences have one entry.
        first_q, first_k: where its sequence begins in Q and O, and in K and V; 0 if these are not packed.
        first_key: first key of the tile, counted from the beginning of its sequence.
        mask: the keys that each query of the sequence sees.
        tile_m: queries of a block.
        tile_n: keys of a whole tile; the last tile of a sequence may have fewer.
    """

    n_block: Int32
    head: Int32
    sequence: Index
    batch: Index
    first_q: Index
    first_k: Index
    first_key: Int32
    mask: IntervalMask
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    def exists(self) -> Boolean:
        """Whether the tile has a key. Those of a dense batch all do."""
        return self.first_key < self.mask.seqlen_k

    def is_lone(self) -> Boolean:
        """See `is_lone`."""
        return is_lone(self.mask.seqlen_q, self.mask.seqlen_k, self.mask.kind, self.tile_n)

    def uniform(self) -> KeyTile:
        """The same, in registers of the warp rather than of its threads; a whole warp calls it."""
        own: dict[str, Any] = {
            name: cute.arch.make_warp_uniform(getattr(self, name))
            for name in ("n_block", "head", "sequence", "first_q", "first_k", "first_key")
        }
        lengths = map(cute.arch.make_warp_uniform, (self.mask.seqlen_q, self.mask.seqlen_k))
        mask = dataclasses.replace(self.mask, **dict(zip(("seqlen_q", "seqlen_k"), lengths)))
        return dataclasses.replace(self, **own, mask=mask)

    def turn_at(self, m_block: Index) -> tuple[Index, Index]:
        """How many key tiles a query block that sees this one sees before it, and how many after it.

        Blocks that take turns add to a tile of dQ in this order, by ascending key. All of them visit queries from the
        last to the first. Those of the key tiles before this one were launched earlier, or drawn earlier by a block
        that runs (`cuteflash.kernels.sm90.handout`): a block never waits for one that may not run yet.
        """
        blocks = self.key_blocks(m_block)
        return self.n_block - blocks.lo, blocks.hi - 1 - self.n_block

    def key_blocks(self, m_block: Index) -> KeyBlocks:
        """The key tiles that a query block of its sequence sees."""
        first = m_block * self.tile_m
        last = cutlass.min(first + self.tile_m, self.mask.seqlen_q) - 1
        return KeyBlocks(*self.mask.n_blocks(first, last, self.tile_n))

    def query_blocks(self, is_descending: bool = False, is_spread: bool = False) -> QueryBlocks:
        """The query blocks that the tile visits: upwards, or downwards.

        With `is_spread` tiles that see the same ones begin at different ones.

        Rows past the last query need no mask: their log-sum-exp is infinite. Keys past the last one do.
        """
        mask = self.mask
        end = self.first_key + self.tile_n
        last = cutlass.min(end, mask.seqlen_k) - 1
        lo, hi = mask.m_blocks(self.first_key, last, self.tile_m)
        full_lo, full_hi = mask.full_m_blocks(self.first_key, last, self.tile_m)
        if mask.kind != "window":
            full_hi = hi
        full_lo = cutlass.select_(end > mask.seqlen_k, hi, cutlass.min(cutlass.max(full_lo, lo), hi))
        full_hi = cutlass.min(cutlass.max(full_hi, full_lo), hi)
        first = hi - 1 if is_descending else lo
        if is_spread and mask.kind == "full":
            count = cutlass.max(hi - lo, 1)
            stride = cutlass.max(count * self.tile_n // cutlass.max(mask.seqlen_k, 1), 1)
            first = lo + self.n_block * stride % count
        return QueryBlocks(lo, hi, full_lo, full_hi, first, is_descending)

    def q_bounds(self, key: Int32) -> tuple[Index, Index]:
        """The queries `[lo, hi)` that see a key of the tile, counted from its first; none if it does not exist."""
        key = self.first_key + key
        lo, hi = self.mask.q_bounds(key)
        return cutlass.select_(key < self.mask.seqlen_k, lo, UNBOUNDED), hi
