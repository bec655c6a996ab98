"""Input checks of quantising to FP8, before any launch; see `cuteflash.validate`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.arguments import Fp8InferenceOptions, FwdOptions
from cuteflash.core.tile_numbers import first_tile
from cuteflash.problem import DTYPES, FP8_MAX, HEAD_DIM_MAX
from cuteflash.quantize_problem import (
    BLOCK_TOKENS,
    GRANULARITIES,
    HADAMARD_BLOCKS,
    HEAD_DIM_STEP,
    ROTARY_STEP,
    QuantizeOptions,
)
from cuteflash.validate import (
    FP32_MAX,
    FP32_TINY,
    HALF_DTYPES,
    POSITIVE,
    check_fwd,
    check_options,
    check_strided,
    holds,
)
from cuteflash.validate_packed import PackedInputs, check_packed, check_values, differences

TABLE_DTYPES = (*HALF_DTYPES, torch.float32)


class QuantizeInputs(NamedTuple):
    """The tensors of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    @property
    def packed(self) -> PackedInputs | None:
        """Those that attention of packed sequences has, too; None if each sequence is an entry of the batch."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        vectors = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k
        return PackedInputs(self.q, self.k, self.v, *vectors)

    @property
    def batch(self) -> int:
        """Batch entries, or packed sequences."""
        return self.q.shape[0] if self.packed is None else self.packed.batch

    @property
    def descales(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The scales that are given; None if there are none."""
        if self.q_descale is None or self.k_descale is None or self.v_descale is None:
            return None
        return self.q_descale, self.k_descale, self.v_descale

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines; None without a rotary embedding."""
        return None if self.rotary_cos is None or self.rotary_sin is None else (self.rotary_cos, self.rotary_sin)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks of 128 tokens in a sequence of Q, K and V; numbers of blocks of all packed sequences."""
        if self.packed is not None:
            q, k = (first_tile(x.shape[0], self.batch, BLOCK_TOKENS) for x in (self.q, self.k))
            return q, k, k
        of_q, of_k = ((x.shape[1] + BLOCK_TOKENS - 1) // BLOCK_TOKENS for x in (self.q, self.k))
        return of_q, of_k, of_k

    def descale_shapes(self, granularity: str) -> tuple[tuple[int, ...], ...]:
        """The shapes of the descales of Q, K and V."""
        kv_heads = self.k.shape[-2]
        if granularity == "head":
            return ((self.batch, kv_heads),) * 3
        entries = self.batch if self.packed is None else 1
        return tuple((entries, kv_heads, blocks) for blocks in self.blocks)


def check_quantize(inputs: QuantizeInputs, options: QuantizeOptions) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError, ValueError, NotImplementedError: as `check_fwd` does.
    """
    q, k, v = inputs[:3]
    if options.granularity not in GRANULARITIES:
        allowed = ", ".join(map(repr, GRANULARITIES))
        raise ValueError(f"granularity is {options.granularity!r}; allowed: {allowed}")
    if options.to not in FP8_MAX:
        raise ValueError(f"to is {options.to!r}; allowed: {', '.join(map(repr, FP8_MAX))}")
    if inputs.packed is None:
        check_fwd(q, k, v, FwdOptions())
    else:
        check_packed(inputs.packed, FwdOptions())
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in HALF_DTYPES:
            raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {', '.join(map(str, HALF_DTYPES))}")
        if holds(tensor.shape[-1] % HEAD_DIM_STEP != 0):
            raise ValueError(
                f"{name}.shape[{tensor.dim() - 1}] (head_dim) is {tensor.shape[-1]}; allowed: multiples of "
                f"{HEAD_DIM_STEP} up to {HEAD_DIM_MAX}, so that rows of FP8 begin on 16 bytes"
            )
    _check_hadamard(options.hadamard, q.shape[-1])
    _check_descales(inputs, options)
    _check_tables(inputs)


def check_fp8_inference(q: Tensor, k: Tensor, v: Tensor, options: Fp8InferenceOptions) -> None:
    """Raise if these tensors cannot be quantised and attended to; reads no element.

    Raises:
        TypeError, ValueError, NotImplementedError: as `check_quantize` does.
    """
    _check_inference_options(options)
    check_fwd(q, k, v, FwdOptions(pack_gqa=options.pack_gqa))
    check_quantize(QuantizeInputs(q, k, v), QuantizeOptions(hadamard=options.hadamard))


def check_fp8_packed_inference(inputs: PackedInputs, options: Fp8InferenceOptions) -> None:
    """The same of packed sequences."""
    _check_inference_options(options)
    check_packed(inputs, FwdOptions(pack_gqa=options.pack_gqa))
    check_quantize(QuantizeInputs(**inputs._asdict()), QuantizeOptions(hadamard=options.hadamard))


def _check_inference_options(options: Fp8InferenceOptions) -> None:
    check_options(options)
    if options.out_dtype is not None and options.out_dtype not in DTYPES:
        raise ValueError(f"out_dtype is {options.out_dtype!r}; allowed: None, {', '.join(map(repr, DTYPES))}")


def _check_hadamard(block: int, head_dim: int) -> None:
    if block and (block not in HADAMARD_BLOCKS or holds(head_dim % block != 0)):
        raise ValueError(
            f"hadamard is {block} with a head_dim of {head_dim}; allowed: 0 (none) or "
            f"{', '.join(map(str, HADAMARD_BLOCKS))}, a divisor of head_dim"
        )


def _check_descales(inputs: QuantizeInputs, options: QuantizeOptions) -> None:
    given = {name: getattr(inputs, name) for name in ("q_descale", "k_descale", "v_descale")}
    missing = [name for name, descale in given.items() if descale is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{missing[0]} is None; allowed: a tensor, as another descale is given, or None for all three")
    for (name, descale), shape in zip(given.items(), inputs.descale_shapes(options.granularity), strict=True):
        if descale is None:
            continue
        _check_tensor(name, descale, inputs.q, (torch.float32,))
        if descale.dim() != len(shape) or any(holds(a != b) for a, b in zip(descale.shape, shape, strict=True)):
            entries = "1" if inputs.packed is not None and options.granularity == "block" else "batch"
            blocks = f", blocks of {BLOCK_TOKENS} tokens" if options.granularity == "block" else ""
            sizes = f"({entries}, kv_heads{blocks})"
            raise ValueError(
                f"{name}.shape is {tuple(descale.shape)}; allowed with granularity {options.granularity!r}: "
                f"{tuple(shape)}, {sizes}"
            )


def _check_tables(inputs: QuantizeInputs) -> None:
    q, k, cos, sin = inputs.q, inputs.k, inputs.rotary_cos, inputs.rotary_sin
    if cos is None and sin is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is None:
            raise ValueError(
                f"{name} is None; allowed: a tensor, as the other one of rotary_cos and rotary_sin is given"
            )
        _check_tensor(name, table, q, TABLE_DTYPES)
    assert cos is not None and sin is not None
    if sin.dtype != cos.dtype:
        raise TypeError(f"rotary_sin.dtype is {sin.dtype}; allowed: {cos.dtype}, that of rotary_cos")
    is_packed = inputs.packed is not None
    if not is_packed and holds(k.shape[1] != q.shape[1]):
        raise ValueError(
            f"k.shape[1] (seqlen) is {k.shape[1]}; allowed with rotary_cos: {q.shape[1]}, that of q, as both have the "
            "same positions"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        shape, head_dim = tuple(table.shape), q.shape[-1]
        fits = len(shape) == 2 and not (
            holds(shape[0] == 0 if is_packed else shape[0] != q.shape[1])
            or holds(shape[1] == 0)
            or holds(2 * shape[1] % ROTARY_STEP != 0)
            or holds(2 * shape[1] > head_dim)
            or holds(shape[1] != cos.shape[1])
        )
        if not fits:
            rows = "positions" if is_packed else q.shape[1]
            raise ValueError(
                f"{name}.shape is {shape}; allowed: ({rows}, rotary_dim / 2), the same for both, rotary_dim a "
                f"multiple of {ROTARY_STEP} up to {head_dim}"
            )


def _check_tensor(name: str, tensor: Tensor, q: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_strided(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
    if tensor.device != q.device:
        raise ValueError(f"{name}.device is {tensor.device}; allowed: {q.device}, that of q")


def check_lengths(inputs: QuantizeInputs, *, complete: bool) -> None:
    """Raise ValueError if the lengths of packed sequences are wrong, or exceed a rotary embedding's. Reads them.

    `complete` is as for `check_values`.
    """
    if inputs.packed is None:
        return
    check_values(inputs.packed, complete=complete)
    if inputs.rotary_cos is not None:
        positions = inputs.rotary_cos.shape[0]
        for side in "qk":
            used, ends = getattr(inputs, f"seqused_{side}"), getattr(inputs, f"cu_seqlens_{side}")
            longest = max(differences(ends.tolist()) if used is None else used.tolist(), default=0)
            if longest > positions:
                raise ValueError(
                    f"rotary_cos.shape[0] is {positions}; allowed: {longest} or more, the longest sequence of {side}"
                )


def check_descale_values(inputs: QuantizeInputs) -> None:
    """Raise ValueError if a given descale is not a positive number that fp32 holds. Reads them."""
    for name in ("q_descale", "k_descale", "v_descale"):
        descale = getattr(inputs, name)
        if descale is None:
            continue
        wrong = ~((descale >= FP32_TINY) & (descale <= FP32_MAX))  # a NaN, too
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(f"{name}{list(index)} is {descale[index].item()}; allowed: a {POSITIVE}")
