"""A tiny DeepSeek-V3 with random weights, its heads of full size, generates through our attention as through eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from cuteflash.integrations import transformers as integration  # noqa: E402

VOCABULARY, LENGTH = 97, 20


def model(implementation: str, **sizes: Any) -> Any:
    """The same random weights for every implementation; the second of two layers has experts."""
    integration.register()
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        pad_token_id=0,
        **{"q_lora_rank": 32, **sizes},
    )
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (
        512,
        128,
        64,
        128,
    )
    config._attn_implementation = implementation
    torch.manual_seed(0)
    built = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():  # attention that matters: the usual initialisation is nearly uniform
            if parameter.dim() == 2:
                parameter.mul_(6)
    return built


def batch(padding: bool) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding:
        mask[1, :7] = mask[2, :-1] = 0
    return ids * mask, mask


@pytest.mark.parametrize("padding", [False, True])
@torch.no_grad()
def test_logits_equal_eager(padding: bool) -> None:
    ids, mask = batch(padding)
    ours, eager = (model(name)(input_ids=ids, attention_mask=mask).logits for name in ("cuteflash", "eager"))
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_eager(padding: bool, cache: str) -> None:
    ids, mask = batch(padding)
    some: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": cache,
        "eos_token_id": None,
    }
    ours, eager = (model(name).generate(ids, attention_mask=mask, **some) for name in ("cuteflash", "eager"))
    assert torch.equal(ours, eager)


def test_gradients_equal_eager() -> None:
    ids, _ = batch(False)
    gradients = []
    for name in ("cuteflash", "eager"):
        trained = model(name, q_lora_rank=None).train()
        trained(input_ids=ids, labels=ids).loss.backward()
        gradients.append(trained.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)
