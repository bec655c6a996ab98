"""Attention of 16-bit tensors through FP8 in one call, without a GPU: results, launches and errors."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import cuteflash
from cuteflash import Fp8, flash_attn_func, fp8_inference_ops, fp8_planning, planning, quantize_planning
from cuteflash.arguments import Fp8InferenceOptions
from cuteflash.dispatch import Choice
from tests.quantized import data

OP, OP_LSE = torch.ops.cuteflash.fp8_inference.default, torch.ops.cuteflash.fp8_inference_lse.default
NUM_SMS = 132


def in_two_calls(q: Tensor, k: Tensor, v: Tensor, hadamard: int | None = None, **options: Any) -> Any:
    some = cuteflash.quantize_qkv(q, k, v, hadamard=hadamard, smooth_v=True)
    assert some.v is not None
    scales = {"q_descale": some.q_descale, "k_descale": some.k_descale, "v_descale": some.v_descale}
    return flash_attn_func(some.q, some.k, some.v, **scales, v_mean=some.v_mean, **options)


@pytest.mark.parametrize(
    ("fp8", "options"),
    [
        (True, {}),
        (Fp8(), {"causal": True, "return_lse": True, "softmax_scale": 0.3}),
        (Fp8(hadamard=32), {"window_size": (5, 2), "softcap": 3.0, "pack_gqa": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_call_is_two(dtype: torch.dtype, fp8: Any, options: dict[str, Any]) -> None:
    q, k, v = data(50, 40, head_dim_v=16, dtype=dtype)
    found = flash_attn_func(q, k, v, fp8=fp8, **options)
    hadamard = fp8.hadamard if isinstance(fp8, Fp8) else None
    torch.testing.assert_close(found, in_two_calls(q, k, v, hadamard, out_dtype=dtype, **options), rtol=0, atol=0)
    exact = flash_attn_func(*(x.double() for x in (q, k, v)), **options)
    out, exact = (x[0] if isinstance(x, tuple) else x for x in (found, exact))
    assert out.dtype == dtype
    assert (out - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()


def test_the_dtype_of_the_result_may_be_another() -> None:
    q, k, v = data(20)
    assert flash_attn_func(q, k, v, fp8=True).dtype == torch.bfloat16
    assert flash_attn_func(q, k, v, fp8=True, out_dtype=torch.float16).dtype == torch.float16


def test_nothing_to_see() -> None:
    for lengths in ((4, 0), (0, 4)):
        q, k, v = data(*lengths)
        out, lse = flash_attn_func(q, k, v, fp8=True, return_lse=True)
        assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()


SCALE = torch.ones(2, 2)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "word": ({"fp8": "yes"}, TypeError, "fp8 is 'yes'; allowed: a cuteflash.Fp8, True, False"),
    "scales": (
        {"fp8": True, "q_descale": None, "k_descale": SCALE},
        ValueError,
        "fp8 is True; allowed with k_descale: False, as q, k and v have 8 bits already",
    ),
    "mean": (
        {"fp8": True, "v_mean": torch.ones(2, 2, 64)},
        ValueError,
        "v_mean is given; allowed with fp8: False and None",
    ),
    "transposed": ({"fp8": Fp8(), "transposed_v": True}, ValueError, "transposed_v is True, v_mean is None; allowed"),
    "out": ({"fp8": True, "out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32; allowed: None, torch"),
    "out without": ({"fp8": False, "out_dtype": torch.float16}, ValueError, "out_dtype is torch.float16, v_mean is No"),
    "fp32": ({"fp8": True, "dtype": torch.float32}, TypeError, "q.dtype is torch.float32; allowed: torch.float16"),
    "fp8": ({"fp8": True, "dtype": torch.float8_e4m3fn}, TypeError, "q.dtype is torch.float8_e4m3fn; allowed"),
    "head dim": ({"fp8": True, "head_dim": 24}, ValueError, r"q.shape\[3\] \(head_dim\) is 24; allowed: multiples of"),
    "block": ({"fp8": Fp8(128)}, ValueError, "hadamard is 128 with a head_dim of 64; allowed"),
    "softcap": ({"fp8": True, "softcap": -1.0}, ValueError, "softcap is -1.0; allowed"),
    "heads": (
        {"fp8": True, "pack_gqa": True, "heads": 65, "kv_heads": 1},
        ValueError,
        "pack_gqa is True with 65 query",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    given, error, message = BAD[case]
    options = dict(given)
    sizes = {name: options.pop(name) for name in ("dtype", "head_dim", "heads", "kv_heads") if name in options}
    dtype = sizes.pop("dtype", torch.bfloat16)
    q, k, v = (x.to(dtype) for x in data(9, **sizes))
    with pytest.raises(error, match=message):
        flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize("hadamard", [16, 0, True, "64"])
def test_blocks_that_no_rotation_has(hadamard: Any) -> None:
    error = ValueError if type(hadamard) is int else TypeError
    with pytest.raises(error, match=r"hadamard is .*; allowed: None, 32, 64, 128, 256"):
        Fp8(hadamard)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused_before_anything_is_computed(name: str) -> None:
    tensors = dict(zip("qkv", data(9), strict=True))
    tensors[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"{name}.requires_grad is True; cuteflash has no gradient of"):
        flash_attn_func(**tensors, fp8=True)
    with torch.no_grad():
        flash_attn_func(**tensors, fp8=True)


@pytest.mark.parametrize("op", [OP, OP_LSE], ids=str)
def test_opcheck(op: Any) -> None:
    options = Fp8InferenceOptions(window_right=0, hadamard=32, out_dtype="fp16")
    torch.library.opcheck(op, (*data(9), *options))


def test_fake_results_look_like_real_ones() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in data(9, 21, head_dim_v=16))
        out, lse = flash_attn_func(q, k, v, fp8=True, return_lse=True)
    assert out.shape == (2, 9, 4, 16) and out.dtype == torch.bfloat16 and out.device.type == "cuda"
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32


def test_vmap_autocast_and_the_count_of_operations() -> None:
    q, k, v = data(9, 21)
    expected = OP(q, k, v)
    mapped = torch.vmap(lambda *x: OP(*x))(*(torch.stack([x, x.flip(0)]) for x in (q, k, v)))
    torch.testing.assert_close(mapped, torch.stack([expected, expected.flip(0)]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attn_func(q.float(), k.float(), v.float(), fp8=True), expected)
    with FlopCounterMode(display=False) as counter:
        OP(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 4 * 9 * 21 * (64 + 64)


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q * 2, k, v, causal=True, fp8=Fp8(hadamard=64))

    tensors = data(20)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(*tensors), model(*tensors))


class Gpu:
    """A GPU on which kernels only record: (its kind, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str = "sm_90a") -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        properties = types.SimpleNamespace(multi_processor_count=NUM_SMS)
        for module in (planning, quantize_planning):
            monkeypatch.setattr(module, "current_target", lambda index: target)
        monkeypatch.setattr(fp8_planning, "compiled", lambda kernel_cls, traits, problem, target: self._kernel(problem))
        monkeypatch.setattr(quantize_planning, "kernel_of", self._kernel)
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        self.inference = fp8_inference_ops.cuda_inference(has_lse=False)

    def _kernel(self, problem: Any) -> Any:
        return lambda *arguments: self.launches.append((problem, arguments))


def test_a_call_quantises_and_attends_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    for seqlen in (300, 300, 301):
        q, k, v = data(seqlen, head_dim_v=48)
        out = gpu.inference(q, k, v, *Fp8InferenceOptions(0.3, window_right=0, hadamard=64, out_dtype="fp16"))
        (quantizing, given), (attending, arguments) = gpu.launches[-2:]
        assert quantizing.transposes_v and quantizing.smooths_v and quantizing.hadamard == 64
        assert (
            attending.operands.transposed_v and attending.operands.has_v_mean and attending.operands.o_dtype == "fp16"
        )
        assert attending.scores.mask == "causal" and arguments[9] == 0.3
        assert all(x is y for x, y in zip(given, (q, k, v), strict=False))
        *quantised, mean = given[3:10]
        assert all(x is y for x, y in zip(arguments, (*quantised[:3], out, None, *quantised[3:], mean), strict=False))
        assert arguments[2].shape == (2, 2, 48, 384) and out.shape == (2, seqlen, 4, 48) and out.dtype == torch.float16
    assert len(gpu.launches) == 6


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        ("sm_90a", {"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ("sm_90a", {"family": "sm80"}, NotImplementedError, "needs the sm90 family .Hopper.; sm_90a runs sm80, which"),
        ("sm_80", {}, NotImplementedError, "needs the sm90 family .Hopper.; sm_80 runs sm80"),
    ],
)
def test_nothing_is_launched_before_all_is_checked(
    target: str, options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, target)
    with pytest.raises(error, match=message):
        gpu.inference(*data(4), *Fp8InferenceOptions(**options))
    assert not gpu.launches


def test_unaligned_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    q, k, v = data(4)
    moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(ValueError, match=r"q.data_ptr\(\) is .*; allowed: multiples of 16 bytes"):
        gpu.inference(moved, k, v)
