"""Times `cuteflash.append_kv` with a rotary embedding, in one launch and in several, beside a copy of as many bytes.

    python -m benchmarks.append --json benchmarks/results/append.json      # measure, on a GPU
    python -m benchmarks.append --from benchmarks/results/append.json

New tokens are read once and written once. The copy beside a call reads and writes as many bytes together, in the same
rounds. Results are compared with the definition in torch before they are timed. A decode step has one token a sequence:
there the host's time of a call, which is listed beside, is what counts outside of CUDA graphs.
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

from cuteflash.append import append_kv, apply_rotary
from cuteflash.append_planning import append_problem, rotary_problem
from cuteflash.append_problem import AppendOptions, RotaryOptions
from cuteflash.dispatch import current_target
from cuteflash.nn.rotary import apply_rotary_emb
from cuteflash.traits.append import AppendTraits
from cuteflash.validate_append import AppendInputs, RotaryInputs

from . import beside_copy, device
from .ahead import build_all
from .beside_copy import Trial
from .command import Command

ROUNDS, QUICK_ROUNDS = 9, 3
BEGIN = 5  # tokens that every cache has already
STEP = 2**-7  # of a bf16, relative
HOST_CALLS = 200


class Shape(NamedTuple):
    """New tokens of a batch of sequences."""

    batch: int
    tokens: int
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    page_size: int = 0  # 0: the caches are not paged

    @property
    def label(self) -> str:
        pages = f", pages of {self.page_size}" if self.page_size else ""
        return f"D{self.head_dim}, {self.batch} × {self.tokens}, {self.heads}/{self.kv_heads} heads{pages}"


class Step(NamedTuple):
    """The tensors of one step."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None
    cos: Tensor
    sin: Tensor


SHAPES = (
    Shape(64, 1),
    Shape(64, 1, page_size=16),
    Shape(4, 8192),
    Shape(4, 8192, page_size=16),
    Shape(4, 8192, head_dim=64, heads=64, kv_heads=16),
    Shape(4, 8192, head_dim=256, heads=16, kv_heads=4),
)
QUICK = (Shape(64, 1), Shape(4, 8192))


def make_step(shape: Shape, where: torch.device) -> Step:
    """Normal Q, K and V in bf16, caches of NaN, pages in a random order."""
    generator = torch.Generator(where).manual_seed(0)

    def normal(heads: int) -> Tensor:
        size = (shape.batch, shape.tokens, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=where, dtype=torch.bfloat16)

    positions, table = BEGIN + shape.tokens, None
    size = shape.batch, positions
    if shape.page_size:
        pages = -(-positions // shape.page_size)
        size = shape.batch * pages, shape.page_size
        order = torch.randperm(size[0], generator=generator, device=where).to(torch.int32)
        table = order.view(shape.batch, pages)
    k_cache, v_cache = (
        torch.full((*size, shape.kv_heads, shape.head_dim), torch.nan, device=where, dtype=torch.bfloat16)
        for _ in range(2)
    )
    angles = torch.arange(positions, device=where)[:, None] * 10000.0 ** -(
        torch.arange(0, shape.head_dim, 2, device=where) / shape.head_dim
    )
    seqlens = torch.full((shape.batch,), BEGIN, dtype=torch.int32, device=where)
    q, k, v = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)
    return Step(q, k, v, k_cache, v_cache, seqlens, table, angles.cos(), angles.sin())


def fused(step: Step) -> Tensor:
    """Q and K rotated, K and V appended, in one launch."""
    return append_kv(*_places(step), q=step.q, rotary_cos=step.cos, rotary_sin=step.sin, page_table=step.page_table)


def separate(step: Step) -> Tensor:
    """The same in three launches."""
    q, k = (apply_rotary(x, step.cos, step.sin, seqlen_offsets=step.cache_seqlens) for x in (step.q, step.k))
    append_kv(*_places(step._replace(k=k)), page_table=step.page_table)
    return q


def with_torch(step: Step) -> Tensor:
    """The same in torch's operators, with rotated Q and K in memory."""
    positions = step.cache_seqlens[:, None] + torch.arange(step.k.shape[1], device=step.k.device)
    cos, sin = step.cos[positions], step.sin[positions]
    q, k = apply_rotary_emb(step.q, cos, sin), apply_rotary_emb(step.k, cos, sin)
    sequences = torch.arange(step.k.shape[0], device=step.k.device)[:, None]
    if step.page_table is None:
        places: tuple[Tensor, Tensor] = sequences, positions
    else:
        page_size = step.k_cache.shape[1]
        places = step.page_table[sequences, positions // page_size], positions % page_size
    step.k_cache[places] = k
    step.v_cache[places] = step.v
    return q


def append_alone(step: Step) -> Tensor:
    """K and V appended as they are."""
    append_kv(*_places(step), page_table=step.page_table)
    return step.q


WAYS: dict[str, Callable[[Step], Tensor]] = {
    "rotary and append, one launch": fused,
    "rotary and append, three launches": separate,
    "rotary and append, torch": with_torch,
    "append": append_alone,
}


def _places(step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return step.k_cache, step.v_cache, step.k, step.v, step.cache_seqlens


def traffic(way: str, step: Step) -> int:
    """Bytes that have to be read and written, without cosines."""
    moved = step.k.numel() + step.v.numel() + (0 if way == "append" else step.q.numel())
    return 2 * moved * step.k.element_size()


def complaint(way: str, step: Step, q: Tensor) -> str | None:
    """None for a right result, else what is wrong with it."""
    right_q, right_k = step.q, step.k
    if way != "append":
        cos, sin = step.cos[BEGIN:], step.sin[BEGIN:]
        right_q, right_k = (apply_rotary_emb(x.float(), cos, sin) for x in (step.q, step.k))
    found = [cache if step.page_table is None else cache[step.page_table] for cache in (step.k_cache, step.v_cache)]
    if step.page_table is not None:
        found = [x.flatten(1, 2) for x in found]
    end = BEGIN + step.k.shape[1]
    pairs = {"q": (q, right_q), "k": (found[0][:, BEGIN:end], right_k), "v": (found[1][:, BEGIN:end], step.v)}
    for name, (x, right) in pairs.items():
        if not bool(((x.float() - right.float()).abs() <= STEP * right.float().abs() + 1e-6).all()):
            return f"{name} is off by more than a rounding"
    if not all(bool(x[:, :BEGIN].isnan().all() & x[:, end:].isnan().all()) for x in found):
        return "a row that is nobody's was written to"
    return None


def measure(shape: Shape, where: torch.device, rounds: int = ROUNDS) -> dict[str, Any]:
    """All ways on one shape: microseconds, rate beside the copy of as many bytes, host's microseconds."""
    found = beside_copy.measure({name: functools.partial(_trial, name, shape, where) for name in WAYS}, where, rounds)
    calls = HOST_CALLS if where.type == "cuda" else 2
    for name, us in device.known_microseconds(found.runners, where, calls, rounds).items():
        found.results[name]["host_us"] = us
    return {"label": shape.label, "tokens": shape.tokens, "results": found.results}


def _trial(name: str, shape: Shape, where: torch.device) -> Trial:
    step = make_step(shape, where)
    return Trial(traffic(name, step), functools.partial(WAYS[name], step), functools.partial(complaint, name, step))


def kernels(shapes: Sequence[Shape]) -> list[tuple[Any, Any, Any]]:
    """Class, traits and problem of all kernels that the shapes run."""
    from cuteflash.kernels.common.append_kv import AppendKv  # imports the compiler

    problems = []
    for shape in dict.fromkeys(shape._replace(batch=1, tokens=1) for shape in shapes):
        step = make_step(shape, torch.device("cpu"))
        plain = AppendInputs(*_places(step), page_table=step.page_table)
        rotated = plain._replace(rotary_cos=step.cos, rotary_sin=step.sin, q=step.q)
        problems += [append_problem(inputs, AppendOptions()) for inputs in (plain, rotated)]
        rotation = RotaryInputs(step.q, step.cos, step.sin, step.cache_seqlens)
        problems.append(rotary_problem(rotation, RotaryOptions()))
    return [(AppendKv, AppendTraits(), problem) for problem in dict.fromkeys(problems)]


def markdown(result: dict[str, Any]) -> str:
    """The table and its notes, in markdown."""
    about = (
        "Microseconds of a call on the GPU, bf16; in brackets the rate over that of a copy of as many bytes, for one "
        "token a sequence the host's microseconds."
    )
    return beside_copy.table(result, about, tuple(WAYS), _text)


def _text(shape: dict[str, Any], way: str) -> str:
    entry = shape["results"][way]
    beside = f"host {entry['host_us']:.0f}" if shape["tokens"] == 1 else f"{entry['of_copy']:.2f}"
    return f"{entry['us']:.1f} ({beside})"


COMMAND = Command("append", "append_kv", "append benchmark", markdown, beside_copy.is_wrong)


def run(
    shapes: Sequence[Shape], where: torch.device, path: pathlib.Path | None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Measure all shapes; the file at `path` is rewritten after each."""
    return beside_copy.run(shapes, functools.partial(measure, where=where, rounds=rounds), where, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, print, write; 1 if a result was wrong or a call failed, 2 without a GPU, else 0."""
    parser = COMMAND.parser()
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    options = parser.parse_args(argv)

    def measured(where: torch.device) -> dict[str, Any]:
        shapes = QUICK if options.quick else SHAPES
        build_all(kernels(shapes), current_target(where.index), os.cpu_count() or 1)
        return run(shapes, where, options.json, QUICK_ROUNDS if options.quick else ROUNDS)

    return COMMAND.main(options, measured)


if __name__ == "__main__":
    sys.exit(main())
