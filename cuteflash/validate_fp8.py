"""Input checks of 8-bit operands with scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.arguments import Fp8Options
from cuteflash.problem import DTYPES, PACK_GQA_MAX, TRANSPOSED_KEYS, packs_block_scales
from cuteflash.quantize_problem import BLOCK_TOKENS
from cuteflash.validate import (
    DIMS,
    FP8_DTYPES,
    Dims,
    check_head_dim,
    check_kind,
    check_options,
    check_same_device,
    check_same_kind,
    check_shapes,
    check_strided,
    check_strides,
    holds,
)

HEAD_DIM_STEP = 16  # a row's bytes are a multiple of 16


class Fp8Inputs(NamedTuple):
    """The tensors of an operator on 8-bit operands."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    v_mean: Tensor | None = None

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
        return self.v.shape[2 if options.transposed_v else 3]


def check_fp8(inputs: Fp8Inputs, options: Fp8Options) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, stride, device mix or option that is not allowed.
        NotImplementedError: a device or memory layout that is not supported.
    """
    q, k, v = inputs[:3]
    check_fp8_operands(q, k, v, options, DIMS)
    batch, keys, heads, _ = k.shape
    if options.transposed_v:
        check_keys(v, -(-keys // TRANSPOSED_KEYS) * TRANSPOSED_KEYS, k)
    _check_descales(inputs, options)
    if inputs.v_mean is not None:
        expected_mean = batch, heads, inputs.head_dim_v(options)
        check_per_head("v_mean", inputs.v_mean, q, expected_mean, "(batch, heads) of k and v's head_dim")


def check_fp8_operands(q: Tensor, k: Tensor, v: Tensor, options: Fp8Options, dims: Dims) -> None:
    """What `check_fp8` says of options and operands, whose dimensions are `dims`, but for the keys of Vᵀ."""
    check_options(options)
    if options.out_dtype not in DTYPES:
        raise ValueError(f"out_dtype is {options.out_dtype!r}; allowed: {', '.join(map(repr, DTYPES))}")
    v_dims = transposed_dims(dims) if options.transposed_v else dims
    for name, tensor, names in (("q", q, dims), ("k", k, dims), ("v", v, v_dims)):
        check_kind(name, tensor, names, FP8_DTYPES)
        check_same_kind(name, tensor, q)
    check_shapes(q, k, options.pack_gqa, dims, HEAD_DIM_STEP)
    check_head_dim("v", v, v_dims.index("head_dim"), HEAD_DIM_STEP)
    expected = dict(zip(dims, k.shape, strict=True))
    for axis, dim in enumerate(v_dims):
        if dim not in ("head_dim", "keys") and holds(v.shape[axis] != expected[dim]):
            raise ValueError(
                f"v.shape[{axis}] ({dim}) is {v.shape[axis]}; allowed: {expected[dim]}, that of k "
                f"(k.shape is {tuple(k.shape)}, transposed_v is {options.transposed_v})"
            )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not holds(tensor.shape[-1] == 0):  # the keys of Vᵀ: of none, no stride is used
            check_strides(name, tensor)


def transposed_dims(dims: Dims) -> Dims:
    """The dimensions of Vᵀ, if `dims` are those of K."""
    return (*dims[:-3], "heads", "head_dim", "keys")


def check_keys(v: Tensor, expected: int, k: Tensor, more: str = "") -> None:
    """Raise ValueError if Vᵀ does not have as many keys as its layout; `more` says what else they depend on."""
    if holds(v.shape[-1] != expected):
        raise ValueError(
            f"v.shape[{v.dim() - 1}] (keys) is {v.shape[-1]}; allowed: {expected}, those of k in whole "
            f"{TRANSPOSED_KEYS}s{more} (k.shape is {tuple(k.shape)}, transposed_v is True)"
        )


def _check_descales(inputs: Fp8Inputs, options: Fp8Options) -> None:
    q, k = inputs.q, inputs.k
    (batch, keys, heads, _), queries, words = k.shape, q.shape[1], "(batch, heads) of k"
    blocks: tuple[tuple[int, ...], ...] = ((), (), ())
    if inputs.has_block_scales:
        blocks = tuple((-(-tokens // BLOCK_TOKENS),) for tokens in (queries, keys, keys))
        words += f" and blocks of {BLOCK_TOKENS} tokens, as q_descale has 3 dimensions"
    for (name, tensor), some in zip(inputs.descales.items(), blocks, strict=True):
        check_per_head(name, tensor, q, (batch, heads, *some), words)
    if inputs.has_block_scales:
        check_packs_block_scales(q.shape[2], heads, options)


def check_packs_block_scales(heads: int, kv_heads: int, options: Fp8Options) -> None:
    """Raise ValueError if the heads of a call with scales of 128 tokens shall be packed and cannot be."""
    heads_per_kv = heads // kv_heads if holds(kv_heads != 0) else 1
    if options.pack_gqa and not packs_block_scales(heads_per_kv):
        raise ValueError(
            f"pack_gqa is True with {heads_per_kv} query heads for each KV head; allowed with scales of {BLOCK_TOKENS} "
            f"tokens: divisors of {PACK_GQA_MAX}"
        )


def check_per_head(name: str, tensor: Tensor, q: Tensor, expected: tuple[int, ...], words: str) -> None:
    """Raise if a tensor does not hold what is expected of each batch entry and KV head, fp32 on q's device.

    Args:
        name, tensor: as the error names it.
        q: the operator's.
        expected: its shape, which `words` explain.
        words: see `expected`.
    """
    check_strided(name, tensor)
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {torch.float32}")
    check_same_device(name, tensor, q)
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(holds(size != other) for size, other in zip(shape, expected, strict=True)):
        raise ValueError(f"{name}.shape is {shape}; allowed: {expected}, {words}")


def check_descale_values(descales: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a scale is not a positive finite number. Reads them."""
    for name, tensor in descales.items():
        wrong = ~((tensor > 0) & tensor.isfinite())
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name}{place or ''} is {tensor[tuple(place)].item()}; allowed: positive, finite numbers")
