"""Multi-head latent attention: keys and values are projections of one latent vector for each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuteflash import kvcache_api, mla, mla_prefill
from cuteflash.mla_problem import HEADS_MAX
from cuteflash.nn.rotary import RotaryEmbedding, apply_rotary_emb, packed_positions
from cuteflash.problem import HEAD_DIM_MAX, HEAD_DIM_STEP
from cuteflash.validate_mla import LATENT_DIM, ROPE_DIM, ROW_DIM
from cuteflash.validate_packed import check_vector

Angles = tuple[Tensor, Tensor]


class Cache(NamedTuple):
    """The rows that queries attend to.

    Attributes:
        rows: (batch, seqlen, 1, 576), packed (total, 1, 576), or with a table (num_pages, page_size, 1, 576).
        lengths: (batch,), rows of each sequence; None is all, and the rows are those of the queries.
        page_table: (batch, pages of a sequence).
        descale: of rows of e4m3, (), (1,) or (batch,).
    """

    rows: Tensor
    lengths: Tensor | None = None
    page_table: Tensor | None = None
    descale: Tensor | None = None

    def gathered(self, dtype: torch.dtype) -> Tensor:
        """The rows with those of a sequence one after the other, whatever lies after its last one; e4m3 as `dtype`."""
        rows = self.rows
        if self.page_table is not None:
            entries = self.page_table.clamp(0, rows.shape[0] - 1)  # those after the last row may be any number
            rows = rows[entries].flatten(1, 2)
        return rows if self.descale is None else (rows.float() * self.descale.view(-1, 1, 1, 1)).to(dtype)


class MultiHeadLatentAttention(torch.nn.Module):
    """Causal multi-head latent attention, (batch, seqlen, hidden_size) → (batch, seqlen, hidden_size).

    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. A token's latent c and rotated key k_rope are what a cache holds, 576
    columns for all heads together. The same attention is computed in two ways, which agree:

    - plain: keys ``[W_k c, k_rope]`` and values ``W_v c`` of each head, and attention of head dim 192 with values of
      128. For prompts and training.
    - absorbed: the queries ``[W_k^T q_nope, q_rope]`` attend to the cached rows themselves, and W_v is applied to the
      result (`cuteflash.flash_mla_decode`). For decoding: a step reads each cached row once, for all heads. Inference
      only.

    The state dict has the names of DeepSeek-V3 in transformers:

    ==========================================  =========================================================
    `q_proj.weight`                             (heads (nope + rope), hidden_size), without `q_lora_rank`
    `q_a_proj`, `q_a_layernorm`, `q_b_proj`     its two factors, with `q_lora_rank`
    `kv_a_proj_with_mqa`, `kv_a_layernorm`      (512 + 64, hidden_size) and (512,): the latent and the shared key
    `kv_b_proj.weight`                          (heads (nope + v), 512): W_k and W_v, head after head
    `o_proj.weight`                             (hidden_size, heads v)
    ==========================================  =========================================================

    Args:
        hidden_size: columns of inputs and outputs.
        num_heads: heads, up to 128.
        q_lora_rank: rank of the queries' projection; None is one projection without factors.
        kv_lora_rank: 512, columns of the latent.
        qk_nope_head_dim: columns of a head's query and key without rotation; with `qk_rope_head_dim` a multiple of 8 up
            to 256.
        qk_rope_head_dim: 64, columns with rotation, whose key all heads share.
        v_head_dim: columns of a head's value, a multiple of 8 up to 256.
        softmax_scale: factor of the scores; None is ``1 / sqrt(nope + rope)``.
        rotary_emb_base, rotary_emb_interleaved: as `RotaryEmbedding` takes them.
        rms_norm_eps: of the norms of both latents.
        attention_bias: whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have a bias.
        deterministic: gradients are the same in every run.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size that is not allowed.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = LATENT_DIM,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = ROPE_DIM,
        v_head_dim: int = 128,
        softmax_scale: float | None = None,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = True,
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.v_head_dim = v_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.softmax_scale = self.qk_head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.deterministic = deterministic
        self.rotary_emb = RotaryEmbedding(qk_rope_head_dim, rotary_emb_base, rotary_emb_interleaved)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        q_dim, o_dim = num_heads * self.qk_head_dim, num_heads * v_head_dim
        if q_lora_rank is None:
            self.q_proj = torch.nn.Linear(hidden_size, q_dim, bias=False, **factory)
        else:
            self.q_a_proj = torch.nn.Linear(hidden_size, q_lora_rank, bias=attention_bias, **factory)
            self.q_a_layernorm = torch.nn.RMSNorm(q_lora_rank, rms_norm_eps, **factory)
            self.q_b_proj = torch.nn.Linear(q_lora_rank, q_dim, bias=False, **factory)
        self.kv_a_proj_with_mqa = torch.nn.Linear(hidden_size, ROW_DIM, bias=attention_bias, **factory)
        self.kv_a_layernorm = torch.nn.RMSNorm(kv_lora_rank, rms_norm_eps, **factory)
        kv_b_dim = num_heads * (qk_nope_head_dim + v_head_dim)
        self.kv_b_proj = torch.nn.Linear(kv_lora_rank, kv_b_dim, bias=False, **factory)
        self.o_proj = torch.nn.Linear(o_dim, hidden_size, bias=attention_bias, **factory)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        kv_cache: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        cos_sin: Angles | None = None,
        absorbed: bool | None = None,
        descale: Tensor | None = None,
    ) -> Tensor:
        """Shaped as x.

        Args:
            x: (batch, seqlen, hidden_size), new tokens; with `cu_seqlens` packed sequences, (total, hidden_size).
            cu_seqlens: int32 (batch + 1,), the first token of each packed sequence, then the total; without a cache.
            max_seqlen: at least the longest packed sequence.
            kv_cache: (batch, seqlen_cache, 1, 576), or with `page_table` (num_pages, page_size, 1, 576), page_size
                a multiple of 64: the rows of the new tokens are written to it. Inference only.
            cache_seqlens: (batch,) int32, rows that the cache of each sequence has before the call. None says that it
                has none: x is then the beginning of each sequence.
            page_table: (batch, pages of a sequence) int32.
            cos_sin: the cosines and sines of the new tokens' angles, each (seqlen, 32), (batch, seqlen, 32) or packed
                (total, 32); None is those of `rotary_emb` for their positions.
            absorbed: which of the two ways computes it; None is absorbed with `cache_seqlens`, otherwise plain. Plain
                with `cache_seqlens` projects all rows of the cache, which pays with many new tokens.
            descale: fp32, (), (1,) or (batch,), of a cache of e4m3: what its elements are multiplied with.

        Raises:
            ValueError: an input has the wrong number of dimensions, or does not go with another one.
            TypeError, NotImplementedError: as `cuteflash.flash_mla_decode` and `cuteflash.append_latents`.
        """
        absorbed = cache_seqlens is not None if absorbed is None else absorbed
        _check_inputs(x, cu_seqlens, kv_cache, cache_seqlens, page_table, descale)
        if absorbed and cu_seqlens is not None:
            raise ValueError("absorbed is True with cu_seqlens; allowed: False or None, packed sequences are plain")
        if cos_sin is None:
            cos_sin = self._cos_sin(x, cu_seqlens, cache_seqlens)
        q_nope, q_rope = self.queries(x, cos_sin)
        rows = self.rows(x, cos_sin)
        cache = Cache(rows)
        if kv_cache is not None:
            begins = 0 if cache_seqlens is None else cache_seqlens
            mla.append_latents(kv_cache, rows, begins, page_table=page_table, descale=descale)
            if cache_seqlens is not None:
                cache = Cache(kv_cache, cache_seqlens + x.shape[1], page_table, descale)
        if absorbed:
            out = self._absorbed(q_nope, q_rope, cache)
        else:
            out = self._plain(torch.cat((q_nope, q_rope), dim=-1), cache, cu_seqlens, max_seqlen)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected

    def queries(self, x: Tensor, cos_sin: Angles) -> tuple[Tensor, Tensor]:
        """The queries of all heads, (.., heads, nope) and, rotated, (.., heads, 64)."""
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split((self.qk_nope_head_dim, ROPE_DIM), dim=-1)
        return q_nope, apply_rotary_emb(q_rope, *cos_sin, self.rotary_emb.interleaved)

    def rows(self, x: Tensor, cos_sin: Angles) -> Tensor:
        """What a cache holds of tokens, (.., 1, 576): the latent after its norm, then the rotated key."""
        latents, k_rope = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split((LATENT_DIM, ROPE_DIM), dim=-1)
        rotated = apply_rotary_emb(k_rope, *cos_sin, self.rotary_emb.interleaved)
        return torch.cat((self.kv_a_layernorm(latents).to(rotated.dtype), rotated), dim=-1)

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows (.., 1, 576) the keys (.., heads, nope), their shared part (.., 1, 64), the values (.., heads, v)."""
        latents, k_rope = rows.split((LATENT_DIM, ROPE_DIM), dim=-1)
        projected = self.kv_b_proj(latents.squeeze(-2)).unflatten(-1, (self.num_heads, -1))
        k_nope, v = projected.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
        return k_nope, k_rope.to(k_nope.dtype), v

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, cache: Cache) -> Tensor:
        """O, (batch, seqlen, heads, v), of queries that attend to the rows themselves."""
        w_k, w_v = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(
            (self.qk_nope_head_dim, self.v_head_dim), dim=1
        )
        q = torch.cat((torch.einsum("bshn,hnr->bshr", q_nope, w_k), q_rope), dim=-1)
        named: dict[str, Any] = {"page_table": cache.page_table, "descale": cache.descale}
        out = mla.flash_mla_decode(q, cache.rows, cache.lengths, **named, softmax_scale=self.softmax_scale, causal=True)
        return torch.einsum("bshr,hvr->bshv", out, w_v)

    def _plain(self, q: Tensor, cache: Cache, cu_seqlens: Tensor | None, max_seqlen: int | Tensor | None) -> Tensor:
        """O, (batch, seqlen, heads, v) or packed (total, heads, v), of queries (.., heads, nope + 64)."""
        k, k_rope, v = self.keys_values(cache.gathered(q.dtype))
        options: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": True}
        out: Tensor
        if cache.lengths is not None:
            keys = torch.cat((k, k_rope.expand(*k.shape[:-1], ROPE_DIM)), dim=-1)
            out = kvcache_api.flash_attn_with_kvcache(q, keys, v, cache_seqlens=cache.lengths, **options)
            return out
        if cu_seqlens is not None:
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max_seqlen)
        out = mla_prefill.flash_mla_prefill(q, k, k_rope, v, **options, deterministic=self.deterministic)
        return out

    def _cos_sin(self, x: Tensor, cu_seqlens: Tensor | None, cache_seqlens: Tensor | None) -> Angles:
        """The angles of new tokens, by their positions."""
        if cu_seqlens is not None:
            positions = packed_positions(cu_seqlens, x.shape[0])
        else:
            positions = torch.arange(x.shape[1], device=x.device)
            if cache_seqlens is not None:
                positions = cache_seqlens[:, None] + positions
        return self.rotary_emb.cos_sin(positions, torch.promote_types(x.dtype, torch.float32))


def _check_sizes(heads: int, latent: int, nope: int, rope: int, v: int) -> None:
    if (latent, rope) != (LATENT_DIM, ROPE_DIM):
        raise ValueError(
            f"kv_lora_rank is {latent} and qk_rope_head_dim is {rope}; allowed: {LATENT_DIM} and {ROPE_DIM}"
        )
    if not 0 < heads <= HEADS_MAX:
        raise ValueError(f"num_heads is {heads}; allowed: 1 to {HEADS_MAX}")
    largest = HEAD_DIM_MAX - ROPE_DIM
    for name, size, most in (("qk_nope_head_dim", nope, largest), ("v_head_dim", v, HEAD_DIM_MAX)):
        if not 0 < size <= most or size % HEAD_DIM_STEP:
            raise ValueError(f"{name} is {size}; allowed: multiples of {HEAD_DIM_STEP} up to {most}")


def _check_inputs(
    x: Tensor,
    cu_seqlens: Tensor | None,
    kv_cache: Tensor | None,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    descale: Tensor | None,
) -> None:
    allowed = "(batch, seqlen, hidden_size)" if cu_seqlens is None else "packed, (total, hidden_size)"
    if x.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(f"x.shape is {tuple(x.shape)}; allowed: {allowed}")
    if kv_cache is None:
        others = {"cache_seqlens": cache_seqlens, "page_table": page_table, "descale": descale}
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"{name} is given without kv_cache; allowed: None")
    elif cu_seqlens is not None:
        raise ValueError("cu_seqlens is given with kv_cache; allowed: None, and x as (batch, seqlen, hidden_size)")
    if cache_seqlens is not None:
        check_vector("cache_seqlens", cache_seqlens, x.device)
        if cache_seqlens.shape[0] != x.shape[0]:
            raise ValueError(
                f"cache_seqlens.shape is {tuple(cache_seqlens.shape)}; allowed: ({x.shape[0]},), the batch"
            )
