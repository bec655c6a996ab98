"""Which tokens of which requests a step computes.

A step first takes the next token of every request that is answering, then prompts, oldest first, until the token budget
is used up; a prompt that does not fit is continued in the next step. A request takes the pages of all its known tokens
when it is admitted, and one more whenever a page is full. If there is none left, the youngest request gives its pages
back and is computed anew later.

A step may be planned while the one before is under way: where its requests stand is known then, but not which tokens
they continue with, nor whether these end one of them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Sequence

from serving.pages import PagePool
from serving.requests import Event, Finish, Request


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the engine.

    Attributes:
        batch_tokens: tokens that a step computes at most; at least `requests`.
        requests: that run at the same time.
        length: tokens of a request, prompt and answer.
        waiting: requests that wait to run.
    """

    batch_tokens: int = 2048
    requests: int = 64
    length: int = 4096
    waiting: int = 1024

    def check(self) -> None:
        """Raise ValueError if a size is not allowed."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; allowed: positive numbers")
        if self.batch_tokens < self.requests:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}; allowed: at least requests, {self.requests}, "
                "so that every answer grows in a step"
            )


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """The tokens ``[start, start + count)`` of a request; `chooses` says whether the answer's next token follows."""

    request: Request
    start: int
    count: int
    chooses: bool = False


_count_of = operator.attrgetter("count")


class Scheduler:
    """Requests that wait and that run."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        limits.check()
        self.pool, self.limits = pool, limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def plan(self) -> list[Chunk]:
        """What to compute next, the shortest chunks first; empty if nothing is to be done but what is under way.

        `advance` has to follow, then `commit` or `drop`. Not with a step under way if `is_short`.
        """
        planned: dict[Request, Chunk] = {}
        budget = self.limits.batch_tokens
        preempted = self.preemptions
        size = self.pool.page_size
        for request in sorted(self.running, key=_is_prompt):
            if budget == 0:
                break
            if not request.pages:  # it gave them to one before it
                continue
            known = len(request.tokens)
            if known == request.most_tokens:  # its last token is under way
                continue
            if known > len(request.pages) * size:
                budget += self._grow(request, planned)
                if not request.pages:
                    continue
            count = known - request.computed
            if count > budget:
                count = budget
            planned[request] = Chunk(request, request.computed, count)
            budget -= count
        while budget and self.waiting and len(planned) < self.limits.requests and preempted == self.preemptions:
            request = self.waiting[0]
            if not self._admit(request):
                break
            planned[request] = Chunk(request, request.computed, min(request.remaining, budget))
            budget -= planned[request].count
        return sorted(planned.values(), key=_count_of)

    @property
    def is_short(self) -> bool:
        """Whether a request would have to give way in the next plan, by what is known before steps under way end."""
        pool = self.pool
        if pool.available >= len(self.running):
            return False
        return sum(len(one.tokens) > len(one.pages) * pool.page_size for one in self.running) > pool.available

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """The chunks are under way, each in the row of its place."""
        for row, chunk in enumerate(chunks):
            request = chunk.request
            request.computed += chunk.count
            chunk.chooses = request.computed == len(request.tokens)
            if chunk.chooses:
                request.tokens.append(-1 - row)

    def commit(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> None:
        """The chunks are computed, and of each the model chose a token; only those after a last chunk count.

        What was computed of requests that have ended since does not count either.
        """
        size = self.pool.page_size
        for chunk, token in zip(chunks, tokens, strict=True):
            request, start = chunk.request, chunk.start
            if not request.pages:
                continue
            end = start + chunk.count
            if end // size > start // size:
                self._remember(request, start // size, end // size)
            if chunk.chooses:
                self._choose(request, end, token)

    def drop(self, chunks: Sequence[Chunk], error: str) -> None:
        """The chunks could not be computed: their requests end, if they have not yet."""
        for chunk in chunks:
            if chunk.request.pages:
                self._finish(chunk.request, "error", error=error)

    def abort(self, request: Request) -> None:
        """End a request; its pages are free. Nothing happens if it has ended."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.listener(Event(finish="abort"))
        elif request in self.running:
            self._finish(request, "abort")

    def _admit(self, request: Request) -> bool:
        """Let the request run if there are pages for all its tokens."""
        size = self.pool.page_size
        full = (len(request.tokens) - 1) // size  # at least one token is computed: the next one follows from it
        found = self.pool.match(request.digests(size, full))
        needed = self.pool.pages_for(len(request.tokens)) - len(found)
        if needed > self.pool.available - self.pool.idle_among(found):
            return False
        self.pool.hold(found)
        request.pages = found + self.pool.allocate(needed)
        request.computed = len(found) * size
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        self.waiting.popleft()
        self.running.append(request)
        self.running.sort(key=lambda one: one.number)
        return True

    def _grow(self, request: Request, planned: dict[Request, Chunk]) -> int:
        """Take the page that the last token needs, from younger requests if necessary, or from itself.

        Returns:
            The tokens of chunks that are not planned any more.
        """
        refund = 0
        needed = self.pool.pages_for(len(request.tokens)) - len(request.pages)
        while needed > self.pool.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest in planned:
                refund += planned.pop(youngest).count
            if youngest is request:
                return refund
        if needed:
            request.pages += self.pool.allocate(needed)
        return refund

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _remember(self, request: Request, full_before: int, full: int) -> None:
        """Name the pages that have become full."""
        digests = request.digests(self.pool.page_size, full)
        for index in range(full_before, full):
            self.pool.remember(request.pages[index], digests[index])

    def _choose(self, request: Request, place: int, token: int) -> None:
        """The answer's next token, which goes to `place`."""
        if token in request.sampling.stop_tokens:
            del request.tokens[place:]  # a step that has begun since goes on from there
            self._finish(request, "stop")
            return
        request.tokens[place] = token
        if place + 1 == request.most_tokens:
            self._finish(request, "length", token)
        else:
            request.listener(Event(token, None, None, request.cached_tokens or 0))

    def _finish(self, request: Request, finish: Finish, token: int | None = None, error: str | None = None) -> None:
        self._leave(request)
        request.listener(Event(token, finish, error, request.cached_tokens or 0))

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.pages = []


def _is_prompt(request: Request) -> bool:
    """Whether more of its known tokens are to be computed than the one that an answer has grown by."""
    return len(request.tokens) - request.computed > 1
