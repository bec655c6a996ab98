"""Decoding of latent attention: GB/s and TFLOP/s beside a copy and a matrix product of the same run.

    python -m benchmarks.mla --json benchmarks/results/mla.json      # measure, on a GPU
    python -m benchmarks.mla --cache e4m3 --quick                    # rows of e4m3 beside those of bf16
    python -m benchmarks.mla --from benchmarks/results/mla.json      # the table of a file

GB/s count the cached rows that a step reads, once; TFLOP/s count both products, of all heads and tokens with the rows
of their sequence. The copy reads and writes as many bytes together, the matrix product is one of bf16 with 8192 rows,
columns and terms; both take turns with the kernel in the same rounds. A step is timed as a CUDA graph of a call for
each cache, of which several are visited in turn, so that none is read out of the GPU's cache; and call after call. The
last column is the step by the sm80 family, whatever the best one of the GPU is; with cached rows of e4m3 the step with
those of bf16. Pages of 64 rows lie in a random order. Outputs are compared with attention in fp32 before a clock runs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuteflash.mla_planning import CudaMlaDecode
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.traits.arch import Family
from cuteflash.tune.timing import Runner, first_call, interleaved, median

from . import device
from .beside_copy import copier
from .contest import add_shapes, one_line
from .decode import Replay, Rotation
from .decode_inputs import complaint

L2_BYTES = 256 << 20  # of all caches that are visited in turn
ROUNDS, QUICK_ROUNDS = 7, 3
PRODUCT_SIZE = 8192
SCALE = 192**-0.5  # as models have it that were trained with 128 + 64 columns a head
KIB = 1024
OURS, SM80, HALF, COPY, PRODUCT = "ours", "sm80", "bf16", "copy", "product"
FP8 = torch.float8_e4m3fn
CACHES = {"bf16": torch.bfloat16, "e4m3": FP8}
BATCHES = ((128, 8 * KIB), (32, 4 * KIB), (1, 128 * KIB), (256, KIB), (16, 32 * KIB), (1, 8 * KIB))
QUICK_BATCHES = BATCHES[:3]
HEADS, QUICK_HEADS = (16, 32, 64, 128), (16, 64, 128)
# Mixed lengths by Zipf's law: sequences, and keys of the longest; the n-th has an n-th of them.
ZIPF = (128, 32 * KIB), (128, 128 * KIB)


class Shape(NamedTuple):
    """A decode step.

    Attributes:
        lengths: cached rows of each sequence.
        queries: of a sequence.
    """

    heads: int
    lengths: tuple[int, ...]
    queries: int = 1

    @property
    def label(self) -> str:
        batch, longest = len(self.lengths), max(self.lengths)
        size = f"{longest // KIB}k" if longest % KIB == 0 else str(longest)
        words = f"{batch} × {size}" if len(set(self.lengths)) == 1 else f"{batch} mixed up to {size}"
        return f"{words}, {self.heads} heads" + (f", {self.queries} queries" if self.queries > 1 else "")

    def nbytes(self, cache: torch.dtype) -> int:
        """Bytes of the cached rows that a step reads."""
        return cache.itemsize * LATENT_DIM * sum(self.lengths)

    @property
    def flops(self) -> int:
        """Floating-point operations of a step."""
        return 2 * (LATENT_DIM + LATENT_DIM_V) * self.heads * self.queries * sum(self.lengths)


class Caches(NamedTuple):
    """Arguments of a step."""

    q: Tensor  # (batch, queries, heads, 576)
    kv_cache: Tensor  # (pages, 64, 1, 576)
    page_table: Tensor  # (batch, pages of the longest)
    cache_seqlens: Tensor  # (batch,)
    descale: Tensor | None = None  # (1,), of e4m3


def shapes(quick: bool) -> list[Shape]:
    """The grid: equal lengths, mixed ones, and two queries."""
    batches, heads = (QUICK_BATCHES, QUICK_HEADS) if quick else (BATCHES, HEADS)
    grid = [Shape(h, (length,) * batch) for batch, length in batches for h in heads]
    mixed = [tuple(max(longest // n, 1) for n in range(1, batch + 1)) for batch, longest in ZIPF]
    grid += [Shape(h, lengths) for lengths in mixed for h in heads]
    return grid + [Shape(h, (8 * KIB,) * 64, 2) for h in (16, 64)]


def make_caches(shape: Shape, where: torch.device, seed: int, cache: torch.dtype = torch.bfloat16) -> Caches:
    """Normal tensors; entries of the table past a sequence's pages are -1."""
    generator = torch.Generator(where).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=where, dtype=torch.bfloat16)

    counts = [-(-length // PAGE_ROWS) for length in shape.lengths]
    order = torch.randperm(sum(counts), generator=generator, device=where).to(torch.int32)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=where)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return Caches(
        normal(len(counts), shape.queries, shape.heads, LATENT_DIM),
        normal(sum(counts), PAGE_ROWS, 1, LATENT_DIM).to(cache),
        table,
        torch.tensor(shape.lengths, dtype=torch.int32, device=where),
        torch.full((1,), 0.875, device=where) if cache == FP8 else None,
    )


def attention_in_fp32(caches: Caches, sequences: Sequence[int]) -> Tensor:
    """O of some sequences, by definition; the last token sees all rows, each one before it one less."""
    outs = []
    for i in sequences:
        length = int(caches.cache_seqlens[i])
        pages = caches.page_table[i, : -(-length // PAGE_ROWS)].long()
        rows = caches.kv_cache[pages].flatten(0, 2)[:length].float()
        if caches.descale is not None:
            rows = rows * caches.descale
        q = caches.q[i].float()
        scores = q @ rows.T * SCALE
        token = torch.arange(len(q), device=q.device)[:, None]
        hidden = torch.arange(length, device=q.device) > length - len(q) + token
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), -1)
        outs.append(weights @ rows[:, :LATENT_DIM_V])
    return torch.stack(outs)


class Ours:
    """A family's kernel, by its planner; None is the best of the GPU."""

    def __init__(self, family: Family | None = None) -> None:
        self.family = family
        self.decode = CudaMlaDecode()

    def __call__(self, caches: Caches) -> Tensor:
        *tensors, descale = caches
        options: dict[str, Any] = {"softmax_scale": SCALE, "causal": True, "num_splits": 0}
        return self.decode(*tensors, **options, family=self.family, descale=descale)[0]


attend, attend_sm80 = Ours(), Ours("sm80")


def graph(name: str) -> str:
    """What the graph of an implementation is called."""
    return f"{name} (graph)"


def measure(shape: Shape, where: torch.device, rounds: int, cache: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Microseconds of a step by each implementation, as a graph and call after call, of the copy and of the product."""
    nbytes = shape.nbytes(cache)
    entry: dict[str, Any] = {"label": shape.label, "bytes": nbytes, "flops": shape.flops, "cache": str(cache)}
    count = max(1, -(-L2_BYTES // nbytes))
    calls: dict[str, tuple[Ours, torch.dtype]] = {OURS: (attend, cache)}
    calls |= {HALF: (attend, torch.bfloat16)} if cache == FP8 else {SM80: (attend_sm80, cache)}
    some = sorted({0, len(shape.lengths) // 2, len(shape.lengths) - 1})
    runners: dict[str, Runner] = {COPY: copier(nbytes, where), PRODUCT: multiplier(where)}
    wrong = None
    try:
        for name, (call, dtype) in calls.items():
            caches = [make_caches(shape, where, seed, dtype) for seed in range(count)]
            exact = attention_in_fp32(caches[0], some)
            rotation = Rotation(call, caches)  # type: ignore[arg-type]
            wrong = wrong or complaint(first_call(rotation, where)[some], exact)
            if wrong is None:
                rotation(count)
                runners[name] = rotation
                if where.type == "cuda":
                    runners[graph(name)] = Replay(rotation)
    except Exception as failure:
        wrong = one_line(failure)
    for name in (COPY, PRODUCT):
        runners[name](1)
    entry |= {name: 1e3 * median(own) for name, own in interleaved(runners, where, rounds).items()}
    for name in map(graph, calls):
        if name in entry:
            entry[name] /= count
    return entry | ({"problem": wrong} if wrong else {})


def multiplier(where: torch.device) -> Runner:
    """A runner of bf16 matrix products."""
    size = PRODUCT_SIZE if where.type == "cuda" else 64
    a, b = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def run(calls: int) -> Tensor:
        for _ in range(calls):
            torch.mm(a, b, out=out)
        return out

    return run


def product_tflops(us: float) -> float:
    """TFLOP/s of a matrix product that takes so many microseconds."""
    return 2 * PRODUCT_SIZE**3 / us / 1e6


def run(
    grid: Sequence[Shape],
    where: torch.device,
    path: pathlib.Path | None,
    rounds: int,
    cache: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Measure all shapes; the file at `path` is rewritten after each."""

    def told(shape: Shape) -> dict[str, Any]:
        cell = measure(shape, where, rounds, cache)
        print(lines_of(cell), file=sys.stderr, flush=True)
        return cell

    return add_shapes({"environment": device.environment(where)}, grid, told, where, path)


def lines_of(cell: dict[str, Any]) -> str:
    """A cell's line of the table."""
    product = product_tflops(cell[PRODUCT])
    copied = cell["bytes"] / cell[COPY] / 1e3
    if "problem" in cell:
        return f"| {cell['label']} | wrong: {cell['problem']} | | | | | |"
    us, other = (cell.get(graph(name), cell[name]) for name in (OURS, second(cell)))
    gbps, tflops = cell["bytes"] / us / 1e3, cell["flops"] / us / 1e6
    return (
        f"| {cell['label']} | {us:.1f} ({cell[OURS]:.1f}) | {gbps:.0f} | {gbps / copied:.2f} | "
        f"{tflops:.0f} | {tflops / product:.2f} | {other:.1f} |"
    )


def second(cell: dict[str, Any]) -> str:
    """What the last column of a cell's table is of."""
    return HALF if HALF in cell else SM80


def table(result: dict[str, Any]) -> Iterator[str]:
    """The table, in markdown."""
    environment, cells = result["environment"], result["shapes"]
    copies = [cell["bytes"] / cell[COPY] / 1e3 for cell in cells]
    products = [product_tflops(cell[PRODUCT]) for cell in cells]
    is_e4m3 = any(HALF in cell for cell in cells)
    kind = "bf16 with cached rows of e4m3, those of bf16 in the last column" if is_e4m3 else "bf16"
    yield (
        f"{environment['gpu']}, {environment['date']}. {kind}, pages of {PAGE_ROWS}, as a CUDA graph, in brackets call "
        f"after call. Copies of as many bytes ran at {min(copies):.0f} to {max(copies):.0f} GB/s, matrix products at "
        f"{min(products):.0f} to {max(products):.0f} TFLOP/s."
    )
    yield ""
    yield f"| | µs | GB/s | of the copy | TFLOP/s | of the product | {HALF if is_e4m3 else SM80} µs |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(lines_of, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, and print; 1 if a result was wrong or a call failed, 2 without a GPU, else 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.mla", description="latent attention, measured")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, three rounds")
    parser.add_argument("--cache", choices=CACHES, default="bf16", help="element type of the cached rows")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results here after every shape")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, metavar="FILE", help="read results, measure nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.source:
        result = json.loads(arguments.source.read_text())
    elif not torch.cuda.is_available():
        print("measuring latent attention needs a CUDA device; torch finds none", file=sys.stderr)
        return 2
    else:
        where = torch.device("cuda", torch.cuda.current_device())
        rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
        result = run(shapes(arguments.quick), where, arguments.json, rounds, CACHES[arguments.cache])
    print("\n".join(table(result)))
    return 1 if any("problem" in cell for cell in result["shapes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
