"""The server, over HTTP: answers, streams, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import serve
import uvicorn
from serving import protocol
from serving.engine import Engine
from serving.requests import Sampling
from serving.scheduler import Limits
from serving.text import ByteTokenizer
from serving.web import BODY_BYTES, Answer, Served, make_app

from tests.patience import wait_until
from tests.serving_parts import eager_answers, make_engine

BYTES = ByteTokenizer()
GREEDY = {"temperature": 0, "ignore_eos": True}


class Server:
    """A server on a free port, and requests to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(Served(engine, BYTES, "tiny")), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> Server:
        self.engine.start()
        self._thread.start()
        wait_until(lambda: self._server.started, "the server")
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.engine.stop()
        self._socket.close()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._socket.getsockname()[1], timeout=60)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and parsed answer; `body` is made JSON if it is not bytes."""
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        return self.ask("POST", path, body)

    def stream(self, body: Any, path: str = "/v1/completions") -> list[Any]:
        """The messages of a stream, which has to end as it should."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body | {"stream": True}))
            response = connection.getresponse()
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            lines = response.read().decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def rest(self) -> None:
        """Returns when the engine has nothing to do, and all pages are free."""
        pool = self.engine.runner.pool
        wait_until(lambda: self.engine.is_idle and pool.available == pool.capacity, "the engine's rest")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(make_engine(tokens=512)) as running:
        yield running


def text_of(prompt: str, tokens: int = 12) -> str:
    return BYTES.decode(eager_answers("tiny", [BYTES.encode(prompt)], tokens)[0])


def test_a_completion(server: Server) -> None:
    status, answer = server.post({"prompt": "Hello", "max_tokens": 12, "model": "tiny", **GREEDY})
    assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["text"] == text_of("Hello") and choice["finish_reason"] == "length" and choice["index"] == 0
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12


def test_several_prompts_are_several_choices(server: Server) -> None:
    _, answer = server.post({"prompt": ["one", "two", [1, 2]], "max_tokens": 12, **GREEDY})
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [text_of("one"), text_of("two"), BYTES.decode(eager_answers("tiny", [[1, 2]], 12)[0])]
    messages = server.stream({"prompt": ["one", "two"], "max_tokens": 12, **GREEDY})
    streamed = ["", ""]
    for message in messages:
        streamed[message["choices"][0]["index"]] += message["choices"][0]["text"]
    assert streamed == texts[:2]


def test_a_chat_whole_and_streamed(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, **GREEDY}
    _, answer = server.post(body, "/v1/chat/completions")
    text = text_of("user: Hi\nassistant: ")
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    options = {"stream_options": {"include_usage": True}}
    *messages, usage = server.stream(body | options, "/v1/chat/completions")
    deltas = [message["choices"][0]["delta"] for message in messages]
    assert {message["object"] for message in messages} == {"chat.completion.chunk"}
    assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert [message["choices"][0]["finish_reason"] for message in messages[-2:]][-1] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_a_stop_text_ends_the_answer_and_its_request(server: Server) -> None:
    text = text_of("stop", 40)
    stop = text[5:7]
    body = {"prompt": "stop", "max_tokens": 40, "stop": [stop], **GREEDY}
    _, answer = server.post(body)
    assert answer["choices"][0] | {"text": text[: text.find(stop)], "finish_reason": "stop"} == answer["choices"][0]
    server.rest()


def test_a_seed_repeats_an_answer(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 12, "seed": 5}
    answers = [server.post(body)[1]["choices"][0]["text"] for _ in range(2)]
    assert answers[0] == answers[1] != server.post(body | {"seed": 6})[1]["choices"][0]["text"]


def test_models_and_health(server: Server) -> None:
    status, models = server.ask("GET", "/v1/models")
    assert status == 200 and [model["id"] for model in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == 256
    assert server.ask("GET", "/health")[1]["pages"] == 64


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "complaint"),
    [
        ("POST", "/v1/completions", b"{", 400, "not JSON"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "not JSON"),
        ("POST", "/v1/completions", b"[" * 100_000, 400, "not JSON"),
        ("POST", "/v1/completions", b"", 400, "not JSON"),
        ("POST", "/v1/completions", b" " * (BODY_BYTES + 1), 413, "larger than"),
        ("POST", "/v1/completions", {"prompt": 3}, 400, "prompt"),
        ("POST", "/v1/completions", {"prompt": "\ud800"}, 400, "surrogates"),
        ("POST", "/v1/completions", {"prompt": [99999]}, 400, "the token 99999"),
        ("POST", "/v1/completions", {"prompt": "a" * 300}, 400, "together 317; allowed: up to 256"),
        ("POST", "/v1/completions", {"prompt": ["a", "a" * 300]}, 400, "together 317"),
        ("POST", "/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "allowed: 'tiny'"),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("POST", "/v1/nothing", {}, 404, "Not Found"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
    ],
)
def test_errors_are_answered(server: Server, method: str, path: str, body: Any, status: int, complaint: str) -> None:
    found, answer = server.ask(method, path, body)
    assert found == status and complaint in answer["error"]["message"] and answer["error"]["code"] == status
    server.rest()


def test_many_clients_at_once(server: Server) -> None:
    prompts = [f"{'common prefix, ' * 3}client {i}" for i in range(8)]
    bodies = [{"prompt": prompt, "max_tokens": 12, **GREEDY} for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.post, bodies))
    assert [answer["choices"][0]["text"] for _, answer in answers] == [text_of(prompt) for prompt in prompts]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Server, stream: bool) -> None:
    connection = server.connect()
    body = {"prompt": "bye", "max_tokens": 250, "stream": stream, **GREEDY}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        connection.getresponse().read(10)
    wait_until(lambda: server.engine.scheduler.running, "the request")
    request = server.engine.scheduler.running[0]
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    server.rest()
    assert len(request.tokens) < 4 + 250
    assert server.post({"prompt": "Hello", "max_tokens": 12, **GREEDY})[1]["choices"][0]["text"] == text_of("Hello")


def test_too_many_requests_get_429() -> None:
    engine = make_engine(limits=Limits(16, 1, 256, 1))
    with Server(engine) as server:
        kept = [engine.submit([1], Sampling(250), lambda event: None) for _ in range(2)]
        status, answer = server.post({"prompt": "a"})
        for request in kept:
            engine.abort(request)
        server.rest()
        assert status == 429 and "try again later" in answer["error"]["message"]
        assert server.post({"prompt": "a"})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_failing_model_is_answered(stream: bool) -> None:
    engine = make_engine()

    def fail(chunks: object) -> list[int]:
        raise RuntimeError("broken")

    engine.runner.launch = fail  # type: ignore[method-assign]
    with Server(engine) as server, contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": stream}))
        response = connection.getresponse()
        assert response.status == (200 if stream else 500)
        assert "the engine failed: RuntimeError: broken" in response.read().decode()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--preset", "tiny", "--requests", "0"], "requests is 0"),
        (["--preset", "tiny", "--batch-tokens", "1"], "batch_tokens is 1"),
        (["--preset", "tiny", "--length", "9999"], "length is 9999; allowed: up to 1024"),
        (["--preset", "tiny", "--cache-tokens", "-4"], "tokens is -4"),
        (["--model", "/nowhere"], "has no causal language model"),
        ([], "required"),
    ],
)
def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str], options: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.main(["--device", "cpu", *options])
    assert caught.value.code == 2 and complaint in capsys.readouterr().err


def test_serve_starts_and_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: started.append((threading.active_count(), options)))
    before = threading.active_count()
    assert serve.main(["--preset", "tiny", "--device", "cpu", "--port", "9", "--length", "64"]) == 0
    ((threads, options),) = started
    assert options["port"] == 9 and threads == before + 1 and threading.active_count() == before


def test_tokens_that_arrive_together_are_one_message() -> None:
    """A stream that falls behind catches up; a stop text between them still ends it."""
    engine = make_engine()
    call = protocol.read_call({"prompt": "hello", "max_tokens": 12, **GREEDY}, False, BYTES, "tiny", engine.limit)

    async def pieces(stops: tuple[str, ...]) -> list[tuple[int, str, str | None]]:
        answer = Answer(Served(engine, BYTES, "tiny"), dataclasses.replace(call, stops=stops))
        answer.submit()
        while engine.step():
            pass
        return [piece async for piece in answer.pieces()]

    (whole,) = asyncio.run(pieces(()))
    assert whole == (0, BYTES.decode(eager_answers("tiny", call.prompts, 12)[0]), "length")
    stop = whole[1][3:5]
    assert asyncio.run(pieces((stop,))) == [(0, whole[1][: whole[1].index(stop)], "stop")]
