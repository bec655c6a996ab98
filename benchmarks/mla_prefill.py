"""Prompts in the plain form of latent attention: TFLOP/s beside other implementations, on the same inputs.

    python -m benchmarks.mla_prefill --json benchmarks/results/mla_prefill.json      # measure, on a GPU
    python -m benchmarks.mla_prefill --from benchmarks/results/mla_prefill.json --into docs/benchmarks.md

Heads have 192 columns of Q and K and 128 of V, as DeepSeek-V3's. Ours takes K in two parts, of which all heads share
the second, and for comparison in one tensor, as peers do: torch's SDPA by cuDNN, and flash-attn-4. Only "ours, made
here" is charged for making that tensor, which it does in each call. Outputs are compared with attention in fp32 before
a clock runs.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuteflash.api import flash_attn_func
from cuteflash.mla_prefill import flash_mla_prefill
from cuteflash.problem import MaskKind
from cuteflash.tune.cells import Cell
from cuteflash.tune.peers import missing_peer, peer_attention
from cuteflash.tune.timing import Runner, first_call, interleaved, median

from . import device
from .command import Command
from .contest import add_shapes, one_line, remarks
from .decode_inputs import complaint
from .mla import multiplier, product_tflops
from .rates import in_words

HEAD_DIM, ROPE_DIM, HEAD_DIM_V = 192, 64, 128
ROUNDS, QUICK_ROUNDS = 7, 3
OURS, WHOLE, MADE, PRODUCT = "ours, two parts", "ours, one tensor", "ours, made here", "product"
PEERS = ("fa4", "cudnn")
KIB = 1024


class Shape(NamedTuple):
    """A batch of prompts of one length."""

    batch: int
    seqlen: int
    heads: int
    causal: bool = True

    @property
    def label(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.batch} × {self.seqlen // KIB}k, {self.heads} heads, {mask}"

    @property
    def flops(self) -> float:
        """Floating-point operations of both products, of the scores that the mask leaves."""
        scores = self.seqlen * (self.seqlen + 1) / 2 if self.causal else self.seqlen**2
        return 2 * (HEAD_DIM + HEAD_DIM_V) * self.batch * self.heads * scores


SHAPES = (
    Shape(2, 8 * KIB, 16),
    Shape(1, 8 * KIB, 128),
    Shape(8, 2 * KIB, 16),
    Shape(1, 16 * KIB, 16),
    Shape(2, 8 * KIB, 16, causal=False),
)


class Prompts(NamedTuple):
    """Arguments, (batch, seqlen, heads, columns)."""

    q: Tensor
    k: Tensor  # 128 columns
    k_rope: Tensor  # one head of 64 columns
    v: Tensor
    whole: Tensor  # K of 192 columns
    causal: bool


def make_prompts(shape: Shape, where: torch.device) -> Prompts:
    """Normal tensors in bf16."""
    generator = torch.Generator(where).manual_seed(0)

    def normal(heads: int, columns: int) -> Tensor:
        size = shape.batch, shape.seqlen, heads, columns
        return torch.randn(size, generator=generator, device=where, dtype=torch.bfloat16)

    q, k = normal(shape.heads, HEAD_DIM), normal(shape.heads, HEAD_DIM - ROPE_DIM)
    k_rope, v = normal(1, ROPE_DIM), normal(shape.heads, HEAD_DIM_V)
    return Prompts(q, k, k_rope, v, together(k, k_rope), shape.causal)


def together(k: Tensor, k_rope: Tensor) -> Tensor:
    """K in one tensor."""
    return torch.cat((k, k_rope.expand(*k.shape[:-1], ROPE_DIM)), -1)


def attention_in_fp32(prompts: Prompts, heads: Sequence[int]) -> Tensor:
    """O of some heads of the last sequence, by definition."""
    outs = []
    for head in heads:
        q, k, v = (x[-1, :, head].float() for x in (prompts.q, prompts.whole, prompts.v))
        scores = q @ k.T * HEAD_DIM**-0.5
        if prompts.causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
        outs.append(torch.softmax(scores, -1) @ v)
    return torch.stack(outs, 1)


def in_parts(prompts: Prompts) -> Tensor:
    return flash_mla_prefill(prompts.q, prompts.k, prompts.k_rope, prompts.v, causal=prompts.causal)


def in_one(prompts: Prompts) -> Tensor:
    return flash_attn_func(prompts.q, prompts.whole, prompts.v, causal=prompts.causal)


def made_here(prompts: Prompts) -> Tensor:
    return in_one(prompts._replace(whole=together(prompts.k, prompts.k_rope)))


def ways(shape: Shape) -> Iterator[tuple[str, Callable[[Prompts], Tensor]]]:
    """Name and call of each implementation; that of a peer may raise."""
    yield from ((OURS, in_parts), (WHOLE, in_one), (MADE, made_here))
    for name in PEERS:
        yield name, functools.partial(_peer, name, shape)


def _peer(name: str, shape: Shape, prompts: Prompts) -> Tensor:
    if missing := missing_peer(name):
        raise NotImplementedError(missing)
    tokens, hidden = shape.batch * shape.seqlen, shape.heads * HEAD_DIM
    mask: MaskKind = "causal" if shape.causal else "full"
    attention = peer_attention(name, Cell(HEAD_DIM, mask, shape.seqlen, tokens=tokens, hidden=hidden))
    with attention.context():
        return attention.turned(attention.call(*map(attention.turned, (prompts.q, prompts.whole, prompts.v))))


def measure(shape: Shape, where: torch.device, rounds: int) -> dict[str, Any]:
    """Microseconds of each implementation that is right, and of a matrix product of 8192 rows beside them."""
    prompts = make_prompts(shape, where)
    some = sorted({0, shape.heads - 1})
    exact = attention_in_fp32(prompts, some)
    results: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {PRODUCT: multiplier(where)}
    for name, call in ways(shape):
        entry = results[name] = {}
        repeat = functools.partial(_repeat, call, prompts)
        try:
            wrong = complaint(first_call(repeat, where)[-1][:, some], exact)
        except Exception as failure:
            wrong = one_line(failure)
        if wrong is None:
            runners[name] = repeat
        else:
            entry["left out" if name in PEERS else "problem"] = wrong
    for name, times in interleaved(runners, where, rounds).items():
        us = 1e3 * median(times)
        if name == PRODUCT:
            product = product_tflops(us)
        else:
            results[name] = {"us": us, "tflops": shape.flops / us / 1e6}
    return {"label": shape.label, "product_tflops": product, "results": results}


def _repeat(call: Callable[[Prompts], Tensor], prompts: Prompts, calls: int) -> Tensor:
    with torch.inference_mode():
        for _ in range(calls):
            out = call(prompts)
    return out


def run(grid: Sequence[Shape], where: torch.device, path: pathlib.Path | None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure all shapes; the file at `path` is rewritten after each."""
    result: dict[str, Any] = {"environment": device.environment(where)}
    return add_shapes(result, grid, lambda shape: measure(shape, where, rounds), where, path)


def markdown(result: dict[str, Any]) -> str:
    """The table and its notes."""
    environment, cells = result["environment"], result["shapes"]
    names = list(cells[0]["results"])
    lines = [
        f"{environment['gpu']}, {environment['date']}. TFLOP/s, bf16; matrix products of 8192 rows ran at "
        f"{min(cell['product_tflops'] for cell in cells):.0f} to {max(cell['product_tflops'] for cell in cells):.0f}.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for cell in cells:
        found = (cell["results"][name] for name in names)
        texts = (
            f"{entry['tflops']:.0f}" if "tflops" in entry else "–" if "left out" in entry else "wrong"
            for entry in found
        )
        lines.append(f"| {cell['label']} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in notes(result))]) + "\n"


def notes(result: dict[str, Any]) -> list[str]:
    """Our speed in that of the others; what was wrong, failed or was left out: in words."""
    lines = []
    for other in (WHOLE, MADE, *PEERS):
        both = [(cell["results"], cell["label"]) for cell in result["shapes"]]
        found = [(r[OURS]["tflops"] / r[other]["tflops"], at) for r, at in both if "us" in r[OURS] and "us" in r[other]]
        if found:
            lines.append(in_words(f"{OURS} / {other}", found))
    return lines + remarks(result["shapes"])


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether a result of ours was wrong or a call failed."""
    return any(": problem: " in line for line in notes(result))


COMMAND = Command("mla_prefill", "prompts of latent attention", "mla prefill benchmark", markdown, is_wrong)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, print, write; 1 if a result of ours was wrong or a call failed, 2 without a GPU, else 0."""
    parser = COMMAND.parser()
    parser.add_argument("--quick", action="store_true", help="two shapes, three rounds")
    options = parser.parse_args(argv)
    grid, rounds = (SHAPES[:2], QUICK_ROUNDS) if options.quick else (SHAPES, ROUNDS)
    return COMMAND.main(options, lambda where: run(grid, where, options.json, rounds))


if __name__ == "__main__":
    sys.exit(main())
