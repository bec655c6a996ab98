"""Input checks of attention to keys in two parts: what tensors look like, and, apart, what the vectors say."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cuteflash.problem import LENGTH_MAX
from cuteflash.validate import (
    DIMS,
    FP8_DTYPES,
    FP32_MAX,
    FP32_TINY,
    PACKED_DIMS,
    SCALES,
    check_head_dim,
    check_kind,
    check_same_kind,
    check_strides,
    holds,
)
from cuteflash.validate_mla import ROPE_DIM
from cuteflash.validate_packed import PackedInputs, check_values, check_vectors


class PrefillOptions(NamedTuple):
    """The arguments of the operator after its tensors.

    Attributes:
        softmax_scale: factor of the scores, positive and finite; None is ``1 / sqrt(head_dim)``.
        causal: the last query is aligned with the last key, and a query sees no key after its own.
        deterministic: of the backward, as of `cuteflash.arguments.FwdOptions`.
        lengths: class of the sequences' lengths, likewise.
    """

    softmax_scale: float | None = None
    causal: bool = False
    deterministic: bool = False
    lengths: str | None = None


class PrefillInputs(NamedTuple):
    """The tensors of the operator; packed sequences have no batch mode and rows of all sequences in seqlen's place."""

    q: Tensor  # (batch, seqlen_q, heads, head_dim)
    k: Tensor  # (batch, seqlen_k, heads, head_dim - 64)
    k_rope: Tensor  # (batch, seqlen_k, 1, 64), the last columns of every head's key
    v: Tensor  # (batch, seqlen_k, heads, head_dim_v)
    cu_seqlens_q: Tensor | None = None  # (batch + 1,)
    cu_seqlens_k: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie one after the other."""
        return self.cu_seqlens_q is not None

    def packed(self, k: Tensor) -> PackedInputs:
        """As the operators of packed sequences name the tensors, with these keys."""
        assert self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        return PackedInputs(self.q, k, self.v, self.cu_seqlens_q, self.cu_seqlens_k)


def check_prefill(inputs: PrefillInputs, options: PrefillOptions) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError: a dtype that is not supported, not that of q, or of a vector that is not int32; one vector alone.
        ValueError: a shape, stride, device mix or option that is not allowed.
        NotImplementedError: a device or memory layout that is not supported.
    """
    scale = options.softmax_scale
    if scale is not None and not FP32_TINY <= scale <= FP32_MAX:
        raise ValueError(f"softmax_scale is {scale}; allowed: {SCALES}")
    if (inputs.cu_seqlens_q is None) != (inputs.cu_seqlens_k is None):
        name = "cu_seqlens_q" if inputs.cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"{name} is None; allowed: both vectors, or neither")
    q, k, k_rope, v = inputs[:4]
    dims = PACKED_DIMS if inputs.is_packed else DIMS
    tensors = {"q": q, "k": k, "k_rope": k_rope, "v": v}
    for name, tensor in tensors.items():
        if tensor.dtype in FP8_DTYPES:
            raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: torch.float16, torch.bfloat16")
        check_kind(name, tensor, dims)
        check_same_kind(name, tensor, q)
    last = len(dims) - 1
    check_head_dim("q", q, last)
    check_head_dim("v", v, last)
    _check_shape("k_rope", k_rope, (*v.shape[:-2], 1, ROPE_DIM), "v's rows, one head")
    _check_shape(
        "k", k, (*v.shape[:-1], q.shape[-1] - ROPE_DIM), f"v's rows and heads, {ROPE_DIM} columns fewer than q"
    )
    heads_axis = last - 1
    if holds(v.shape[heads_axis] != q.shape[heads_axis]):
        raise ValueError(f"v.shape[{heads_axis}] (heads) is {v.shape[heads_axis]}; allowed: {q.shape[heads_axis]}, q's")
    if not inputs.is_packed and holds(v.shape[0] != q.shape[0]):
        raise ValueError(f"v.shape[0] (batch) is {v.shape[0]}; allowed: {q.shape[0]}, that of q")
    for name, tensor in tensors.items():
        check_strides(name, tensor)
        if isinstance(tensor.shape[last - 2], int) and tensor.shape[last - 2] > LENGTH_MAX:
            raise ValueError(f"{name}.shape[{last - 2}] is {tensor.shape[last - 2]}; allowed: up to {LENGTH_MAX}")
    if inputs.is_packed:
        check_vectors(inputs.packed(k))


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], whose: str) -> None:
    if any(holds(size != other) for size, other in zip(tensor.shape, expected, strict=True)):
        raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; allowed: {tuple(expected)}, {whose}")


def check_prefill_values(inputs: PrefillInputs, *, complete: bool) -> None:
    """As `check_values`, of packed sequences."""
    if inputs.is_packed:
        check_values(inputs.packed(inputs.k), complete=complete)
