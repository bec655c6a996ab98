"""The module of latent attention: both ways against the definition, with and without a cache, and transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash.nn import MultiHeadLatentAttention

HIDDEN, HEADS, LENGTH, PAGE = 48, 3, 70, 64


def module(dtype: torch.dtype = torch.float32, **options: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    built = MultiHeadLatentAttention(HIDDEN, HEADS, **options).to(dtype)
    with torch.no_grad():
        for weight in built.parameters():
            if weight.dim() == 2:
                weight.mul_(3)  # attention that is not nearly uniform
            else:
                weight.add_(torch.randn_like(weight) / 4)
    return built


def inputs(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def definition(attention: MultiHeadLatentAttention, x: Tensor) -> Tensor:
    """DeepSeek-V2's equations 9 to 19, from the weights alone, in fp64."""
    w = {name: value.detach().double() for name, value in attention.state_dict().items()}
    x = x.double()

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def rotated(y: Tensor) -> Tensor:
        angles = torch.arange(y.shape[1]).double()[:, None] * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
        turned = (
            torch.view_as_complex(y.unflatten(-1, (32, 2)).contiguous())
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.view_as_real(turned).flatten(-2)

    if "q_proj.weight" in w:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q = q.unflatten(-1, (HEADS, -1))
    nope = attention.qk_nope_head_dim
    latent, shared = (x @ w["kv_a_proj_with_mqa.weight"].T).split((512, 64), -1)
    kv = (norm(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).unflatten(-1, (HEADS, -1))
    scores = torch.einsum("bshd,bthd->bhst", q[..., :nope], kv[..., :nope])
    scores += torch.einsum("bshd,btd->bhst", rotated(q[..., nope:]), rotated(shared[:, :, None])[:, :, 0])
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    weights = (scores * (nope + 64) ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", weights, kv[..., nope:]).flatten(-2) @ w["o_proj.weight"].T


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": 40}, {"qk_nope_head_dim": 64, "v_head_dim": 96}], ids=str)
@pytest.mark.parametrize("absorbed", [False, True])
@torch.no_grad()
def test_both_ways_are_the_definition(options: dict[str, Any], absorbed: bool) -> None:
    attention = module(**options)
    out = attention(inputs(), absorbed=absorbed)
    torch.testing.assert_close(out.double(), definition(attention, inputs()), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_both_ways_agree_in_bf16() -> None:
    attention, x = module(torch.bfloat16), inputs(torch.bfloat16)
    exact = definition(attention, x)
    plain, absorbed = (attention(x, absorbed=way).double() for way in (False, True))
    errors = [(out - exact).square().mean().sqrt() / exact.square().mean().sqrt() for out in (plain, absorbed)]
    assert max(errors) < 0.02
    assert errors[1] < 2 * errors[0]


def caches(dtype: torch.dtype, is_paged: bool) -> tuple[Tensor, Tensor | None]:
    """A cache of 128 rows a sequence that is full of NaN, and its table, one entry of which is no page."""
    if not is_paged:
        return torch.full((2, 2 * PAGE, 1, 576), torch.nan, dtype=dtype), None
    table = torch.tensor([[3, 1, -7], [0, 4, 999]], dtype=torch.int32)
    return torch.full((5, PAGE, 1, 576), torch.nan, dtype=dtype), table


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("absorbed", [None, False])
@pytest.mark.parametrize("steps", [(LENGTH - 3, 1, 2), (1, LENGTH - 1)], ids=str)
@torch.no_grad()
def test_a_cache_gives_what_the_whole_sequence_gives(is_paged: bool, absorbed: bool | None, steps: Any) -> None:
    attention, x = module(), inputs()
    whole = attention(x)
    cache, table = caches(x.dtype, is_paged)
    done = 0
    for i, count in enumerate(steps):
        lengths = torch.full((2,), done, dtype=torch.int32) if i else None
        out = attention(
            x[:, done : done + count], kv_cache=cache, cache_seqlens=lengths, page_table=table, absorbed=absorbed
        )
        torch.testing.assert_close(out, whole[:, done : done + count], atol=1e-4, rtol=1e-4)
        done += count


@torch.no_grad()
def test_sequences_of_several_lengths_in_one_step() -> None:
    attention, x = module(), inputs()
    whole = attention(x)
    cache, _ = caches(x.dtype, False)
    attention(x[:, :40], kv_cache=cache)
    lengths = torch.tensor([7, 40], dtype=torch.int32)
    out = attention(torch.stack((x[0, 7:9], x[1, 40:42])), kv_cache=cache, cache_seqlens=lengths)
    torch.testing.assert_close(out, torch.stack((whole[0, 7:9], whole[1, 40:42])), atol=1e-4, rtol=1e-4)


def test_packed_sequences_and_their_gradients() -> None:
    attention, x = module(), inputs(length=12)
    rows = torch.cat((x[0, :5], x[1]))
    ends = torch.tensor([0, 5, 17], dtype=torch.int32)
    packed = attention(rows, cu_seqlens=ends, max_seqlen=12)
    alone = torch.cat((attention(x[:1, :5])[0], attention(x[1:])[0]))
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), list(attention.parameters())) for y in (packed, alone)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_angles_of_the_caller() -> None:
    attention, x = module(), inputs()
    angles = attention.rotary_emb.cos_sin(torch.arange(LENGTH))
    assert torch.equal(attention(x, cos_sin=angles), attention(x))
    assert not torch.equal(attention(x, cos_sin=attention.rotary_emb.cos_sin(torch.arange(LENGTH) * 3)), attention(x))


@pytest.mark.parametrize("q_lora_rank", [None, 40])
@torch.no_grad()
def test_it_is_deepseek_v3_of_transformers(q_lora_rank: int | None) -> None:
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config._attn_implementation = "eager"
    ours = module(q_lora_rank=q_lora_rank)
    theirs = DeepseekV3Attention(config, 0).eval()
    theirs.load_state_dict(ours.state_dict())
    x = inputs()
    positions = torch.arange(LENGTH)[None]
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    expected = theirs(x, DeepseekV3RotaryEmbedding(config)(x, positions), mask)[0]
    torch.testing.assert_close(ours(x), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours(x, absorbed=True), expected, atol=1e-4, rtol=1e-4)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"x": torch.zeros(3, HIDDEN)}, r"x.shape is \(3, 48\); allowed: \(batch, seqlen, hidden_size\)"),
    "packed rank": ({"cu_seqlens": int32(0, 3)}, r"x.shape is \(2, 3, 48\); allowed: packed, \(total, hidden_size\)"),
    "no cache": ({"cache_seqlens": int32(0, 0)}, "cache_seqlens is given without kv_cache; allowed: None"),
    "table": ({"page_table": int32(0)[None]}, "page_table is given without kv_cache; allowed: None"),
    "batch": (
        {"kv_cache": torch.zeros(2, 9, 1, 576), "cache_seqlens": int32(0)},
        r"cache_seqlens.shape is \(1,\); allowed: \(2,\), the batch",
    ),
    "packed cache": (
        {"x": torch.zeros(3, HIDDEN), "cu_seqlens": int32(0, 3), "kv_cache": torch.zeros(1, 9, 1, 576)},
        "cu_seqlens is given with kv_cache; allowed: None",
    ),
    "absorbed": ({"x": torch.zeros(3, HIDDEN), "cu_seqlens": int32(0, 3), "absorbed": True}, "absorbed is True"),
    "gradients": ({"kv_cache": torch.zeros(2, 9, 1, 576)}, "rows requires grad; allowed: tensors that do not, or a ca"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_what_a_call_refuses(case: str) -> None:
    change, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=message):
        module()(**{"x": torch.zeros(2, 3, HIDDEN), **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256 and qk_rope_head_dim is 64; allowed: 512 and 64"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32; allowed: 512 and 64"),
        ({"num_heads": 129}, "num_heads is 129; allowed: 1 to 128"),
        ({"qk_nope_head_dim": 200}, "qk_nope_head_dim is 200; allowed: multiples of 8 up to 192"),
        ({"v_head_dim": 60}, "v_head_dim is 60; allowed: multiples of 8 up to 256"),
    ],
    ids=str,
)
def test_sizes_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadLatentAttention(**{"hidden_size": HIDDEN, "num_heads": HEADS, **options}, device="meta")
