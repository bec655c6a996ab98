"""transformers' own caches: dynamic, static, and the paged one of continuous batching, against eager attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from cuteflash.integrations import transformers as integration  # noqa: E402
from cuteflash.integrations.transformers import PAGED_NAME, paged_attention  # noqa: E402
from cuteflash.integrations.transformers.mask import Mask  # noqa: E402
from tests.operators_called import Operators  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # much, so that answers are varied
    "tie_word_embeddings": False,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1},
}
PAGED_IN_PLACE = ("llama", "qwen2", "qwen3")  # those without sliding layers
ANSWER = 10
each_model = pytest.mark.parametrize("name", OWN)


@functools.cache
def model(name: str, implementation: str) -> Any:
    """The same random weights for every implementation."""
    integration.register()
    config = transformers.AutoConfig.for_model(name, **SIZES, **OWN[name])
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for module in built.modules():
        if getattr(module, "sinks", None) is not None:
            torch.nn.init.normal_(module.sinks, mean=1.0)
    return built


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def alone(name: str, prompt: Sequence[int], **options: Any) -> list[int]:
    """The greedy answer of eager attention to one prompt."""
    return batch_answers(name, "eager", torch.tensor([prompt]), **options)[0]


def batch_answers(name: str, implementation: str, ids: Tensor, **options: Any) -> list[list[int]]:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model(name, implementation).generate(
        ids, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, **options
    )
    answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return answers


@each_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_tokens_of_eager(name, cache):
    """Prompts of two lengths, padded on the left: the answers of each alone, without padding."""
    given = prompts(12, 5)
    ids = torch.tensor([given[0], [0] * 7 + given[1]])
    mask = torch.tensor([[1] * 12, [0] * 7 + [1] * 5])
    ours = batch_answers(name, "cuteflash", ids, attention_mask=mask, cache_implementation=cache)
    assert ours == [alone(name, prompt) for prompt in given]
    assert len({*ours[0]}) > 2


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_rows_of_a_static_cache_that_are_not_in_use_change_nothing(name, gradients):
    """They may hold anything: NaN in a cache that is used for the first time."""
    with torch.set_grad_enabled(gradients):
        check_unused_rows(name)


def check_unused_rows(name: str) -> None:
    ours = model(name, "cuteflash")
    ids = torch.tensor(prompts(9))
    cache = transformers.StaticCache(config=ours.config, max_cache_len=24)
    got = [ours(input_ids=ids[:, :6], past_key_values=cache).logits]
    for layer in cache.layers:
        rows = slice(6, None) if layer.keys.shape[2] > 7 else slice(7, 7)
        for rows_of in (layer.keys, layer.values):
            rows_of.data[:, :, rows] = float("nan")
    got += [ours(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(6, 9)]
    expected = model(name, "eager")(input_ids=ids).logits
    torch.testing.assert_close(torch.cat(got, dim=1), expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_without_padding_no_length_of_a_static_cache_is_read(monkeypatch):
    """A step attends with lengths that only the device knows."""
    used = Mask.used.fget  # type: ignore[attr-defined]
    reads = property(lambda mask: used(mask) if mask.lengths is None else pytest.fail("the length was read"))
    monkeypatch.setattr(Mask, "used", reads)
    ours = model("llama", "cuteflash")
    cache = transformers.StaticCache(config=ours.config, max_cache_len=24)
    with Operators() as operators:
        for ids in torch.tensor(prompts(9)).split([6, 1, 2], dim=1):
            ours(input_ids=ids, past_key_values=cache)
    assert operators.names == ["fwd"] * 2 + ["kvcache_fwd"] * 4  # at first transformers says itself that it is empty


@pytest.mark.slow
def test_steps_with_a_static_cache_are_one_graph():
    """As `generate` compiles them on a GPU; every step has another length."""
    config = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    given = torch.tensor(prompts(12))
    ours = batch_answers("llama", "cuteflash", given, cache_implementation="static", compile_config=config)
    assert ours == [alone("llama", given[0].tolist())]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def generation() -> Any:
    return transformers.GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)


def batched(name: str, given: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The answers of transformers' continuous batching with ours."""
    batching = transformers.ContinuousBatchingConfig(num_blocks=64, **{"max_batch_tokens": 16, **options})
    ours = model(name, "cuteflash")
    results = ours.generate_batch(
        [list(prompt) for prompt in given],
        generation_config=generation(),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    assert ours.config._attn_implementation == "cuteflash"  # it is switched for the batches only
    return [results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.split("_")[1]))]


@each_model
def test_continuous_batching_gives_the_tokens_of_eager(name, monkeypatch):
    """Prompts that take several steps, beside requests that answer; most answers go beyond a page."""
    given, ours, steps = prompts(3, 21, 1, 9, 40), model(name, "cuteflash"), []
    forward = ours.forward

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with Operators() as operators:
            output = forward(*args, **kwargs)
        steps.append(operators.names)
        return output

    monkeypatch.setattr(ours, "forward", noted)
    assert batched(name, given, page_size=8) == [alone(name, prompt) for prompt in given]
    gathered, in_place = ["varlen_fwd"] * 2, ["append_kv", "kvcache_fwd"] * 2
    assert steps[0] == gathered
    assert steps[-ANSWER // 2 :] == [in_place if name in PAGED_IN_PLACE else gathered] * (ANSWER // 2)


def test_the_prefix_of_another_request_is_found():
    given = prompts(24)
    given.append([*given[0][:17], 5, 6])
    assert batched("llama", given, page_size=8, max_batch_tokens=64) == [alone("llama", prompt) for prompt in given]


def test_attention_in_fp8_does_not_batch():
    built = model("llama", "cuteflash_fp8")
    with pytest.raises(NotImplementedError, match="cuteflash_fp8, which does not support continuous batching"):
        built.generate_batch(prompts(3), generation_config=generation(), progress_bar=False)


def test_other_implementations_still_batch():
    integration.register()
    batching = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=16, auto_switch_to_flash=False)
    results = model("llama", "sdpa").generate_batch(
        prompts(3), generation_config=generation(), continuous_batching_config=batching, progress_bar=False
    )
    assert [out.generated_tokens for out in results.values()] == [alone("llama", prompts(3)[0])]


def test_a_step_comes_after_its_inputs_are_cleared(monkeypatch):
    """Which transformers does on the current stream, without a wait, and copies the step's inputs on another one."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingIOs

    integration.register()
    happened = []

    class Stream:
        def synchronize(self):
            happened.append("waited")

    def streams(device):
        happened.append(device.type)
        return Stream()

    monkeypatch.setattr(torch.cuda, "current_stream", streams)
    for kind in ("cuda", "cpu"):
        inputs = object.__new__(ContinuousBatchingIOs)
        inputs.device, inputs.compute_stream = torch.device(kind), None
        inputs._reset_static_tensors = lambda full_reset: happened.append("cleared")
        inputs.reset()
        assert inputs.requests_in_batch == []
    assert happened == ["cleared", "cuda", "waited", "cleared"]


def test_outside_of_continuous_batching_its_implementation_is_refused():
    built = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation=PAGED_NAME))
    with pytest.raises(ValueError, match=r'cache is None; .* attn_implementation="cuteflash"'):
        built(input_ids=torch.tensor(prompts(3)))


class OtherCache:
    pass


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, ValueError, "attention_mask is given"),
        ({"dropout": 0.1}, NotImplementedError, "dropout is 0.1"),
        ({"position_bias": torch.ones(1)}, NotImplementedError, "position bias"),
        ({"rows": 2}, ValueError, "query has 2 rows"),
        ({}, NotImplementedError, "cache is a OtherCache of transformers .* supported: those of"),
    ],
)
def test_what_paged_attention_refuses(changed, error, message):
    module = torch.nn.Module()
    module.layer_idx = 0
    states = torch.zeros(changed.pop("rows", 1), 2, 4, 16)
    with pytest.raises(error, match=message):
        paged_attention(
            module, states, states, states, changed.pop("attention_mask", None), cache=OtherCache(), **changed
        )
