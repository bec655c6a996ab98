"""The scales of 8-bit operands, as a tile applies them: to the softmax's scale, and with V's mean to O at its end."""

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
    """Factors of Q, K and V, fp32 (batch, KV heads), and the mean that was taken out of V.

    Of packed sequences each is an entry of the batch. The rows after the last one have no scale: their scores do not
    exist, and their O is 0 times 1.

    Attributes:
        v_mean: (batch, KV heads, head_dim_v) fp32; None if V is whole.
        is_packed: whether the operands are packed sequences.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    v_mean: cute.Tensor | None
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

    def mean_of_v(self, tile: QueryTile) -> cute.Tensor:
        """The mean of a tile's V, (head_dim_v,)."""
        return self.v_mean[*self._place(tile), None]

    def _place(self, tile: QueryTile) -> tuple[Int32, Int32]:
        """(batch entry, KV head); of the rows after the last sequence that of the last one."""
        sequence = cutlass.min(tile.sequence, self.v.shape[0] - 1) if self.is_packed else tile.sequence
        return sequence, tile.kv_head
