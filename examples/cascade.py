"""A decode step of many requests that share one long system prompt: attention to the shared pages once, not once each.

    python examples/cascade.py                                            # in miniature on a CPU, within seconds
    python examples/cascade.py --requests 128 --prefix 16384 --own 256    # on a GPU, with times

Cascade attention: the queries of all requests are the queries of one sequence, the shared prefix, which is read once.
Each request attends to its own tokens in a second call, and `cuteflash.merge_attn_states` puts the two together by
their log-sum-exps. It is compared with one call in which every request reads the shared pages for itself: the bytes of
keys and values that both read, on a GPU their times, and the errors of both. The exit status is 1 if they differ by
more than rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from cuteflash import flash_attn_with_kvcache, merge_attn_states

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS_PER_ROUND = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What is attended to.

    Attributes:
        requests: that share the prefix.
        prefix: tokens of the shared prefix, a multiple of `page_size`.
        own: tokens of a request's own at most; requests have between a half and all of them.
        queries: new tokens of each request, up to half of `own`.
        heads, kv_heads, head_dim: of the attention.
        page_size: tokens of a page.
    """

    requests: int = 64
    prefix: int = 8192
    own: int = 512
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    def check(self) -> None:
        """Raise ValueError if a size is not allowed."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; allowed: positive numbers")
        if self.prefix % self.page_size:
            raise ValueError(f"prefix is {self.prefix}; allowed: multiples of the page size, {self.page_size}")
        if 2 * self.queries > self.own:
            raise ValueError(f"queries is {self.queries}; allowed: up to {self.own // 2}, half of own")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; allowed: multiples of kv_heads, {self.kv_heads}")


LARGE = Sizes()
SMALL = Sizes(requests=6, prefix=96, own=24, heads=8, kv_heads=2, head_dim=64, page_size=16)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The tensors of a decode step; the new tokens are in the cache already.

    Attributes:
        q: (requests, queries, heads, head_dim).
        k_pages, v_pages: (pages, page_size, kv_heads, head_dim).
        page_table: (requests, pages of a request) int32; all rows begin with the pages of the shared prefix.
        prefix: tokens of the shared prefix.
        own: (requests,) int32, further tokens of each request.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    prefix: int
    own: Tensor

    @property
    def lengths(self) -> Tensor:
        """All tokens of each request, (requests,) int32."""
        return self.own + self.prefix


def make_step(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Step:
    """Normal tensors in pages that lie in a random order."""
    draw = torch.Generator().manual_seed(seed)
    shared, each = sizes.prefix // sizes.page_size, -(-sizes.own // sizes.page_size)
    pages = torch.randperm(shared + sizes.requests * each, generator=draw).int()
    table = torch.cat((pages[:shared].expand(sizes.requests, -1), pages[shared:].view(sizes.requests, each)), dim=1)
    own = torch.randint(-(-sizes.own // 2), sizes.own + 1, (sizes.requests,), generator=draw).int()
    rows = len(pages), sizes.page_size, sizes.kv_heads, sizes.head_dim
    draw_here = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw_here, device=device).to(dtype)

    q = normal(sizes.requests, sizes.queries, sizes.heads, sizes.head_dim)
    return Step(q, normal(*rows), normal(*rows), table.to(device), sizes.prefix, own.to(device))


def one_call(step: Step) -> Tensor:
    """O, (requests, queries, heads, head_dim): every request reads all its pages."""
    return flash_attn_with_kvcache(
        step.q, step.k_pages, step.v_pages, cache_seqlens=step.lengths, page_table=step.page_table, causal=True
    )


def cascade(step: Step) -> Tensor:
    """O, (requests, queries, heads, head_dim): the shared pages are read once."""
    shape = step.q.shape[:2]
    shared = step.prefix // step.k_pages.shape[1]
    # Every query sees all of the prefix, whose pages are full: one sequence of requests * queries queries.
    of_prefix, lse_of_prefix = flash_attn_with_kvcache(
        step.q.flatten(0, 1)[None], step.k_pages, step.v_pages, page_table=step.page_table[:1, :shared], return_lse=True
    )
    of_own, lse_of_own = flash_attn_with_kvcache(
        step.q,
        step.k_pages,
        step.v_pages,
        cache_seqlens=step.own,
        page_table=step.page_table[:, shared:],
        causal=True,
        return_lse=True,
    )
    of_prefix = of_prefix[0].unflatten(0, shape)
    lse_of_prefix = lse_of_prefix[0].unflatten(1, shape).transpose(0, 1)
    return merge_attn_states(of_prefix, lse_of_prefix, of_own, lse_of_own)[0]


def exact(step: Step) -> Tensor:
    """O by the definition, in fp32, each request for itself."""
    heads, head_dim = step.q.shape[2:]
    found = []
    for q, table, length in zip(step.q.float(), step.page_table, step.lengths.tolist(), strict=True):
        k, v = (pages[table].flatten(0, 1)[:length].float() for pages in (step.k_pages, step.v_pages))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        seen = torch.ones(len(q), length, dtype=torch.bool, device=q.device).tril(length - len(q))
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v))
    return torch.stack(found)


def bytes_read(step: Step) -> tuple[int, int]:
    """Bytes of keys and values that `one_call` and `cascade` ask for."""
    per_token = 2 * step.k_pages[0, 0].numel() * step.k_pages.element_size()
    own = int(step.own.sum())
    return (len(step.own) * step.prefix + own) * per_token, (step.prefix + own) * per_token


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """The median time of a step on the GPU, of steps in a CUDA graph, in which the host costs nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS_PER_ROUND):
            call()
    times: list[float] = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / STEPS_PER_ROUND)
    return median(times[1:])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cascade", description="Attention of many requests to one shared prefix.")
    for field in dataclasses.fields(Sizes):
        here, there = getattr(SMALL, field.name), getattr(LARGE, field.name)
        shown = f"{there}" if here == there else f"{there}; on a CPU {here}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, metavar="N", help=f"default: {shown}")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="of the times on a GPU (default: 10)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if the two are not equal but for rounding. A wrong option raises SystemExit(2)."""
    parser = make_parser()
    options = parser.parse_args(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)}
    usual = LARGE if device.type == "cuda" else SMALL
    sizes = dataclasses.replace(usual, **{name: value for name, value in given.items() if value is not None})
    try:
        sizes.check()
        if options.rounds < 1:
            raise ValueError(f"rounds is {options.rounds}; allowed: positive numbers")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch finds no GPU; allowed here: cpu")
        if device.type == "cuda" and dtype is torch.float32:
            raise ValueError("dtype is fp32; allowed on a GPU: bf16, fp16")
        step = make_step(sizes, dtype, device)
        with torch.inference_mode():
            return report(step, options.rounds)
    except ValueError as error:
        parser.error(str(error))


def report(step: Step, rounds: int) -> int:
    """Compare the two ways and print what was found; 0 if their errors are alike."""
    ways = {"one call": one_call, "cascade": cascade}
    right = exact(step)
    errors = [float((way(step).float() - right).abs().max()) for way in ways.values()]
    on_gpu = step.q.device.type == "cuda"
    requests, own = len(step.own), float(step.own.float().mean())
    print(f"{requests} requests, {step.prefix} shared tokens, {own:.0f} of their own on average; {step.q.dtype}")
    for name, error, size in zip(ways, errors, bytes_read(step), strict=True):
        line = f"{name:>9}: {size / 1e6:10.2f} MB of keys and values, largest error {error:.1e}"
        if on_gpu:
            line += f", {milliseconds(functools.partial(ways[name], step), rounds):.4f} ms"
        print(line)
    allowed = 2 * errors[0] + torch.finfo(step.q.dtype).eps * float(right.abs().max())
    if not errors[1] <= allowed:
        print(f"cascade: its error is above {allowed:.1e}, twice that of one call and a rounding", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
