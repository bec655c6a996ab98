"""The engine: it takes requests at any time, from any thread, and computes a step after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from serving.requests import Event, Listener, Request, Sampling
from serving.runner import Chosen, Runner
from serving.scheduler import Chunk, Scheduler

log = logging.getLogger("serving")


class BusyError(RuntimeError):
    """Too many requests wait."""


class Engine:
    """Continuous batching over a runner.

    `start` gives it a thread of its own, `stop` ends it; `generate` computes in the caller's thread instead.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner.pool, runner.limits)
        self.steps = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._outbox: deque[tuple[Listener, Event]] = deque()
        self._wake = threading.Condition()
        self._under_way: tuple[list[Chunk], Chosen] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._submitted = 0
        self._unfinished = 0

    def submit(self, prompt: Sequence[int], sampling: Sampling, listener: Listener) -> Request:
        """Take a request. `listener` is called with each event, in the thread that computes; it must be quick.

        Raises:
            ValueError: the request can never be served: it is too long, say.
            BusyError: too many requests wait; later this one could be served.
        """
        self._check(prompt, sampling)
        with self._wake:
            if self._stopping:
                raise BusyError("the engine has stopped")
            if self._unfinished >= self.runner.limits.requests + self.runner.limits.waiting:
                raise BusyError(f"{self._unfinished} requests run or wait; try again later")
            self._unfinished += 1
            self._submitted += 1
            request = Request(self._submitted, list(prompt), len(prompt), sampling, self._queued(listener))
            self._inbox.append(lambda: self.scheduler.add(request))
            self._wake.notify()
        return request

    def abort(self, request: Request) -> None:
        """End a request soon; its listener is told. Nothing happens if it has ended."""
        with self._wake:
            self._inbox.append(lambda: self.scheduler.abort(request))
            self._wake.notify()

    def step(self) -> bool:
        """Begin a step, and end the one before; False if there was neither. If one fails, its requests end, no others.

        A step begins before the chosen tokens of the one before are read, so that the GPU need not wait for the host.
        """
        self._read_inbox()
        if self.scheduler.is_short:
            self._end_step()  # it may end requests, whose pages others need
        chunks = self.scheduler.plan()
        if not (chunks or self._under_way):
            self._deliver()
            return False
        begun = self._begin_step(chunks) if chunks else None
        self._end_step()
        self._under_way = begun
        self._deliver()
        return True

    def _begin_step(self, chunks: list[Chunk]) -> tuple[list[Chunk], Chosen] | None:
        self.steps += 1
        try:
            chosen = self.runner.launch(chunks)
        except Exception as error:  # of whatever kind: the other requests have to go on
            self._drop(chunks, error)
            return None
        self.scheduler.advance(chunks)
        return chunks, chosen

    def _end_step(self) -> None:
        if self._under_way is None:
            return
        (chunks, chosen), self._under_way = self._under_way, None
        try:
            tokens = chosen.tolist()
        except Exception as error:
            self._drop(chunks, error)
        else:
            self.scheduler.commit(chunks, tokens)

    def _drop(self, chunks: list[Chunk], error: Exception) -> None:
        log.error("a step of %d requests failed", len(chunks), exc_info=error)
        self.scheduler.drop(chunks, f"{type(error).__name__}: {error}")

    def generate(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
        """The answers to `prompts`, in their order, computed here and now.

        Raises:
            RuntimeError: a step failed.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        errors = []

        def listen_for(answer: list[int]) -> Listener:
            def listen(event: Event) -> None:
                if event.token is not None:
                    answer.append(event.token)
                if event.finish == "error":
                    errors.append(event.error)

            return listen

        for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True):
            self.submit(prompt, sampling, listen_for(answer))
        while self.step():
            pass
        if errors:
            raise RuntimeError(f"{len(errors)} requests failed, the first by {errors[0]}")
        return answers

    def statistics(self) -> dict[str, int]:
        """Counts, as of now."""
        pool, scheduler = self.runner.pool, self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "steps": self.steps,
            "pages": pool.capacity,
            "available_pages": pool.available,
            "evicted_pages": pool.evictions,
            "preemptions": scheduler.preemptions,
        }

    @property
    def is_idle(self) -> bool:
        """Whether every request that was taken has ended."""
        return self._unfinished == 0 and self.scheduler.is_idle

    def start(self) -> None:
        """Compute in a thread until `stop`."""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests that have not ended are aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._inbox or self._under_way or not self.scheduler.is_idle):
                    self._wake.wait()
                if self._stopping:
                    break
            self.step()
        self._end_step()
        self._read_inbox()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.abort(request)
        self._deliver()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _queued(self, listener: Listener) -> Listener:
        return lambda event: self._outbox.append((listener, event))

    def _deliver(self) -> None:
        """Tell the listeners; their errors do not reach the engine."""
        while self._outbox:
            listener, event = self._outbox.popleft()
            if event.finish is not None:
                with self._wake:
                    self._unfinished -= 1
            try:
                listener(event)
            except Exception:
                log.exception("a request's listener failed")

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        sampling.check()
        if not prompt:
            raise ValueError("the prompt has no token; allowed: one and more")
        outside = next((token for token in prompt if not 0 <= token < self.runner.vocabulary), None)
        if outside is not None:
            raise ValueError(f"the prompt has the token {outside}; allowed: 0 to {self.runner.vocabulary - 1}")
        length, limit = len(prompt) + sampling.max_tokens, self.limit
        if length > limit:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together {length}; "
                f"allowed: up to {limit}"
            )

    @property
    def limit(self) -> int:
        """Tokens of the longest request: the setting, or what the cache holds, and one that is never computed."""
        pool = self.runner.pool
        return min(self.runner.limits.length, pool.capacity * pool.page_size + 1)
