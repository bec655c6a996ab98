"""The run-time side of a backward: which tiles of keys there are, in which order, under which mask and scale."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cuteflash.arguments import BwdScalars, BwdTensors, PackedTensors
from cuteflash.core.launch import LONGER_THAN_MEAN, lengths_of, live_rows, score_scales
from cuteflash.core.lengths import Lengths, Sequence
from cuteflash.core.mask import IntervalMask, blocks_of
from cuteflash.core.schedule import Order, RaggedOrder, TileOrder
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.tile import KeyTile, QueryBlocks, stores_dq
from cuteflash.problem import BwdProblem, MaskKind, Storage
from cuteflash.traits.base import BwdTraits

LONGEST_OF_SOME = 12  # in mean lengths: a few sequences are that long, which may have most of the work
LONE_HEADS = 8  # of a packed tile that one block takes, at most
LONE_ROUNDS = 8  # of blocks that run at the same time, at least, that are left then
LONG_LOOP = 1536  # keys, from which on heads that run side by side are faster; between the lengths that were timed
TURN_SLACK = 2  # steps that pass, of one, before blocks begin that take their turns after those that begin now


@dataclasses.dataclass(frozen=True)
class BwdLaunch:
    """What the blocks of one launch of a backward share.

    Attributes:
        order: all key tiles, in the order in which they are handed out.
        heads_per_kv: query heads that read one KV head.
        lengths, window_left, window_right, attention_chunk, scale_log2, inner_scale, mask_kind: see `Launch`.
        softmax_scale: factor of dQ and dK.
        tile_m, tile_n: of the kernel.
        heads: KV heads.
        heads_at_once: so many of them have one tile in the order, whose block takes one after the other; None is one.
        held_dq: as in `BwdTraits`, of a dense batch; then the order has one tile for all keys of a head.
    """

    order: Order
    heads_per_kv: Int32
    lengths: Lengths
    window_left: Int32
    window_right: Int32
    attention_chunk: Int32 | None
    scale_log2: Float32
    inner_scale: Float32
    softmax_scale: Float32
    mask_kind: cutlass.Constexpr[MaskKind]
    storage: cutlass.Constexpr[Storage]
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    heads: Int32
    heads_at_once: Int32 | None
    held_dq: cutlass.Constexpr[int]
    line: ClassVar[None] = None  # keys are not split

    @staticmethod
    def of(kernel, tensors: BwdTensors, packed: PackedTensors, scalars: BwdScalars) -> BwdLaunch:
        """The launch of a kernel; `tensors` as `batched` returns them."""
        scores, traits = kernel.problem.scores, kernel.traits
        heads_per_kv = tensors.q.shape[2] // tensors.k.shape[2]
        scale_log2, inner_scale = score_scales(scores.softcap, scalars)
        at_once = lone_heads(kernel, tensors, packed, scalars)
        return BwdLaunch(
            order=key_order(kernel, tensors, packed, scalars, at_once),
            heads_per_kv=heads_per_kv,
            lengths=lengths_of(tensors, packed),
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            attention_chunk=scalars.attention_chunk if scores.chunked else None,
            scale_log2=scale_log2 * LOG2_E,
            inner_scale=inner_scale,
            softmax_scale=scalars.softmax_scale,
            mask_kind=scores.mask,
            storage=kernel.problem.storage,
            tile_m=traits.tile_m,
            tile_n=traits.tile_n,
            heads=tensors.k.shape[2],
            heads_at_once=at_once,
            held_dq=held_dq(traits, kernel.problem),
        )

    def tile(self, index: Int32) -> KeyTile:
        """The tile with number `index` of the order; a whole warp calls it.

        The first keys of a sequence come first: the most queries see them.
        """
        n_block, head, number = self.order.tile(index)
        if self.storage.k == "dense":
            n_block = self.order.m_blocks - 1 - n_block
        return self.tile_of(n_block, head, number, self.sequence(number))

    def sequence(self, number: Int32) -> Sequence:
        """The sequence of a batch entry, or the rows of K after the last one."""
        return self.lengths.sequence_of_keys(number)

    def tile_of(self, n_block: Int32, head: Int32, number: Int32, sequence: Sequence) -> KeyTile:
        """Key tile `n_block` of a KV head of batch entry `number`, which is `sequence`."""
        window = self.window_left, self.window_right
        mask = IntervalMask(self.mask_kind, sequence.seqlen_q, sequence.seqlen_k, *window, self.attention_chunk)
        return KeyTile(
            n_block=n_block,
            head=head,
            sequence=number,
            batch=0 if self.storage.k == "varlen" else number,
            first_q=sequence.first_q,
            first_k=sequence.first_k,
            first_key=n_block * self.tile_n,
            mask=mask,
            tile_m=self.tile_m,
            tile_n=self.tile_n,
        )

    def key_tiles(self) -> Int32:
        """Key tiles of a head of a dense batch."""
        return blocks_of(self.lengths.seqlen_k, self.tile_n)

    def stores_dq(self, tile: KeyTile) -> Boolean:
        """Whether dQ that a tile's block computes is stored, and not added to a sum in memory."""
        lengths, tiles = (tile.mask.seqlen_q, tile.mask.seqlen_k), (self.tile_m, self.tile_n)
        return stores_dq(*lengths, self.mask_kind, self.heads_per_kv, tiles, self.held_dq)

    def steps(self, blocks: QueryBlocks) -> Int32:
        """Steps of a tile with these query blocks: each block of each query head."""
        return self.heads_per_kv * cutlass.max(blocks.count, 0)

    def rows_visited(self, tile: KeyTile) -> Int32:
        """How many rows of Q a tile's steps have: what it costs."""
        return self.steps(tile.query_blocks()) * self.tile_m


def held_dq(traits: BwdTraits, problem: BwdProblem) -> int:
    """See `BwdLaunch`."""
    return traits.held_dq if problem.storage.k == "dense" else 0


def adds_in_turn(traits: BwdTraits, problem: BwdProblem) -> bool:
    """Whether blocks add to a tile of dQ by ascending key, each after the one before it."""
    return problem.is_deterministic or (traits.in_turn and problem.storage.k == "dense")


def lone_heads(kernel, tensors: BwdTensors, packed: PackedTensors, scalars: BwdScalars) -> Int32 | None:
    """How many KV heads of a packed tile a block takes, if most blocks are lone: finding the tile is much of the work.

    None if each head has a block.
    """
    traits = kernel.traits
    if kernel.problem.storage.k != "varlen" or not traits.lone_blocks:
        return None
    _, rows, heads, _ = tensors.k.shape
    tiles = flat_order(packed.cu_seqlens_k, rows, heads, traits.tile_n, alike=True).size()
    rounds = tiles // (scalars.num_sms * traits.blocks_per_sm)
    return cutlass.min(cutlass.max(rounds // LONE_ROUNDS, 1), LONE_HEADS)


def key_order(
    kernel, tensors: BwdTensors, packed: PackedTensors, scalars: BwdScalars, heads_at_once: Int32 | None = None
) -> Order:
    """The order of the key tiles of a kernel, in groups of heads; that of packed sequences goes by their mean length.

    What a head's tiles read and add to again and again, Q, dO and the fp32 sum of dQ, should stay in L2. With
    `heads_at_once` so many heads have one tile, whose head is their number.
    """
    traits, problem = kernel.traits, kernel.problem
    batch, seqlen_q, heads_q, _ = tensors.q.shape
    _, seqlen_k, heads_k, _ = tensors.k.shape
    row_bytes = problem.operands.kv_row_bytes + 4 * traits.head_dim
    differ = problem.scores.mask != "full"  # what tiles of a sequence cost
    live = seqlen_q
    if problem.storage.k == "varlen":
        batch = packed.cu_seqlens_k.shape[0] - 1
        # Sums of dQ that leave L2 take power. Under other masks, tiles of fewer heads at a time gained nothing.
        adds = traits.first_stores and not differ
        live = live_rows(seqlen_q, batch, LONGEST_OF_SOME if adds else LONGER_THAN_MEAN)
    group = TileOrder.head_group(live * (heads_q // heads_k), Int32(1), row_bytes)
    if problem.is_deterministic and traits.turns_at_once:
        group = cutlass.max(group, scalars.num_sms // traits.turns_at_once)
    if problem.storage.k == "varlen":
        if problem.is_deterministic and traits.first_stores:
            steps = seqlen_q // batch * (heads_q // heads_k) // (traits.tile_m * (2 if differ else 1))
            group = cutlass.max(group, heads_in_turn(steps, scalars.num_sms))
        if heads_at_once is not None:
            heads_k = (heads_k + heads_at_once - 1) // heads_at_once
        order = flat_order(packed.cu_seqlens_k, seqlen_k, heads_k, traits.tile_n, traits.lone_blocks)
        return dataclasses.replace(
            order,
            counter=packed.tile_counter,
            group=cutlass.min(group, heads_k),
            draws_first=problem.is_deterministic,  # a block waits for blocks with tiles before its own: do they run?
        )
    n_blocks = Int32(1) if held_dq(traits, problem) else cute.ceil_div(seqlen_k, traits.tile_n)
    if differ and traits.persistent:
        group = TileOrder.even_group(group, n_blocks, scalars.num_sms)
    by_block = differ or adds_in_turn(traits, problem)
    if not by_block and traits.family == "sm90":  # elsewhere not timed
        # Fewer blocks add to the same tile of dQ at a time, which pays in long loops; short ones take head after head.
        group, by_block = cutlass.min(group, 1 + seqlen_k // LONG_LOOP * group), True
    return TileOrder(n_blocks, heads_k, batch, cutlass.min(group, heads_k * batch), by_block, zigzag=differ)


def heads_in_turn(steps: Int32, blocks: Int32) -> Int32:
    """So many heads side by side that blocks seldom wait for their turn.

    A block is to be a step behind the one with the key tile before its own, and blocks begin as others end, `blocks` in
    the `steps` of a mean loop: if those of as many heads begin before the next key tile's do, that one comes in time.
    """
    return cute.ceil_div(TURN_SLACK * blocks, cutlass.max(steps, 1))


def flat_order(cu: cute.Tensor, rows: Int32, heads: Int32, tile: int, alike: bool) -> RaggedOrder:
    """The tiles of packed sequences, each head's beside the others', first rows first, one a block."""
    return RaggedOrder(
        cu_q=cu,
        counter=None,
        rows=rows,
        heads=heads,
        batch=cu.shape[0] - 1,
        group=heads,
        passes=Int32(1),
        tile_tokens=tile,
        longest_first=False,
        alike=alike,
    )
