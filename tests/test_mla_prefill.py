"""Attention to keys in two parts: what the operator computes on a CPU, what a launch gets, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cuteflash import flash_attn_func, flash_attn_varlen_func, flash_mla_prefill, mla_prefill_ops, mla_prefill_planning
from cuteflash.arguments import FwdArguments
from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.packed_planning import TileCounters
from cuteflash.problem import DENSE, FwdProblem, Operands, Scores, Storage
from tests.kernel_store import KernelStore

PREFILL = torch.ops.cuteflash.mla_prefill.default
HEADS, LENGTHS = 3, (5, 0, 12)


def inputs(is_packed: bool = False, columns: int = 192, **kind: Any) -> dict[str, Any]:
    """The operator's tensors by name: packed, 17 queries and keys, the last two keys of nobody NaN."""
    generator = torch.Generator().manual_seed(0)
    rows = (19,) if is_packed else (2, 7)
    shapes = {"q": (HEADS, columns), "k": (HEADS, columns - 64), "k_rope": (1, 64), "v": (HEADS, 40)}
    made: dict[str, Any] = {name: torch.randn(*rows, *shape, generator=generator) for name, shape in shapes.items()}
    if is_packed:
        for name in ("k", "k_rope", "v"):
            made[name][17:] = torch.nan
    made = {name: x.to(**kind) for name, x in made.items()}
    ends = torch.tensor([0, 5, 5, 17], dtype=torch.int32) if is_packed else None
    return made | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}


def whole(tensors: dict[str, Any], **options: Any) -> Any:
    """The same by the functions of keys in one part."""
    q, k, k_rope, v, cu_q, cu_k = tensors.values()
    keys = torch.cat((k, k_rope.expand(*k.shape[:-1], 64)), dim=-1)
    if cu_q is None:
        return flash_attn_func(q, keys, v, return_lse=True, **options)
    return flash_attn_varlen_func(q, keys, v, cu_q, cu_k, return_lse=True, **options)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("columns", [72, 192, 256])
def test_it_is_attention_to_the_whole_keys(is_packed: bool, causal: bool, columns: int) -> None:
    tensors = inputs(is_packed, columns)
    out, lse = flash_mla_prefill(**tensors, softmax_scale=0.1, causal=causal, return_lse=True)
    expected = whole(tensors, softmax_scale=0.1, causal=causal)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(flash_mla_prefill(**tensors, softmax_scale=0.1, causal=causal), out)
    direct = PREFILL(*tensors.values(), 0.1, causal)
    assert torch.equal(direct[0], out) and torch.equal(direct[1], lse)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradients_are_those_of_whole_keys(is_packed: bool, of: str) -> None:
    found = []
    for attend in (lambda x: flash_mla_prefill(**x, causal=True, return_lse=True), lambda x: whole(x, causal=True)):
        tensors = inputs(is_packed, dtype=torch.float64)
        leaves = [tensors[name].requires_grad_() for name in ("q", "k", "k_rope", "v")]
        out, lse = attend(tensors)
        parts = {"out": (out * out.sin()).sum(), "lse": lse[lse > -1e30].cos().sum()}
        loss = parts[of] if of in parts else parts["out"] + parts["lse"]
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_gradcheck() -> None:
    q, k, k_rope, v, _, _ = inputs(columns=72, dtype=torch.float64).values()
    some = [x[:1, :3, :2].clone().requires_grad_() for x in (q, k, k_rope, v)]
    torch.autograd.gradcheck(lambda *x: flash_mla_prefill(*x, causal=True, return_lse=True), some)


def test_second_derivatives_are_refused() -> None:
    tensors = inputs()
    q = tensors["q"].requires_grad_()
    (grad,) = torch.autograd.grad(flash_mla_prefill(**tensors).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cuteflash has no second derivatives"):
        grad.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
def test_opcheck(is_packed: bool) -> None:
    tensors = inputs(is_packed)
    for name in ("q", "k", "k_rope", "v"):
        tensors[name].requires_grad_()
    if is_packed:  # what is compared bit for bit may not be NaN
        for name in ("k", "k_rope", "v"):
            tensors[name].data.nan_to_num_()
    torch.library.opcheck(PREFILL, tuple(tensors.values()))


@pytest.mark.slow
def test_compiling_makes_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_mla_prefill, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (7, 5, 6):
            tensors = {name: None if x is None else x[:, :count].clone() for name, x in inputs().items()}
            torch.testing.assert_close(compiled(**tensors, causal=True), flash_mla_prefill(**tensors, causal=True))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_results_look_like_real_ones(device: str, is_packed: bool) -> None:
    tensors = inputs(is_packed, dtype=torch.bfloat16)
    real = PREFILL(*tensors.values())
    with FakeTensorMode() if device != "meta" else contextlib.nullcontext():
        made = [x if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in tensors.values()]
        fake = PREFILL(*made)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]


@pytest.mark.parametrize("is_packed", [False, True])
def test_transforms(is_packed: bool) -> None:
    tensors = inputs(is_packed)
    q, *others = tensors.values()
    both = torch.stack([q, -q])
    out, _ = torch.vmap(PREFILL, in_dims=(0, *[None] * 5))(both, *others)
    assert torch.equal(out[1], PREFILL(-q, *others)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert PREFILL(*tensors.values())[0].dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        PREFILL(*tensors.values())
    pairs = sum(n * n for n in LENGTHS) if is_packed else 2 * 49
    assert counter.get_total_flops() == 2 * HEADS * pairs * (192 + 40)
    with pytest.raises(NotImplementedError, match="q has a tangent"):
        torch.func.jvp(lambda x: PREFILL(x, *others)[0], (q,), (q,))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"k_rope": None}, TypeError, "k_rope is a NoneType; allowed: a torch.Tensor"),
    "rank": ({"k": lambda x: x[0]}, ValueError, r"k has 3 dimensions, .*allowed: 4, \(batch, seqlen, heads, head_dim"),
    "dtype": ({"k_rope": lambda x: x.half()}, TypeError, "k_rope.dtype is torch.float16; allowed: torch.float32, that"),
    "fp8": ({"q": lambda x: x.to(torch.float8_e5m2)}, TypeError, "q.dtype is torch.float8_e5m2; allowed: torch.float1"),
    "columns": ({"k": lambda x: x[..., :120]}, ValueError, r"k.shape is \(2, 7, 3, 120\); allowed: \(2, 7, 3, 128\), "),
    "shared heads": ({"k_rope": lambda x: x.expand(-1, -1, 3, -1)}, ValueError, r"k_rope.shape is .* \(2, 7, 1, 64\),"),
    "shared columns": ({"k_rope": lambda x: x[..., :32]}, ValueError, r"k_rope.shape is \(2, 7, 1, 32\); allowed: \(2"),
    "keys": ({"v": lambda x: x[:, :6]}, ValueError, r"k_rope.shape is \(2, 7, 1, 64\); allowed: \(2, 6, 1, 64\), v's "),
    "heads": ({"q": lambda x: x[:, :, :2]}, ValueError, r"v.shape\[2\] \(heads\) is 3; allowed: 2, q's"),
    "batch": ({"q": lambda x: x[:1]}, ValueError, r"v.shape\[0\] \(batch\) is 2; allowed: 1, that of q"),
    "stride": ({"k": lambda x: x.mT.contiguous().mT}, ValueError, r"k.stride\(3\) is 3; allowed: 1"),
    "scale": ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0; allowed: None or a positive number"),
    "one vector": ({"cu_seqlens_q": int32(0, 2)}, TypeError, "cu_seqlens_k is None; allowed: both vectors, or neither"),
    "limit": ({"max_seqlen_k": 7}, ValueError, "max_seqlen_k is given without cu_seqlens_q; allowed: None"),
    "flag": ({"causal": 1}, TypeError, "causal is 1; allowed: True, False"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    change, error, message = BAD[case]
    tensors = inputs()
    with pytest.raises(error, match=message):
        flash_mla_prefill(**(tensors | {n: make(tensors[n]) if callable(make) else make for n, make in change.items()}))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_k": int32(0, 5, 5)}, ValueError, r"cu_seqlens_k.shape is \(3,\); allowed: \(4,\), that of cu_s"),
        ({"cu_seqlens_q": int32(0, 5, 4, 17)}, ValueError, r"cu_seqlens_q\[2\] is 4, the end of sequence 1"),
        ({"max_seqlen_q": 11}, ValueError, "max_seqlen_q is 11; allowed: 12 or more, the length of sequence 2"),
        ({"max_seqlen_q": 1.5}, TypeError, "max_seqlen_q is 1.5; allowed: None, an int"),
    ],
    ids=str,
)
def test_packed_calls_that_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_mla_prefill(**(inputs(True) | change))


# Launches, driven on CPU tensors with kernels that record their arguments.


class Gpu:
    """A GPU on which kernels only record: (problem, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
        self.launches: list[tuple[FwdProblem, tuple[Any, ...]]] = []
        monkeypatch.setattr(mla_prefill_planning, "current_target", lambda index: target)
        monkeypatch.setattr(mla_prefill_planning, "compiled", self._compiled)
        monkeypatch.setattr(mla_prefill_planning, "counters", TileCounters())
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        properties = types.SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        stream = types.SimpleNamespace(device_index=0, cuda_stream=1)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def _compiled(self, kernel_cls: Any, traits: Any, problem: FwdProblem, target: str) -> Any:
        assert kernel_cls == "sm90"
        return lambda *arguments: self.launches.append((problem, arguments))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_launch_gets_both_parts(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, "sm_90a")
    tensors = inputs(is_packed, dtype=torch.bfloat16)
    run = mla_prefill_ops.CudaPrefill()
    for scale in (0.3, 0.3, 0.4):
        o, lse = run(*tensors.values(), scale, True)
    assert len(gpu.launches) == 3
    problem, arguments = gpu.launches[-1]
    assert problem.operands.shares_k and problem.scores == Scores("causal")
    assert problem.storage == (Storage("varlen", "varlen") if is_packed else DENSE)
    found = FwdArguments.of((*arguments, None), shares_k=True)
    assert (*found.flat()[:-1],) == arguments
    given = (tensors["q"], tensors["k"], tensors["v"], o, lse)
    assert all(x is y for x, y in zip(found.tensors, given, strict=True))
    assert found.shared_k is tensors["k_rope"] and found.packed.cu_seqlens_k is tensors["cu_seqlens_k"]
    assert found.scalars.softmax_scale == 0.4 and found.scalars.window_right == 0
    assert (found.packed.tile_counter is not None) == is_packed


@pytest.mark.parametrize(("target", "columns"), [("sm_80", 192), ("sm_90a", 72), ("sm_90a", 64 + 96)])
def test_elsewhere_keys_are_put_together(target: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, target)
    seen: list[Tensor] = []
    monkeypatch.setattr(mla_prefill_ops, "fwd_lse_cuda", lambda q, k, v, *options: seen.append(k) or (q, v))
    tensors = inputs(columns=columns, dtype=torch.bfloat16)
    mla_prefill_ops.CudaPrefill()(*tensors.values())
    assert seen[0].shape == (2, 7, HEADS, columns) and not gpu.launches


KERNELS = [
    (columns, storage, mask)
    for columns, storage, mask in (
        (192, DENSE, "causal"),
        (192, Storage("varlen", "varlen"), "causal"),
        (192, DENSE, "full"),
        (128, DENSE, "causal"),
        (256, Storage("varlen", "varlen"), "full"),
    )
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if i == 0 else pytest.mark.slow) for i, case in enumerate(KERNELS)],
    ids=str,
)
def test_kernels_compile_without_complaint(case: Any, kernels: KernelStore) -> None:
    columns, storage, mask = case
    operands = dataclasses.replace(Operands.of("bf16", columns, 128), shares_k=True)
    problem = FwdProblem(operands, Scores(mask), storage, has_lse=True)
    choice = choose_shipped(problem, "sm_90a", "sm90", "long")
    kernels(choice.kernel_cls, choice.traits, problem, "sm_90a").assert_clean()


@pytest.mark.parametrize("columns", [64, 72, 160])
def test_a_problem_of_two_parts_has_whole_slabs(columns: int) -> None:
    with pytest.raises(ValueError, match=f"shares_k is True; allowed with head_dim {columns} of 'bf16': False"):
        dataclasses.replace(Operands.of("bf16", columns, 128), shares_k=True)
