"""The serving engine of examples/serve.py beside transformers' generation, on one model with random weights.

    python -m benchmarks.serve --preset 1b --json serve.json

Every way answers the same prompts with as many tokens, greedily, and none stops early. The engine and transformers'
continuous batching take all requests at once and batch them as they like; `generate` takes them in static batches,
padded on the left. Times are wall-clock times. The first token's is counted from the beginning, since all
requests are there from the beginning; of `generate`, which gives tokens only when a batch is done, only throughput is
measured. It needs the repository: the engine is not part of a wheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from cuteflash.output import check_file, write_file
from cuteflash.tune.machine import versions

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
ENGINE, STATIC, CONTINUOUS = "engine", "generate", "generate_batch"
WAYS = (ENGINE, STATIC, CONTINUOUS)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is asked: prompts of lengths between the two, and the tokens of each answer."""

    requests: int = 128
    shortest: int = 64
    longest: int = 1024
    answer: int = 128
    batch: int = 64

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]

    @property
    def length(self) -> int:
        return self.longest + self.answer


FULL = Load()
QUICK = Load(requests=16, shortest=16, longest=128, answer=16, batch=8)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Seconds: of the run, and from its beginning to each token of each answer, if the way tells."""

    seconds: float
    tokens: int
    times: Sequence[Sequence[float]] = ()

    def summary(self) -> dict[str, float]:
        """Tokens of answers a second, and of requests: to the first token, and between tokens, in milliseconds."""
        found = {"seconds": self.seconds, "tokens_per_second": self.tokens / self.seconds}
        if self.times:
            firsts = sorted(times[0] for times in self.times)
            gaps = sorted(b - a for times in self.times for a, b in itertools.pairwise(times))
            for name, values in (("first_token_ms", firsts), ("between_tokens_ms", gaps)):
                found[name] = 1e3 * median(values)
                found[f"{name}_p95"] = 1e3 * values[int(0.95 * (len(values) - 1))]
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to generate: its model's vocabulary, the run that is measured, and what gives its memory back."""

    vocabulary: int
    run: Callable[[Sequence[Sequence[int]]], Measured]
    close: Callable[[], object] = lambda: None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description="The engine beside transformers' generation.")
    parser.add_argument("--preset", default="1b", help="the model, of examples/serving/presets.py")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--quick", action="store_true", help="few and short requests")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way; the median is shown")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write all measurements")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a way failed. A wrong option raises SystemExit(2)."""
    parser = make_parser()
    options = parser.parse_args(argv)
    ways = options.ways.split(",")
    if set(ways) - set(WAYS):
        parser.error(f"ways is {options.ways}; allowed: {', '.join(WAYS)}")
    if options.rounds < 1:
        parser.error(f"rounds is {options.rounds}; allowed: positive numbers")
    if not (EXAMPLES / "serving").is_dir():
        parser.error(f"{EXAMPLES} does not have the engine; run the benchmark in a checkout of the repository")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("device is cuda, but torch finds no GPU; allowed here: cpu")
    if options.json is not None:
        check_file(options.json)
    load = QUICK if options.quick else FULL
    found: dict[str, Any] = {}
    for way in ways:
        try:
            found[way] = measure(way, options, load)
            print(line(way, found[way]), flush=True)
        except Exception as error:  # a way of another library may fail in any manner
            found[way] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{way}: failed: {found[way]['failed']}", file=sys.stderr)
    if options.json is not None:
        about = {"preset": options.preset, "load": dataclasses.asdict(load), "versions": versions()}
        write_file(options.json, json.dumps(about | {"ways": found}) + "\n")
    return int(any("failed" in result for result in found.values()))


def measure(way: str, options: argparse.Namespace, load: Load) -> dict[str, float]:
    """The median of each number over the rounds, each with prompts of its own, after a run that does not count."""
    device = torch.device(options.device)
    make = {ENGINE: make_engine, STATIC: make_static, CONTINUOUS: make_continuous}[way]
    made = make(options.preset, device, load)
    made.run(load.prompts(made.vocabulary, seed=0))
    runs = [made.run(load.prompts(made.vocabulary, seed=1 + i)).summary() for i in range(options.rounds)]
    made.close()
    del made
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {name: median(each[name] for each in runs) for name in runs[0]}


def line(way: str, result: dict[str, float]) -> str:
    """One line for people."""
    text = f"{way:>14}: {result['tokens_per_second']:8.0f} tokens/s"
    if "first_token_ms" in result:
        first, between = result["first_token_ms"], result["between_tokens_ms"]
        text += f", first token {first:7.1f} ms (p95 {result['first_token_ms_p95']:.1f})"
        text += f", between tokens {between:6.2f} ms (p95 {result['between_tokens_ms_p95']:.2f})"
    return text


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def wait(device: torch.device) -> float:
    """The time when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_engine(preset: str, device: torch.device, load: Load) -> Way:
    """The engine with its prefixes turned off, since other ways find none either."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from serving.engine import Engine
    from serving.presets import make_model
    from serving.requests import Event, Sampling
    from serving.runner import CacheSettings, Runner
    from serving.scheduler import Limits

    limits = Limits(batch_tokens=max(2048, load.batch), requests=load.batch, length=load.length, waiting=load.requests)
    tokens = load.batch * load.length
    model = make_model(preset, dtype_of(device), device)
    runner = Runner(model, limits, CacheSettings(tokens=tokens, keeps_prefixes=False))
    if device.type == "cuda":
        for _ in runner.capture():
            pass
    engine = Engine(runner)

    def run(prompts: Sequence[Sequence[int]]) -> Measured:
        times: list[list[float]] = [[] for _ in prompts]
        begin = wait(device)
        for prompt, its in zip(prompts, times, strict=True):

            def listen(event: Event, its: list[float] = its) -> None:
                if event.token is not None:
                    its.append(time.perf_counter() - begin)

            engine.submit(prompt, Sampling(load.answer), listen)
        while engine.step():
            pass
        return Measured(wait(device) - begin, sum(map(len, times)), times)

    return Way(runner.vocabulary, run)


def _plain_model(preset: str, device: torch.device) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from serving.presets import make_model

    return make_model(preset, dtype_of(device), device, attention="sdpa")


def make_static(preset: str, device: torch.device, load: Load) -> Way:
    """`generate` of transformers with SDPA: batches in the order of arrival, padded on the left."""
    model = _plain_model(preset, device)

    def run(prompts: Sequence[Sequence[int]]) -> Measured:
        tokens = 0
        begin = wait(device)
        for place in range(0, len(prompts), load.batch):
            batch = prompts[place : place + load.batch]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in batch], device=device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=load.answer, do_sample=False, eos_token_id=[], pad_token_id=0
            )
            tokens += out.shape[0] * (out.shape[1] - longest)
        return Measured(wait(device) - begin, tokens)

    return Way(model.config.vocab_size, run)


def make_continuous(preset: str, device: torch.device, load: Load) -> Way:
    """transformers' continuous batching with SDPA."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _plain_model(preset, device)
    model.generation_config.eos_token_id = None
    generation = GenerationConfig(max_new_tokens=load.answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=load.batch, allow_block_sharing=False, auto_switch_to_flash=False
    )

    def run(prompts: Sequence[Sequence[int]]) -> Measured:
        inputs = [list(prompt) for prompt in prompts]
        begin = wait(device)
        results = model.generate_batch(
            inputs,
            generation_config=generation,
            continuous_batching_config=batching,
            record_timestamps=True,
            persistent_manager=True,  # what it prepares is prepared in the first run, which does not count
        )
        seconds = wait(device) - begin
        outputs = list(results.values())
        if len(outputs) != len(prompts) or any(len(out.generated_tokens) != load.answer for out in outputs):
            raise RuntimeError(f"{len(outputs)} answers to {len(prompts)} prompts, or some of another length")
        times = [[stamp - begin for stamp in out.timestamps] for out in outputs if out.timestamps]
        return Measured(seconds, len(outputs) * load.answer, times)

    return Way(model.config.vocab_size, run, model.destroy_cached_continuous_batching_manager)


if __name__ == "__main__":
    sys.exit(main())
