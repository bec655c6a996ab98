"""The scales of 8-bit operands, as a tile applies them: to the softmax's scale, and to O at its end."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.arguments import ScaleTensors
from cuteflash.core.tile import QueryTile
from cuteflash.problem import Storage


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of Q, K and V, fp32 (batch, KV heads); of packed sequences each is an entry of the batch.

    The rows after the last packed sequence have none: their scores do not exist, and their O is 0 times 1.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    is_packed: cutlass.Constexpr[bool]

    @classmethod
    def of(cls, tensors: ScaleTensors, storage: Storage) -> Scales | None:
        """Those of a kernel's arguments; None if its operands have 16 bits."""
        return None if tensors.q_descale is None else cls(*tensors, is_packed=storage.q == "varlen")

    def of_scores(self, tile: QueryTile) -> Float32:
        """The factor of a tile's products of Q and K."""
        at = self._place(tile)
        return self.q[at] * self.k[at]

    def of_v(self, tile: QueryTile) -> Float32:
        """The factor of a tile's V."""
        sequence, head = self._place(tile)
        scale = self.v[sequence, head]
        return cutlass.select_(tile.sequence == sequence, scale, Float32(1.0)) if self.is_packed else scale

    def _place(self, tile: QueryTile) -> tuple[Int32, Int32]:
        """(batch entry, KV head); of the rows after the last sequence that of the last one."""
        sequence = cutlass.min(tile.sequence, self.v.shape[0] - 1) if self.is_packed else tile.sequence
        return sequence, tile.kv_head
