"""Times `cuteflash.quantize_qkv` beside copies of as many bytes.

    python -m benchmarks.quantize --json benchmarks/results/quantize.json      # measure, on a GPU
    python -m benchmarks.quantize --from benchmarks/results/quantize.json --into docs/benchmarks.md

A call reads 2 bytes and writes 1 byte an element; scales for whole heads cost a second reading of Q, K and V, and V's
mean one of V. The copy beside it reads and writes as many bytes together, in the same rounds. Results are compared with
the definition in torch before they are timed.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuteflash.quantize import QuantizedQKV, quantize_qkv
from cuteflash.quantize_planning import problem_of
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeOptions
from cuteflash.reference import quantize as reference
from cuteflash.traits.quantize import TARGET, traits_of
from cuteflash.validate_quantize import QuantizeInputs

from . import beside_copy
from .ahead import build_all
from .beside_copy import Trial
from .command import Command

HIDDEN = 2048
ROUNDS = 9
SCALE = 0.01  # a given one
STEP = 2**-3  # of an e4m3, relative to it, at most
NEAR_TIES = 0.01  # share of elements that may be rounded the other way, as sums in fp32 have another order


class Shape(NamedTuple):
    """Self-attention whose operands are quantised; as many heads as fit into the hidden size."""

    head_dim: int
    batch: int = 4
    seqlen: int = 4096
    group: int = 1  # query heads of a KV head
    hidden: int = HIDDEN

    @property
    def label(self) -> str:
        return f"D{self.head_dim}, {self.batch} × {self.seqlen}" + (f", GQA {self.group}" if self.group > 1 else "")


class Way(NamedTuple):
    """How a call quantises.

    Attributes:
        options: of the call.
        given: scales are given.
        rotary: with the rotary embedding of all columns.
    """

    options: QuantizeOptions
    given: bool = False
    rotary: bool = False

    @property
    def reads(self) -> tuple[int, int]:
        """How often Q and K are read, and V."""
        again = not self.given and self.options.granularity == "head"
        return 1 + again, 1 + (again or self.options.smooth_v)

    @property
    def least(self) -> float:
        """What magnitudes count as in a comparison, at least, over their scale.

        After a rotary embedding a 16-bit element may be rounded the other way, which a Hadamard rotation spreads.
        """
        return 2.0 if self.rotary and self.options.hadamard else 2.0**-6

    @property
    def descale_error(self) -> float:
        """How far computed descales may be off, relative to them, for the same reason."""
        return 2.0**-7 if self.rotary else 1e-5


SHAPES = (Shape(64), Shape(128), Shape(256), Shape(128, group=4), Shape(128, 16, 1024))
ALL: dict[str, Any] = {"hadamard": 64, "transpose_v": True, "smooth_v": True}
WAYS = {
    "given scales": Way(QuantizeOptions(), given=True),
    "given scales, Vᵀ": Way(QuantizeOptions(transpose_v=True), given=True),
    "given scales, Hadamard": Way(QuantizeOptions(hadamard=64), given=True),
    "given scales, rotary": Way(QuantizeOptions(), given=True, rotary=True),
    "given scales, V minus its mean, Vᵀ": Way(QuantizeOptions(smooth_v=True, transpose_v=True), given=True),
    "scales of blocks": Way(QuantizeOptions("block")),
    "scales of blocks, Hadamard, Vᵀ": Way(QuantizeOptions("block", hadamard=64, transpose_v=True)),
    "scales of blocks, all of these": Way(QuantizeOptions("block", **ALL), rotary=True),
    "scales of heads": Way(QuantizeOptions()),
    "scales of heads, Vᵀ": Way(QuantizeOptions(transpose_v=True)),
    "scales of heads, all of these": Way(QuantizeOptions(**ALL), rotary=True),
}


def make_inputs(shape: Shape, way: Way, where: torch.device) -> QuantizeInputs:
    """Normal Q, K and V in bf16, V with a mean, and what the way takes beside them."""
    heads = shape.hidden // shape.head_dim
    generator = torch.Generator(where).manual_seed(0)

    def normal(count: int) -> Tensor:
        size = (shape.batch, shape.seqlen, count, shape.head_dim)
        return torch.randn(size, generator=generator, device=where, dtype=torch.bfloat16)

    q, k, v = normal(heads), normal(heads // shape.group), normal(heads // shape.group) + 1
    blocks = () if way.options.granularity == "head" else (-(-shape.seqlen // BLOCK_TOKENS),)
    scale = torch.full((shape.batch, heads // shape.group, *blocks), SCALE, device=where) if way.given else None
    cos, sin = _tables(shape, where) if way.rotary else (None, None)
    return QuantizeInputs(q, k, v, scale, scale, scale, cos, sin)


def _tables(shape: Shape, where: torch.device) -> tuple[Tensor, Tensor]:
    columns = torch.arange(0, shape.head_dim, 2, device=where) / shape.head_dim
    angles = torch.arange(shape.seqlen, device=where)[:, None] * 10000.0**-columns
    return angles.cos(), angles.sin()


def traffic(way: Way, inputs: QuantizeInputs) -> int:
    """Bytes that a call reads and writes, without scales and cosines."""
    of_qk, of_v = way.reads
    return (2 * of_qk + 1) * (inputs.q.numel() + inputs.k.numel()) + (2 * of_v + 1) * inputs.v.numel()


def call_of(way: Way, inputs: QuantizeInputs) -> Callable[[], QuantizedQKV]:
    """The call."""
    tensors = {name: x for name, x in inputs._asdict().items() if x is not None}
    options = way.options._asdict() | {"hadamard": way.options.hadamard or None}
    dtype = reference.FP8_TYPES[options.pop("to")]
    return functools.partial(quantize_qkv, **tensors, **options, dtype=dtype)


def complaint(way: Way, inputs: QuantizeInputs, found: QuantizedQKV) -> str | None:
    """None for a right result, else what is wrong with it."""
    expected = reference.quantize(*inputs[:3], inputs.descales, inputs.tables, way.options)
    values = found.q, found.k, found.v if found.vt is None else found.vt
    for name, x, right in zip("qkv", values, expected, strict=False):
        assert x is not None and right is not None
        x, right = x.float(), right.float()
        differs = x != right
        if bool(((x - right).abs() > STEP * right.abs().clamp_min(way.least)).any()):
            return f"{name} is off by more than a rounding"
        if differs.float().mean() > NEAR_TIES:
            return f"{differs.float().mean():.1%} of {name} are rounded otherwise"
    others = found.q_descale, found.k_descale, found.v_descale, found.v_mean
    for name, x, right in zip(("q_descale", "k_descale", "v_descale", "v_mean"), others, expected[3:], strict=True):
        if right is not None and (x is None or not torch.allclose(x, right, rtol=way.descale_error, atol=1e-5 * SCALE)):
            return f"{name} is wrong"
    return None


def measure(shape: Shape, where: torch.device, rounds: int = ROUNDS) -> dict[str, Any]:
    """All ways on one shape, each in microseconds and in the rate of the copy of as many bytes beside it."""
    trials = {name: functools.partial(_trial, way, shape, where) for name, way in WAYS.items()}
    return {"label": shape.label, "results": beside_copy.measure(trials, where, rounds).results}


def _trial(way: Way, shape: Shape, where: torch.device) -> Trial:
    inputs = make_inputs(shape, way, where)
    return Trial(traffic(way, inputs), call_of(way, inputs), functools.partial(complaint, way, inputs))


def kernels(shapes: Sequence[Shape]) -> list[tuple[Any, Any, Any]]:
    """Class, traits and problem of all kernels that the shapes run."""
    from cuteflash.kernels.common.quantize import Quantize  # imports the compiler

    small = {shape._replace(batch=1, seqlen=BLOCK_TOKENS) for shape in shapes}
    inputs = [(make_inputs(shape, way, torch.device("cpu")), way) for shape in small for way in WAYS.values()]
    problems = dict.fromkeys(problem_of(tensors, way.options) for tensors, way in inputs)
    return [(Quantize, traits_of(problem), problem) for problem in problems]


def markdown(result: dict[str, Any]) -> str:
    """The table and its notes, in markdown."""
    about = f"Rate of `quantize_qkv` over that of a copy of as many bytes (in brackets µs), bf16, hidden size {HIDDEN}."
    return beside_copy.table(result, about, tuple(WAYS), _text)


def _text(shape: dict[str, Any], way: str) -> str:
    entry = shape["results"][way]
    return f"{entry['of_copy']:.2f} ({entry['us']:.0f})"


COMMAND = Command("quantize", "quantize_qkv", "quantize benchmark", markdown, beside_copy.is_wrong)


def run(
    shapes: Sequence[Shape], where: torch.device, path: pathlib.Path | None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Measure all shapes; the file at `path` is rewritten after each."""
    return beside_copy.run(shapes, functools.partial(measure, where=where, rounds=rounds), where, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, print, write; 1 if a result was wrong or a call failed, 2 without a GPU, else 0."""
    options = COMMAND.parser().parse_args(argv)

    def measured(where: torch.device) -> dict[str, Any]:
        build_all(kernels(SHAPES), TARGET, os.cpu_count() or 1)
        return run(SHAPES, where, options.json)

    return COMMAND.main(options, measured)


if __name__ == "__main__":
    sys.exit(main())
