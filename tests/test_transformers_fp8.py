"""transformers on cuteflash in FP8, without a GPU: close to eager attention for long inputs, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from cuteflash.integrations.transformers import FP8_NAME, NAME, register  # noqa: E402
from cuteflash.integrations.transformers.attention import FP8_QUERIES, fp8_attention  # noqa: E402

LONG = FP8_QUERIES + 2
SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def model(implementation: str, cls: Any = transformers.MistralForCausalLM, **settings: Any) -> Any:
    """The same random weights for every implementation, in bf16."""
    register()
    config = cls.config_class(**SIZES, num_attention_heads=4, **settings)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    built = cls(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():  # attention that matters: the usual initialisation is nearly uniform
            if parameter.dim() == 2:
                parameter.mul_(6)
    return built.bfloat16()


def decoder(implementation: str) -> Any:
    return model(implementation, num_key_value_heads=2, sliding_window=50, pad_token_id=0)


def tokens(length: int) -> Tensor:
    return torch.randint(1, 97, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@torch.no_grad()
def test_long_inputs_are_computed_in_8_bits(kind: str) -> None:
    make = decoder if kind == "decoder" else lambda name: model(name, transformers.BertForMaskedLM)
    found, ours, eager = (make(name)(tokens(LONG)).logits.float() for name in (FP8_NAME, NAME, "eager"))
    spread = (eager - eager.mean()).square().mean().sqrt()
    assert not torch.equal(found, ours)
    assert (found - eager).square().mean().sqrt() < 0.2 * spread
    assert (ours - eager).square().mean().sqrt() < (found - eager).square().mean().sqrt()


@torch.no_grad()
def test_short_inputs_and_steps_of_generation_are_computed_in_16_bits() -> None:
    ids = tokens(LONG)
    found, ours = (decoder(name) for name in (FP8_NAME, NAME))
    assert torch.equal(found(ids[:, : FP8_QUERIES - 1]).logits, ours(ids[:, : FP8_QUERIES - 1]).logits)
    cache = found(ids, use_cache=True).past_key_values
    steps = [one(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits for one in (found, ours)]
    assert torch.equal(*steps)


@torch.no_grad()
def test_generation_with_a_static_cache() -> None:
    """Its unused slots are cut off before keys and values are quantised."""
    generated = decoder(FP8_NAME).generate(
        tokens(LONG), max_new_tokens=3, do_sample=False, cache_implementation="static", eos_token_id=None
    )
    assert generated.shape == (2, LONG + 3)


@torch.no_grad()
def test_padding_and_several_sequences_are_refused_if_8_bits_are_used() -> None:
    ids, mask = tokens(LONG), torch.ones(2, LONG, dtype=torch.long)
    mask[1, :9] = 0
    fp8 = decoder(FP8_NAME)
    with pytest.raises(NotImplementedError, match=f"attention_mask has padding, or several .* of {LONG} queries"):
        fp8(ids, attention_mask=mask)
    positions = torch.arange(LONG).expand(2, -1) % 70
    with pytest.raises(NotImplementedError, match="several sequences in a row"):
        fp8(ids, position_ids=positions, use_cache=False)
    short = fp8(ids[:, :20], attention_mask=mask[:, :20]).logits
    assert torch.equal(short, decoder(NAME)(ids[:, :20], attention_mask=mask[:, :20]).logits)


def test_training_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"query.requires_grad is True; attention in FP8 is for inference"):
        decoder(FP8_NAME)(tokens(5))


def test_other_refusals_are_those_of_16_bits() -> None:
    x = torch.zeros(1, 2, 130, 16, dtype=torch.bfloat16)
    layer = torch.nn.Module()
    for arguments, message in (({"dropout": 0.1}, "dropout is 0.1"), ({"s_aux": x}, "s_aux is given")):
        with pytest.raises(NotImplementedError, match=message):
            fp8_attention(layer, x, x, x, None, **arguments)
    with pytest.raises(TypeError, match=r"q.dtype is torch.float32; allowed: torch.float16, torch.bfloat16"):
        fp8_attention(layer, x.float(), x.float(), x.float(), None)
    with pytest.raises(NotImplementedError, match="BloomModel does not run on cuteflash"):
        model(FP8_NAME, transformers.BloomModel)
