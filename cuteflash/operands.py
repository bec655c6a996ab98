"""The matrices of the two products of attention: their element types, widths, and how they are given."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self, cast, get_args

HalfDtype = Literal["fp16", "bf16"]
Fp8Dtype = Literal["e4m3", "e5m2"]
Dtype = HalfDtype | Fp8Dtype

DTYPES: tuple[str, ...] = get_args(HalfDtype)  # each of Q, K, V and O alike
FP8_OPERANDS: tuple[str, ...] = get_args(Fp8Dtype)  # of Q, K and V; O then has one of `DTYPES`
FP8_DTYPES: tuple[str, ...] = ("e4m3",)  # as rows and sweeps name operands of 8 bits: those of e5m2 take the same rows

DTYPE_BYTES: dict[Dtype, int] = {"fp16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}
FP8_OUT: HalfDtype = "bf16"  # element type of O if nothing else is asked for
HEAD_DIM_STEP = 8
HEAD_DIM_MAX = 256
PACK_GQA_MAX = 64  # query heads one tile can fold together: the smallest tile_m


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if a value is not one of those that are allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def packs_block_scales(heads: int) -> bool:
    """Whether scales of 128 tokens allow so many query heads of a KV head in the rows of a tile: see `Operands`."""
    return PACK_GQA_MAX % heads == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The matrices of S = Q Kᵀ and O = P V.

    Attributes:
        qk_dtype: element type of Q and K.
        pv_dtype: element type of V, and of P as the second product reads it. Of 8 bits P is e4m3.
        o_dtype: element type of O.
        head_dim: columns of Q and K; a multiple of 8 up to 256.
        head_dim_v: columns of V and O; a multiple of 8 up to 256.
        packed_heads: query heads of one KV head folded into the rows of a tile (``pack_gqa``); 1 is none.
        transposed_v: V is given as Vᵀ, in the order of keys that the product with an 8-bit P reads.
        has_v_mean: V is given minus a mean of each column, fp32, which is added to O.
        has_block_scales: each 128 tokens have scales of their own.
        cache_dtype: element type of K and V in memory beside a Q of 16 bits; None is that of Q. A kernel makes fp16 of
            them, which is the type of both products then, and K and V have a scale for each KV head of a batch entry.
        shares_k: all heads share the last 64 columns of K, which are a tensor of their own.
        transposed_before: the launch right before makes that Vᵀ, and may still run: only loads of Vᵀ wait for its end.

    8-bit operands have scales: fp32 factors of Q, K and V, one for each KV head of a batch entry or for each 128 tokens
    of it. The rows of a warpgroup then have one scale of Q, so that `packed_heads` divides its 64 rows.
    """

    qk_dtype: Dtype
    pv_dtype: Dtype
    o_dtype: HalfDtype
    head_dim: int
    head_dim_v: int
    packed_heads: int = 1
    transposed_v: bool = False
    has_v_mean: bool = False
    has_block_scales: bool = False
    cache_dtype: Literal["e4m3"] | None = None
    shares_k: bool = False
    transposed_before: bool = False

    def __post_init__(self) -> None:
        check_choice("dtype", self.qk_dtype, (*DTYPES, *FP8_OPERANDS))
        if self.pv_dtype != self.qk_dtype:
            raise ValueError(f"pv_dtype is {self.pv_dtype!r}; allowed: {self.qk_dtype!r}, that of Q and K")
        if self.is_fp8:
            check_choice("o_dtype", self.o_dtype, DTYPES)
        elif self.o_dtype != self.qk_dtype:
            raise ValueError(f"o_dtype is {self.o_dtype!r}; allowed: {self.qk_dtype!r}, that of Q and K")
        if self.transposed_v and not self.is_fp8:
            raise ValueError(f"transposed_v is True; allowed with {self.pv_dtype!r}: False, only 8-bit V is transposed")
        if self.transposed_before and not self.transposed_v:
            raise ValueError("transposed_before is True; allowed without transposed_v: False")
        if self.has_v_mean and not self.is_fp8:
            raise ValueError(f"has_v_mean is True; allowed with {self.pv_dtype!r}: False, 8-bit V has one apart")
        for name, value in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if not HEAD_DIM_STEP <= value <= HEAD_DIM_MAX or value % HEAD_DIM_STEP:
                raise ValueError(f"{name} is {value}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}")
        if self.shares_k and (self.has_scales or self.head_dim not in (128, 192, 256)):
            raise ValueError(f"shares_k is True; allowed with head_dim {self.head_dim} of {self.k_dtype!r}: False")
        if not 1 <= self.packed_heads <= PACK_GQA_MAX:
            raise ValueError(f"packed_heads is {self.packed_heads}; allowed: 1 to {PACK_GQA_MAX}")
        if self.cache_dtype is not None and (self.is_fp8 or self.cache_dtype not in FP8_DTYPES):
            raise ValueError(
                f"cache_dtype is {self.cache_dtype!r}; allowed with {self.qk_dtype!r}: None, or of 16 bits e4m3"
            )
        if self.has_block_scales and not self.is_fp8:
            raise ValueError(
                f"has_block_scales is True; allowed with {self.pv_dtype!r}: False, 8-bit operands have scales"
            )
        if self.has_block_scales and not packs_block_scales(self.packed_heads):
            raise ValueError(
                f"packed_heads is {self.packed_heads}; allowed with has_block_scales: divisors of {PACK_GQA_MAX}"
            )

    @classmethod
    def of(cls, dtype: Dtype, head_dim: int, head_dim_v: int, packed_heads: int = 1) -> Self:
        """Operands of one element type, and O of the same; of 8 bits, O is `FP8_OUT`."""
        o_dtype = FP8_OUT if dtype in FP8_OPERANDS else cast(HalfDtype, dtype)
        return cls(dtype, dtype, o_dtype, head_dim, head_dim_v, packed_heads)

    @property
    def is_fp8(self) -> bool:
        """Whether Q, K and V have 8 bits."""
        return self.qk_dtype in FP8_OPERANDS

    @property
    def row_dtype(self) -> str:
        """The element type by which rows know these operands."""
        return FP8_DTYPES[0] if self.is_fp8 else self.qk_dtype

    @property
    def product_dtype(self) -> Dtype:
        """The element type of Q, K and V as the products read them."""
        return self.qk_dtype if self.cache_dtype is None else "fp16"

    @property
    def k_dtype(self) -> Dtype:
        """The element type of K in memory."""
        return self.cache_dtype or self.qk_dtype

    @property
    def v_dtype(self) -> Dtype:
        """The element type of V in memory."""
        return self.cache_dtype or self.pv_dtype

    @property
    def has_scales(self) -> bool:
        """Whether K and V have scales."""
        return self.is_fp8 or self.cache_dtype is not None

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one key's K and V."""
        return self.head_dim * DTYPE_BYTES[self.k_dtype] + self.head_dim_v * DTYPE_BYTES[self.v_dtype]
