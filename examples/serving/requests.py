"""What is asked of the engine, and what it answers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from serving.pages import ROOT, page_digest

Finish = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when to stop.

    Attributes:
        max_tokens: of the answer, positive.
        temperature: 0 takes the most probable token.
        top_p: the most probable tokens that together have this much of the probability; above 0, at most 1.
        seed: the same seed gives the same tokens whatever else is in the batch, up to the rounding of the model.
        stop_tokens: end the answer and are no part of it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def check(self) -> None:
        """Raise ValueError if a value is not allowed."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; allowed: positive numbers")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 and more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed: above 0, at most 1")


class Event(NamedTuple):
    """A part of an answer; the last one has `finish`. There is one for every token, so it has to be made quickly.

    Attributes:
        token: the next token; None if there is none, as with a stop token.
        finish: why the answer ends; None if it goes on.
        error: what failed, if `finish` is "error".
        cached_tokens: tokens of the prompt whose keys and values were found in the cache.
    """

    token: int | None = None
    finish: Finish | None = None
    error: str | None = None
    cached_tokens: int = 0


Listener = Callable[[Event], None]


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request on its way through the engine; only the scheduler changes it.

    Attributes:
        number: in the order of arrival.
        tokens: the prompt, then the answer. A token that a step is yet to choose is -1 less its row in that step.
        prompt_tokens: how many of them are the prompt.
        computed: tokens that are in the cache, or will be with the steps that are under way.
        pages: those held, in order.
        cached_tokens: see `Event`; of the first time that the request ran.
        most_tokens: that there can be, prompt and answer.
    """

    number: int
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    listener: Listener
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    cached_tokens: int | None = None
    preemptions: int = 0
    most_tokens: int = dataclasses.field(init=False)
    _digests: list[bytes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.most_tokens = self.prompt_tokens + self.sampling.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens that are yet to be computed; 1 while the answer grows."""
        return len(self.tokens) - self.computed

    def digests(self, page_size: int, pages: int) -> Sequence[bytes]:
        """Names of the first `pages` pages, all of which are full of chosen tokens."""
        for index in range(len(self._digests), pages):
            previous = self._digests[-1] if self._digests else ROOT
            self._digests.append(page_digest(previous, self.tokens[index * page_size : (index + 1) * page_size]))
        return self._digests[:pages]

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token: of the seed and the token's place, of nothing else."""
        if self.sampling.temperature == 0:
            return 0.0
        place = f"{self.sampling.seed}/{len(self.tokens) - self.prompt_tokens}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=3).digest(), "big") / 2**24  # exact in fp32
