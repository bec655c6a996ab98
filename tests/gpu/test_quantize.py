"""Quantising Q, K and V to FP8: every element against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuteflash import quantize_planning, quantize_qkv
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.traits.arch import arch_of_capability
from cuteflash.traits.quantize import TARGET
from cuteflash.validate_quantize import QuantizeInputs
from tests.gpu.pairwise import every_pair
from tests.quantized import LARGEST, assert_nearest, check, data, natural, tables

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def supported(device: torch.device) -> None:
    if device.type == "cuda":
        arch = arch_of_capability(*torch.cuda.get_device_capability(device))
        if arch.name != TARGET:
            pytest.skip(f"{arch.name} has no kernel that quantises")
        torch.full((1 << 28,), 0x7F, dtype=torch.uint8, device=device)  # NaN where results will be allocated


@every_pair(
    head_dims=[(16, 48), (64, 64), (96, 80), (128, 128), (192, 128), (256, 256)],
    options=[{}, {"transpose_v": True}, {"smooth_v": True, "transpose_v": True}],
    granularity=["head", "block"],
)
def test_head_dims(head_dims: tuple[int, int], options: dict[str, Any], granularity: str, device: torch.device) -> None:
    head_dim, head_dim_v = head_dims
    check(*data(300, head_dim=head_dim, head_dim_v=head_dim_v, device=device), granularity=granularity, **options)


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize(
    ("hadamard", "head_dim"), [(32, 96), (32, 256), (64, 64), (64, 192), (64, 256), (128, 128), (256, 256)]
)
def test_hadamard(hadamard: int, head_dim: int, granularity: str, device: torch.device) -> None:
    tensors = data(130, 70, head_dim=head_dim, dtype=torch.float16, device=device)
    check(*tensors, hadamard=hadamard, granularity=granularity)


@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (4, 1), (10, 2), (16, 2), (9, 1)], ids=str)
@pytest.mark.parametrize(("head_dim", "hadamard"), [(128, None), (64, 64), (256, 64)])
def test_heads_that_share_scales_of_blocks(
    head_dim: int, hadamard: int | None, heads: tuple[int, int], device: torch.device
) -> None:
    tensors = data(300, 210, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, device=device)
    check(*tensors, hadamard=hadamard, granularity="block")


@every_pair(
    dims=[(16, 16), (16, 128), (48, 64), (128, 128), (80, 96), (256, 256)],
    interleaved=[False, True],
    dtype=[torch.bfloat16, torch.float32],
)
def test_rotary(dims: tuple[int, int], interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    rotary_dim, head_dim = dims
    tensors = data(200, heads=6, kv_heads=3, head_dim=head_dim, device=device)
    sines = tables(200, rotary_dim, dtype, device)
    check(*tensors, **sines, rotary_interleaved=interleaved)


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize(("head_dim", "hadamard"), [(64, 64), (96, None), (128, 64), (256, 256)])
def test_rotary_of_whole_rows(head_dim: int, hadamard: int | None, granularity: str, device: torch.device) -> None:
    """A thread then has columns of both halves; five heads are no multiple of those that a block visits."""
    tensors = data(150, heads=10, kv_heads=5, head_dim=head_dim, device=device)
    check(*tensors, **tables(150, head_dim, device=device), hadamard=hadamard, granularity=granularity)


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("heads", [(15, 5), (32, 8), (9, 1)], ids=str)
@pytest.mark.parametrize("rotary_dim", [64, 128])
def test_rotary_of_heads_that_share_scales(
    rotary_dim: int, heads: tuple[int, int], granularity: str, device: torch.device
) -> None:
    """Everything at once, several batch entries; blocks of a cluster find scales together, or one those of nine."""
    tensors = data(300, batch=3, heads=heads[0], kv_heads=heads[1], head_dim=128, device=device)
    options = {"hadamard": 64, "transpose_v": True, "smooth_v": True, "granularity": granularity}
    check(*tensors, **tables(300, rotary_dim, device=device), **options)


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("heads", [(24, 8), (10, 5), (16, 16)], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 96), (256, 256)])
def test_rotary_of_many_heads(
    head_dim: int, rotary_dim: int, heads: tuple[int, int], granularity: str, device: torch.device
) -> None:
    """Blocks have several heads of Q and of K, of several batch entries."""
    batch, tokens = (7, 900) if device.type == "cuda" else (2, 140)
    tensors = data(tokens, batch=batch, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, device=device)
    options = {"hadamard": 64, "transpose_v": True, "smooth_v": True, "granularity": granularity}
    check(*tensors, **tables(tokens, rotary_dim, device=device), **options)


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_e5m2(granularity: str, device: torch.device) -> None:
    options = {"dtype": torch.float8_e5m2, "transpose_v": True, "smooth_v": True}
    check(*data(300, head_dim=64, device=device), granularity=granularity, **options)


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_everything_at_once(granularity: str, device: torch.device) -> None:
    tensors = data(333, head_dim=128, device=device)
    options = {"hadamard": 64, "transpose_v": True, "smooth_v": True, "granularity": granularity}
    check(*tensors, **tables(333, 96, device=device), **options)


WHOLE = {"hadamard": 64, "transpose_v": True, "smooth_v": True}


@every_pair(
    head_dims=[(64, 64), (64, 128), (128, 128), (128, 80), (256, 256)],
    granularity=["head", "block"],
    dtype=[torch.bfloat16, torch.float16],
    seqlen=[1100, 129, 513, 5],
    heads=[(4, 4), (10, 5), (12, 2)],
)
def test_everything_at_once_with_whole_rows(
    head_dims: tuple[int, int],
    granularity: str,
    dtype: torch.dtype,
    seqlen: int,
    heads: tuple[int, int],
    device: torch.device,
) -> None:
    """Rows of Q and K are mixed by tensor cores after their embedding; a block has some heads, and some tiles of V."""
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": dtype}
    tensors = data(seqlen, heads=heads[0], kv_heads=heads[1], device=device, **sizes)
    table = torch.float32 if dtype == torch.bfloat16 else torch.float16
    check(*tensors, **tables(seqlen, head_dims[0], table, device), granularity=granularity, **WHOLE)


@pytest.mark.parametrize("transpose_v", [False, True])
def test_given_scales_and_whole_rows(transpose_v: bool, device: torch.device) -> None:
    scales = {f"{name}_descale": torch.full((2, 2), 0.01, device=device) for name in "qkv"}
    tensors = data(700, head_dim=128, device=device)
    options = WHOLE | {"transpose_v": transpose_v}
    check(*tensors, **tables(700, 128, device=device), **options, **scales)


@pytest.mark.parametrize(
    ("seqlen", "seqlen_k"), [(1, 1), (1, 500), (127, 129), (128, 128), (513, 64), (0, 40), (40, 0)]
)
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_lengths(seqlen: int, seqlen_k: int, granularity: str, device: torch.device) -> None:
    tensors = data(seqlen, seqlen_k, heads=8, head_dim=128, device=device)
    check(*tensors, granularity=granularity, transpose_v=True, smooth_v=True)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3)])
def test_given_scales(shape: tuple[int, ...], device: torch.device) -> None:
    scales = {f"{name}_descale": torch.rand(shape, device=device) * 0.01 + 1e-3 for name in "qkv"}
    granularity = "block" if len(shape) == 3 else "head"
    check(*data(300, device=device), granularity=granularity, transpose_v=True, smooth_v=True, **scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hadamard", "head_dim"), [(64, 64), (64, 192), (64, 256), (128, 128)])
def test_given_scales_and_hadamard(hadamard: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Tensor cores mix blocks of 64 columns."""
    scales = {f"{name}_descale": torch.full((2, 2), 0.01, device=device) for name in "qkv"}
    check(*data(150, head_dim=head_dim, dtype=dtype, device=device), hadamard=hadamard, **scales)


def test_slices_of_a_fused_projection_and_expanded_heads(device: torch.device) -> None:
    x = torch.randn(2, 333, 8 * 128 + 8, device=device).bfloat16()[..., 8:].unflatten(-1, (8, 128))
    q, k, v = x.split((4, 2, 2), dim=2)
    check(q, k, v, hadamard=128, transpose_v=True)
    check(q[:1].expand(3, -1, -1, -1), k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1), granularity="block")


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("hadamard", [None, 32, 64])
def test_not_finite_and_zero_inputs(hadamard: int | None, granularity: str, device: torch.device) -> None:
    q, k, v = data(300, device=device)
    q[0, 5, 1, 7] = k[1, 200, 0, 3] = v[0, 17, 1, 60] = float("nan")
    q[1, 9, 2, 0], k[0, 255, 1, 63], v[1, 130, 0, 1] = float("inf"), -float("inf"), float("inf")
    q[0, :, 2:] = 0
    k[1, 128:256, 1] = v[1, :, 1] = 0
    found = check(q, k, v, hadamard=hadamard, granularity=granularity)
    assert found.v is not None and found.v[1, 130, 0, 1].float() == LARGEST
    assert (found.q_descale[0, 1] == 1).all()
    check(q, k, v, hadamard=hadamard, granularity=granularity, smooth_v=True, transpose_v=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_not_finite_whole_rows(head_dim: int, granularity: str, device: torch.device) -> None:
    """What is not finite takes all of its rotated row with it, and nothing of any other."""
    q, k, v = data(600, head_dim=head_dim, device=device)
    q[0, 5, 1, 7] = k[1, 200, 0, 3] = v[0, 17, 1, 60] = float("nan")
    q[1, 9, 2, 0], k[0, 255, 1, 63], v[1, 130, 0, 1] = float("inf"), -float("inf"), float("inf")
    q[0, 40, 0, 1], q[0, 40, 0, 2] = float("inf"), -float("inf")
    q[1, :, :2] = 0
    v[1, 256:512, 1] = float("nan")
    check(q, k, v, **tables(600, head_dim, device=device), granularity=granularity, **WHOLE)


def test_the_smallest_and_the_largest_inputs(device: torch.device) -> None:
    q, k, v = data(140, device=device)
    check(q * 1e-38, k * 1e36, v * 1e-40)
    largest = torch.full((1, 64, 2, 128), 65504.0, device=device, dtype=torch.float16)
    check(largest, largest, largest, hadamard=128)


def test_results_repeat_bit_for_bit(device: torch.device) -> None:
    tensors = data(2049, heads=8, head_dim=128, device=device)
    first = quantize_qkv(*tensors, smooth_v=True, transpose_v=True, hadamard=128)
    for _ in range(20):
        again = quantize_qkv(*tensors, smooth_v=True, transpose_v=True, hadamard=128)
        for a, b in zip(first, again):
            assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("smooth_v", [False, True])
def test_whoever_puts_parts_together_the_bits_are_the_same(
    smooth_v: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that convert, or, of longer sequences, a kernel of its own; other tests have the former."""
    q, k, v = data(1100, heads=8, head_dim=128, device=cuda)
    sines = tables(1100, 128, device=cuda)
    inputs = QuantizeInputs(q, k, v, None, None, None, sines["rotary_cos"], sines["rotary_sin"])
    options = QuantizeOptions("head", hadamard=64, transpose_v=True, smooth_v=smooth_v)
    folded = quantize_planning.launch_of(inputs, options)(inputs)
    monkeypatch.setattr(quantize_planning, "FOLDED_TOKENS", 0)
    for a, b in zip(folded, quantize_planning.launch_of(inputs, options)(inputs), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_graph_replays_with_other_values(cuda: torch.device) -> None:
    q, k, v = data(256, device=cuda)
    quantize_qkv(q, k, v, smooth_v=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_qkv(q, k, v, smooth_v=True)
    q.copy_(torch.randn_like(q) * 3)
    graph.replay()
    for a, b in zip(captured, quantize_qkv(q, k, v, smooth_v=True)):
        assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_offsets_beyond_32_bits(cuda: torch.device) -> None:
    rows = 2**31 // (64 * 4) + 300
    x = torch.empty(1, rows, 4, 64, device=cuda, dtype=torch.bfloat16).normal_()
    found = quantize_qkv(x, x, x, transpose_v=True)
    assert found.vt is not None
    tail = slice(rows - 256, rows)
    none = x.new_zeros(())  # is in doubt
    assert_nearest("q", found.q[:, tail], x[:, tail].double(), none, found.q_descale)
    begin = (rows - 256) // 128 * 128
    v = natural(found.vt[..., begin:], rows - begin)
    assert_nearest("v", v, x[:, begin:].double(), none, found.v_descale)
