"""Packed sequences of 8-bit operands: what a CPU computes, what a launch gets, which input is refused.

A GPU's launches are driven here on CPU tensors, with kernels that record their arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cuteflash import flash_attn_func, flash_attn_varlen_func, fp8_packed_ops, fp8_packed_planning, packed_planning
from cuteflash.arguments import Fp8Options, FwdArguments
from cuteflash.core.signature import fwd_fake_args
from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.kernels.sm90 import ragged
from cuteflash.problem import LENGTH_MAX, FwdProblem, Operands, Scores, Storage
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from tests.kernel_store import KernelStore

FP8 = torch.float8_e4m3fn
FWD = torch.ops.cuteflash.fp8_varlen_fwd.default
FWD_LSE = torch.ops.cuteflash.fp8_varlen_fwd_lse.default
LENGTHS_Q, LENGTHS_K = (3, 0, 7, 1, 4), (5, 2, 0, 130, 21)
NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "q_descale", "k_descale", "v_descale")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return int32(0, *itertools.accumulate(lengths))


def inputs(rest: int = 0, lengths: Any = (LENGTHS_Q, LENGTHS_K), heads: int = 4, kv_heads: int = 2) -> dict[str, Any]:
    """Q, K, V, vectors and scales, by name."""
    generator = torch.Generator().manual_seed(0)
    total_q, total_k = (sum(side) + rest for side in lengths)
    shapes = (total_q, heads, 32), (total_k, kv_heads, 32), (total_k, kv_heads, 16)
    operands = [(torch.randn(shape, generator=generator) * 100).to(FP8) for shape in shapes]
    scales = [torch.rand(len(lengths[0]), kv_heads, generator=generator) / 100 + 0.01 for _ in shapes]
    return dict(zip(NAMES, (*operands, *map(ends, lengths), *scales), strict=True))


def transposed(v: Tensor, lengths: tuple[int, ...], padding: float = math.nan) -> Tensor:
    """Packed V^T, its layout spelled out; what no sequence needs is `padding`."""
    total, heads, columns = v.shape
    result = torch.full((heads, columns, (total // 128 + len(lengths)) * 128), padding)
    for i, (end, length) in enumerate(zip(itertools.accumulate(lengths), lengths, strict=True)):
        start = ((end - length) // 128 + i) * 128
        result[..., start : start + -(-length // 16) * 16] = 0
        for key in range(length):
            group, (j, t, b) = key // 16 * 16, (key % 16 // 8, key % 8 // 2, key % 2)
            result[..., start + group + 4 * t + 2 * j + b] = v[end - length + key].float()
    return result.to(FP8)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "out_dtype": torch.float16},
    "window": {"window_size": (2, 1), "softmax_scale": 0.3, "softcap": 5.0},
}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_each_sequence_is_what_it_would_be_alone(case: str, is_transposed: bool) -> None:
    given, options = inputs(rest=3), OPTIONS[case] | {"return_lse": True}
    mean = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1)) if case == "causal" else None
    v = transposed(given["v"], LENGTHS_K) if is_transposed else given["v"]
    packed = given | {"v": v, "transposed_v": is_transposed, "v_mean": mean}
    out, lse = flash_attn_varlen_func(**packed, max_seqlen_q=7, max_seqlen_k=130, **options)
    for i in range(len(LENGTHS_Q)):
        of_q, of_k = (slice(cu[i].item(), cu[i + 1].item()) for cu in (given["cu_seqlens_q"], given["cu_seqlens_k"]))
        scales = {name: given[name][i : i + 1] for name in NAMES[5:]}
        q, k, v = given["q"][None, of_q], given["k"][None, of_k], given["v"][None, of_k]
        own_mean = None if mean is None else mean[i : i + 1]
        o_i, lse_i = flash_attn_func(q, k, v, **scales, v_mean=own_mean, **options)
        assert torch.equal(out[of_q], o_i[0])
        assert torch.equal(lse[:, of_q], lse_i[0])
    assert out.dtype == options.get("out_dtype", torch.bfloat16)
    assert (out[15:] == 0).all() and (lse[:, 15:] == -math.inf).all()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_that_do_not_count_are_not_read_and_give_zero(is_transposed: bool) -> None:
    given = inputs(rest=3)
    used_q, used_k = (2, 0, 7, 0, 4), (5, 1, 0, 33, 16)
    kept_q, kept_k = (
        torch.cat([torch.arange(b, b + n) for b, n in zip(given[cu].tolist(), used, strict=False)])
        for cu, used in (("cu_seqlens_q", used_q), ("cu_seqlens_k", used_k))
    )
    fewer = {"q": given["q"][kept_q], "k": given["k"][kept_k], "v": given["v"][kept_k]}
    fewer |= {"cu_seqlens_q": ends(used_q), "cu_seqlens_k": ends(used_k)}
    expected = flash_attn_varlen_func(**given | fewer)
    for name, kept in (("q", kept_q), ("k", kept_k), ("v", kept_k)):
        given[name].view(torch.uint8)[[i for i in range(len(given[name])) if i not in kept]] = 0x7F  # NaN
    if is_transposed:
        given["v"] = transposed(given["v"], LENGTHS_K)
    used = {"seqused_q": int32(*used_q), "seqused_k": int32(*used_k)}
    out, lse = flash_attn_varlen_func(**given, **used, transposed_v=is_transposed, return_lse=True)
    assert torch.equal(out[kept_q], expected)
    rest = [i for i in range(len(out)) if i not in kept_q]
    assert (out[rest] == 0).all() and (lse[:, rest] == -math.inf).all()


@pytest.mark.parametrize("lengths", [((), ()), ((0,), (3,)), ((3,), (0,)), ((2, 0), (0, 0))], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_nothing_to_see(lengths: Any, is_transposed: bool) -> None:
    given = inputs(lengths=lengths)
    if is_transposed:
        given["v"] = transposed(given["v"], lengths[1])
    out, lse = flash_attn_varlen_func(**given, transposed_v=is_transposed, return_lse=True)
    assert out.shape == (sum(lengths[0]), 4, 16) and (out == 0).all() and (lse == -math.inf).all()


def test_the_schema() -> None:
    assert str(FWD._schema) == (
        "cuteflash::fp8_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor? seqused_q=None, Tensor? seqused_k=None, "
        "Tensor? v_mean=None, float? softmax_scale=None, int window_left=-1, int window_right=-1, float softcap=0., "
        "bool? pack_gqa=None, str? family=None, bool transposed_v=False, str out_dtype='bf16', "
        "str? lengths=None) -> Tensor"
    ).replace("'bf16'", '"bf16"')


@pytest.mark.slow
@pytest.mark.parametrize(("op", "is_transposed"), [(FWD, True), (FWD_LSE, False)], ids=str)
def test_opcheck(op: Any, is_transposed: bool) -> None:
    given = inputs()
    mean = None
    if is_transposed:
        given["v"], mean = transposed(given["v"], LENGTHS_K, padding=0.0), torch.ones(5, 2, 16)
    options = Fp8Options(window_right=0, transposed_v=is_transposed, out_dtype="fp16")
    # Not "test_schema", which compares the arguments before and after, of a type that torch does not compare.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (*given.values(), int32(1, 0, 2, 1, 4), None, mean, *options), test_utils=checks)


@pytest.mark.slow
def test_compiling_makes_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((LENGTHS_Q, LENGTHS_K), ((9, 2, 3), (3, 4, 5)), ((5, 5), (2, 8))):
            given = inputs(lengths=lengths)
            given |= {"v": transposed(given["v"], lengths[1]), "transposed_v": True}
            limits = {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
            out = compiled(**given, **limits, causal=True, return_lse=True)
            torch.testing.assert_close(out, flash_attn_varlen_func(**given, **limits, causal=True, return_lse=True))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_fake_results_look_like_real_ones(device: str) -> None:
    given = inputs()
    given["v"] = transposed(given["v"], LENGTHS_K)
    options = Fp8Options(transposed_v=True, out_dtype="fp16")
    real = FWD_LSE(*given.values(), None, None, None, *options)
    with FakeTensorMode() if device != "meta" else contextlib.nullcontext():
        made = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in given.values()]
        fake = FWD_LSE(*made, None, None, None, *options)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert fake[0].device.type == device


def test_vmap_and_autocast() -> None:
    given = inputs()
    shorter = ends((1, 2, 3, 4, 5))
    q, k, v, cu_q, cu_k, *scales = given.values()
    stacked = torch.stack([cu_q, shorter])
    out = torch.vmap(FWD, in_dims=(None, None, None, 0, None, None, None, None))(q, k, v, stacked, cu_k, *scales)
    with torch.autocast("cpu", torch.float16):
        expected = [FWD(q, k, v, cu, cu_k, *scales) for cu in (cu_q, shorter)]
    assert out.dtype == torch.bfloat16 and torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_flops_are_those_of_each_sequence(is_transposed: bool) -> None:
    given = inputs()
    if is_transposed:
        given["v"] = transposed(given["v"], LENGTHS_K)
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_func(**given, transposed_v=is_transposed, return_lse=True)
    pairs = sum(a * b for a, b in zip(LENGTHS_Q, LENGTHS_K, strict=True))
    assert counter.get_total_flops() == 2 * 4 * pairs * (32 + 16)


@pytest.mark.parametrize("name", ["q", "v_descale"])
def test_gradients_are_refused_before_anything_is_computed(name: str) -> None:
    given = inputs()
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"no gradient of torch.ops.cuteflash.fp8_varlen_fwd"):
        flash_attn_varlen_func(**given)
    with torch.no_grad():
        flash_attn_varlen_func(**given)


class Gpu:
    """An sm_90a on which kernels only record: (problem, traits, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str = "sm_90a") -> None:
        self.launches: list[tuple[FwdProblem, Any, tuple[Any, ...]]] = []
        properties = types.SimpleNamespace(multi_processor_count=132)
        stream = types.SimpleNamespace(device_index=0, cuda_stream=1)
        monkeypatch.setattr("cuteflash.planning.current_target", lambda index: target)
        monkeypatch.setattr(fp8_packed_planning, "compiled", self._compiled)
        monkeypatch.setattr(fp8_packed_planning, "counters", packed_planning.TileCounters())
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.fwd, self.fwd_lse = fp8_packed_ops.cuda_forward(has_lse=False), fp8_packed_ops.cuda_forward(has_lse=True)

    def _compiled(self, kernel_cls: Any, traits: Any, problem: FwdProblem, target: str) -> Any:
        return lambda *arguments: self.launches.append((problem, traits, arguments))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_launch_gets_tensors_vectors_a_counter_scales_and_scalars(gpu: Gpu) -> None:
    given, used = inputs(), int32(1, 0, 1, 1, 1)
    options = Fp8Options(0.3, 5, -1, 2.0, False, None, out_dtype="fp16")
    o, lse = gpu.fwd_lse(*given.values(), None, used, None, *options)
    problem, traits, arguments = gpu.launches[0]
    operands = Operands("e4m3", "e4m3", "fp16", 32, 16)
    storage = Storage("varlen", "varlen", used_k=True)
    assert problem == FwdProblem(operands, Scores("window", softcap=True), storage, has_lse=True)
    assert traits.turns_v and {"varlen", "turned_v"} <= traits.features
    tensors, packed, scales, scalars, *_ = FwdArguments.of((*arguments, None))
    assert all(x is y for x, y in zip(tensors, (*list(given.values())[:3], o, lse), strict=True))
    *vectors, counter, _, _, _ = packed
    assert all(x is y for x, y in zip(vectors, (*list(given.values())[3:5], None, used), strict=True))
    assert counter.tolist() == [0] and counter.dtype == torch.int32
    assert all(x is given.get(name) for name, x in scales._asdict().items())
    assert scalars == (0.3, 2.0, 5, 1 << 30, 0, 132)
    assert (o.dtype, o.shape, lse.shape) == (torch.float16, (15, 4, 16), (4, 15))


def test_what_decides_the_kernel_of_a_launch(gpu: Gpu) -> None:
    given, mean = inputs(), torch.rand(2, 5, 16).transpose(0, 1)
    *others, _ = given.values()
    gpu.fwd(*given.values())
    gpu.fwd(*others, given["v_descale"] * 2)  # not its scales
    vt = transposed(given["v"], LENGTHS_K)
    gpu.fwd(*(given | {"v": vt}).values(), int32(1, 0, 1, 1, 1), None, mean, *Fp8Options(transposed_v=True))
    plain, scaled, smooth = gpu.launches
    assert plain[0] == scaled[0] and not plain[0].operands.transposed_v
    assert smooth[0].operands.transposed_v and smooth[0].operands.has_v_mean and smooth[0].storage.used_q
    assert FwdArguments.of((*smooth[2], None)).scales.v_mean is mean
    gpu.fwd(*(given | {"cu_seqlens_q": ends((3, 3, 3, 3, 3))}).values(), *[None] * 3, *Fp8Options(pack_gqa=True))
    assert gpu.launches[-1][0].operands.packed_heads == 2


def test_results_are_filled_beforehand_if_some_queries_do_not_count(gpu: Gpu) -> None:
    o, lse = gpu.fwd_lse(*inputs().values(), int32(1, 0, 1, 1, 1))
    assert (o == 0).all() and (lse == -math.inf).all()
    assert len(gpu.launches) == 1
    o, lse = gpu.fwd_lse(*inputs(lengths=((3,), (0,))).values())
    assert (o == 0).all() and (lse == -math.inf).all()
    assert len(gpu.launches) == 1


def test_wrong_values_are_found_on_a_gpu_on_request(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    given["k_descale"][3, 1] = -1.0
    gpu.fwd(*given.values())
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"k_descale\[3, 1\] is -1.0"):
        gpu.fwd(*given.values())
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[-1\] is 14"):
        gpu.fwd(*(inputs() | {"cu_seqlens_q": ends((3, 0, 6, 1, 4))}).values())
    assert len(gpu.launches) == 1


def test_other_kernel_families_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match=r"needs the sm90 family .Hopper.; sm_80 runs sm80"):
        Gpu(monkeypatch, "sm_80").fwd(*inputs().values())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scales": (
        dict.fromkeys(NAMES[5:]),
        TypeError,
        "q.dtype is torch.float8_e4m3fn; .*needs q_descale, k_descale and v_descale",
    ),
    "one scale": ({"k_descale": None}, TypeError, "k_descale is None; allowed with 8-bit q, k and v"),
    "a scale for each batch entry": (
        {"k_descale": torch.ones(1, 2)},
        ValueError,
        r"k_descale.shape is \(1, 2\); allowed: \(5, 2\), \(sequences, heads of k\)",
    ),
    "scales of 128 tokens": (
        {"q_descale": torch.ones(5, 2, 1)},
        ValueError,
        r"q_descale.shape is \(5, 2, 1\); allowed: \(1, 2, 5\), \(1, heads of k, blocks of 128 tokens\)",
    ),
    "zero": ({"v_descale": torch.zeros(5, 2)}, ValueError, r"v_descale\[0, 0\] is 0.0; allowed: positive"),
    "mean": ({"v_mean": torch.ones(5, 2, 8)}, ValueError, r"v_mean.shape is \(5, 2, 8\); allowed: \(5, 2, 16\)"),
    "no tensor": ({"v_mean": 0.0}, TypeError, "v_mean is a float; allowed: None, a torch.Tensor"),
    "16 bits": ({"q": torch.zeros(15, 4, 32).half()}, TypeError, "q.dtype is torch.float16; allowed on cpu: torch.fl"),
    "rank": ({"q": torch.zeros(1, 15, 4, 32).to(FP8)}, ValueError, r"q has 4 dimensions.*\(total, heads, head_dim\)"),
    "rows of V": ({"v": torch.zeros(9, 2, 16).to(FP8)}, ValueError, r"v.shape\[0\] \(total\) is 9; allowed: 158"),
    "head dim": (
        {"q": torch.zeros(15, 4, 24).to(FP8), "k": torch.zeros(158, 2, 24).to(FP8)},
        ValueError,
        r"q.shape\[2\] \(head_dim\) is 24; allowed: multiples of 16",
    ),
    "heads of V^T": (
        {"v": torch.zeros(4, 16, 768).to(FP8), "transposed_v": True},
        ValueError,
        r"v.shape\[0\] \(heads\) is 4; allowed: 2, that of k",
    ),
    "keys of V^T": (
        {"v": torch.zeros(2, 16, 256).to(FP8), "transposed_v": True},
        ValueError,
        r"v.shape\[2\] \(keys\) is 256; allowed: 768, those of k in whole 128s, rounded down, and 128 more",
    ),
    "vector": ({"cu_seqlens_q": ends(LENGTHS_Q).long()}, TypeError, "cu_seqlens_q.dtype is torch.int64; allowed"),
    "decreasing": ({"cu_seqlens_k": int32(0, 5, 3, 7, 137, 158)}, ValueError, r"cu_seqlens_k\[2\] is 3, the end of"),
    "limit": ({"max_seqlen_k": 129}, ValueError, "max_seqlen_k is 129; allowed: 130 or more, the length of sequence 3"),
    "out": ({"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32; allowed: None, torch.bfloat16"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    changes, error, message = BAD[case]
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**inputs() | changes)


@pytest.mark.parametrize("given", [{"transposed_v": True}, {"out_dtype": torch.half}, {"v_mean": torch.ones(1, 1, 16)}])
def test_16_bits_have_no_formats(given: dict[str, Any]) -> None:
    x = torch.zeros(4, 1, 16)
    with pytest.raises(ValueError, match=f"{next(iter(given))} is .*; allowed without q_descale"):
        flash_attn_varlen_func(x, x, x, int32(0, 4), int32(0, 4), **given)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_kernels_get_vectors_and_then_scales(is_transposed: bool) -> None:
    operands = Operands("e4m3", "e4m3", "bf16", 64, 96, transposed_v=is_transposed, has_v_mean=is_transposed)
    problem = FwdProblem(operands, storage=Storage("varlen", "varlen", used_k=True))
    tensors, packed, scales, scalars, *_ = FwdArguments.of(fwd_fake_args(problem))
    assert packed.cu_seqlens_q is not None and packed.seqused_q is None and packed.tile_counter is not None
    assert all(len(scale.shape) == 2 for scale in scales[:3]) and (scales.v_mean is not None) == is_transposed
    assert len(tensors.v.shape) == 3 and tensors.v.shape[1 if is_transposed else 2] == 96 and len(scalars) == 6


def test_boxes_of_transposed_v_lie_where_the_sequence_does() -> None:
    """What a descriptor's coordinates and strides make of the keys of a sequence, see `ragged.sequence_columns`."""
    for first, length in ((0, 16), (128, 48), (1 << 29, 1 << 29), (384, LENGTH_MAX // 16 * 16)):
        for key in (0, 5, length - 1):
            inner, further = ragged.END - length + key, (first + length) // ragged.GRAIN
            address = inner + further * ragged.GRAIN + ragged.END // ragged.GRAIN * ragged.GRAIN * (ragged.TURN - 1)
            assert inner < ragged.END and further < ragged.EXTENT and address % (1 << 64) == first + key
    assert ragged.GRAIN * (ragged.TURN - 1) < 1 << 40 and ragged.GRAIN % 16 == 0  # what a descriptor holds


@pytest.mark.parametrize(("fields", "regs"), [({}, (24, 240)), ({"turns_v": True}, (40, 232)), ({"tile_m": 192}, 0)])
def test_a_warp_that_turns_v_and_hands_out_tiles_gets_more_registers(fields: dict[str, Any], regs: Any) -> None:
    traits = FwdTraitsFp8Sm90(**({"tile_m": 128, "tile_n": 128, "head_dim": 64, "head_dim_v": 64} | fields))
    assert traits.packed_regs == (regs or (32, 160))
    assert "varlen" in traits.features
    fuller = dataclasses.replace(traits, head_dim_v=256, tile_n=160)
    assert ("varlen" in fuller.features) == (fuller.accumulator_regs <= fuller.packed_regs[1] - 16)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "is_transposed", "packed_heads"), [(64, True, 7), (128, False, 1)])
def test_rows_compile_without_complaint(
    head_dim: int, is_transposed: bool, packed_heads: int, kernels: KernelStore
) -> None:
    operands = Operands.of("e4m3", head_dim, head_dim, packed_heads)
    operands = dataclasses.replace(operands, transposed_v=is_transposed, has_v_mean=packed_heads > 1)
    problem = FwdProblem(operands, storage=Storage("varlen", "varlen", used_k=True))
    choice = choose_shipped(problem, "sm_90a", "sm90")
    kernels(choice.kernel_cls, choice.traits, problem, "sm_90a").assert_no_complaint()
