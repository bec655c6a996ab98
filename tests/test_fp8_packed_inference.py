"""Attention of packed sequences of 16 bits through FP8 in one call, without a GPU: results, launches and errors."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import cuteflash
from cuteflash import (
    Fp8,
    flash_attn_func,
    flash_attn_varlen_func,
    fp8_packed_inference_ops,
    fp8_packed_planning,
    packed_planning,
    planning,
    quantize_planning,
)
from cuteflash.arguments import Fp8InferenceOptions
from cuteflash.dispatch import Choice
from tests.test_quantize_packed import LENGTHS, USED, packed, vectors

OP, OP_LSE = torch.ops.cuteflash.fp8_varlen_inference.default, torch.ops.cuteflash.fp8_varlen_inference_lse.default


@pytest.mark.parametrize(
    ("fp8", "options"),
    [
        (True, {}),
        (Fp8(), {"causal": True, "softmax_scale": 0.3, "out_dtype": torch.float16}),
        (Fp8(hadamard=32), {"window_size": (5, 2), "softcap": 3.0, "pack_gqa": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("used", [(None, None), USED, (None, USED[1])], ids=["all", "used", "used keys"])
def test_each_sequence_is_what_it_is_alone(used: Any, fp8: Any, options: dict[str, Any]) -> None:
    q, k, v = packed(head_dim_v=48)
    counts = {
        f"seqused_{side}": torch.tensor(some, dtype=torch.int32)
        for side, some in zip("qk", used, strict=True)
        if some is not None
    }
    out, lse = flash_attn_varlen_func(q, k, v, *vectors(), **counts, fp8=fp8, return_lse=True, **options)
    assert out.dtype == options.get("out_dtype", torch.bfloat16)
    seen = torch.zeros(len(out), dtype=torch.bool)
    begins = [some.tolist() for some in vectors()]
    for i in range(len(LENGTHS[0])):
        of_q, of_k = (
            slice(begin[i], begin[i] + (some if count is None else count)[i])
            for begin, some, count in zip(begins, LENGTHS, used, strict=True)
        )
        alone = (q[None, of_q], k[None, of_k], v[None, of_k])
        expected, expected_lse = flash_attn_func(*alone, fp8=fp8, return_lse=True, **options)
        assert torch.equal(out[of_q], expected[0]) and torch.equal(lse[:, of_q], expected_lse[0])
        seen[of_q] = True
    assert (out[~seen] == 0).all() and (lse[:, ~seen] == -torch.inf).all()


@pytest.mark.parametrize("transpose_v", [False, True])
def test_scales_of_blocks_are_those_of_the_quantiser(transpose_v: bool) -> None:
    q, k, v = packed(0)
    cu_q, cu_k = vectors()
    some = cuteflash.quantize_qkv(
        q, k, v, granularity="block", transpose_v=transpose_v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )
    scales = {"q_descale": some.q_descale, "k_descale": some.k_descale, "v_descale": some.v_descale}
    values = some.vt if transpose_v else some.v
    assert values is not None
    out = flash_attn_varlen_func(some.q, some.k, values, cu_q, cu_k, **scales, transposed_v=transpose_v)
    for i, (begin_q, begin_k) in enumerate(zip(cu_q[:-1].tolist(), cu_k[:-1].tolist(), strict=True)):
        of_q, of_k = slice(begin_q, begin_q + LENGTHS[0][i]), slice(begin_k, begin_k + LENGTHS[1][i])
        one = cuteflash.quantize_qkv(q[None, of_q], k[None, of_k], v[None, of_k], granularity="block")
        assert one.v is not None
        scales = {"q_descale": one.q_descale, "k_descale": one.k_descale, "v_descale": one.v_descale}
        torch.testing.assert_close(out[of_q], flash_attn_func(one.q, one.k, one.v, **scales)[0])


def test_scales_of_blocks_have_one_shape() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in packed(0))
    wrong = {f"{name}_descale": torch.ones(1, 2, 7) for name in "qkv"}
    message = r"k_descale.shape is \(1, 2, 7\); allowed: \(1, 2, 8\), \(1, heads of k, blocks of 128 tokens\), as q"
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, k, v, *vectors(), **wrong)


SCALE = torch.ones(5, 2)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "word": ({"fp8": "yes"}, TypeError, "fp8 is 'yes'; allowed: a cuteflash.Fp8, True, False"),
    "scales": ({"k_descale": SCALE}, ValueError, "fp8 is True; allowed with k_descale: False, as q, k and v have 8"),
    "mean": ({"v_mean": torch.ones(5, 2, 64)}, ValueError, "v_mean is given; allowed with fp8: False and None"),
    "transposed": ({"transposed_v": True}, ValueError, "transposed_v is True, v_mean is None; allowed with fp8"),
    "out": ({"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32; allowed: None, torch"),
    "block": ({"fp8": Fp8(128)}, ValueError, "hadamard is 128 with a head_dim of 64; allowed"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; allowed"),
    "longest": ({"max_seqlen_k": 100}, ValueError, "max_seqlen_k is 100; allowed: 256 or more"),
    "used": ({"seqused_k": torch.zeros(5)}, TypeError, "seqused_k.dtype is torch.float32; allowed: torch.int32"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    given, error, message = BAD[case]
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(*packed(), *vectors(), **{"fp8": True} | given)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused_before_anything_is_computed(name: str) -> None:
    tensors = dict(zip("qkv", packed(0), strict=True))
    tensors[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"{name}.requires_grad is True; cuteflash has no gradient of"):
        flash_attn_varlen_func(*tensors.values(), *vectors(), fp8=True)


@pytest.mark.parametrize("op", [OP, OP_LSE], ids=str)
def test_opcheck(op: Any) -> None:
    lengths = (20, 0, 3), (9, 1, 0)
    options = Fp8InferenceOptions(window_right=0, hadamard=32, out_dtype="fp16")
    used = torch.tensor((10, 0, 3), dtype=torch.int32)
    torch.library.opcheck(op, (*packed(0, lengths, head_dim=32), *vectors(lengths), used, None, *options))


def test_fake_results_look_like_real_ones() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in packed(head_dim_v=16))
        ends = [torch.empty(6, dtype=torch.int32, device="cuda") for _ in range(2)]
        out, lse = flash_attn_varlen_func(q, k, v, *ends, fp8=True, return_lse=True)
    assert out.shape == (310, 4, 16) and out.dtype == torch.bfloat16 and out.device.type == "cuda"
    assert lse.shape == (4, 310) and lse.dtype == torch.float32


def test_vmap_autocast_and_the_count_of_operations() -> None:
    tensors, ends = packed(0), vectors()
    expected = OP(*tensors, *ends)
    mapped = torch.vmap(lambda *x: OP(*x, *ends))(*(torch.stack([x, x * 0.5]) for x in tensors))
    torch.testing.assert_close(mapped[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = flash_attn_varlen_func(*(x.float() for x in tensors), *ends, fp8=True)
    assert torch.equal(found, expected)
    with FlopCounterMode(display=False) as counter:
        OP(*tensors, *ends)
    pairs = sum(a * b for a, b in zip(*LENGTHS, strict=True))
    assert counter.get_total_flops() == 2 * 4 * pairs * (64 + 64)


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return flash_attn_varlen_func(q * 2, k, v, cu_q, cu_k, causal=True, fp8=Fp8(hadamard=64))

    arguments = (*packed(0), *vectors())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(*arguments), model(*arguments))


class Gpu:
    """A GPU on which kernels only record: (its kind, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str = "sm_90a") -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        properties = types.SimpleNamespace(multi_processor_count=132)
        for module in (planning, quantize_planning):
            monkeypatch.setattr(module, "current_target", lambda index: target)
        monkeypatch.setattr(
            fp8_packed_planning, "compiled", lambda kernel_cls, traits, problem, target: self._kernel(problem)
        )
        monkeypatch.setattr(packed_planning.counters, "of", lambda device: torch.zeros(1, dtype=torch.int32))
        monkeypatch.setattr(quantize_planning, "kernel_of", self._kernel)
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        self.inference = fp8_packed_inference_ops.cuda_inference(has_lse=False)

    def _kernel(self, problem: Any) -> Any:
        return lambda *arguments: self.launches.append((problem, arguments))


def test_a_call_quantises_and_attends_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    used = torch.tensor(USED[1], dtype=torch.int32)
    q, k, v = packed(head_dim_v=48)
    ends = vectors()
    for _ in range(2):
        out = gpu.inference(q, k, v, *ends, None, used, *Fp8InferenceOptions(0.3, window_right=0, hadamard=64))
        (quantizing, given), (attending, arguments) = gpu.launches[-2:]
        assert quantizing.is_packed and quantizing.transposes_v and quantizing.smooths_v and quantizing.has_used
        assert attending.operands.transposed_v and attending.operands.has_v_mean and attending.storage.used_k
        *quantised, mean = given[3:10]
        expected = (*quantised[:3], out, None, *ends, None, used)
        assert all(x is y for x, y in zip(arguments, expected, strict=False))
        assert all(x is y for x, y in zip(arguments[13:], (*quantised[3:], mean), strict=False))
        assert arguments[2].shape == (2, 48, (461 // 128 + 5) * 128) and out.shape == (310, 4, 48)
    assert len(gpu.launches) == 4


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        ("sm_90a", {"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ("sm_80", {}, NotImplementedError, "needs the sm90 family .Hopper.; sm_80 runs sm80"),
    ],
)
def test_nothing_is_launched_before_all_is_checked(
    target: str, options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, target)
    with pytest.raises(error, match=message):
        gpu.inference(*packed(), *vectors(), None, None, *Fp8InferenceOptions(**options))
    assert not gpu.launches
