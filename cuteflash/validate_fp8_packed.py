"""Input checks of packed sequences of 8-bit operands with scales."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cuteflash.arguments import Fp8Options
from cuteflash.core.tile_numbers import first_tile
from cuteflash.problem import TRANSPOSED_KEYS
from cuteflash.quantize_problem import BLOCK_TOKENS
from cuteflash.validate import PACKED_DIMS
from cuteflash.validate_fp8 import check_fp8_operands, check_keys, check_packs_block_scales, check_per_head
from cuteflash.validate_packed import PackedInputs, check_vectors


class Fp8PackedInputs(NamedTuple):
    """The tensors of an operator on packed sequences of 8-bit operands, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    v_mean: Tensor | None = None

    @property
    def packed(self) -> PackedInputs:
        """Those that packed sequences of 16 bits have, too."""
        return PackedInputs(
            self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k
        )

    @property
    def descales(self) -> dict[str, Tensor]:
        """The scales by name."""
        return {name: getattr(self, name) for name in ("q_descale", "k_descale", "v_descale")}

    @property
    def has_block_scales(self) -> bool:
        """Whether each 128 tokens have scales of their own."""
        return self.q_descale.dim() == 3

    def head_dim_v(self, options: Fp8Options) -> int:
        """Columns of V."""
        return self.v.shape[1 if options.transposed_v else 2]


def first_key(first_row: int, sequence: int) -> int:
    """Where a sequence begins in Vᵀ if it begins at row `first_row` of K; for the batch size, how long Vᵀ is."""
    key: int = first_tile(first_row, sequence, TRANSPOSED_KEYS) * TRANSPOSED_KEYS
    return key


def check_fp8_packed(inputs: Fp8PackedInputs, options: Fp8Options) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element. Errors as `check_fp8`'s."""
    q, k, v = inputs[:3]
    check_fp8_operands(q, k, v, options, PACKED_DIMS)
    packed = inputs.packed
    check_vectors(packed)
    if options.transposed_v:
        more = f", rounded down, and {TRANSPOSED_KEYS} more for each of {packed.batch} sequences"
        check_keys(v, first_key(k.shape[0], packed.batch), k, more)
    sizes, words = (packed.batch, k.shape[1]), "(sequences, heads of k)"
    if inputs.has_block_scales:
        rows = q.shape[0], k.shape[0], k.shape[0]
        shapes: list[tuple[int, ...]] = [(1, k.shape[1], first_tile(some, packed.batch, BLOCK_TOKENS)) for some in rows]
        of_blocks = (
            f"(1, heads of k, blocks of {BLOCK_TOKENS} tokens), as q_descale has 3 dimensions: those of all rows, "
            f"rounded down, and one more for each of {packed.batch} sequences"
        )
        check_packs_block_scales(q.shape[1], k.shape[1], options)
    else:
        shapes, of_blocks = [sizes] * 3, words
    for (name, tensor), shape in zip(inputs.descales.items(), shapes, strict=True):
        check_per_head(name, tensor, q, shape, of_blocks)
    if inputs.v_mean is not None:
        check_per_head("v_mean", inputs.v_mean, q, (*sizes, inputs.head_dim_v(options)), f"{words} and v's head_dim")
