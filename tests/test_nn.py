"""The modules against torch's own, in fp64 on the CPU; rotary embedding against complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash.nn import (
    MHA,
    FlashCrossAttention,
    FlashSelfAttention,
    RotaryEmbedding,
    apply_rotary_emb,
    packed_positions,
)

DIM, HEADS = 32, 2
F64 = torch.float64


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def module(**options: Any) -> MHA:
    torch.manual_seed(1)
    return MHA(DIM, HEADS, dtype=F64, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_torchs(causal: bool) -> None:
    ours, theirs = module(causal=causal), torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=F64)
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.Wqkv.weight.data, ours.Wqkv.bias.data
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = random(2, 5, DIM)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    with torch.no_grad():
        assert_close(ours(x), theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_cross_attention_is_torchs() -> None:
    ours, theirs = module(cross_attn=True), torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=F64)
    theirs.in_proj_weight.data = torch.cat((ours.Wq.weight.data, ours.Wkv.weight.data))
    theirs.in_proj_bias.data = torch.cat((ours.Wq.bias.data, ours.Wkv.bias.data))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x, x_kv = random(2, 5, DIM), random(2, 7, DIM, seed=1)
    with torch.no_grad():
        assert_close(ours(x, x_kv), theirs(x, x_kv, x_kv, need_weights=False)[0])
        assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


class Recorded(MHA):
    """Keeps what attention gets."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
        self.seen = q, k, v
        return super().attend(q, k, v, *lengths)


@pytest.mark.parametrize("options", [{"causal": True, "window_size": (2, 0)}, {"window_size": (1, 3)}], ids=str)
def test_grouped_heads_windows_and_scale(options: dict[str, Any]) -> None:
    layer = Recorded(64, 4, 2, softmax_scale=0.2, dtype=F64, **options)
    x = random(2, 6, 64)
    with torch.no_grad():
        out = layer(x)
    q, k, v = (tensor.transpose(1, 2) for tensor in layer.seen)
    assert q.shape == (2, 4, 6, 16) and k.shape == v.shape == (2, 2, 6, 16)
    left, right = options["window_size"]
    distance = torch.arange(6)[None] - torch.arange(6)[:, None]
    mask = (distance >= -left) & (distance <= right)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
    with torch.no_grad():
        assert_close(out, layer.out_proj(theirs.transpose(1, 2).flatten(2)))


def test_softcap() -> None:
    layer = Recorded(DIM, HEADS, softcap=0.5, dtype=F64)
    with torch.no_grad():
        out = layer(random(1, 4, DIM))
    q, k, v = (tensor.transpose(1, 2) for tensor in layer.seen)
    scores = 0.5 * torch.tanh(q @ k.mT / 4.0 / 0.5)
    with torch.no_grad():
        assert_close(out, layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


def test_state_dict_names() -> None:
    """They are documented, and what a checkpoint holds."""
    shapes = {name: tuple(x.shape) for name, x in MHA(64, 4, 2, rotary_emb_dim=8).state_dict().items()}
    assert shapes == {
        "Wqkv.weight": (128, 64),
        "Wqkv.bias": (128,),
        "out_proj.weight": (64, 64),
        "out_proj.bias": (64,),
    }
    crossed = MHA(64, 4, 2, cross_attn=True, qkv_proj_bias=False, out_proj_bias=False).state_dict()
    assert list(crossed) == ["Wq.weight", "Wkv.weight", "out_proj.weight"]
    assert not FlashSelfAttention().state_dict() and not RotaryEmbedding(8).state_dict()


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device_dtype: torch.dtype) -> None:
    layer = Recorded(DIM, HEADS, causal=True, rotary_emb_dim=16)
    x = random(2, 5, DIM, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", device_dtype):
        low = layer(x)
    assert {tensor.dtype for tensor in layer.seen} == {low.dtype} == {device_dtype}
    with torch.no_grad():
        torch.testing.assert_close(low.float(), layer(x), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: MHA(DIM, HEADS, dropout=0.1), NotImplementedError, r"dropout is 0\.1; cuteflash supports 0"),
        (lambda: FlashSelfAttention(attention_dropout=0.2), NotImplementedError, r"attention_dropout is 0\.2"),
        (lambda: FlashCrossAttention(alibi_slopes=torch.ones(2)), NotImplementedError, "alibi_slopes is a tensor"),
        (lambda: MHA(DIM, 3), ValueError, "embed_dim is 32 with 3 heads"),
        (lambda: MHA(DIM, 8), ValueError, "embed_dim is 32 with 8 heads; allowed: .* multiple of 8 up to 256"),
        (lambda: MHA(64, 4, 3), ValueError, "num_heads is 4; allowed: positive multiples of num_heads_kv, 3"),
        (lambda: MHA(DIM, HEADS, rotary_emb_dim=18), ValueError, "rotary_emb_dim is 18; allowed: .* 16"),
        (lambda: MHA(DIM, HEADS, rotary_emb_dim=7), ValueError, "dim is 7; allowed: positive even"),
        (lambda: MHA(DIM, HEADS, rotary_emb_dim=8, cross_attn=True), ValueError, "rotary_emb_dim is 8 with cross"),
        (lambda: RotaryEmbedding(8, base=0), ValueError, "base is 0"),
    ],
)
def test_a_module_that_cannot_be(build: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build()


CU_SEQLENS = torch.tensor([0, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: MHA(DIM, HEADS)(x[0]), r"x\.shape is \(5, 32\); allowed: \(batch, seqlen, embed_dim\)"),
        (lambda x: MHA(DIM, HEADS)(x, cu_seqlens=CU_SEQLENS), r"x\.shape is \(2, 5, 32\); allowed: packed"),
        (lambda x: MHA(DIM, HEADS)(x, x), "x_kv is given to self-attention"),
        (lambda x: MHA(DIM, HEADS)(x, cu_seqlens_k=CU_SEQLENS), "cu_seqlens_k is given"),
        (lambda x: MHA(DIM, HEADS, cross_attn=True)(x[0], x[0], cu_seqlens=CU_SEQLENS), "cu_seqlens_k is None"),
        (lambda x: FlashCrossAttention()(x, x, cu_seqlens=CU_SEQLENS), "cu_seqlens_k is None; allowed"),
        (lambda x: FlashCrossAttention()(x, x, cu_seqlens_k=CU_SEQLENS), "cu_seqlens is None; allowed"),
        (lambda x: RotaryEmbedding(8)(x, x), "positions is None with shapes"),
        (lambda x: apply_rotary_emb(x, torch.ones(2, 17), torch.ones(2, 17)), "cos.shape is .2, 17."),
        (lambda x: apply_rotary_emb(x, torch.ones(3, 8), torch.ones(3, 8)), "cos.shape is .3, 8."),
    ],
)
def test_inputs_that_do_not_fit(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(random(2, 5, DIM, dtype=torch.float32))


def rotated(x: Tensor, positions: Tensor, dim: int, base: float, interleaved: bool) -> Tensor:
    """Column pairs as complex numbers, multiplied by exp(i angle)."""
    turned, rest = x[..., :dim], x[..., dim:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).mT
    angles = positions.double()[..., None] * base ** (-2.0 * torch.arange(dim // 2).double() / dim)
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles).unsqueeze(-2))
    return torch.cat((result.flatten(-2) if interleaved else result.mT.flatten(-2), rest), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [16, 6])
def test_rotary_embedding_is_a_complex_product(dim: int, interleaved: bool) -> None:
    q, k = random(2, 5, 3, 16), random(2, 5, 1, 16, seed=1)
    rotary = RotaryEmbedding(dim, 100.0, interleaved)
    for positions in (None, torch.tensor([3, 0, 7, 7, 1]), torch.arange(10).view(2, 5)):
        where = torch.arange(5) if positions is None else positions
        for x, turned in zip((q, k), rotary(q, k, positions)):
            assert_close(turned, rotated(x, where, dim, 100.0, interleaved))


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = random(1, 1, 1, 16).expand(1, 9, 1, 16), random(1, 1, 1, 16, seed=1).expand(1, 9, 1, 16)
    q, k = RotaryEmbedding(16)(q, k)
    scores = torch.einsum("bihd,bjhd->ij", q, k)
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_angles_are_not_rounded_to_the_dtype_of_the_inputs() -> None:
    x = random(1, 1, 1, 16).expand(1, 3000, 1, 16)
    low, _ = RotaryEmbedding(16).bfloat16()(x.bfloat16(), x.bfloat16())
    exact = rotated(x.bfloat16().double(), torch.arange(3000), 16, 10000.0, False)
    assert low.dtype == torch.bfloat16
    assert float((low.double() - exact).abs().max()) < 0.02


def test_positions_of_packed_tokens() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 7, 7], dtype=torch.int32)
    positions = packed_positions(cu_seqlens, 9)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1] and positions.dtype == torch.int32


def test_a_module_made_on_the_meta_device_becomes_real() -> None:
    layer = MHA(DIM, HEADS, rotary_emb_dim=16, causal=True, device="meta", dtype=F64)
    other = MHA(DIM, HEADS, rotary_emb_dim=16, causal=True, dtype=F64)
    layer.to_empty(device="cpu").load_state_dict(other.state_dict())
    x = random(1, 4, DIM)
    with torch.no_grad():
        assert torch.equal(layer(x), other(x))


def test_options_are_printed() -> None:
    assert "causal=True" in repr(FlashSelfAttention(causal=True))
    assert "8, base=10000.0, interleaved=False" in repr(MHA(DIM, HEADS, rotary_emb_dim=8))
