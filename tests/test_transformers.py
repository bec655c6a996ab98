"""Tiny, randomly initialised models of transformers: ours against eager attention, and what is refused."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from cuteflash.integrations import transformers as integration  # noqa: E402

VOCABULARY, LENGTH = 97, 24
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
DECODER: dict[str, Any] = dict(
    **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0
)


def config(name: str) -> Any:
    if name == "bert":
        return transformers.BertConfig(**SIZES, num_attention_heads=4)
    if name == "llama":
        return transformers.LlamaConfig(**DECODER)
    if name == "mistral":
        return transformers.MistralConfig(**DECODER, sliding_window=7)
    if name == "gemma2":
        return transformers.Gemma2Config(
            **DECODER,
            sliding_window=7,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
            final_logit_softcapping=None,
        )
    assert name == "modernbert"
    return transformers.ModernBertConfig(
        **SIZES, num_attention_heads=4, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0
    )


def model(name: str, implementation: str) -> Any:
    """The same random weights for every implementation."""
    integration.register()
    classes = {
        "bert": transformers.BertForMaskedLM,
        "llama": transformers.LlamaForCausalLM,
        "mistral": transformers.MistralForCausalLM,
        "gemma2": transformers.Gemma2ForCausalLM,
        "modernbert": transformers.ModernBertForMaskedLM,
    }
    settings = config(name)
    settings._attn_implementation = implementation
    torch.manual_seed(0)
    built = classes[name](settings).eval()
    with torch.no_grad():
        for parameter in built.parameters():  # attention that matters: the usual initialisation is nearly uniform
            if parameter.dim() == 2:
                parameter.mul_(6)
    return built


ENCODERS, DECODERS = ["bert", "modernbert"], ["llama", "mistral", "gemma2"]
each_model = pytest.mark.parametrize("name", ENCODERS + DECODERS)
each_decoder = pytest.mark.parametrize("name", DECODERS)


def batch(padding: str) -> tuple[Tensor, Tensor | None]:
    """Token ids and a padding mask of rows with 24, 9, 1 and 9 tokens."""
    ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    if padding == "none":
        return ids, None
    mask = torch.zeros(4, LENGTH, dtype=torch.long)
    for row, count in enumerate((LENGTH, 9, 1, 9)):
        if padding == "right":
            mask[row, :count] = 1
        else:
            mask[row, LENGTH - count :] = 1
    return ids * mask, mask


@torch.no_grad()
def logits(name: str, implementation: str, ids: Tensor, mask: Tensor | None) -> Tensor:
    output: Tensor = model(name, implementation)(input_ids=ids, attention_mask=mask).logits
    return output


@each_model
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_logits_equal_eager(name, padding):
    ids, mask = batch(padding)
    tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    ours, eager = (logits(name, implementation, ids, mask) for implementation in ("cuteflash", "eager"))
    torch.testing.assert_close(ours[tokens], eager[tokens], atol=2e-4, rtol=2e-4)


@each_model
def test_padding_changes_nothing_for_the_tokens(name):
    """The same row alone and unpadded: independent of what eager makes of a mask."""
    ids, mask = batch("right")
    padded = logits(name, "cuteflash", ids, mask)
    alone = logits(name, "cuteflash", ids[1:2, :9], None)
    torch.testing.assert_close(padded[1:2, :9], alone, atol=2e-4, rtol=2e-4)


@each_decoder
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_eager(name, padding, cache):
    ids, mask = batch(padding)
    mask = torch.ones_like(ids) if mask is None else mask
    tokens = [
        model(name, implementation).generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, cache_implementation=cache, eos_token_id=None
        )
        for implementation in ("cuteflash", "eager")
    ]
    assert tokens[0].shape == (4, LENGTH + 12)
    assert torch.equal(tokens[0], tokens[1])


@each_decoder
@torch.no_grad()
def test_chunked_prefill_equals_one_pass(name):
    ids, _ = batch("none")
    ours = model(name, "cuteflash")
    whole = ours(input_ids=ids).logits
    cache = transformers.DynamicCache(config=ours.config)
    parts = [ours(input_ids=ids[:, i:j], past_key_values=cache).logits for i, j in ((0, 10), (10, 23), (23, 24))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_padding_between_tokens():
    """Right-padded prompts that go on: the padding ends up between tokens."""
    ids, mask = batch("none")[0], torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 5:11] = 0
    ours, eager = (logits("llama", implementation, ids, mask) for implementation in ("cuteflash", "eager"))
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=2e-4, rtol=2e-4)
    with pytest.raises(ValueError, match="padding between tokens"):
        logits("mistral", "cuteflash", ids, mask)


@torch.no_grad()
def test_cross_attention_sees_the_encoders_tokens():
    settings = transformers.BertConfig(**SIZES, num_attention_heads=4, is_decoder=True, add_cross_attention=True)
    outputs = []
    _ids, mask = batch("right")
    states = torch.randn(4, LENGTH, 64, generator=torch.Generator().manual_seed(2))
    integration.register()
    for implementation in ("cuteflash", "eager"):
        settings._attn_implementation = implementation
        torch.manual_seed(0)
        decoder = transformers.BertModel(settings).eval()
        full = batch("none")[0]
        output = decoder(input_ids=full, encoder_hidden_states=states, encoder_attention_mask=mask)
        outputs.append(output.last_hidden_state)
    torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_model():
    """Also that the mask of another batch compiles nothing again."""
    ours = model("llama", "cuteflash")
    compiled = torch.compile(ours, backend="aot_eager")
    graphs = []
    for padding in ("none", "left", "none", "left"):
        ids, mask = batch(padding)
        tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        results = [run(input_ids=ids, attention_mask=mask, use_cache=False).logits[tokens] for run in (compiled, ours)]
        torch.testing.assert_close(*results)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[3] - graphs[2] <= 1 and graphs[2] - graphs[1] <= 1, graphs


def attention_inputs() -> tuple[torch.nn.Module, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 6, 16, generator=generator) for _ in range(3))
    return torch.nn.Module(), q, k, v


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout": 0.1}, NotImplementedError, "dropout is 0.1"),
        ({"sinks": torch.zeros(2)}, NotImplementedError, "attention sinks"),
        ({"indices": torch.zeros(2)}, NotImplementedError, "sparse attention"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "position bias"),
        ({"output_attentions": True}, ValueError, "output_attentions is True"),
    ],
)
def test_refused_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        integration.attention(*attention_inputs(), None, **arguments)


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 1, 6, 6), torch.ones(2, 6, dtype=torch.bool), integration.make_mask(2, 6, 7), "causal"]
)
def test_masks_that_are_not_of_this_attention_are_refused(mask):
    with pytest.raises(ValueError, match="attention_mask"):
        integration.attention(*attention_inputs(), mask)


@pytest.mark.parametrize(
    "arguments", [{"is_causal": True}, {"sliding_window": 3}, {"is_causal": False, "sliding_window": 5}]
)
def test_what_only_the_layer_asks_for_is_refused(arguments):
    """Eager attention would not do it: it follows the mask, and there is none."""
    with pytest.raises(ValueError, match=r"Module asks for .* and gives no attention mask"):
        integration.attention(*attention_inputs(), None, **arguments)


def test_a_window_of_no_key_is_refused_only_if_it_is_used():
    """Qwen2-MoE makes such a mask for layers that it does not have."""
    function = transformers.masking_utils.sliding_window_causal_mask_function(0)
    mask = integration.make_mask(2, 6, 6, mask_function=function)
    with pytest.raises(ValueError, match="sliding window is 0"):
        integration.attention(*attention_inputs(), mask)


def test_without_a_mask_nothing_is_hidden():
    module, q, k, v = attention_inputs()
    ours, _ = integration.attention(module, q, k, v, None)
    torch.testing.assert_close(ours.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_sinks_join_the_softmax():
    module, q, k, v = attention_inputs()
    sinks = torch.tensor([0.5, -1.0])
    logits = torch.cat([q @ k.mT / 4, sinks[None, :, None, None].expand(2, 2, 6, 1)], dim=-1)
    for s_aux in (sinks, sinks[None, :, None, None], sinks.bfloat16()):
        ours, _ = integration.attention(module, q, k, v, None, s_aux=s_aux)
        torch.testing.assert_close(ours.transpose(1, 2), logits.softmax(dim=-1)[..., :-1] @ v)


@pytest.mark.parametrize("padded", [False, True])
def test_gpt_oss_trains_as_with_eager_attention(padded):
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=50, num_local_experts=2, num_experts_per_tok=1, sliding_window=5, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    tokens, seen = torch.randint(1, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    if padded:
        seen[1, :4] = 0
    model, results = transformers.GptOssForCausalLM(config), []
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    for implementation in ("eager", "cuteflash"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(input_ids=tokens, attention_mask=seen).logits[seen.bool()]
        logits.square().mean().backward()
        results.append([logits.detach(), *(layer.self_attn.sinks.grad.clone() for layer in model.model.layers)])
        results[-1].append(model.model.embed_tokens.weight.grad.clone())
    assert results[0][1].abs().min() > 0
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-3)


def test_a_layer_with_sinks_that_gives_none_is_refused():
    module, q, k, v = attention_inputs()
    module.sinks = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(NotImplementedError, match="Module has sinks"):
        integration.attention(module, q, k, v, None)


def test_the_operator_names_what_it_refuses():
    module, q, k, v = attention_inputs()
    with pytest.raises(ValueError, match="head_dim"):
        integration.attention(module, q[..., :12], k[..., :12], v[..., :12], None)


def test_dropout_in_training_is_refused():
    settings = transformers.LlamaConfig(**DECODER, attention_dropout=0.1)
    settings._attn_implementation = "cuteflash"
    integration.register()
    with pytest.raises(NotImplementedError, match="dropout"):
        transformers.LlamaForCausalLM(settings).train()(input_ids=batch("none")[0])


def test_attention_weights_are_refused_and_not_left_out():
    with pytest.raises(ValueError, match="output_attentions"):
        model("bert", "cuteflash")(input_ids=batch("none")[0], output_attentions=True)


def test_register_twice_and_other_implementations_still_load():
    integration.register()
    integration.register()
    logits("llama", "sdpa", *batch("none"))


def test_without_transformers_the_error_names_a_command(monkeypatch):
    real_import = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        integration.register()
