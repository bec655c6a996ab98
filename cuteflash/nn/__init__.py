"""Attention as `torch.nn` modules, with the constructor names of FlashAttention-2's.

    FlashSelfAttention, FlashCrossAttention    attention alone, on packed projections; no parameters
    MHA                                        projections, rotary embedding and attention
    MultiHeadLatentAttention                   the same of DeepSeek's models, with a cache of latents
    RotaryEmbedding, apply_rotary_emb          rotary position embedding; no parameters

All take dense batches and packed sequences (`cu_seqlens`), and work under `torch.autocast`.
"""

from cuteflash.nn.attention import FlashCrossAttention, FlashSelfAttention
from cuteflash.nn.latent import MultiHeadLatentAttention
from cuteflash.nn.mha import MHA
from cuteflash.nn.rotary import RotaryEmbedding, apply_rotary_emb, packed_positions

__all__ = [
    "MHA",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "MultiHeadLatentAttention",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "packed_positions",
]
