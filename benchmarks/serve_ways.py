"""The ways to generate that `benchmarks.serve` compares; its docstring says what they are."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
ENGINE, STATIC, COMPILED = "engine", "generate", "generate_compiled"
CONTINUOUS, OURS = "generate_batch", "generate_batch_cuteflash"
WAYS = (ENGINE, STATIC, COMPILED, CONTINUOUS, OURS)
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


def work(way: str, preset: str, device: str, load: Load, connection: Connection) -> None:
    """Prepare a way, say that it is ready by None, and run it for each seed that comes; a text says why it failed."""
    try:
        made = makers()[way](preset, torch.device(device), load)
        made.run(load.prompts(made.vocabulary, seed=0))
        connection.send(None)
        while True:
            connection.send(made.run(load.prompts(made.vocabulary, connection.recv())))
    except EOFError:  # nobody asks any more
        made.close()
    except Exception as error:  # a way of another library may fail in any manner
        connection.send(f"{type(error).__name__}: {error}")


def makers() -> dict[str, Callable[[str, torch.device, Load], Way]]:
    return {
        ENGINE: make_engine,
        STATIC: make_static,
        COMPILED: functools.partial(make_static, compiles=True),
        CONTINUOUS: make_continuous,
        OURS: functools.partial(make_continuous, attention="cuteflash"),
    }


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def wait(device: torch.device) -> float:
    """The time when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def find_examples() -> None:
    """The engine, which is not installed, can be imported afterwards."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))


def make_engine(preset: str, device: torch.device, load: Load) -> Way:
    """The engine with its prefixes turned off, since other ways find none either."""
    find_examples()
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
        for _ in runner.capture():
            pass
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
    find_examples()
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
