"""The serving engine of examples/serve.py beside transformers' generation, on one model with random weights.

    python -m benchmarks.serve --preset 1b --json serve.json
    python -m benchmarks.serve --preset 1b --quick          # below a minute on an H200

Every way answers the same prompts with as many tokens, greedily, and none stops early. The engine and transformers'
continuous batching take all requests at once and batch them as they like, within the same limits: requests that run,
tokens of a step, tokens of the cache. `generate` takes them in static batches, padded on the left. Ways:

- engine: examples/serve.py's.
- generate: transformers with SDPA and its dynamic cache.
- generate_compiled: with SDPA and a static cache, for which it compiles its steps and captures them in CUDA graphs.
- generate_batch: transformers' continuous batching with SDPA.
- generate_batch_cuteflash: transformers' continuous batching with ours.

Times are wall-clock times. The first token's is counted from the beginning, since all requests are there from the
beginning; of `generate`, which gives tokens only when a batch is done, only throughput is measured. How many of the
answers begin with the same token as the first way's is printed, too: in 16 bits not all, since rounding depends on the
shapes of a batch. It needs the repository: the engine is not part of a wheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import inspect
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

BEGIN = time.monotonic()
EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
ENGINE, STATIC, COMPILED = "engine", "generate", "generate_compiled"
CONTINUOUS, OURS = "generate_batch", "generate_batch_cuteflash"
WAYS = (ENGINE, STATIC, COMPILED, CONTINUOUS, OURS)
QUICK_WAYS = (ENGINE, STATIC, CONTINUOUS, OURS)  # compiling takes longer than all of them
PAGE = 256  # tokens, of transformers' cache


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is asked: prompts of lengths between the two, and the tokens of each answer."""

    requests: int = 128
    shortest: int = 64
    longest: int = 1024
    answer: int = 128
    batch: int = 64
    batch_tokens: int = 2048

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]

    @property
    def length(self) -> int:
        return self.longest + self.answer


FULL = Load()
QUICK = Load(requests=64, shortest=64, longest=512, answer=64, batch=32)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A run.

    Attributes:
        seconds: that it took.
        answers: the tokens of each answer, in the order of the prompts.
        times: seconds from its beginning to each token of each answer, if the way tells.
    """

    seconds: float
    answers: Sequence[Sequence[int]]
    times: Sequence[Sequence[float]] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

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
    parser.add_argument("--ways", help=f"of {', '.join(WAYS)} (default: all; with --quick without {COMPILED})")
    parser.add_argument("--quick", action="store_true", help="few and short requests")
    parser.add_argument("--rounds", type=int, help="runs of each way; the median is shown (default: 3; with --quick 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write all measurements")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a way failed. A wrong option raises SystemExit(2)."""
    parser = make_parser()
    options = parser.parse_args(argv)
    ways = (options.ways or ",".join(QUICK_WAYS if options.quick else WAYS)).split(",")
    if options.rounds is None:
        options.rounds = 1 if options.quick else 3
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
    about = {"preset": options.preset, "load": dataclasses.asdict(load), "versions": versions(), "ways": found}
    expected: Sequence[Sequence[int]] = ()
    note(f"on {options.device}: {', '.join(ways)}")
    for way in ways:
        try:
            found[way], answers = measure(way, options, load)
            expected = expected or answers
            found[way]["equal_first_tokens"] = equal_first_tokens(answers, expected)
            print(line(way, found[way]), flush=True)
        except Exception as error:  # a way of another library may fail in any manner
            found[way] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{way}: failed: {found[way]['failed']}", file=sys.stderr)
        if options.json is not None:  # after each way, for runs that are cut
            write_file(options.json, json.dumps(about) + "\n")
    return int(any("failed" in result for result in found.values()))


def note(text: str) -> None:
    """A line about what is done by now, with the seconds since the benchmark began, on the standard error."""
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


def makers() -> dict[str, Callable[[str, torch.device, Load], Way]]:
    return {
        ENGINE: make_engine,
        STATIC: make_static,
        COMPILED: functools.partial(make_static, compiles=True),
        CONTINUOUS: make_continuous,
        OURS: functools.partial(make_continuous, attention="cuteflash"),
    }


def measure(way: str, options: argparse.Namespace, load: Load) -> tuple[dict[str, float], Sequence[Sequence[int]]]:
    """The median of each number over the rounds, each with prompts of its own, after a run that does not count.

    Returns:
        The numbers, and the answers of the last round.

    Raises:
        RuntimeError: an answer does not have the length that was asked for.
    """
    device = torch.device(options.device)
    made = makers()[way](options.preset, device, load)
    note(f"{way}: made")
    measured = []
    for i in range(1 + options.rounds):
        one = made.run(load.prompts(made.vocabulary, seed=i))
        note(f"{way}: {one.tokens} tokens in {one.seconds:.2f} s" + (", which do not count" if i == 0 else ""))
        if [len(answer) for answer in one.answers] != [load.answer] * load.requests:
            raise RuntimeError(f"{len(one.answers)} answers to {load.requests} prompts, or some of another length")
        measured += [one] * (i > 0)
    made.close()
    runs = [one.summary() for one in measured]
    del made
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {name: median(each[name] for each in runs) for name in runs[0]}, measured[-1].answers


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

    limits = Limits(load.batch_tokens, requests=load.batch, length=load.length, waiting=load.requests)
    tokens = load.batch * load.length
    model = make_model(preset, dtype_of(device), device)
    runner = Runner(model, limits, CacheSettings(tokens=tokens, keeps_prefixes=False))
    if device.type == "cuda":
        for rows in runner.capture():
            note(f"{ENGINE}: captured a step of {rows} rows")
    engine = Engine(runner)

    def run(prompts: Sequence[Sequence[int]]) -> Measured:
        times: list[list[float]] = [[] for _ in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        begin = wait(device)
        for prompt, its, answer in zip(prompts, times, answers, strict=True):

            def listen(event: Event, its: list[float] = its, answer: list[int] = answer) -> None:
                if event.token is not None:
                    its.append(time.perf_counter() - begin)
                    answer.append(event.token)

            engine.submit(prompt, Sampling(load.answer), listen)
        while engine.step():
            pass
        return Measured(wait(device) - begin, answers, times)

    return Way(runner.vocabulary, run)


def _model(preset: str, device: torch.device, attention: str) -> Any:
    """The preset's model with an attention of transformers, or ours for it; its weights are those of the engine's."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from serving.presets import make_model

    if attention == "cuteflash":
        from cuteflash.integrations.transformers import register

        register()
    return make_model(preset, dtype_of(device), device, attention=attention)


def make_static(preset: str, device: torch.device, load: Load, compiles: bool = False) -> Way:
    """`generate` of transformers with SDPA: batches in the order of arrival, padded on the left.

    Args:
        compiles: it has a static cache for all tokens of a batch, kept for the next one, and compiles its steps.
    """
    from transformers import StaticCache

    model = _model(preset, device, "sdpa")
    options = {"max_new_tokens": load.answer, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    caches: dict[int, Any] = {}

    def run(prompts: Sequence[Sequence[int]]) -> Measured:
        answers: list[list[int]] = []
        begin = wait(device)
        for place in range(0, len(prompts), load.batch):
            batch = prompts[place : place + load.batch]
            if compiles:
                if len(batch) not in caches:
                    caches[len(batch)] = StaticCache(config=model.config, max_cache_len=load.length)
                caches[len(batch)].reset()
                options["past_key_values"] = caches[len(batch)]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in batch], device=device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
            answers += model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
        return Measured(wait(device) - begin, answers)

    return Way(model.config.vocab_size, run)


def make_continuous(preset: str, device: torch.device, load: Load, attention: str = "sdpa") -> Way:
    """transformers' continuous batching, with the engine's limits and without prefixes, as the engine."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batching = accepted(
        ContinuousBatchingConfig,
        max_requests_per_batch=load.batch,
        max_batch_tokens=load.batch_tokens,
        num_blocks=load.batch * -(-load.length // PAGE),
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    if attention == "sdpa" and not hasattr(batching, "auto_switch_to_flash"):
        attention = "paged|sdpa"  # of transformers before 5.20, which would take flash-attn for "sdpa" if it finds it
    model = _model(preset, device, attention)
    model.generation_config.eos_token_id = None
    generation = GenerationConfig(max_new_tokens=load.answer, do_sample=False, eos_token_id=-1, pad_token_id=0)

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
        times = [[stamp - begin for stamp in out.timestamps] for out in outputs if out.timestamps]
        return Measured(seconds, [out.generated_tokens for out in outputs], times)

    return Way(model.config.vocab_size, run, model.destroy_cached_continuous_batching_manager)


def accepted(kind: Callable[..., Any], **options: Any) -> Any:
    """`kind` with those of the options that this version of transformers has."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in options.items() if name in known})


if __name__ == "__main__":
    sys.exit(main())
