"""Decoding: how fast attention of a few queries reads a KV cache, beside the rate of a copy and other implementations.

    python -m benchmarks.decode --json benchmarks/results/decode.json      # measure, on a GPU
    python -m benchmarks.decode --from benchmarks/results/decode.json --into docs/benchmarks.md

GB/s count the keys and values that a step reads once, nothing else. The copy beside them reads and writes as many bytes
together, in the same rounds; a kernel that only reads may be faster. A step is timed call after call, and as a CUDA
graph of a call for each cache. Several caches are visited in turn, so that none is read out of the GPU's cache;
`--one-cache` visits one. Every query sees all keys. Outputs are compared with attention in fp32 before a clock runs.
Peers are torch's SDPA backends and flash-attn-4, which get no pages, and no caches of 8 bits (`--cache e4m3`).

Caches in a row and caches in pages are compared twice, like with like: with the lengths that the caches' sizes say,
which the host knows, and with lengths on the device, as a server has them. `--lengths` leaves one of both out.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cuteflash.api import flash_attn_func
from cuteflash.traits.arch import Family
from cuteflash.tune.peers import BACKENDS, PEERS, Attention, missing_peer
from cuteflash.tune.timing import Runner, first_call, interleaved, median

from . import device
from .beside_copy import copier
from .command import Command
from .contest import add_shapes, one_line, remarks
from .decode_inputs import PAGES, Caches, Shape, attention_in_fp32, complaint, copies_of, make_caches
from .rates import in_words

ROUNDS, QUICK_ROUNDS = 7, 3
HOST_CALLS = 100
SPLITS: dict[str, Any] = {"num_splits": 0}  # as many parts as the kernel's planning chooses
OURS, SM80, GRAPH, COPY = "ours", "ours sm80", " (graph)", "copy"
COMPARED = ((OURS, "cudnn"), (OURS, "fa4"), (OURS, "fa2"), (SM80, "fa2"))
LENGTHS = {"host": "", "device": ", lengths on the device"}  # where they are, in the names of implementations
KIB = 1024
CACHES = ("bf16", "e4m3")
HEADS = ((32, 8, (8 * KIB,)), (32, 8, (128 * KIB,)), (32, 8, (8 * KIB,) * 16), (64, 8, (4 * KIB,) * 64),
         (32, 32, (4 * KIB,) * 32), (32, 1, (32 * KIB,) * 8), (32, 8, (128 * KIB, *(KIB,) * 63)))  # fmt: skip


class Settings(NamedTuple):
    """How a run measures.

    Attributes:
        rounds: of interleaved batches.
        one_cache: a single cache is visited again and again.
        peers: names of other implementations.
        pages: page sizes.
        cache: element type of the caches.
        lengths: where the lengths of sequences that fill their caches are.
    """

    rounds: int = ROUNDS
    one_cache: bool = False
    peers: tuple[str, ...] = PEERS
    pages: tuple[int, ...] = PAGES
    cache: str = CACHES[0]
    lengths: tuple[str, ...] = tuple(LENGTHS)


def shapes(head_dims: Sequence[int], queries: int, quick: bool, cache: str = CACHES[0]) -> list[Shape]:
    """The grid; the quick one has a single sequence of 8k, many of 4k, and mixed lengths."""
    kinds = [HEADS[i] for i in (0, 3, 6)] if quick else HEADS
    is_e4m3 = cache == "e4m3"
    return [
        Shape(head_dim, *kind)._replace(queries=queries, is_e4m3=is_e4m3) for head_dim in head_dims for kind in kinds
    ]


def attend(caches: Caches, family: Family | None = None) -> Tensor:
    """Ours: without pages and lengths the public function, otherwise the operator of caches."""
    if caches.descales is not None:
        return attend_e4m3(caches, caches.descales, family)
    if caches.page_table is None and caches.lengths is None:
        out: Tensor = flash_attn_func(caches.q, caches.k, caches.v, family=family, **SPLITS)
        return out
    op = torch.ops.cuteflash.kvcache_fwd
    found: Tensor = op(caches.q, caches.k, caches.v, seqused_k=caches.lengths, page_table=caches.page_table, **SPLITS)
    return found


def attend_e4m3(caches: Caches, descales: Tensor, family: Family | None) -> Tensor:
    """Ours on e4m3 caches: the operator of caches."""
    k_descale, v_descale = descales
    found: Tensor = torch.ops.cuteflash.kvcache_fwd(
        caches.q,
        caches.k,
        caches.v,
        seqused_k=caches.lengths,
        page_table=caches.page_table,
        k_descale=k_descale,
        v_descale=v_descale,
        family=family,
        **SPLITS,
    )
    return found


def peer(name: str) -> Attention:
    """A peer without a mask, that takes several query heads for a KV head."""
    if name == "fa4":
        from flash_attn.cute import flash_attn_func as flash_attention_4

        return Attention(lambda q, k, v: flash_attention_4(q, k, v)[0])
    call = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    return Attention(call, heads_first=True, context=functools.partial(torch.nn.attention.sdpa_kernel, BACKENDS[name]))


class Rotation:
    """A runner that visits caches in turn."""

    def __init__(self, call: Callable[[Caches], Tensor], caches: Sequence[Caches]) -> None:
        self.call, self.caches = call, caches
        self.next = 0

    def __call__(self, calls: int) -> Tensor:
        with torch.inference_mode():
            for _ in range(calls):
                out = self.call(self.caches[self.next])
                self.next = (self.next + 1) % len(self.caches)
        return out


class Replay:
    """A runner that replays a CUDA graph with a call for each cache; it counts as that many calls."""

    def __init__(self, rotation: Rotation) -> None:
        self.graph, self.calls = torch.cuda.CUDAGraph(), len(rotation.caches)
        with torch.cuda.graph(self.graph):
            self.out = rotation(self.calls)

    def __call__(self, calls: int) -> Tensor:
        for _ in range(calls):
            self.graph.replay()
        return self.out


def contestants(shape: Shape, where: torch.device, settings: Settings) -> Iterator[tuple[str, Any]]:
    """The name and the rotation of each implementation, one after the other; an exception in place of one that fails.

    Peers share the caches in a row with `ours`. A shape of mixed lengths has caches in pages alone, and its lengths
    on the device.
    """
    count = copies_of(shape, settings.one_cache)
    for place in ("device",) if shape.is_mixed else settings.lengths:
        for page_size in settings.pages if shape.is_mixed else (0, *settings.pages):
            caches = [make_caches(shape, where, page_size, seed, place == "device") for seed in range(count)]
            yield ours(page_size, place), Rotation(attend, caches)
            if page_size or place == "device":
                continue
            yield SM80, Rotation(functools.partial(attend, family="sm80"), caches)
            for name in () if shape.is_e4m3 else settings.peers:
                missing = missing_peer(name)
                yield name, NotImplementedError(missing) if missing else _peer_rotation(name, caches)


def ours(page_size: int, place: str) -> str:
    """The name of ours on caches in pages, or in a row with `page_size` 0, whose lengths are in a place."""
    return OURS + f", pages of {page_size}" * (page_size > 0) + LENGTHS[place]


def _peer_rotation(name: str, caches: Sequence[Caches]) -> Rotation:
    attention = peer(name)

    def call(one: Caches) -> Tensor:
        q, k, v = (attention.turned(x) for x in (one.q, one.k, one.v))
        with attention.context():
            return attention.turned(attention.call(q, k, v))

    return Rotation(call, caches)


def measure(shape: Shape, where: torch.device, settings: Settings) -> dict[str, Any]:
    """All implementations on one shape: microseconds and GB/s, call after call and as a graph, host's microseconds."""
    results: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for name, rotation in contestants(shape, where, settings):
        entry = results[name] = {}
        try:
            if isinstance(rotation, Exception):
                raise rotation
            first = rotation.caches[0]
            wrong = complaint(first_call(rotation, where), attention_in_fp32(first))
            if wrong is None:
                rotation(len(rotation.caches))
                if where.type == "cuda":
                    runners[name + GRAPH] = Replay(rotation)
                runners[name] = rotation
        except Exception as failure:
            wrong = one_line(failure)
        if wrong:
            entry["left out" if name in PEERS else "problem"] = wrong
    runners[COPY] = copier(shape.nbytes, where)
    times = {name: 1e3 * median(own) for name, own in interleaved(runners, where, settings.rounds).items()}
    eager = {name: runners[name] for name in results if name in runners}
    host = device.known_microseconds(eager, where, HOST_CALLS if where.type == "cuda" else 1, settings.rounds)
    for name, entry in results.items():
        if name in eager:
            entry |= {"us": times[name], "gbps": shape.nbytes / times[name] / 1e3, "host_us": host[name]}
        replay = runners.get(name + GRAPH)
        if isinstance(replay, Replay):
            us = times[name + GRAPH] / replay.calls
            entry |= {"graph_us": us, "graph_gbps": shape.nbytes / us / 1e3}
    copied = shape.nbytes / times[COPY] / 1e3
    return {"label": shape.label, "bytes": shape.nbytes, "copy_gbps": copied, "results": results}


def run(grid: Sequence[Shape], where: torch.device, path: pathlib.Path | None, settings: Settings) -> dict[str, Any]:
    """Measure all shapes; the file at `path` is rewritten after each."""
    result: dict[str, Any] = {"environment": device.environment(where), "settings": settings._asdict()}
    result["queries"] = grid[0].queries
    return add_shapes(result, grid, lambda shape: measure(shape, where, settings), where, path)


def markdown(result: dict[str, Any]) -> str:
    """The tables and their notes, in markdown."""
    environment, cells = result["environment"], result["shapes"]
    names = list(dict.fromkeys(name for cell in cells for name in cell["results"]))
    visited = "one cache" if result["settings"]["one_cache"] else "caches visited in turn"
    cache = result["settings"].get("cache", CACHES[0])
    lines = [
        f"{environment['gpu']}, {environment['date']}. GB/s of keys and values, {cache}, {result['queries']} "
        f"quer{'y' if result['queries'] == 1 else 'ies'} a sequence, {visited}: as a CUDA graph, in brackets call "
        "after call.",
        "",
        f"| | {' | '.join(names)} | copy |",
        f"|---|{'---|' * (len(names) + 1)}",
    ]
    for cell in cells:
        found = " | ".join(_text(cell["results"].get(name)) for name in names)
        lines.append(f"| {cell['label']} | {found} | {cell['copy_gbps']:.0f} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in notes(result))]) + "\n"


def _text(entry: dict[str, Any] | None) -> str:
    if entry is None or "left out" in entry:
        return "–"
    if "problem" in entry:
        return "wrong"
    eager = f"{entry['gbps']:.0f}"
    return f"{entry['graph_gbps']:.0f} ({eager})" if "graph_gbps" in entry else eager


def ratios(result: dict[str, Any]) -> list[str]:
    """Ours in peers' speed, and from pages in that from rows, of graphs if there are any, in words.

    The geometric mean of all shapes, and the worst one.
    """
    lines = []
    pages = result["settings"].get("pages", PAGES)
    from_pages = ((ours(size, place), ours(0, place)) for place in LENGTHS for size in pages)
    for first, second in (*COMPARED, *from_pages):
        found = []
        for cell in result["shapes"]:
            speeds = [_speed(cell["results"].get(name)) for name in (first, second)]
            if all(speeds):
                found.append((speeds[0] / speeds[1], cell["label"]))
        if found:
            lines.append(in_words(f"{first}/{second}", found))
    return lines


def _speed(entry: dict[str, Any] | None) -> float:
    """GB/s; 0 if nothing was timed."""
    return 0.0 if entry is None else entry.get("graph_gbps", entry.get("gbps", 0.0))


def notes(result: dict[str, Any]) -> list[str]:
    """Speed in peers' speeds; what was wrong, failed or was left out: in words."""
    return ratios(result) + remarks(result["shapes"])


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether a result of ours was wrong or a call failed."""
    return any(": problem: " in line for line in notes(result))


COMMAND = Command("decode", "decoding", "decode benchmark", markdown, is_wrong)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, print, write; 1 if a result of ours was wrong or a call failed, 2 without a GPU, else 0."""
    parser = COMMAND.parser()
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256], metavar="D")
    parser.add_argument("--queries", type=int, choices=(1, 4), default=1, help="of a sequence")
    parser.add_argument("--one-cache", action="store_true", help="visit one cache again and again")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--pages", type=int, nargs="*", default=list(PAGES), metavar="SIZE")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="where lengths are")
    parser.add_argument("--cache", choices=CACHES, default=CACHES[0], help="element type of the caches; Q is bf16")
    parser.add_argument("--quick", action="store_true", help="three shapes of a head dim, three rounds")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name contains this")
    options = parser.parse_args(argv)
    grid = shapes(options.head_dims, options.queries, options.quick, options.cache)
    grid = [shape for shape in grid if options.only in shape.label]
    if not grid:
        parser.error(f"--only is {options.only!r}, which is in no shape's name")

    def measured(where: torch.device) -> dict[str, Any]:
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        settings = Settings(
            rounds, options.one_cache, tuple(options.peers), tuple(options.pages), options.cache, tuple(options.lengths)
        )
        return run(grid, where, options.json, settings)

    return COMMAND.main(options, measured)


if __name__ == "__main__":
    sys.exit(main())
