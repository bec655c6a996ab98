"""A small engine, prompts, and the answers that transformers' eager generation gives."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from serving.engine import Engine
from serving.presets import make_model
from serving.requests import Event, Request, Sampling
from serving.runner import CacheSettings, Runner
from serving.scheduler import Limits

CPU = torch.device("cpu")
LIMITS = Limits(batch_tokens=16, requests=4, length=256, waiting=8)
PAGE = 8
ANSWER = 16  # tokens


@functools.cache
def model(preset: str, attention: str | None = None) -> Any:
    """In fp32 on the CPU; two of the same preset have the same weights."""
    return make_model(preset, torch.float32, CPU, **({} if attention is None else {"attention": attention}))


def make_engine(preset: str = "tiny", limits: Limits = LIMITS, tokens: int = 1024, **cache: Any) -> Engine:
    return Engine(Runner(model(preset), limits, CacheSettings(PAGE, tokens, **cache)))


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Bytes. Those of one seed and place begin alike, whatever their lengths."""
    return [[random.Random(f"{seed}/{i}/{j}").randrange(256) for j in range(n)] for i, n in enumerate(lengths)]


@functools.cache
def _eager_answer(preset: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    given = torch.tensor([prompt])
    out = model(preset, "eager").generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, eos_token_id=[]
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def eager_answers(preset: str, prompts: Sequence[Sequence[int]], tokens: int = ANSWER) -> list[list[int]]:
    """Greedy, each prompt for itself, with transformers' own cache."""
    return [_eager_answer(preset, tuple(prompt), tokens) for prompt in prompts]


class Client:
    """Submits a request and notes its events."""

    def __init__(self, engine: Engine, prompt: Sequence[int], sampling: Sampling | None = None) -> None:
        self.events: list[Event] = []
        self.request: Request = engine.submit(prompt, sampling or Sampling(ANSWER), self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if event.token is not None]

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish if self.events else None


def run(engine: Engine) -> None:
    """Until there is nothing to do; then nobody holds a page."""
    while engine.step():
        pass
    pool = engine.runner.pool
    assert pool.available == pool.capacity
