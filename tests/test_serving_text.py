"""Text piece by piece, and what a request may ask."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from serving.presets import load_model, make_config, make_model
from serving.protocol import BadRequest, read_call
from serving.text import ByteTokenizer, HubTokenizer, TextStream

TEXT = "Grüße, 世界! 🚀 done"
BYTES = ByteTokenizer()


def pieces(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(BYTES, stops)
    found = []
    for token in text.encode():
        found.append(stream.push(token))
        if stream.is_stopped:
            break
    return [*found, stream.finish()], stream.is_stopped


def test_pieces_are_whole_characters_and_make_up_the_text() -> None:
    found, stopped = pieces(TEXT)
    assert "".join(found) == TEXT and not stopped and not any("�" in piece for piece in found)


@pytest.mark.parametrize("stops", [("世",), ("界!",), ("done",), ("zzz", "! ", "Gx"), ("G",), ("e, 世界! 🚀", "e, x")])
def test_a_text_ends_before_its_first_stop(stops: tuple[str, ...]) -> None:
    found, stopped = pieces(TEXT, stops)
    assert stopped and "".join(found) == TEXT[: min(i for stop in stops if (i := TEXT.find(stop)) >= 0)]


def test_what_may_begin_a_stop_is_held_back() -> None:
    found, stopped = pieces("abcab", ("abd", "bcx"))
    assert found == ["", "", "a", "bc", "", "ab"] and not stopped


def test_bytes_that_are_no_text_are_not_held_back_forever() -> None:
    stream = TextStream(BYTES)
    found = [stream.push(255) for _ in range(40)]
    assert sum(map(len, found)) >= 32


def test_bytes_round_trip() -> None:
    assert BYTES.decode([*BYTES.encode(TEXT), BYTES.end]) == TEXT
    assert BYTES.decode(BYTES.encode_chat([{"role": "user", "content": "x"}])) == "user: x\nassistant: "


def call(body: Any, is_chat: bool = False) -> Any:
    return read_call(body, is_chat, BYTES, "tiny", 100)


def test_a_request_is_read() -> None:
    found = call({"prompt": "ab", "max_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": 3, "stop": "x"})
    assert found.prompts == [[256, 97, 98]] and found.stops == ["x"] and not found.stream
    assert (found.sampling.max_tokens, found.sampling.temperature, found.sampling.top_p) == (5, 0, 0.5)
    assert found.sampling.seed == 3 and found.sampling.stop_tokens == {257}


def test_what_is_not_given_is_openais_default() -> None:
    found = call({"prompt": [1, 2], "stream": None})
    assert (found.sampling.max_tokens, found.sampling.temperature, found.sampling.top_p) == (16, 1.0, 1.0)
    chat = call({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, is_chat=True)
    assert chat.sampling.max_tokens == 100 - len(chat.prompts[0])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [[256, 97]]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([[1], "b"], [[1], [256, 98]]),
    ],
)
def test_prompts_are_texts_or_tokens(prompt: Any, prompts: list[list[int]]) -> None:
    assert call({"prompt": prompt}).prompts == prompts


def test_the_end_can_be_ignored_and_others_added() -> None:
    assert call({"prompt": "a", "ignore_eos": True}).sampling.stop_tokens == frozenset()
    assert call({"prompt": "a", "stop_token_ids": [5]}).sampling.stop_tokens == {257, 5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "model": "big"}, "model"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "seed": "x"}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": list("abcde")}, "stop"),
        ({"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": []}, "stream_options"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 3}, "logprobs"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
    ],
)
def test_what_is_not_allowed_is_named(body: Any, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        call(body)
    assert caught.value.param == param and (param is None or param in str(caught.value))


@pytest.mark.parametrize("messages", [None, [], "x", ["x"], [{"role": "user"}], [{"content": "x"}]])
def test_messages_that_are_not_allowed_are_refused(messages: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        call({"messages": messages}, is_chat=True)
    assert caught.value.param == "messages"


def test_a_checkpoint_is_loaded(tmp_path: pathlib.Path) -> None:
    model: Any = make_model("tiny", torch.float32, torch.device("cpu"))
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(ValueError, match="has no tokenizer"):
        HubTokenizer(tmp_path, loaded)
    _save_tokenizer(tmp_path)
    tokenizer = HubTokenizer(tmp_path, loaded)
    assert tokenizer.stop_tokens == {257}
    assert tokenizer.decode(tokenizer.encode("ab ba")) == "ab ba"
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def _save_tokenizer(directory: pathlib.Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(directory)


@pytest.mark.parametrize("directory", ["empty", "other"])
def test_a_directory_without_a_model_is_refused(tmp_path: pathlib.Path, directory: str) -> None:
    if directory == "other":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(ValueError, match="has no causal language model"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="preset is 'x'; allowed: tiny, "):
        make_config("x")
