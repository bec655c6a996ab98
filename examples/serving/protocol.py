"""OpenAI's requests, read from JSON and checked, and its answers."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from serving.requests import Sampling
from serving.text import Tokenizer

Json = dict[str, Any]
STOPS = 4  # texts that end an answer, at most
PROMPTS = 128  # of a request, at most

# What would change the answer, and is not implemented: allowed only with the value that changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


class BadRequest(ValueError):
    """A request that is not allowed.

    Attributes:
        param: which part of it.
        status: of the answer.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request.

    Attributes:
        is_chat: of chat completions.
        prompts: their tokens; an answer is a choice for each.
        sampling: of each; with another seed.
        stops: texts that end an answer.
        stream: whether the answer is sent piece by piece.
        include_usage: whether a stream ends with its usage.
        identity: of the answer.
        created: in seconds since 1970.
    """

    is_chat: bool
    model: str
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    stops: Sequence[str]
    stream: bool
    include_usage: bool
    identity: str
    created: int

    def piece(self, index: int, text: str, finish: str | None, is_first: bool = False) -> Json:
        """A message of a stream: a part of a choice."""
        if self.is_chat:
            delta = ({"role": "assistant"} if is_first else {}) | ({"content": text} if text or is_first else {})
            choice: Json = {"delta": delta}
        else:
            choice = {"text": text}
        return self._answer([{"index": index, **choice, "logprobs": None, "finish_reason": finish}], ".chunk")

    def whole(self, texts: Sequence[str], finishes: Sequence[str], usage: Json) -> Json:
        """The whole answer."""
        choices = []
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            choice: Json = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            choices.append({"index": index, **choice, "logprobs": None, "finish_reason": finish})
        return self._answer(choices, "") | {"usage": usage}

    def last(self, usage: Json) -> Json:
        """A stream's message with the usage."""
        return self._answer([], ".chunk") | {"usage": usage}

    def _answer(self, choices: Sequence[Json], suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(prompt: int, answer: int, cached: int) -> Json:
    """Tokens of all prompts, of all answers, and those of the prompts that were found in the cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def failure(message: str, status: int, param: str | None = None) -> Json:
    """An error, as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def read_call(body: Any, is_chat: bool, tokenizer: Tokenizer, model: str, limit: int) -> Call:
    """A checked request.

    Args:
        body: the parsed JSON.
        tokenizer: encodes the prompts.
        model: the only one that there is.
        limit: tokens of the longest request; of a chat, what the prompt leaves is the answer's if it names no limit.

    Raises:
        BadRequest: a value is missing or not allowed.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the request is a {type(body).__name__}; allowed: a JSON object")
    if body.get("model", model) != model:
        raise BadRequest(f"model is {body['model']!r}; allowed: {model!r}", "model", 404)
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name} is {value!r}; allowed: {neutral[0]!r}", name)
    prompts = [_chat(body, tokenizer)] if is_chat else _prompts(body, tokenizer)
    stream_options = _value(body, "stream_options", dict, {})
    return Call(
        is_chat,
        model,
        prompts,
        _sampling(body, tokenizer, max(limit - len(prompts[0]), 1) if is_chat else 16),
        _stops(body),
        _value(body, "stream", bool, False),
        _value(stream_options, "include_usage", bool, False),
        f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        int(time.time()),
    )


def _sampling(body: Json, tokenizer: Tokenizer, default: int) -> Sampling:
    """OpenAI's defaults sample: temperature and top_p are 1."""
    if body.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    else:
        name = "max_tokens"
    stop_tokens = _value(body, "stop_token_ids", list, [])
    if not all(type(token) is int for token in stop_tokens):
        raise BadRequest("stop_token_ids has something else than integers", "stop_token_ids")
    ends = frozenset() if _value(body, "ignore_eos", bool, False) else tokenizer.stop_tokens
    seed = _value(body, "seed", int, secrets.randbits(32))
    sampling = Sampling(
        max_tokens=_value(body, name, int, default),
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        seed=seed,
        stop_tokens=ends | frozenset(stop_tokens),
    )
    try:
        sampling.check()
    except ValueError as error:
        raise BadRequest(str(error), str(error).split()[0]) from error
    return sampling


def _prompts(body: Json, tokenizer: Tokenizer) -> list[list[int]]:
    """A text, tokens, or a list of either."""
    prompt = body.get("prompt")
    several = prompt if isinstance(prompt, list) and prompt and not _are_tokens(prompt) else [prompt]
    if len(several) > PROMPTS:
        raise BadRequest(f"prompt has {len(several)} entries; allowed: up to {PROMPTS}", "prompt")
    found = []
    for one in several:
        if isinstance(one, str):
            found.append(tokenizer.encode(one))
        elif isinstance(one, list) and one and _are_tokens(one):
            found.append(one)
        else:
            raise BadRequest("prompt is missing or not allowed; allowed: a text, tokens, or a list of either", "prompt")
    return found


def _are_tokens(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values)


def _chat(body: Json, tokenizer: Tokenizer) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is missing or not allowed; allowed: a list of messages", "messages")
    texts = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRequest("a message has no role or no text; allowed: objects with both", "messages")
        texts.append({"role": role, "content": content})
    try:
        return tokenizer.encode_chat(texts)
    except Exception as error:  # a template raises what it likes, for roles that it does not know, say
        raise BadRequest(f"messages cannot be used: {error}", "messages") from error


def _stops(body: Json) -> list[str]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > STOPS or not all(isinstance(x, str) and x for x in stops):
        raise BadRequest(f"stop is {stop!r}; allowed: a text, or a list of up to {STOPS}, none empty", "stop")
    return stops


def _number(body: Json, name: str) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} is {value!r}; allowed: numbers", name)
    try:
        return float(value)
    except OverflowError as error:
        raise BadRequest(f"{name} is too large", name) from error


def _value(body: Json, name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadRequest(f"{name} is {value!r}; allowed: {kind.__name__}", name)
    return value
