"""The scales of 8-bit operands, as a tile applies them: to the softmax's scale, and with V's mean to O at its end."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Float32

from cuteflash.arguments import ScaleTensors
from cuteflash.core.tile import QueryTile


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of Q, K and V, fp32 (batch, KV heads), and the mean that was taken out of V.

    Attributes:
        v_mean: (batch, KV heads, head_dim_v) fp32; None if V is whole.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    v_mean: cute.Tensor | None

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

    def mean_of_v(self, tile: QueryTile) -> cute.Tensor:
        """The mean of a tile's V, (head_dim_v,)."""
        return self.v_mean[tile.kv_batch, tile.kv_head, None]
