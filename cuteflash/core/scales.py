"""The scales of 8-bit operands, as a tile applies them: to the softmax's scale, and with V's mean to O at its end.

With a scale for each 128 tokens, that of K belongs to the scores of a key block, and that of V to its product with P.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import ScaleTensors
from cuteflash.core.tile import QueryTile
from cuteflash.core.tile_numbers import first_tile
from cuteflash.problem import Storage
from cuteflash.quantize_problem import BLOCK_TOKENS


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """The scales of a tile's K and V, of 128 keys each.

    Attributes:
        k, v: fp32 (blocks of 128 keys,).
        last_v: fp32 register tensor of one element: that of the key block whose scores were computed last, and whose
            product with V comes next.
        blocks: key blocks that share a scale.
    """

    k: cute.Tensor
    v: cute.Tensor
    last_v: cute.Tensor
    blocks: cutlass.Constexpr[int]

    def of_keys(self, n_block: Int32) -> Float32:
        """The factor of a key block's scores."""
        return self.k[n_block // self.blocks]

    def take_v(self, n_block: Int32) -> None:
        """Load the factor of a key block's V."""
        self.last_v[0] = self.v[n_block // self.blocks]


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of Q, K and V, fp32 (batch, KV heads[, blocks of 128 tokens]), and the mean that was taken out of V.

    Of packed sequences each is an entry of the batch. Scales of 128 tokens are one entry for all of them: where those
    of a sequence begin follows from where it does, by `first_tile`. The rows after the last one have no scale: their
    scores do not exist, and their O is 0 times 1.

    Attributes:
        q: None if Q has 16 bits.
        v_mean: (batch, KV heads, head_dim_v) fp32; None if V is whole.
        is_packed: whether the operands are packed sequences.
    """

    q: cute.Tensor | None
    k: cute.Tensor
    v: cute.Tensor
    v_mean: cute.Tensor | None
    is_packed: cutlass.Constexpr[bool]

    @classmethod
    def of(cls, tensors: ScaleTensors, storage: Storage) -> Scales | None:
        """Those of a kernel's arguments; None if its operands have 16 bits."""
        return None if tensors.k_descale is None else cls(*tensors, is_packed=storage.q == "varlen")

    @property
    def are_of_blocks(self) -> bool:
        """Whether each 128 tokens have scales of their own."""
        return cute.rank(self.k) == 3

    def of_scores(self, tile: QueryTile) -> Float32:
        """The factor of a tile's products of Q and K; with scales of blocks that of Q alone.

        The tile then lies in one block. One past the last query takes the last block's.
        """
        at = self._place(tile)
        if self.q is None:
            return self.k[at]
        if not self.are_of_blocks:
            return self.q[at] * self.k[at]
        block = tile.first_token // BLOCK_TOKENS
        if self.is_packed:
            at, block = (0, tile.kv_head), first_tile(tile.first_q, tile.sequence, BLOCK_TOKENS) + block
        return self.q[*at, cutlass.min(block, self.q.shape[2] - 1)]

    def of_v(self, tile: QueryTile) -> Float32 | None:
        """The factor of a tile's V; None if each block has its own."""
        if self.are_of_blocks:
            return None
        sequence, head = self._place(tile)
        scale = self.v[sequence, head]
        return cutlass.select_(tile.sequence == sequence, scale, Float32(1.0)) if self.is_packed else scale

    def of_blocks(self, tile: QueryTile) -> BlockScales | None:
        """The factors of a tile's key blocks; None if all have the same."""
        if not self.are_of_blocks:
            return None
        if self.is_packed:
            first = 0, 0, first_tile(tile.first_k, tile.sequence, BLOCK_TOKENS)
            k, v = (cute.domain_offset(first, x)[0, tile.kv_head, None] for x in (self.k, self.v))
        else:
            k, v = (x[*self._place(tile), None] for x in (self.k, self.v))
        return BlockScales(k, v, cute.make_rmem_tensor(1, Float32), BLOCK_TOKENS // tile.tile_n)

    def mean_of_v(self, tile: QueryTile) -> cute.Tensor:
        """The mean of a tile's V, (head_dim_v,)."""
        return self.v_mean[*self._place(tile), None]

    def _place(self, tile: QueryTile) -> tuple[Int32, Int32]:
        """(batch entry, KV head); of the rows after the last sequence that of the last one."""
        sequence = cutlass.min(tile.sequence, self.v.shape[0] - 1) if self.is_packed else tile.sequence
        return sequence, tile.kv_head
