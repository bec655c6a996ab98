"""Layers of latent attention that keep rows of 576 numbers a token, instead of keys and values of every head.

They take the place of a model's own ones, whose weights they share. The absorbed form of docs/mla.md, which decodes
from such rows, needs what transformers' attention interface does not hand out: the latents, and nothing projected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash.nn import MultiHeadLatentAttention
from serving.caches import Attends
from serving.latent_cache import LatentCall

MODELS = ("deepseek_v3", "axk1", "glm4_moe_lite", "youtu")  # whose attention is DeepSeek-V3's in all but its sizes


class LatentAttention(torch.nn.Module):
    """Takes the place of `DeepseekV3Attention` and its like.

    Args:
        attention: the layer, whose weights it shares.
        config: the model's.

    Raises:
        ValueError: a size that is not allowed.
    """

    def __init__(self, attention: Any, config: Any) -> None:
        super().__init__()
        self.layer = int(attention.layer_idx)
        with torch.device("meta"):  # its weights are replaced
            self.attention = MultiHeadLatentAttention(
                config.hidden_size,
                config.num_attention_heads,
                q_lora_rank=config.q_lora_rank,
                kv_lora_rank=config.kv_lora_rank,
                qk_nope_head_dim=config.qk_nope_head_dim,
                qk_rope_head_dim=config.qk_rope_head_dim,
                v_head_dim=config.v_head_dim,
                softmax_scale=attention.scaling,
                rotary_emb_interleaved=config.rope_interleave,
                rms_norm_eps=attention.kv_a_layernorm.variance_epsilon,
                attention_bias=config.attention_bias,
            )
        self.attention.load_state_dict(attention.state_dict(), assign=True)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        step: Attends,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As the layer's own, (1, tokens, hidden_size), over the pages of `step`."""
        x = hidden_states[0]
        cos, sin = (angles[0].chunk(2, dim=-1)[0] for angles in position_embeddings)  # each is there twice
        own = self.attention
        o = step.attend(LatentCall(self.layer, own, *own.queries(x, (cos, sin)), own.rows(x, (cos, sin))))
        return own.o_proj(o.flatten(-2))[None], None


def use_latents(model: torch.nn.Module) -> None:
    """Replace the attention of a model of `MODELS`, in place; others are left alone.

    Raises:
        ValueError: the model's sizes are not allowed.
    """
    config: Any = model.config
    if config.model_type in MODELS:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn = LatentAttention(layer.self_attn, config)  # type: ignore[union-attr,operator]
