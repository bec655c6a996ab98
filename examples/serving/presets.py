"""Models with random weights, and checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from serving.attention import NAME, register
from serving.latent_attention import use_latents
from serving.norms import use_fused_norms

BYTES = 256 + 3  # the vocabulary of `text.ByteTokenizer`
_TINY: dict[str, Any] = {
    "vocab_size": BYTES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # much, so that answers are varied
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_TINY_LATENT: dict[str, Any] = {
    **_TINY,
    "num_key_value_heads": 4,
    "head_dim": 64,  # of what is rotated
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}

# Name → type of model, and what of its configuration is not the type's default.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", _TINY),
    "tiny-qwen2": ("qwen2", _TINY),
    "tiny-qwen3": ("qwen3", _TINY),
    "tiny-mistral": ("mistral", {**_TINY, "sliding_window": 24}),
    "tiny-gpt-oss": (
        "gpt_oss",
        {**_TINY, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-deepseek": ("deepseek_v3", _TINY_LATENT),
    "tiny-deepseek-dense": ("deepseek_v3", {**_TINY_LATENT, "first_k_dense_replace": 2}),
    "1b": (
        "llama",
        {
            **_LLAMA,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "8b": (
        "llama",
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "head_dim": 128,
        },
    ),
}


def make_config(preset: str) -> Any:
    """The transformers configuration of a preset. ValueError if there is none of the name."""
    from transformers import AutoConfig

    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; allowed: {', '.join(PRESETS)}")
    kind, options = PRESETS[preset]
    return AutoConfig.for_model(kind, **options)


def make_model(
    preset: str, dtype: torch.dtype, device: torch.device, seed: int = 0, attention: str = NAME
) -> torch.nn.Module:
    """A model with random weights; the same seed gives the same on the same device."""
    from transformers import AutoModelForCausalLM

    register()
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(make_config(preset), attn_implementation=attention, dtype=dtype)
    if attention == NAME:
        use_latents(model)
        use_fused_norms(model)
    made: torch.nn.Module = model.eval()
    return made


def load_model(directory: pathlib.Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A checkpoint's model. ValueError if it cannot be loaded, or its sizes are not allowed."""
    from transformers import AutoModelForCausalLM

    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=NAME, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no causal language model: {error}") from error
    model.to(device)
    use_latents(model)
    use_fused_norms(model)
    loaded: torch.nn.Module = model.eval()
    return loaded
