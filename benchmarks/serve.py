"""The serving engine of examples/serve.py beside transformers' generation, on one model with random weights.

    python -m benchmarks.serve --preset 1b --json serve.json
    python -m benchmarks.serve --preset 1b --quick          # all ways in a minute on an H200

Every way answers the same prompts with as many tokens, greedily, and none stops early. The engine and transformers'
continuous batching take all requests at once and batch them as they like, within the same limits: requests that run,
tokens of a step, tokens of the cache. `generate` takes them in static batches, padded on the left. Ways:

- engine: examples/serve.py's.
- generate: transformers with SDPA and its dynamic cache.
- generate_compiled: with SDPA and a static cache, for which it compiles its steps and captures them in CUDA graphs.
- generate_batch: transformers' continuous batching with SDPA.
- generate_batch_cuteflash: transformers' continuous batching with ours.

Each way has a process of its own. They prepare at the same time: load, compile, and run once, which does not count.
Then they are measured one after the other, round by round, and each result is printed at once.

Times are wall-clock times. The first token's is counted from the beginning, since all requests are there from the
beginning; of `generate`, which gives tokens only when a batch is done, only throughput is measured. How many of the
answers begin with the same token as the first way's is printed, too: in 16 bits not all, since rounding depends on the
shapes of a batch. It needs the repository: the engine is not part of a wheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import torch

from benchmarks.serve_ways import EXAMPLES, WAYS, Load, Measured, work
from cuteflash.output import check_file, write_file
from cuteflash.tune.machine import versions

BEGIN = time.monotonic()
FULL = Load()
QUICK = Load(requests=64, shortest=64, longest=512, answer=32, batch=32)
PREPARE, PREPARE_QUICK, LEAVE = 600, 60, 5  # seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description="The engine beside transformers' generation.")
    parser.add_argument("--preset", default="1b", help="the model, of examples/serving/presets.py")
    parser.add_argument("--ways", default=",".join(WAYS), help="what to compare (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few and short requests")
    parser.add_argument("--rounds", type=int, help="runs of each way; the median is shown (default: 3; with --quick 1)")
    parser.add_argument(
        "--prepare",
        type=int,
        metavar="SECONDS",
        help=f"a way that is not ready by then is left out (default: {PREPARE}; with --quick {PREPARE_QUICK})",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write all measurements")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a way failed. A wrong option raises SystemExit(2)."""
    options = read_options(argv)
    try:
        return compare(options)
    finally:  # ways that are ready end by themselves, now that nobody asks them any more
        end = time.monotonic() + LEAVE
        for process in multiprocessing.active_children():
            process.join(max(end - time.monotonic(), 0))
            process.terminate()


def compare(options: argparse.Namespace) -> int:
    """Prepare, measure, and print; returns 1 if a way failed."""
    load = QUICK if options.quick else FULL
    note(f"{', '.join(options.ways)} prepare on {options.device}")
    failed: dict[str, str] = {}
    ready = prepare(options, load, failed)
    measured = measure(ready, options.rounds, load, failed)
    found: dict[str, Any] = {}
    expected: Sequence[Sequence[int]] = ()
    for way, runs in measured.items():
        summaries, answers = [run.summary() for run in runs], runs[-1].answers
        found[way] = {name: median(each[name] for each in summaries) for name in summaries[0]}
        expected = expected or answers
        found[way]["equal_first_tokens"] = equal_first_tokens(answers, expected)
        print(line(way, found[way]), flush=True)
    found |= {way: {"failed": why} for way, why in failed.items()}
    if options.json is not None:
        about = {"preset": options.preset, "load": dataclasses.asdict(load), "versions": versions(), "ways": found}
        write_file(options.json, json.dumps(about) + "\n")
    return int(bool(failed))


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options with their defaults. SystemExit(2) if one is not allowed."""
    parser = make_parser()
    options = parser.parse_args(argv)
    options.ways = options.ways.split(",")
    if set(options.ways) - set(WAYS):
        parser.error(f"ways is {','.join(options.ways)}; allowed: {', '.join(WAYS)}")
    for name, full, quick in (("rounds", 3, 1), ("prepare", PREPARE, PREPARE_QUICK)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
        if getattr(options, name) < 1:
            parser.error(f"{name} is {getattr(options, name)}; allowed: positive numbers")
    if not (EXAMPLES / "serving").is_dir():
        parser.error(f"{EXAMPLES} does not have the engine; run the benchmark in a checkout of the repository")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("device is cuda, but torch finds no GPU; allowed here: cpu")
    if options.json is not None:
        check_file(options.json)
    return options


def start(way: str, options: argparse.Namespace, load: Load) -> Connection:
    """Begin to prepare a way in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    context.Process(target=work, args=(way, options.preset, options.device, load, its), daemon=True).start()
    its.close()  # so that the end of the process is noticed
    return ours


def prepare(options: argparse.Namespace, load: Load, failed: dict[str, str]) -> dict[str, Connection]:
    """The ways that are ready within the time, in their order; why others are not is noted in `failed`."""
    connections = {way: start(way, options, load) for way in options.ways}
    pending = dict(connections)
    end = time.monotonic() + options.prepare
    while pending and (left := end - time.monotonic()) > 0:
        heard = wait(pending.values(), left)
        for way in [way for way, connection in pending.items() if connection in heard]:
            answer = receive(pending.pop(way))
            if isinstance(answer, str):
                fail(failed, way, answer)
            else:
                note(f"{way}: ready")
    for way in pending:
        fail(failed, way, f"not ready after {options.prepare} s; --prepare allows for more")
    return {way: connection for way, connection in connections.items() if way not in failed}


def measure(ready: dict[str, Connection], rounds: int, load: Load, failed: dict[str, str]) -> dict[str, list[Measured]]:
    """The rounds of each way, each with prompts of its own; a way that fails is noted in `failed` and left out."""
    measured: dict[str, list[Measured]] = {way: [] for way in ready}
    for seed in range(1, 1 + rounds):
        for way in list(measured):
            ready[way].send(seed)
            answer = receive(ready[way])
            if isinstance(answer, Measured) and list(map(len, answer.answers)) == [load.answer] * load.requests:
                measured[way].append(answer)
                note(f"{way}: {answer.tokens} tokens in {answer.seconds:.2f} s, {answer.tokens / answer.seconds:.0f}/s")
            else:
                fail(failed, way, answer if isinstance(answer, str) else "an answer has another length than asked for")
                del measured[way]
    return measured


def receive(connection: Connection) -> Measured | str | None:
    """What a way tells: None if it is ready, a run, or why it failed."""
    try:
        told: Measured | str | None = connection.recv()
    except EOFError:
        return "its process has ended"
    return told


def note(text: str) -> None:
    """A line about what is done by now, with the seconds since the benchmark began, on the standard error."""
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


def fail(failed: dict[str, str], way: str, why: str) -> None:
    failed[way] = why
    note(f"{way}: failed: {why}")


def equal_first_tokens(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The part of the answers that begin with the token of `expected`."""
    pairs = list(zip(answers, expected, strict=True))
    return sum(one[0] == other[0] for one, other in pairs) / len(pairs)


def line(way: str, result: dict[str, float]) -> str:
    """One line for people."""
    text = f"{way:>24}: {result['tokens_per_second']:8.0f} tokens/s"
    if "first_token_ms" in result:
        first, between = result["first_token_ms"], result["between_tokens_ms"]
        text += f", first token {first:7.1f} ms (p95 {result['first_token_ms_p95']:.1f})"
        text += f", between tokens {between:6.2f} ms (p95 {result['between_tokens_ms_p95']:.2f})"
    return text + f", first tokens as the first way's {result['equal_first_tokens']:.0%}"


if __name__ == "__main__":
    sys.exit(main())
