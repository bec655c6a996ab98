"""Text to tokens and back, also piece by piece."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serving.presets import BYTES

UNFINISHED = "�"  # what a decoder makes of a character whose last bytes are missing
PENDING = 8  # tokens that may wait for the end of a character
Messages = Sequence[Mapping[str, str]]


class Tokenizer(Protocol):
    """What the server needs; `stop_tokens` end an answer."""

    stop_tokens: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Messages) -> list[int]:
        """The conversation as the model knows it, up to where the assistant's next message begins."""


class ByteTokenizer:
    """A token is a byte of UTF-8; three more begin a text, end it and pad."""

    begin, end = BYTES - 3, BYTES - 2
    stop_tokens = frozenset({end})

    def encode(self, text: str) -> list[int]:
        return [self.begin, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_chat(self, messages: Messages) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")


class HubTokenizer:
    """A checkpoint's tokenizer. ValueError if it has none."""

    def __init__(self, directory: pathlib.Path, model: Any) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory} has no tokenizer: {error}") from error
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = self._tokenizer.eos_token_id if ends is None else ends
        self.stop_tokens = frozenset([ends] if isinstance(ends, int) else ends or ())

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def encode_chat(self, messages: Messages) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ValueError("the model has no chat template; allowed: /v1/completions")
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)  # the template has them
        return tokens


class TextStream:
    """The text of an answer, as far as it is certain.

    Args:
        tokenizer: decodes.
        stops: the answer ends before the first of these texts; none is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._begin = self._end = 0  # tokens whose text is out are before `_end`; decoding starts at `_begin`
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._end])
        text = self._tokenizer.decode(self._tokens[self._begin :])
        is_pending = text.endswith(UNFINISHED) and len(self._tokens) - self._end < PENDING
        if len(text) <= len(before) or is_pending:
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return self._release(text[len(before) :], is_last=False)

    def finish(self) -> str:
        """What was held back, when the answer has ended."""
        before = self._tokenizer.decode(self._tokens[self._begin : self._end])
        text = self._tokenizer.decode(self._tokens[self._begin :])
        self._begin = self._end = len(self._tokens)
        return self._release(text[len(before) :], is_last=True)

    def _release(self, text: str, is_last: bool) -> str:
        """`text` up to a stop, less what may be the beginning of one."""
        if self.is_stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return self._held[: min(found)]
        kept = 0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out = self._held[: len(self._held) - kept]
        self._held = self._held[len(out) :]
        return out


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
