"""A small GPT over bytes: RMSNorm, rotary embedding, SwiGLU; its attention is `cuteflash.nn.MHA`, or torch's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from cuteflash.nn import MHA

from .corpus import VOCABULARY
from .settings import Settings

INIT_STD = 0.02
MLP_STEP = 64  # the hidden columns of SwiGLU, 8/3 of the model's, are rounded up to a multiple of this

Length = int | Tensor | None


class TorchMHA(MHA):
    """`MHA` with torch's attention: the same parameters, the same projections."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: Length,
        cu_seqlens_k: Tensor | None,
        max_seqlen_k: Length,
    ) -> Tensor:
        if cu_seqlens is None:
            return _sdpa(q, k, v)
        if q.device.type != "cuda":  # torch has no attention for packed sequences on a CPU
            lengths = cu_seqlens.diff().tolist()
            parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
            return torch.cat([_sdpa(*(x[None] for x in part))[0] for part in parts])
        ends = cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k
        grouped = {"enable_gqa": True} if self.num_heads != self.num_heads_kv else {}
        out: Any = varlen_attn(q, k, v, *ends, window_size=(-1, 0), **grouped)  # type: ignore[arg-type]
        found: Tensor = out
        return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class Block(torch.nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, settings: Settings, attention: type[MHA]) -> None:
        super().__init__()
        dim, head_dim = settings.dim, settings.dim // settings.heads
        hidden = math.ceil(8 * dim / 3 / MLP_STEP) * MLP_STEP
        self.attention_norm = torch.nn.RMSNorm(dim)
        self.attention = attention(
            dim,
            settings.heads,
            settings.kv_heads,
            qkv_proj_bias=False,
            out_proj_bias=False,
            causal=True,
            rotary_emb_dim=head_dim,
        )
        self.mlp_norm = torch.nn.RMSNorm(dim)
        self.up = torch.nn.Linear(dim, 2 * hidden, bias=False)
        self.down = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Tensor:
        lengths = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        x = x + self.attention(self.attention_norm(x), **lengths)
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class GPT(torch.nn.Module):
    """Bytes → logits of the next byte. The weights follow from `settings.seed`, whatever the attention and device."""

    def __init__(self, settings: Settings, attention: type[MHA] = MHA) -> None:
        super().__init__()
        self.context = settings.context
        self.embedding = torch.nn.Embedding(VOCABULARY, settings.dim)
        self.blocks = torch.nn.ModuleList(Block(settings, attention) for _ in range(settings.layers))
        self.norm = torch.nn.RMSNorm(settings.dim)
        self.head = torch.nn.Linear(settings.dim, VOCABULARY, bias=False)
        self._initialise(settings)

    def _initialise(self, settings: Settings) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out_proj.weight", "down.weight"))
                std = INIT_STD / (2 * settings.layers) ** 0.5 if into_residual else INIT_STD
                torch.nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, inputs: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """fp32 (batch, seqlen, 256), of inputs (batch, seqlen); packed (total, 256), of (total,) with `cu_seqlens`."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, cu_seqlens, self.context)
        logits: Tensor = self.head(self.norm(x)).float()
        return logits


@torch.no_grad()
def nudge(model: GPT, dtype: torch.dtype, seed: int) -> None:
    """Change every weight at random, by at most as much as rounding it to `dtype` may."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        share = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1
        parameter.copy_(parameter.double() * (1 + share * torch.finfo(dtype).eps / 2))


@torch.no_grad()
def sample(model: GPT, prompt: bytes, count: int, seed: int, temperature: float = 0.8) -> bytes:
    """The prompt and `count` bytes that the model continues it with."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text[-model.context :]], device=device))[0, -1].cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return bytes(text)
