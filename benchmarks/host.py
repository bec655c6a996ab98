"""What a call costs the host: microseconds of each public function on a tiny problem, and of the layers below it.

    python -m benchmarks.host                   # on a GPU beside FA2 (torch's SDPA), cuDNN and FA4
    python -m benchmarks.host --device cpu      # anywhere: launches do nothing, see `benchmarks.stand_in`

Each block makes so many calls that the GPU's launch queue holds their kernels, so that the host never waits for the
device. Blocks of all rows take turns. The best block says what the code costs, the median what it costs on this machine
as busy as it is. Rows of torch's own work are what any implementation pays under autograd.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cuteflash
from cuteflash import ops
from cuteflash.calls import bwd_call_of, call_of
from cuteflash.dispatch import current_target
from cuteflash.traits.quantize import TARGET as FP8_TARGET
from cuteflash.tune.peers import PEERS, missing_peer, peer_attention
from cuteflash.tune.timing import median

from . import device
from .contest import write
from .names import TITLES
from .stand_in import no_kernels

# Of a block: the launch queue of a GPU holds so many backwards; short blocks are seldom interrupted.
CALLS = {"cuda": 50, "cpu": 10}
ROUNDS = 100
TOKENS, HEADS, HEAD_DIM = 128, 8, 64
BATCH, PAGE = 4, 64  # of caches

Row = Callable[[], object]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Group(NamedTuple):
    """Rows, by title, and the context of their calls, which is entered once for many."""

    context: Context
    rows: dict[str, Row]


class Time(NamedTuple):
    """Microseconds of a call: those of the best block and of the median one."""

    best: float
    median: float


def dense_rows(where: torch.device) -> dict[str, Row]:
    """Dense attention, and what its gradient consists of."""
    shape = 1, TOKENS, HEADS, HEAD_DIM
    q, k, v, dout = (torch.randn(shape, device=where, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attend = cuteflash.flash_attn_func
    out, lse = attend(q, k, v, return_lse=True)
    forward = ops.fwd_cuda.planner.launch(call_of(q, k, v, ()), q, k, v)
    saved = dout, q, k, v, out, lse, None
    backward = ops.bwd_cuda.planner.launch(bwd_call_of(*saved, ()), *saved)
    x = leaves[0]
    rows: dict[str, Row] = {
        "forward": lambda: attend(q, k, v),
        "forward: allocation and launch": lambda: forward(q, k, v),
        "forward that keeps what its gradient needs": lambda: attend(*leaves),
        "forward + backward": lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
        "backward: allocation and launches": lambda: backward(*saved),
        "torch: a node in Python that does nothing + its gradient": lambda: _gradient(_nothing, leaves, dout),
        "torch: view + its gradient": lambda: torch.autograd.grad(x.view(shape), x, dout),
    }
    return rows


class Nothing(torch.autograd.Function):
    """A node with three inputs, which returns tensors that are there already."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.saved_tensors


def _nothing(*tensors: Tensor) -> Tensor:
    result: Tensor = Nothing.apply(*tensors)  # type: ignore[no-untyped-call]
    return result


def packed_rows(where: torch.device) -> dict[str, Row]:
    """Packed sequences."""
    q, k, v, dout = (torch.randn(TOKENS, HEADS, HEAD_DIM, device=where, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, 50, TOKENS], dtype=torch.int32, device=where)
    lengths = ends, ends, TOKENS - 50, TOKENS - 50
    attend = functools.partial(cuteflash.flash_attn_varlen_func, causal=True)
    return {
        "packed forward": lambda: attend(q, k, v, *lengths),
        "packed forward + backward": lambda: torch.autograd.grad(attend(*leaves, *lengths), leaves, dout),
    }


def cache_rows(where: torch.device) -> dict[str, Row]:
    """Decode steps, with and without new tokens."""
    q, k, v = (torch.randn(BATCH, 1, HEADS, HEAD_DIM, device=where, dtype=torch.bfloat16) for _ in range(3))
    k_cache, v_cache = (torch.randn(BATCH, 4 * PAGE, HEADS, HEAD_DIM, device=where).bfloat16() for _ in range(2))
    k_pages, v_pages = (x.view(4 * BATCH, PAGE, HEADS, HEAD_DIM) for x in (k_cache, v_cache))
    seqlens = torch.full((BATCH,), 17, dtype=torch.int32, device=where)
    table = torch.arange(4 * BATCH, dtype=torch.int32, device=where).view(BATCH, 4)
    cos, sin = (torch.randn(4 * PAGE, HEAD_DIM // 2, device=where) for _ in range(2))
    attend = functools.partial(cuteflash.flash_attn_with_kvcache, cache_seqlens=seqlens, causal=True)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    return {
        "decode": lambda: attend(q, k_cache, v_cache),
        "decode, paged": lambda: attend(q, k_pages, v_pages, page_table=table),
        "decode, appends": lambda: attend(q, k_cache, v_cache, k, v),
        "decode, appends and rotates": lambda: attend(q, k_cache, v_cache, k, v, **rotary),
        "decode, paged, appends and rotates": lambda: attend(q, k_pages, v_pages, k, v, page_table=table, **rotary),
        "append_kv": lambda: cuteflash.append_kv(k_cache, v_cache, k, v, seqlens),
    }


def fp8_rows(where: torch.device) -> dict[str, Row]:
    """The quantiser, and attention that quantises."""
    q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=where, dtype=torch.bfloat16) for _ in range(3))
    return {
        "quantize_qkv": lambda: cuteflash.quantize_qkv(q, k, v),
        "forward, fp8=True": lambda: cuteflash.flash_attn_func(q, k, v, fp8=True),
    }


def peer_groups(names: Sequence[str], where: torch.device) -> list[Group]:
    """Other implementations on the dense problem, each in its context."""
    groups = []
    for name in names:
        chosen = peer_attention(name, device.TINY)
        q, k, v, dout = (
            chosen.turned(torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=where, dtype=torch.bfloat16)) for _ in range(4)
        )
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        gradient = functools.partial(_gradient, chosen.call, leaves, dout)
        title = TITLES[name]
        rows: dict[str, Row] = {
            f"{title} forward": functools.partial(chosen.call, q, k, v),
            f"{title} forward + backward": gradient,
        }
        groups += [
            Group(chosen.context, rows),
            _on_this_thread(f"{title} forward + backward", gradient, chosen.context),
        ]
    return groups


def _gradient(attend: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor) -> object:
    return torch.autograd.grad(attend(*leaves), leaves, dout)


def _on_this_thread(title: str, row: Row, context: Context = contextlib.nullcontext) -> Group:
    """A row without the thread on which autograd runs the backwards of a GPU."""

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with context(), torch.autograd.set_multithreading_enabled(False):
            yield

    return Group(both, {f"{title}, on the calling thread": row})


def groups_of(names: Sequence[str], where: torch.device) -> list[Group]:
    """All rows that a device runs, with the peers of these names."""
    rows = dense_rows(where)
    groups = [Group(contextlib.nullcontext, rows)]
    if where.type == "cuda":
        groups.append(_on_this_thread("forward + backward", rows["forward + backward"]))
        groups += peer_groups(names, where)
    groups.append(Group(contextlib.nullcontext, packed_rows(where)))
    groups.append(Group(torch.no_grad, cache_rows(where)))
    if where.type != "cuda" or current_target(where.index or 0) == FP8_TARGET:
        groups.append(Group(torch.no_grad, fp8_rows(where)))
    return groups


def measure(groups: Sequence[Group], where: torch.device, calls: int, rounds: int) -> dict[str, Time]:
    """The times of all rows, their blocks in turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first compiles and warms up
        for context, rows in groups:
            with context():
                for title, row in rows.items():
                    found.setdefault(title, []).append(_block_us(row, where, calls))
    return {title: Time(min(times[1:]), median(times[1:])) for title, times in found.items()}


def _block_us(row: Row, where: torch.device, calls: int) -> float:
    """Microseconds of a call. Without a GPU all work is this thread's, so that its processor time says it best."""
    clock = time.thread_time
    if where.type == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    started = clock()
    for _ in range(calls):
        row()
    return (clock() - started) * 1e6 / calls


def report(times: Mapping[str, Time]) -> str:
    """A table in Markdown."""
    lines = ["| call | best µs | median µs |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {title} | {best:.1f} | {usual:.1f} |" for title, (best, usual) in times.items())])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; status 2 if an option is wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.host", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["fa2"], help="on a GPU; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="blocks of a row; default: %(default)s")
    parser.add_argument("--calls", type=int, help=f"of a block; default: {CALLS['cuda']}, without a GPU {CALLS['cpu']}")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there, too")
    options = parser.parse_args(argv)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    calls = CALLS[kind] if options.calls is None else options.calls
    if min(options.rounds, calls) < 1:
        parser.error("--rounds and --calls are 1 or more")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and there is no GPU; allowed: cpu, on which launches do nothing")
    for name in options.peers:
        if kind == "cuda" and (reason := missing_peer(name)):
            parser.error(f"--peers {name}: {reason}")
    where = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    with no_kernels() if kind == "cpu" else contextlib.nullcontext():
        times = measure(groups_of(options.peers, where), where, calls, options.rounds)
    found = device.environment(where)
    print(f"{found['gpu']}, torch {torch.__version__}, {options.rounds} blocks of {calls} calls")
    print(report(times))
    if options.json is not None:
        write(found | {"host_us": {title: entry._asdict() for title, entry in times.items()}}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
