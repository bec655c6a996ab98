"""Errors of attention on 8-bit operands: kinds of inputs, measures against the errors, and needles in long contexts.

An error is a root mean square over O's, of one head. That of the kernel compares with fp64 attention of what the
operands stand for; the whole one with fp64 attention of the 16-bit inputs, so that it has the operands' rounding, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cuteflash
from cuteflash.arguments import Fp8Options, FwdTensors, ScaleTensors
from cuteflash.compile import compiled
from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.planning import fwd_scalars
from cuteflash.problem import UNBOUNDED, FwdProblem, Operands
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.reference.fp8 import dequantised
from cuteflash.reference.fp8_accumulator import modelled_attention
from cuteflash.reference.quantize import quantize
from cuteflash.traits.arch import get_arch
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.tune.accuracy import rms
from cuteflash.tune.fp8_accuracy import kernel_model
from cuteflash.tune.inputs import PLAIN, of_kind
from cuteflash.tune.timing import first_call

TARGET = "sm_90a"
SEED = 0
NEEDLE_MEAN = 1.0  # of V
NATS = (7.0, 14.0)  # by how much needles score above the mean of the others: 0.5 % to 85 % of the weight of 128k keys


class Case(NamedTuple):
    """A kind of inputs.

    Attributes:
        kind: of `cuteflash.tune.inputs`.
        v_mean: added to V.
        q_factor: Q is multiplied with it: the standard deviation of the scores.
    """

    kind: str = PLAIN
    v_mean: float = 0.0
    q_factor: float = 1.0


CASES = {
    "normal": Case(),
    "V of mean 1": Case(v_mean=1.0),
    "outlier channels": Case("outliers"),
    "scores of deviation 4": Case(q_factor=4.0),
    "sink of 30 nats": Case("sink:30"),
}


class Measure(NamedTuple):
    """What is done against errors.

    Attributes:
        two_level: products of a block of keys are accumulated from zero, and added to O in fp32.
        smooth_v: V's mean is taken out before V is quantised, and added to O.
        hadamard: columns of a block of Q and K that is rotated; 0 is none.
    """

    two_level: bool
    smooth_v: bool = False
    hadamard: int = 0

    @property
    def label(self) -> str:
        levels = "two levels" if self.two_level else "one level"
        mean, rotation = ", V minus its mean" * self.smooth_v, f", Hadamard {self.hadamard}" if self.hadamard else ""
        return levels + mean + rotation


class Shape(NamedTuple):
    """One head of attention without a mask."""

    head_dim: int
    queries: int = 128
    keys: int = 16384


class Fp8Operands(NamedTuple):
    """Q, K, V and Vᵀ of 8 bits, their scales, and V's mean: (1, 1, head_dim), zeros if it was not taken out."""

    q: Tensor
    k: Tensor
    v: Tensor
    vt: Tensor
    descales: tuple[Tensor, Tensor, Tensor]
    v_mean: Tensor


def problem_of(head_dim: int) -> FwdProblem:
    """What the kernel of all these errors is generated for: no mask, Vᵀ."""
    return FwdProblem(dataclasses.replace(Operands.of("e4m3", head_dim, head_dim), transposed_v=True))


def shipped_traits(head_dim: int) -> FwdTraitsFp8Sm90:
    """Those that a call with Vᵀ gets."""
    traits = choose_shipped(problem_of(head_dim), TARGET, "sm90").traits
    assert isinstance(traits, FwdTraitsFp8Sm90)
    return traits


def measures(head_dim: int) -> list[Measure]:
    """All that a head dim allows: two levels if the registers suffice, rotations of whole blocks."""
    traits = shipped_traits(head_dim)
    levels = [
        two_level
        for two_level in (False, True)
        if dataclasses.replace(traits, two_level=two_level).check(get_arch(TARGET)) is None
    ]
    plain = [Measure(two_level, smooth_v) for two_level in levels for smooth_v in (False, True)]
    return plain + [advised(head_dim)._replace(hadamard=size) for size in (64, 128) if head_dim % size == 0]


def advised(head_dim: int) -> Measure:
    """What `fp8=True` does: the shipped traits, and V less its mean."""
    return Measure(shipped_traits(head_dim).two_level, smooth_v=True)


def make_inputs(case: Case, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V in bf16, (1, tokens, 1, head_dim)."""
    q, k, v = _normal(shape, device)
    q, k, v = of_kind(case.kind, q, k, v)
    return (q * case.q_factor).bfloat16(), k.bfloat16(), (v + case.v_mean).bfloat16()


def _normal(shape: Shape, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(SEED)
    lengths = shape.queries, shape.keys, shape.keys
    return [torch.randn(1, n, 1, shape.head_dim, device=device, generator=generator) for n in lengths]


def quantised(tensors: Sequence[Tensor], measure: Measure) -> Fp8Operands:
    """Operands with a scale for each head, by the definition in torch."""
    q, k, v = tensors
    options = QuantizeOptions(hadamard=measure.hadamard, smooth_v=measure.smooth_v)
    *found, mean = quantize(q, k, v, None, None, options)
    q8, k8, v8, *descales = (x for x in found if x is not None)
    vt = quantize(q, k, v, None, None, options._replace(transpose_v=True))[2]
    assert vt is not None
    v_mean = torch.zeros(1, 1, v.shape[3], device=v.device) if mean is None else mean
    return Fp8Operands(q8, k8, v8, vt, (descales[0], descales[1], descales[2]), v_mean)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one head in fp64, (queries, head_dim)."""
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, dim=-1) @ v


def exact_of_operands(given: Fp8Operands) -> Tensor:
    """Attention of what the operands stand for."""
    wide = (dequantised(x, scale) for x, scale in zip((given.q, given.k, given.v), given.descales, strict=True))
    return exact(*wide) + given.v_mean[0].double()


def of_kernel(given: Fp8Operands, two_level: bool) -> Tensor:
    """O of the kernel with the shipped traits but for its levels, on a GPU."""
    traits = dataclasses.replace(shipped_traits(given.q.shape[3]), two_level=two_level)
    problem = problem_of(given.q.shape[3])
    kernel = compiled(kernel_class(traits), traits, problem, TARGET)
    out = torch.full_like(given.q, float("nan"), dtype=torch.bfloat16)
    scalars = fwd_scalars(Fp8Options(), (UNBOUNDED, UNBOUNDED), given.q.shape[3], given.q.device)
    tensors = FwdTensors(given.q, given.k, given.vt, out, None)

    def run(calls: int) -> Tensor:
        for _ in range(calls):
            kernel(*tensors, *ScaleTensors(*given.descales), *scalars)
        return out

    return first_call(run, given.q.device)[0, :, 0].double() + given.v_mean[0].double()


def of_model(given: Fp8Operands, two_level: bool) -> Tensor:
    """O as the kernel is expected to compute it, before it is rounded."""
    traits = dataclasses.replace(shipped_traits(given.q.shape[3]), two_level=two_level)
    mask = given.q.shape[3] ** -0.5, -1, -1
    out = modelled_attention(given.q, given.k, given.v, given.descales, mask, kernel_model(traits))
    return out[0, :, 0].double() + given.v_mean[0].double()


def relative(out: Tensor, right: Tensor) -> float:
    """The rms error in the rms of the right result."""
    return rms(out.double() - right) / rms(right)


def errors_of(case: Case, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Of bf16 and of each measure the relative errors; without a GPU there are only modelled ones.

    A measure has `modelled` and `kernel`, of what its operands stand for, and `whole_modelled` and `whole`, of the
    inputs.
    """
    tensors = make_inputs(case, shape, device)
    right = exact(*tensors)
    bf16: Tensor = cuteflash.flash_attn_func(*tensors)
    found: dict[str, Any] = {"bf16": relative(bf16[0, :, 0], right), "measures": {}}
    for measure in measures(shape.head_dim):
        given = quantised(tensors, measure)
        of_operands, modelled = exact_of_operands(given), of_model(given, measure.two_level)
        entry = {"modelled": relative(modelled, of_operands), "whole_modelled": relative(modelled, right)}
        if device.type == "cuda":
            out = of_kernel(given, measure.two_level)
            entry |= {"kernel": relative(out, of_operands), "whole": relative(out, right)}
        found["measures"][measure.label] = entry
    return found


def needles(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Which needles exact attention, bf16 and each measure find in a long context, as indices.

    Each query has a key that points in its direction; they lie all over the context. A needle is found if O less the
    mean that V was drawn with is more like the needle's value than like any other's. With that mean in O, how like the
    mean the values are would count, and attention that loses the other keys would find more than exact attention.

    A measure also has what exact attention to its operands finds, which lacks nothing but the operands' rounding, and
    its error of O.
    """
    q, k, v = _normal(shape, device)
    places = torch.linspace(0, shape.keys - 1, shape.queries, device=device).long()
    nats = torch.linspace(*NATS, shape.queries, device=device)[:, None]
    nats = nats[torch.randperm(shape.queries, generator=torch.Generator().manual_seed(SEED)).to(device)]
    rows = q[0, :, 0]
    k[0, places, 0] = rows * nats * shape.head_dim**0.5 / rows.square().sum(-1, keepdim=True)
    tensors = q.bfloat16(), k.bfloat16(), (v + NEEDLE_MEAN).bfloat16()
    values = tensors[2][0, places, 0].double() - NEEDLE_MEAN

    def found(out: Tensor) -> list[int]:
        likest = ((out.double() - NEEDLE_MEAN) @ values.T).argmax(-1).cpu()
        return (likest == torch.arange(shape.queries)).nonzero()[:, 0].tolist()

    bf16: Tensor = cuteflash.flash_attn_func(*tensors)
    attend = of_kernel if device.type == "cuda" else of_model
    right = exact(*tensors)
    result: dict[str, Any] = {"keys": shape.keys, "needles": shape.queries, "head_dim": shape.head_dim}
    result |= {"exact": found(right), "bf16": found(bf16[0, :, 0]), "bf16_error": relative(bf16[0, :, 0], right)}
    result["measures"] = {}
    for measure in measures(shape.head_dim):
        given = quantised(tensors, measure)
        out, operands = attend(given, measure.two_level), found(exact_of_operands(given))
        result["measures"][measure.label] = {"found": found(out), "operands": operands, "error": relative(out, right)}
    return result
