"""Calls of `flash_attn_with_kvcache` that look like an earlier one: what they launch, and what they must not skip."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stand_in import no_kernels
from cuteflash import append_ops, flash_attn_with_kvcache, kvcache_api, kvcache_steps
from cuteflash.calls import Known
from cuteflash.kvcache_ops import kvcache_fwd_cuda, kvcache_fwd_lse_cuda
from tests.kvcached import random_call

CALLS = 40
Launch = tuple[str, tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """A Hopper GPU on which kernels only record: (class of the kernel, arguments) of every launch; no call is known."""
    found: list[Launch] = []

    def compiled(kernel_cls: type, traits: Any, problem: Any, target: str) -> Callable[..., None]:
        return lambda *arguments: found.append((f"{kernel_cls.__name__} {problem}", arguments))

    monkeypatch.setattr(kvcache_api, "steps", steps := Known())
    monkeypatch.setattr(kvcache_steps, "steps", steps)
    monkeypatch.setattr(append_ops, "known_appends", Known())
    for forward in (kvcache_fwd_cuda, kvcache_fwd_lse_cuda):
        monkeypatch.setattr(forward, "known", Known())
    with no_kernels(compiled), torch.no_grad():
        yield found


def described(launches: list[Launch], given: dict[str, Any]) -> list[Any]:
    """Launches with tensors of a call as their names, others as what they look like, but for the counters of tiles."""
    names = {x.data_ptr(): name for name, x in given.items() if isinstance(x, Tensor) and x.numel()}

    def shown(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return names.get(x.data_ptr(), ""), tuple(x.shape), x.stride(), x.dtype

    return [(kernel, [shown(x) for x in arguments]) for kernel, arguments in launches]


def no_long_way(*arguments: object) -> None:
    raise AssertionError("the long way")


def test_known_calls_launch_what_they_launched_first(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, first = [random_call(seed, (torch.bfloat16, torch.float16)) for seed in range(CALLS)], []
    for call in calls:
        result = call.run()
        first.append((described(launches, call.tensors), [(x.shape, x.dtype, x.stride()) for x in result]))
        launches.clear()
    assert sum(len(launched) for launched, _ in first) > CALLS
    monkeypatch.setattr(kvcache_api, "_check_types", no_long_way)
    known = 0
    for _ in range(2):
        for call, (expected, looks) in zip(calls, first, strict=True):
            if isinstance(call.tensors.get("cache_seqlens"), int):
                continue
            result = call.run()
            assert described(launches, call.tensors) == expected
            assert [(x.shape, x.dtype, x.stride()) for x in result] == looks
            launches.clear()
            known += 1
    assert known > CALLS


def test_every_argument_is_part_of_what_is_compared() -> None:
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert sorted(parameters) == sorted((*kvcache_steps.StepTensors._fields, *kvcache_steps.SETTING_NAMES))


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def step(**changed: Any) -> dict[str, Any]:
    """A decode step that appends."""
    tensors = {"q": half(2, 1, 4, 16), "k_cache": half(2, 20, 2, 16), "v_cache": half(2, 20, 2, 16)}
    new = {"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16), "cache_seqlens": torch.ones(2, dtype=torch.int32)}
    return tensors | new | {"causal": True} | changed


EQUAL: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # what a call may have, and what equals it but is not allowed
    "causal": ({"causal": True}, {"causal": 1}),
    "softcap": ({"softcap": 1.0}, {"softcap": True}),
    "softmax_scale": ({"softmax_scale": 1.0}, {"softmax_scale": True}),
    "window_size": ({"window_size": (1, 0)}, {"window_size": (True, False)}),
    "attention_chunk": ({"attention_chunk": 1}, {"attention_chunk": True}),
    "num_splits": ({"num_splits": 1}, {"num_splits": 1.0}),
    "rotary_interleaved": ({"rotary_interleaved": True}, {"rotary_interleaved": 1}),
    "pack_gqa": ({"pack_gqa": True}, {"pack_gqa": 1}),
    "max_seqlen_q": ({"max_seqlen_q": 1}, {"max_seqlen_q": True}),
    "return_lse": ({"return_lse": True}, {"return_lse": 1}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_settings_of_another_type_are_not_those_of_a_known_call(launches: list[Launch], name: str) -> None:
    good, bad = EQUAL[name]
    flash_attn_with_kvcache(**step(**good))
    count = len(launches)
    with pytest.raises(TypeError, match=name):
        flash_attn_with_kvcache(**step(**bad))
    assert len(launches) == count


BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "odd address of a cache": (lambda: {"k_cache": half(1 + 2 * 20 * 2 * 16)[1:].view(2, 20, 2, 16)}, ValueError, "^k"),
    "odd address of new tokens": (lambda: {"v": half(1 + 2 * 2 * 16)[1:].view(2, 1, 2, 16)}, ValueError, r"^v\."),
    "odd address of queries": (lambda: {"q": half(1 + 2 * 4 * 16)[1:].view(2, 1, 4, 16)}, ValueError, r"^q\."),
    "strides of a cache": (lambda: {"v_cache": half(2, 20, 16, 2).transpose(2, 3)}, ValueError, "v_cache.stride"),
    "batch of a cache": (lambda: {"k_cache": half(3, 20, 2, 16), "v_cache": half(3, 20, 2, 16)}, ValueError, "k_"),
    "another dtype": (lambda: {"q": half(2, 1, 4, 16).half()}, TypeError, "k_cache.dtype"),
    "lengths of int64": (lambda: {"cache_seqlens": torch.ones(2, dtype=torch.int64)}, TypeError, "cache_seqlens.dtype"),
    "no lengths": (lambda: {"cache_seqlens": None}, ValueError, "cache_seqlens is None"),
    "an int beyond the cache": (lambda: {"cache_seqlens": 21}, ValueError, "cache_seqlens is 21"),
    "no v": (lambda: {"v": None}, ValueError, "v is None"),
    "a list": (lambda: {"window_size": [1, "0"]}, TypeError, "window_size"),
    "a tensor as a setting": (lambda: {"softmax_scale": torch.ones(())}, TypeError, "softmax_scale"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_known_call_lets_no_bad_one_through(launches: list[Launch], case: str) -> None:
    change, kind, message = BAD[case]
    for _ in range(2):
        flash_attn_with_kvcache(**step())
    count = len(launches)
    with pytest.raises(kind, match=message):
        flash_attn_with_kvcache(**step(**change()))
    assert len(launches) == count


@pytest.mark.parametrize("name", ["q", "k", "k_cache"])
def test_a_known_call_with_a_gradient_is_refused(launches: list[Launch], name: str) -> None:
    flash_attn_with_kvcache(**step())
    with torch.enable_grad(), pytest.raises(ValueError, match=f"{name} requires grad"):
        flash_attn_with_kvcache(**step(**{name: step()[name].requires_grad_()}))


def test_other_tensors_of_a_known_call_are_its_own(launches: list[Launch]) -> None:
    for _ in range(3):
        given = step()
        flash_attn_with_kvcache(**given)
        (_, append), (_, attend) = launches[-2:]
        for name in ("k", "v", "k_cache", "v_cache", "cache_seqlens"):
            assert any(x is given[name] for x in append)
        assert attend[0] is given["q"] and attend[1] is given["k_cache"] and attend[2] is given["v_cache"]


def test_a_known_call_says_that_it_writes_to_the_caches(launches: list[Launch]) -> None:
    given = step()
    for expected in range(1, 4):
        flash_attn_with_kvcache(**given)
        assert given["k_cache"]._version == given["v_cache"]._version == expected


def test_values_are_checked_on_request(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(k=None, v=None, cache_seqlens=torch.full((2,), 21, dtype=torch.int32))
    flash_attn_with_kvcache(**given)
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"seqused_k\[0\] is 21"):
        flash_attn_with_kvcache(**given)


class Seen(TorchDispatchMode):
    """Notes the operators of cuteflash."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "cuteflash" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_a_known_call(launches: list[Launch]) -> None:
    flash_attn_with_kvcache(**step())
    count = len(launches)
    with Seen() as seen:
        flash_attn_with_kvcache(**step())
    assert seen.names == ["cuteflash.append_kv.default", "cuteflash.kvcache_fwd.default"] and len(launches) == count


def test_metadata_that_begin_between_two_boundaries_go_the_long_way(launches: list[Launch]) -> None:
    def has_key(metadata: Tensor) -> bool:
        names = dict.fromkeys(kvcache_steps.StepTensors._fields) | step() | {"scheduler_metadata": metadata}
        del names["causal"]
        return kvcache_steps.key_of(kvcache_steps.StepTensors(**names), (None, True), None) is not None

    whole = torch.zeros(9, dtype=torch.int32)
    assert has_key(whole[:8]) and not has_key(whole[1:])
