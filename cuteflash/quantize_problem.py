"""Quantising Q, K and V to FP8 for attention: the words for it, what a kernel is generated for, and its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

from cuteflash.problem import DTYPES, HEAD_DIM_MAX, Dtype, Fp8Dtype

Granularity = Literal["head", "block"]
RotaryDtype = Literal["fp16", "bf16", "fp32"]

GRANULARITIES: tuple[str, ...] = get_args(Granularity)
BLOCK_TOKENS = 128  # of a scale, and what the keys of V^T are padded to a multiple of
HEAD_DIM_STEP = 16  # rows of 8-bit elements begin on 16 bytes
ROTARY_STEP = 16  # half of the rotated columns are whole loads of 8
HADAMARD_BLOCKS = (32, 64, 128, 256)
CLUSTER_MAX = 8  # blocks of a cluster that every GPU takes
HADAMARD_OF_MMA = 64  # columns that tensor cores mix


class QuantizeOptions(NamedTuple):
    """The arguments of the operator after its tensors.

    Attributes:
        granularity: ``"head"``: one scale for each (batch entry, KV head); ``"block"``: one for each 128 tokens of it.
        hadamard: columns of a block that a Hadamard rotation of Q and K mixes; 0 is none.
        rotary_interleaved: pairs of columns that the rotary embedding rotates are neighbours, not ``rotary_dim / 2``
            apart.
        transpose_v: V is returned as V^T, its keys in the order in which FP8 attention takes them.
        smooth_v: V is quantised minus its mean over the tokens.
        to: element type of the result, ``"e4m3"`` or ``"e5m2"``.
    """

    granularity: str = "head"
    hadamard: int = 0
    rotary_interleaved: bool = False
    transpose_v: bool = False
    smooth_v: bool = False
    to: str = "e4m3"


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeProblem:
    """What the quantising kernels are generated for.

    Attributes:
        dtype: element type of Q, K and V.
        head_dim: columns of Q and K.
        head_dim_v: columns of V.
        granularity: see `QuantizeOptions`.
        has_scales: the scales are given; otherwise they are computed.
        hadamard: columns of a block; 0 is no rotation.
        rotary_dim: columns of Q and K that the rotary embedding rotates; 0 is none.
        rotary_interleaved: see `QuantizeOptions`.
        rotary_dtype: element type of the cosines and sines.
        transposes_v: V^T is written, not V.
        smooths_v: V's mean is subtracted.
        to: element type of the result.
        is_packed: sequences lie one after the other, without a batch dimension.
        has_used: of packed sequences only the first rows count, as many as `QuantizeTensors.used_q` and `used_k` say.
        is_grouped: several heads of Q share a scale that the block which converts a tile finds.
        cluster: how many heads of Q share a scale that as many blocks find together, each of one; 1 if none do.
        measures_shared: whole heads of packed sequences with a rotary embedding are measured, those of K and V being
            fewer.
        folds: what is measured of the parts of heads, which are few and have a rotary embedding, for scales of whole
            heads is put together by each block that converts.
    """

    dtype: Dtype
    head_dim: int
    head_dim_v: int
    granularity: Granularity = "head"
    has_scales: bool = False
    hadamard: int = 0
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_dtype: RotaryDtype = "fp32"
    transposes_v: bool = False
    smooths_v: bool = False
    to: Fp8Dtype = "e4m3"
    is_packed: bool = False
    has_used: bool = False
    is_grouped: bool = False
    cluster: int = 1
    measures_shared: bool = False
    folds: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if not HEAD_DIM_STEP <= value <= HEAD_DIM_MAX or value % HEAD_DIM_STEP:
                raise ValueError(f"{name} is {value}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}")

    @property
    def hadamard_scale(self) -> float:
        """What makes the Hadamard matrix, whose elements are 1 and -1, a rotation."""
        return self.hadamard**-0.5 if self.hadamard else 1.0

    @property
    def splits_columns(self) -> bool:
        """Whether a thread has columns of both halves of what a rotary embedding rotates in a row of Q or K.

        A Hadamard rotation may follow if its blocks are those of four neighbouring threads.
        """
        is_whole = self.rotary_dim == self.head_dim and not self.head_dim & (self.head_dim - 1)
        is_mixed = is_whole and self.hadamard == HADAMARD_OF_MMA
        return bool(self.rotary_dim) and not self.rotary_interleaved and (not self.hadamard or is_mixed)

    @property
    def keeps_angles(self) -> bool:
        """Whether a thread keeps the cosines and sines of its rows, having both columns of each pair."""
        return self.splits_columns or (bool(self.rotary_dim) and self.rotary_interleaved)

    @property
    def shares_angles(self) -> bool:
        """Whether the heads of all batch entries have the same cosines and sines in a tile."""
        return bool(self.rotary_dim) and not (self.is_packed or self.is_grouped)

    @property
    def shares_heads(self) -> bool:
        """Whether a block converts heads of Q and K of all batch entries, whose scales it finds."""
        return self.shares_angles and self.scales_by_block and (self.keeps_angles or self.cluster > 1)

    @property
    def loads_angles_by_rows(self) -> bool:
        """Whether neighbouring threads load neighbouring cosines and sines, in fp32, for each other.

        Of shorter rows what a thread keeps is half of what it would load at once.
        """
        is_whole = self.rotary_dim == self.head_dim and self.head_dim in (128, 256)
        return self.splits_columns and is_whole and self.rotary_dtype == "fp32"

    @property
    def scales_by_block(self) -> bool:
        """Whether the block that converts a tile of tokens finds its scale itself."""
        return not self.has_scales and self.granularity == "block"

    @property
    def measures_heads(self) -> bool:
        """Whether the largest magnitudes of whole heads are computed before anything is converted."""
        return not self.has_scales and self.granularity == "head"

    @property
    def statistics(self) -> int:
        """What is computed of a column of V to be smoothed: its sum, and for a head's scale both extremes."""
        return 3 if self.measures_heads else 1

    @property
    def measures(self) -> bool:
        """Whether something is computed of whole heads before anything is converted."""
        return self.measures_heads or self.smooths_v


@dataclasses.dataclass(frozen=True, slots=True)
class TransposeProblem:
    """What the kernel that makes V^T of 8-bit rows is generated for.

    Attributes:
        dtype: element type of V.
        head_dim_v: columns of V.
    """

    dtype: Fp8Dtype
    head_dim_v: int


class QuantizeTensors(NamedTuple):
    """The tensors of the quantising kernels; inside them CuTe tensors, outside torch's.

    A descale is (batch, kv_heads), or (batch, kv_heads, blocks) with granularity ``"block"``. Packed tensors have all
    rows in one dimension and none for the batch, as V^T; the descales of all their blocks are (1, kv_heads, blocks).
    The numbers of a sequence's blocks, and so its keys in V^T, follow from where it begins, see
    `core.tile_numbers.first_tile`.
    """

    q: Any  # (batch, seqlen_q, heads, head_dim)
    k: Any  # (batch, seqlen_k, kv_heads, head_dim)
    v: Any  # (batch, seqlen_k, kv_heads, head_dim_v)
    q8: Any  # as q, e4m3
    k8: Any  # as k, e4m3
    v8: Any  # as v, e4m3; V^T is (batch, kv_heads, head_dim_v, seqlen_k rounded up to 128)
    q_descale: Any  # fp32
    k_descale: Any
    v_descale: Any
    v_mean: Any = None  # (batch, kv_heads, head_dim_v) fp32, of a smoothed V
    cos: Any = None  # (seqlen, rotary_dim / 2), of a rotary embedding
    sin: Any = None
    workspace: Any = None  # (n,) fp32: magnitudes and sums of parts of heads, if something is measured
    cu_q: Any = None  # (batch + 1,) int32: first row of each packed sequence, then the end of the last one
    cu_k: Any = None
    used_q: Any = None  # (batch,) int32: how many rows of each packed sequence count
    used_k: Any = None
