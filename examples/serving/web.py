"""OpenAI's endpoints over HTTP: completions, chat completions and models, whole or as a stream of server-sent events.

A client that leaves aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving import protocol
from serving.engine import BusyError, Engine
from serving.protocol import BadRequest, Call, Json
from serving.requests import Event, Request
from serving.text import TextStream, Tokenizer

BODY_BYTES = 8 << 20  # of a request, at most
LEFT = 499  # the status for a client that has left; nobody reads it


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What the endpoints share: a started engine, its tokenizer, the model's name."""

    engine: Engine
    tokenizer: Tokenizer
    model: str


def make_app(served: Served) -> Starlette:
    """The application; it neither starts nor stops the engine."""

    async def models(request: HttpRequest) -> Response:
        entry = {"id": served.model, "object": "model", "created": 0, "owned_by": "cuteflash"}
        return JSONResponse({"object": "list", "data": [entry | {"max_model_len": served.engine.limit}]})

    async def health(request: HttpRequest) -> Response:
        return JSONResponse(served.engine.statistics())

    async def completions(request: HttpRequest) -> Response:
        return await _answer(request, served, is_chat=False)

    async def chat(request: HttpRequest) -> Response:
        return await _answer(request, served, is_chat=True)

    async def unknown(request: HttpRequest, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        message = f"{request.method} {request.url.path}: {getattr(error, 'detail', 'failed')}"
        return JSONResponse(protocol.failure(message, status), status)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/health", health),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        exception_handlers={404: unknown, 405: unknown, 500: unknown},
    )


class Answer:
    """The answer to a call while it is made: a request of the engine for each prompt, and their events."""

    def __init__(self, served: Served, call: Call) -> None:
        self._served, self._call = served, call
        self._arrived: deque[tuple[int, Event]] = deque()  # the engine's thread appends
        self._wake = asyncio.Event()
        self._is_waking = False
        self._texts = [TextStream(served.tokenizer, call.stops) for _ in call.prompts]
        self._requests: list[Request] = []
        self._tokens, self._cached = 0, 0

    def submit(self) -> None:
        """Give the prompts to the engine. ValueError or BusyError if it does not take one; then it has none."""
        loop = asyncio.get_running_loop()
        try:
            for index, prompt in enumerate(self._call.prompts):

                def listen(event: Event, index: int = index) -> None:
                    self._arrived.append((index, event))
                    if not self._is_waking:
                        self._is_waking = True
                        with contextlib.suppress(RuntimeError):  # the server has ended
                            loop.call_soon_threadsafe(self._wake.set)

                sampling = dataclasses.replace(self._call.sampling, seed=self._call.sampling.seed + index)
                self._requests.append(self._served.engine.submit(prompt, sampling, listen))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End what has not ended."""
        for request in self._requests:
            self._served.engine.abort(request)

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """The choices' next texts: index, text, why it ends if it does. BadRequest if the engine fails.

        A text has all tokens that have arrived: if the engine is faster than the connection, texts become longer.
        """
        open_choices = set(range(len(self._requests)))
        while open_choices:
            for index, events in (await self._next()).items():
                if index not in open_choices:
                    continue
                text, finish = self._read(index, events)
                if finish is not None:
                    open_choices.remove(index)
                if text or finish is not None:
                    yield index, text, finish

    async def _next(self) -> dict[int, list[Event]]:
        """The events that have arrived, of each choice. Waits for some; there are none if they were read before."""
        await self._wake.wait()
        self._wake.clear()
        self._is_waking = False  # before the deque is read: what comes later wakes again
        found: dict[int, list[Event]] = {}
        while self._arrived:
            index, event = self._arrived.popleft()
            found.setdefault(index, []).append(event)
        return found

    def _read(self, index: int, events: Sequence[Event]) -> tuple[str, str | None]:
        """The text of a choice's events, and why it ends if it does; events after its end do not count."""
        stream, text = self._texts[index], ""
        for event in events:
            if event.finish in ("error", "abort"):
                raise BadRequest(f"the engine failed: {event.error or 'it was stopped'}", status=500)
            if event.token is not None:
                self._tokens += 1
                text += stream.push(event.token)
            finish: str | None = event.finish
            if finish is not None:
                text += stream.finish()
            if stream.is_stopped and finish != "stop":
                finish = "stop"
                self._served.engine.abort(self._requests[index])
            if finish is not None:
                self._cached += event.cached_tokens
                return text, finish
        return text, None

    def usage(self) -> Json:
        return protocol.usage(sum(len(prompt) for prompt in self._call.prompts), self._tokens, self._cached)


async def _answer(request: HttpRequest, served: Served, is_chat: bool) -> Response:
    try:
        call = protocol.read_call(await _body(request), is_chat, served.tokenizer, served.model, served.engine.limit)
        answer = Answer(served, call)
        answer.submit()
    except BadRequest as error:
        return JSONResponse(protocol.failure(str(error), error.status, error.param), error.status)
    except ValueError as error:
        return JSONResponse(protocol.failure(str(error), 400), 400)
    except BusyError as error:
        return JSONResponse(protocol.failure(str(error), 429), 429, headers={"Retry-After": "1"})
    except ClientDisconnect:
        return Response(status_code=LEFT)
    if call.stream:
        return StreamingResponse(_stream(call, answer), media_type="text/event-stream")
    return await _whole(request, call, answer)


async def _body(request: HttpRequest) -> Any:
    """The parsed JSON. BadRequest if it is none, or too large."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            raise BadRequest(f"the request is larger than {BODY_BYTES} bytes", status=413)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not JSON: {error}") from error


async def _stream(call: Call, answer: Answer) -> AsyncIterator[str]:
    """Server-sent events. Starlette ends it when the client leaves."""
    begun: set[int] = set()
    try:
        async for index, text, finish in answer.pieces():
            yield _event(call.piece(index, text, finish, index not in begun))
            begun.add(index)
        if call.include_usage:
            yield _event(call.last(answer.usage()))
        yield "data: [DONE]\n\n"
    except BadRequest as error:
        yield _event(protocol.failure(str(error), error.status))
    finally:
        answer.abort()


def _event(message: Json) -> str:
    return f"data: {json.dumps(message)}\n\n"


async def _whole(request: HttpRequest, call: Call, answer: Answer) -> Response:
    """The whole answer; aborted if the client leaves meanwhile."""
    texts, finishes = [""] * len(call.prompts), [""] * len(call.prompts)

    async def collect() -> None:
        async for index, text, finish in answer.pieces():
            texts[index] += text
            finishes[index] = finish or ""

    collecting = asyncio.create_task(collect())
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=LEFT)
        collecting.result()
        return JSONResponse(call.whole(texts, finishes, answer.usage()))
    except BadRequest as error:
        return JSONResponse(protocol.failure(str(error), error.status), error.status)
    finally:
        collecting.cancel()
        leaving.cancel()
        answer.abort()


async def _left(request: HttpRequest) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
