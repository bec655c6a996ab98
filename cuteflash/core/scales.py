"""The scales of 8-bit operands, as a tile applies them: to the softmax's scale, and to O at its end."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Float32

from cuteflash.arguments import ScaleTensors
from cuteflash.core.tile import QueryTile


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of Q, K and V, fp32 (batch, KV heads)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor

    @classmethod
    def of(cls, tensors: ScaleTensors) -> Scales | None:
        """Those of a kernel's arguments; None if its operands have 16 bits."""
        return None if tensors.q_descale is None else cls(*tensors)

    def of_scores(self, tile: QueryTile) -> Float32:
        """The factor of a tile's products of Q and K."""
        at = tile.kv_batch, tile.kv_head
        return self.q[at] * self.k[at]

    def of_v(self, tile: QueryTile) -> Float32:
        """The factor of a tile's V."""
        return self.v[tile.kv_batch, tile.kv_head]
