"""Operands of 8 bits for the forward benchmark, the implementations that take them, and what their results may lack.

All implementations of a cell get the same operands: normal values or another kind of inputs, quantised to e4m3 with one
power of two for each of Q, K and V. What they stand for is then exact in 16 bits, too, so that 16-bit kernels beside
them compute the same attention.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

import cuteflash
from cuteflash.problem import E4M3_MAX
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.reference.fp8 import dequantised
from cuteflash.reference.quantize import quantize
from cuteflash.tune import accuracy
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.machine import MATMUL_SIZE, Matmul
from cuteflash.tune.timing import Runner

from . import cudnn_fp8
from .contest import Maker
from .judges import facts_of
from .names import FP8_VT, base_of

RMS_LIMIT = 0.035  # of our error, in the rms of O: P has 4 bits of mantissa, and a sum of products 13
GROSS_LIMIT = 0.1  # of any error: O of a peer has 8 bits, too
ELEMENT_LIMIT = 0.15  # of an element's error, in P |V|: rounding P may cost a sixteenth of it, rounding O another one


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Inputs:
    """The operands of one cell.

    Attributes:
        wide: what Q, K and V stand for, exactly, in the cell's dtype.
        q, k, v: of 8 bits, V as it is stored.
        vt: Vᵀ, as `cuteflash.quantize_qkv` gives it.
        descales: of q, k and v, (batch, kv_heads), the same for all heads.
    """

    wide: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    vt: Tensor
    descales: tuple[Tensor, Tensor, Tensor]

    @property
    def cell(self) -> Cell:
        return self.wide.cell


def make_fp8_inputs(cell: Cell, device: torch.device) -> Fp8Inputs:
    """Fresh operands of the cell's kind."""
    made = make_inputs(cell, device)
    tensors = made.q, made.k, made.v
    q_scale, k_scale, v_scale = (_power_of_two(x).expand(cell.batch, cell.heads).contiguous() for x in tensors)
    descales = q_scale, k_scale, v_scale
    # By the definition, which needs no kernel.
    q8, k8, v8 = (x for x in quantize(*tensors, descales, None, QuantizeOptions())[:3] if x is not None)
    vt = quantize(*tensors, descales, None, QuantizeOptions(transpose_v=True))[2]
    assert vt is not None
    q, k, v = (dequantised(x, scale).to(made.q.dtype) for x, scale in zip((q8, k8, v8), descales, strict=True))
    return Fp8Inputs(Inputs(cell, q, k, v), q8, k8, v8, vt, descales)


def _power_of_two(x: Tensor) -> Tensor:
    """The least power of two with which no element is cut, on x's device."""
    return torch.exp2(torch.ceil(torch.log2(x.abs().amax().float() / E4M3_MAX)))


def runner(name: str, inputs: Fp8Inputs) -> Runner:
    """The forward of the implementation called `name`, which has 8-bit operands."""
    if base_of(name) == "cudnn":
        return cudnn_fp8.runner(inputs.cell, (inputs.q, inputs.k, inputs.v), inputs.descales)
    is_transposed = name.endswith(FP8_VT)
    options: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), inputs.descales, strict=True))
    options |= {"window_size": inputs.cell.window} if inputs.cell.mask == "window" else {}
    options |= {"causal": inputs.cell.mask == "causal", "transposed_v": is_transposed}
    tensors = inputs.q, inputs.k, inputs.vt if is_transposed else inputs.v

    def run(calls: int) -> Tensor:
        for _ in range(calls):
            out: Tensor = cuteflash.flash_attn_func(*tensors, **options)
        return out

    return run


def maker(name: str, wide: Maker | None) -> Maker:
    """The function that makes a name's runner over `Fp8Inputs`; `wide` makes that of a name with 16-bit operands."""
    if wide is None:
        return functools.partial(runner, name)
    return lambda inputs: wide(inputs.wide)


class Fp8Judge:
    """Judges the output of a forward on 8-bit operands, whatever it computes with, by what the operands stand for."""

    def __init__(self, inputs: Fp8Inputs):
        self.inputs = inputs
        self.flops: float = inputs.cell.flops
        self.facts = facts_of(inputs.cell)
        wide = inputs.wide
        self._reference = accuracy.make_reference(wide)
        self._sizes = accuracy.make_reference(Inputs(wide.cell, wide.q, wide.k, wide.v.abs())).out
        self._rms = accuracy.rms(self._reference.out)

    def poison(self) -> None:
        """See `Judge`, as for the other methods."""
        accuracy.poison(self.inputs.wide.q)

    def measured(self, out: Tensor) -> dict[str, Any]:
        errors = self._errors(out)
        return {"error": errors.maximum, "rms": errors.rms, "relative": errors.rms / self._rms}

    def complaint(self, out: Tensor, other: Tensor | None) -> str | None:
        if not bool(torch.isfinite(out.float()).all()):
            return "output has NaN or infinite elements"
        errors = self._errors(out)
        if errors.rms > GROSS_LIMIT * self._rms:
            return f"rms error {errors.rms:.2e}; the rms of O is {self._rms:.2e}"
        found = accuracy.rows_at(self._decoded(out), self._reference.index)
        worst = ((found - self._reference.out).abs() / self._sizes).max().item()
        if worst > ELEMENT_LIMIT:
            return f"error {worst:.2f} of what P |V| is, over {ELEMENT_LIMIT:.2f}"
        if other is not None:
            mine, others = self._decoded(out), self._decoded(other)
            apart = accuracy.rms(mine - others) / accuracy.rms(others)
            if apart > GROSS_LIMIT:
                return f"differs from another implementation by {apart:.1%} of O's rms"
        return None

    def imprecision(self, out: Tensor) -> str | None:
        relative = self._errors(out).rms / self._rms
        return None if relative <= RMS_LIMIT else f"rms error {relative:.2%} of O's rms, over {RMS_LIMIT:.2%}"

    def kept(self, out: Tensor) -> Tensor:
        return out.clone()

    def _errors(self, out: Tensor) -> accuracy.Errors:
        return accuracy.errors(self._decoded(out), self._reference)

    def _decoded(self, out: Tensor) -> Tensor:
        """What an output stands for, fp32: one of 8 bits has a scale."""
        return out.float() / cudnn_fp8.out_scale(self.inputs.descales) if out.dtype.itemsize == 1 else out.float()


@functools.lru_cache(maxsize=1)
def make_matmul(device: torch.device, size: int = MATMUL_SIZE) -> Matmul:
    """The e4m3 product of two normal (size, size) matrices on `device`, accumulated in one level."""
    one = torch.ones((), device=device)
    a, b = ((torch.randn(size, size, device=device) * 64).to(torch.float8_e4m3fn) for _ in range(2))

    def run(calls: int) -> Tensor:
        for _ in range(calls):
            out = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return out

    return Matmul(run, 2 * size**3)
