"""From a call with 8-bit operands on a GPU to its launch, see `cuteflash.planning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from cuteflash.arguments import Fp8Options, mask_of_window
from cuteflash.compile import compiled
from cuteflash.dispatch import choose
from cuteflash.planning import Result, fwd_scalars, should_pack, target_of
from cuteflash.problem import (
    HEAD_DIM_MAX,
    TRANSPOSED_KEYS,
    Fp8Dtype,
    FwdProblem,
    HalfDtype,
    MaskKind,
    Operands,
    Scores,
    packs_block_scales,
)
from cuteflash.quantize_problem import TransposeProblem
from cuteflash.strides import compacted, usable_strides
from cuteflash.traits.arch import get_arch
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.traits.quantize import transpose_traits
from cuteflash.validate import ALIGNMENT
from cuteflash.validate_fp8 import Fp8Inputs, check_fp8

FP8_NAMES: dict[torch.dtype, Fp8Dtype] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FAMILY = "sm90"  # that has products of 8-bit operands
# Columns of V, and how many readers of each key pay for a kernel that transposes V, which takes 15 us for 34 MB of it.
# To turn it beside the products costs 2 to 5 % up to 128 columns, 10 to 16 % at 256, a fifth at 224.
READERS_BEFORE = (128, 4096), (192, 2048), (224, 512), (HEAD_DIM_MAX, 2048)

Launch = Callable[[Fp8Inputs], Result]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of O and of LSE


def check_family(device: torch.device, family: str | None) -> str:
    """The compile target of a GPU. NotImplementedError if it, or the family asked for, has no 8-bit products."""
    target = target_of(device, family)
    runs = family or get_arch(target).families[0]
    if runs != FAMILY:
        raise NotImplementedError(
            f"attention on 8-bit operands needs the {FAMILY} family (Hopper); {target} runs {runs}"
            + ("" if family is None else f", which `family` asks for: {family!r}")
        )
    return target


def check_target(q: Tensor, family: str | None) -> None:
    """`check_family` of a traced call; q may be traced for another machine's GPU."""
    if q.device.type == "cuda" and torch.cuda.is_available():
        check_family(q.device, family)


def operands_of(q: Tensor, head_dim_v: int, options: Fp8Options, v_mean: Tensor | None) -> Operands:
    """The operands of a call with these options."""
    return dataclasses.replace(
        Operands.of(FP8_NAMES[q.dtype], q.shape[-1], head_dim_v),
        o_dtype=cast(HalfDtype, options.out_dtype),
        transposed_v=options.transposed_v,
        has_v_mean=v_mean is not None,
    )


class Fp8Planner:
    """The launches of one forward operator on 8-bit operands.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.has_lse = has_lse

    def launch(self, inputs: Fp8Inputs, options: Fp8Options) -> Launch:
        """A checked launch for calls with the same sizes, strides and options; what it keeps holds no tensor.

        Raises:
            TypeError, ValueError, NotImplementedError: as `check_fp8`, `check_family` and `choose` do.
        """
        check_fp8(inputs, options)
        q, k = inputs[:2]
        target = check_family(q.device, options.family)
        (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
        out_dtype, head_dim_v = TORCH_DTYPES[options.out_dtype], inputs.head_dim_v(options)
        shapes = (batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q)
        if q.numel() == 0 or seqlen_k == 0:
            return lambda inputs: results(inputs.q, shapes, out_dtype, has_lse=self.has_lse, fill=True)
        mask, left, right = mask_of_window(options.window_left, options.window_right, seqlen_q)
        operands = dataclasses.replace(
            operands_of(q, head_dim_v, options, inputs.v_mean), has_block_scales=inputs.has_block_scales
        )
        heads_per_kv = heads // k.shape[2]
        transpose = None
        readers = heads_per_kv * readers_of(mask, left, right, seqlen_q, seqlen_k)
        if not options.transposed_v and transposes_before(readers, head_dim_v):
            transpose = transposition(FP8_NAMES[q.dtype], head_dim_v, target)
            operands = dataclasses.replace(operands, transposed_v=True, transposed_before=True)
        problem = FwdProblem(operands, Scores(mask, softcap=options.softcap > 0), has_lse=self.has_lse)
        lengths = cast(LengthClass, options.lengths or length_class_of(seqlen_q, seqlen_k))
        choice = choose(problem, target, FAMILY, lengths)
        packs = options.pack_gqa
        if packs is None:
            packs = should_pack(seqlen_q, heads_per_kv, choice.traits.tile_m)
            packs = packs and (packs_block_scales(heads_per_kv) or not inputs.has_block_scales)
        problem = problem.packed(heads_per_kv) if packs else problem
        kernel = compiled(choice.kernel_cls, choice.traits, problem, target)
        scalars = fwd_scalars(options, (left, right), head_dim, q.device)
        restrides = [usable_strides(x.stride(), ALIGNMENT) for x in inputs[:3]]

        def launch(inputs: Fp8Inputs) -> Result:
            result = results(inputs.q, shapes, out_dtype, has_lse=self.has_lse, fill=False)
            o, lse = result if self.has_lse else (result, None)
            q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip(inputs[:3], restrides, strict=True))
            v_mean = columns_contiguous(inputs.v_mean)
            v = v if transpose is None else transpose(v)  # right before the kernel, see `Operands.transposed_before`
            # In the order of FwdTensors, ScaleTensors and FwdScalars.
            kernel(q, k, v, o, lse, *inputs.descales.values(), v_mean, *scalars)
            return result

        return launch


def readers_of(mask: MaskKind, left: int, right: int, seqlen_q: int, seqlen_k: int) -> int:
    """How many queries of a head read a key, on average; of a window as many as it is wide, or all if they are fewer.

    Args:
        mask, left, right: as `mask_of_window` returns them.
        seqlen_q, seqlen_k: queries and keys.
    """
    if mask != "causal":
        return min(left + right + 1, seqlen_q)
    seeing = min(seqlen_q, seqlen_k)  # the others see no key
    return seeing - seeing**2 // (2 * seqlen_k)


def transposes_before(readers: int, head_dim_v: int) -> bool:
    """Whether a kernel of its own makes Vᵀ, which many readers get back: it moves V once, however many read it.

    Args:
        readers: queries that read a key of V.
        head_dim_v: columns of V.
    """
    return readers >= next(least for columns, least in READERS_BEFORE if head_dim_v <= columns)


def transposition(dtype: Fp8Dtype, head_dim_v: int, target: str) -> Callable[[Tensor], Tensor]:
    """What makes Vᵀ (batch, heads, head_dim_v, keys), as attention takes it, of V as it is stored."""
    from cuteflash.kernels.common.transpose_v import TransposeV  # imports the compiler

    kernel = compiled(TransposeV, transpose_traits(head_dim_v), TransposeProblem(dtype, head_dim_v), target)

    def transpose(v: Tensor) -> Tensor:
        batch, seqlen, heads, columns = v.shape
        keys = -(-seqlen // TRANSPOSED_KEYS) * TRANSPOSED_KEYS
        result = v.new_empty((batch, heads, columns, keys))
        kernel(v, result)
        return result

    return transpose


def results(q: Tensor, shapes: Shapes, dtype: torch.dtype, *, has_lse: bool, fill: bool) -> Result:
    """O and LSE of these shapes, uninitialised or filled with what a query gets that sees no key."""
    o_shape, lse_shape = shapes
    o = q.new_zeros(o_shape, dtype=dtype) if fill else q.new_empty(o_shape, dtype=dtype)
    if not has_lse:
        return o
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    return o, lse.fill_(float("-inf")) if fill else lse


def columns_contiguous(v_mean: Tensor | None) -> Tensor | None:
    """V's mean as a kernel reads it."""
    return v_mean if v_mean is None or v_mean.stride(-1) == 1 else compacted(v_mean)
