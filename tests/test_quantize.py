"""Quantising Q, K and V to FP8 on a CPU: the reference against the definition, the operator, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteflash import quantize_ops, quantize_planning, quantize_qkv
from cuteflash.nn import apply_rotary_emb
from cuteflash.quantize_problem import QuantizeOptions, QuantizeTensors
from cuteflash.reference.quantize import quantize
from tests.quantized import FP8, LARGEST, check, data, natural, tables

OP = torch.ops.cuteflash.quantize_qkv.default


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transpose_v": True, "smooth_v": True},
        {"hadamard": 32, "transpose_v": True},
        {"hadamard": 64} | tables(140, 48),
        {"rotary_interleaved": True} | tables(140, 32, torch.bfloat16),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_every_element_is_the_nearest(granularity: str, options: dict[str, Any]) -> None:
    check(*data(140, head_dim_v=48), granularity=granularity, **options)


@pytest.mark.parametrize(("seqlen", "seqlen_k"), [(1, 1), (128, 129), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_lengths(seqlen: int, seqlen_k: int, granularity: str) -> None:
    check(*data(seqlen, seqlen_k, head_dim=16), granularity=granularity, transpose_v=True)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3)])
def test_given_scales_are_used_and_returned(shape: tuple[int, ...]) -> None:
    scales = {f"{name}_descale": torch.rand(shape) * 0.01 + 1e-3 for name in "qkv"}
    check(*data(), granularity="block" if len(shape) == 3 else "head", **scales)


def test_fp16_and_slices_of_a_fused_projection() -> None:
    x = torch.randn(2, 20, 8 * 32 + 8).half()[..., 8:].unflatten(-1, (8, 32))
    q, k, v = x.split((4, 2, 2), dim=2)
    found = check(q, k, v, hadamard=32)
    for a, b in zip(found, quantize_qkv(q.contiguous(), k.contiguous(), v.contiguous(), hadamard=32)):
        assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_vt_has_its_keys_in_the_order_of_attention() -> None:
    q, k, v = data(130, head_dim=16, batch=1)
    plain, turned = quantize_qkv(q, k, v), quantize_qkv(q, k, v, transpose_v=True)
    assert plain.v is not None and turned.vt is not None and turned.vt.shape == (1, 2, 16, 256)
    for t, j, b in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (3, 1, 1)]:
        position, key = 4 * t + 2 * j + b, 8 * j + 2 * t + b
        assert torch.equal(turned.vt[0, 1, :, 16 + position].float(), plain.v[0, 16 + key, 1].float())
    assert torch.equal(natural(turned.vt, 130).float(), plain.v.float())


def test_a_rotation_leaves_scores_alone_and_spreads_outliers() -> None:
    q, k, v = data(40)
    q[..., 5] *= 50
    plain, mixed = (quantize_qkv(q, k, v, hadamard=size) for size in (None, 64))

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.repeat_interleave(2, 2).double())

    exact = scores(q, k)
    errors = []
    for found in (plain, mixed):
        q_scale = found.q_descale.repeat_interleave(2, 1)[:, None, :, None]
        deviation = scores(found.q.float() * q_scale, found.k.float() * found.k_descale[:, None, :, None]) - exact
        errors.append(float(deviation.norm() / exact.norm()))
    assert errors[1] < 0.05 and mixed.q_descale.max() < plain.q_descale.max() / 3


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 64])
def test_the_rotary_embedding_is_that_of_the_modules(rotary_dim: int, interleaved: bool) -> None:
    q, k, v = data(12)
    cos, sin = tables(12, rotary_dim).values()
    options = QuantizeOptions(rotary_interleaved=interleaved)
    rotated = (apply_rotary_emb(x, cos, sin, interleaved) for x in (q, k))
    for a, b in zip(quantize(q, k, v, None, (cos, sin), options), quantize(*rotated, v, None, None, options)):
        assert a is b is None or torch.equal(a.float(), b.float())


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_what_is_not_finite_changes_its_own_rows_only(granularity: str, smooth_v: bool) -> None:
    clean = data(140)
    dirty = tuple(x.clone() for x in clean)
    for x in dirty:
        x[0, 7, 1, 3], x[1, 130, 0, 5], x[1, 131, 0, 5] = float("nan"), float("inf"), -float("inf")
        x[0, 7, 1, :3] = x[1, 130, 0, :3] = 0
    for x in clean:
        x[0, 7, 1, :4] = x[1, 130, 0, :3] = 0
        x[1, 130:132, 0, 5] = 0
    found, plain = (quantize_qkv(*x, granularity=granularity, smooth_v=smooth_v) for x in (dirty, clean))
    for name in ("q", "k", "v"):
        a, b = getattr(found, name).float(), getattr(plain, name).float()
        assert a[0, 7, 1, 3].isnan() and a[1, 130, 0, 5] == LARGEST and a[1, 131, 0, 5] == -LARGEST
        b[0, 7, 1, 3], b[1, 130, 0, 5], b[1, 131, 0, 5] = float("nan"), LARGEST, -LARGEST
        assert torch.equal(a.nan_to_num(1000.0), b.nan_to_num(1000.0))
        assert torch.equal(getattr(found, f"{name}_descale"), getattr(plain, f"{name}_descale"))


def test_scales_are_positive_and_normal() -> None:
    q, k, v = data(10)
    found = quantize_qkv(q * 0, k * 1e-38, torch.full_like(v, float("nan")))
    assert (found.q_descale == 1).all() and (found.v_descale == 1).all()
    assert (found.k_descale == torch.finfo(torch.float32).tiny).all()
    assert (found.q.float() == 0).all() and found.v is not None and found.v.float().isnan().all()


def test_a_smoothed_v_and_its_mean_are_v() -> None:
    q, k, v = data(140)
    found = quantize_qkv(q, k, v + 100, smooth_v=True)
    assert found.v is not None and found.v_mean is not None
    again = found.v.float() * found.v_descale[:, None, :, None] + found.v_mean[:, None]
    assert (again - (v + 100).float()).abs().max() < 0.2


SCALES = tuple(torch.full((2, 2), 0.5) for _ in range(3))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (None, None, None, None, None, "block", 32, False, True, True),
        (*SCALES, *tables(20, 32).values(), "head", 0, True),
    ],
    ids=["plain", "block", "given"],
)
def test_opcheck(arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(OP, (*data(20, head_dim=32), *arguments))


def test_fake_results_have_the_shapes_and_strides_of_real_ones() -> None:
    for size in ({}, {"batch": 0}, {"seqlen": 0}, {"heads": 0, "kv_heads": 0}):
        tensors = data(**({"seqlen": 130} | size))
        for arguments in ((), (None,) * 5 + ("block", 0, False, True, True), SCALES):
            if arguments is SCALES and size:
                continue
            real = OP(*tensors, *arguments)
            with FakeTensorMode() as mode:
                fake = OP(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in (*tensors, *arguments)))
            for a, b in zip(real, fake):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.filterwarnings("error")
def test_vmap_makes_one_call_after_the_other() -> None:
    q, k, v = data(40)
    found = torch.vmap(OP, in_dims=(0, None, None))(torch.stack([q, 2 * q]), k, v)
    for i in range(2):
        for mapped, alone in zip(found, OP((i + 1) * q, k, v), strict=True):
            assert torch.equal(mapped[i].view(torch.uint8), alone.view(torch.uint8))


def test_no_gradient_is_made_up() -> None:
    q, k, v = data(4)
    found = quantize_qkv(q.requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match=r"no gradient of torch\.ops.cuteflash.quantize_qkv"):
        found.q_descale.sum().backward()


def bad_calls(empty: Callable[..., Tensor]) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Arguments other than those of a good call, the error and what it says."""
    narrow, float32 = empty(2, 6, 4, 24), torch.float32
    scale, blocks, half_scale = (empty(*shape, dtype=float32) for shape in ((2, 4), (2, 4, 2), (2, 2)))
    table, odd, wide, thin = (empty(6, size, dtype=float32) for size in (16, 12, 40, 8))
    short, half, double = (
        empty(size, 16, dtype=dtype) for size, dtype in ((5, float32), (6, torch.half), (6, torch.double))
    )
    three = {"q_descale": scale, "k_descale": scale, "v_descale": scale}
    return {
        "head_dim": ({"q": narrow, "k": narrow}, ValueError, r"q.shape\[3\] .* is 24; .*of 16 up to"),
        "head_dim_v": ({"v": narrow}, ValueError, r"v.shape\[3\] .* is 24; allowed: multiples of 16"),
        "q rank": ({"q": empty(6, 4, 32)}, ValueError, "q has 3 dimensions"),
        "v heads": ({"v": empty(2, 6, 2, 32)}, ValueError, r"v.shape\[2\] .heads. is 2; allowed: 4, that of k"),
        "k dtype": ({"k": empty(2, 6, 4, 32, dtype=torch.float16)}, TypeError, "k.dtype is torch.float16; allowed"),
        "no tensor": ({"v": [1.0]}, TypeError, "v is a list; allowed: a torch.Tensor"),
        "scale no tensor": (three | {"q_descale": 1.0}, TypeError, "q_descale is a float; allowed: a torch.Tensor"),
        "granularity": ({"granularity": "token"}, ValueError, "granularity is 'token'; allowed: 'head', 'block'"),
        "granularity type": ({"granularity": 128}, TypeError, "granularity is 128; allowed: 'head', 'block'"),
        "hadamard": ({"hadamard": 48}, ValueError, "hadamard is 48 with a head_dim of 32; allowed: 0 .* 32, 64"),
        "hadamard of 16": ({"hadamard": 16}, ValueError, "hadamard is 16 .*; allowed: 0 .none. or 32"),
        "hadamard too wide": ({"hadamard": 64}, ValueError, "hadamard is 64 with a head_dim of 32; .*a divisor"),
        "hadamard type": ({"hadamard": 32.0}, TypeError, "hadamard is 32.0; allowed: None, 32"),
        "flag": ({"transpose_v": 1}, TypeError, "transpose_v is 1; allowed: True, False"),
        "one scale": ({"k_descale": scale}, ValueError, "q_descale is None; allowed: a tensor, as another"),
        "scale dtype": (
            three | {"k_descale": empty(2, 4, dtype=torch.float16)},
            TypeError,
            "k_descale.dtype is torch.float16; allowed",
        ),
        "scale shape": (three | {"v_descale": half_scale}, ValueError, r"v_descale.shape is \(2, 2\); .* \(2, 4\)"),
        "scale of blocks": (three | {"q_descale": blocks}, ValueError, r"q_descale.shape is \(2, 4, 2\); .* \(2, 4\)"),
        "blocks": (three | {"granularity": "block"}, ValueError, r"shape is \(2, 4\); .*'block': \(2, 4, 1\)"),
        "one table": ({"rotary_sin": table}, ValueError, "rotary_cos is None; allowed: a tensor"),
        "table dtype": (
            {"rotary_cos": double, "rotary_sin": table},
            TypeError,
            "rotary_cos.dtype is torch.float64; allowed",
        ),
        "table dtypes": (
            {"rotary_cos": half, "rotary_sin": table},
            TypeError,
            "rotary_sin.dtype is torch.float32; allowed: torch.float16, that of rotary_cos",
        ),
        "rotary_dim": ({"rotary_cos": odd, "rotary_sin": odd}, ValueError, r"rotary_cos.shape is \(6, 12\); .* of 16"),
        "rotary_dim too wide": ({"rotary_cos": wide, "rotary_sin": wide}, ValueError, "rotary_cos.shape .* up to 32"),
        "table rows": ({"rotary_cos": short, "rotary_sin": table}, ValueError, r"rotary_cos.shape is \(5, 16\)"),
        "table sizes": ({"rotary_cos": table, "rotary_sin": thin}, ValueError, r"rotary_sin.shape is \(6, 8\)"),
        "lengths": (
            {"q": empty(2, 7, 4, 32), "rotary_cos": table, "rotary_sin": table},
            ValueError,
            r"k.shape\[1\] .seqlen. is 6; allowed with rotary_cos: 7",
        ),
    }


@pytest.mark.parametrize("where", ["cpu", "fake cuda"])
def test_bad_input_is_named(where: str) -> None:
    kind, _, device = where.rpartition(" ")
    with FakeTensorMode() if kind else contextlib.nullcontext():

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        good = {"q": empty(2, 6, 4, 32), "k": empty(2, 6, 4, 32), "v": empty(2, 6, 4, 32)}
        for name, (changes, error, message) in bad_calls(empty).items():
            with pytest.raises(error, match=message):
                quantize_qkv(**good | changes)
                pytest.fail(name)


def test_other_dtypes_and_devices_are_refused() -> None:
    x = torch.zeros(2, 6, 4, 32)
    with pytest.raises(TypeError, match=r"q.dtype is torch.float32; allowed: torch.float16, torch.bfloat16"):
        quantize_qkv(x, x, x)
    half, scale = x.half(), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"q_descale.device is meta; allowed: cpu, that of q"):
        quantize_qkv(half, half, half, q_descale=scale.to("meta"), k_descale=scale, v_descale=scale)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_values_of_scales_are_checked(value: float) -> None:
    wrong = SCALES[0].clone()
    wrong[1, 0] = value
    with pytest.raises(ValueError, match=r"k_descale\[1, 0\] is .*; allowed: a positive number that fp32 holds"):
        quantize_qkv(*data(4), q_descale=SCALES[0], k_descale=wrong, v_descale=SCALES[2])


class Gpu:
    """The CUDA implementation on CPU tensors, with a kernel that records its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: list[Any] = []
        self.launches: list[QuantizeTensors] = []
        monkeypatch.setattr(quantize_ops, "known", type(quantize_ops.known)())
        monkeypatch.setattr(quantize_planning, "current_target", lambda index: "sm_90a")
        monkeypatch.setattr(quantize_planning, "kernel_of", self.kernel_of)

    def kernel_of(self, problem: Any) -> Callable[..., None]:
        self.problems.append(problem)
        return self.launch

    def launch(self, *tensors: Any) -> None:
        assert len(tensors) == len(QuantizeTensors._fields)  # a compiled kernel has no defaults
        self.launches.append(QuantizeTensors(*tensors))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_launch_gets_what_its_kernel_takes(gpu: Gpu) -> None:
    q, k, v = data(300, head_dim_v=48)
    cos, sin = tables(300, 32).values()
    result = quantize_ops.quantize_cuda(q, k, v, None, None, None, cos, sin, "head", 64, False, True, True)
    (problem,), (tensors,) = gpu.problems, gpu.launches
    assert (problem.hadamard, problem.rotary_dim, problem.transposes_v, problem.smooths_v) == (64, 32, True, True)
    assert tensors[:3] == (q, k, v) and tensors.cos is cos and tensors.sin is sin
    assert tensors[3:10] == result
    # 300 tokens are 3 parts of 4 heads of Q and 2 of K, which are fewer; then one part of V's 4 tiles: 3 statistics of
    # 48 columns of 2 heads. All of it twice.
    assert tensors.workspace.shape == (2 * 3 * (4 + 2) + 2 * 2 * 3 * 48,)


def test_a_launch_is_found_again_and_does_not_keep_its_tensors(gpu: Gpu) -> None:
    for seed in range(2):
        tensors = tuple(x + seed for x in data(20))
        quantize_ops.quantize_cuda(*tensors, *SCALES)
        assert gpu.launches[-1][:3] == tensors
        assert gpu.launches[-1].workspace is None and gpu.launches[-1].q_descale is SCALES[0]
    quantize_ops.quantize_cuda(*data(21), *SCALES)
    assert len(gpu.launches) == 3 and gpu.problems[0] == gpu.problems[-1] and len(gpu.problems) == 2


def test_tables_and_scales_that_a_kernel_cannot_address_are_copied(gpu: Gpu) -> None:
    q, k, v = data(20)
    cos = torch.randn(20, 33)[:, 1:]
    sin, scale = torch.randn(32, 20).t(), torch.rand(2, 2).t()
    quantize_ops.quantize_cuda(q, k, v, scale, *SCALES[1:], cos, sin)
    (tensors,) = gpu.launches
    for given, taken in ((cos, tensors.cos), (sin, tensors.sin), (scale, tensors.q_descale)):
        assert taken.is_contiguous() and torch.equal(given, taken)


def test_strides_of_single_entries_do_not_matter(gpu: Gpu) -> None:
    q, k, v = (x.as_strided(x.shape, (3, *x.stride()[1:])) for x in data(20, batch=1))
    quantize_ops.quantize_cuda(q, k, v)
    assert all(x.stride(0) % 8 == 0 for x in gpu.launches[0][:3])


def test_nothing_is_launched_for_nothing(gpu: Gpu) -> None:
    result = quantize_ops.quantize_cuda(*data(0))
    assert not gpu.problems and not gpu.launches
    assert (result[3] == 1).all() and result[0].dtype == FP8


def test_other_gpus_are_refused(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_planning, "current_target", lambda index: "sm_80")
    with pytest.raises(NotImplementedError, match="the GPU's target is sm_80; quantize_qkv runs on sm_90a"):
        quantize_ops.quantize_cuda(*data(4))


def test_unaligned_tensors_are_refused(gpu: Gpu) -> None:
    q, k, v = data(4)
    moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(ValueError, match=r"q.data_ptr\(\) is .*; allowed: multiples of 16 bytes"):
        quantize_ops.quantize_cuda(moved, k, v)


def test_values_of_scales_are_read_on_a_gpu_only_if_asked(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (SCALES[0] * 0, *SCALES[1:])
    quantize_ops.quantize_cuda(*data(4), *wrong)
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"q_descale\[0, 0\] is 0.0"):
        quantize_ops.quantize_cuda(*data(4), *wrong)
