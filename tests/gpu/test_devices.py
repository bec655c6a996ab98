"""Several GPUs: a call runs where its tensors are, whichever device is current, and gives what it gives on the first.

Skipped on a machine with one GPU; `make gpu-test` on one with two runs them.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.appended import random_call
from tests.distributed import Wrap, alone, ddp, fsdp, together
from tests.gpu import gradients as dense
from tests.gpu import latent, packed_gradients
from tests.gpu.checks import Case
from tests.gpu.packed import Packed
from tests.gpu.paged import Paged
from tests.patience import PATIENCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"),
]

Results = tuple[Tensor, ...]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
TIMES = 20
CASE = Case(300, batch=3, heads=4, kv_heads=2, head_dim=128, causal=True, lse=True)
KEYS = (1, 5000, 64, 700)


def forward(device: torch.device, family: str) -> Results:
    found: Results = cuteflash.flash_attn_func(*CASE.inputs(device), **CASE.options(), family=family)
    return found


def backward(device: torch.device, family: str) -> Results:
    inputs = CASE.inputs(device)
    return dense.gradients(inputs, dense.upstream(inputs, CASE), CASE, family, deterministic=True)


def packed(device: torch.device, family: str) -> Results:
    sequences = Packed((5, 0, 300, 64, 1000), case=Case(heads=2, lse=True))
    inputs = sequences.inputs(device)
    given = packed_gradients.upstream(sequences, inputs)
    return packed_gradients.gradients(sequences, inputs, given, family, deterministic=True)


def decode(device: torch.device, family: str) -> Results:
    """Keys split among blocks that wait for each other, through a table of pages."""
    case = Case(seqlen_q=1, heads=8, kv_heads=2, head_dim=128, causal=True, lse=True)
    paged = Paged(KEYS, 64, case, num_splits=0)
    return paged.call(paged.build(device)[0], family)


def append(device: torch.device, _: str) -> Results:
    torch.manual_seed(0)
    arguments = random_call(1, (torch.bfloat16,)).on(device).arguments
    q = cuteflash.append_kv(**arguments)
    caches = arguments["k_cache"], arguments["v_cache"]
    return caches if q is None else (q, *caches)


def latent_decode(device: torch.device, family: str) -> Results:
    case = latent.LatentCase(KEYS, heads=64)
    return latent.run(case, case.inputs(device), family)


def fp8(device: torch.device, _: str) -> Results:
    """The quantiser's kernels and attention."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("8-bit operands need a Hopper")
    return (cuteflash.flash_attn_func(*CASE.inputs(device), causal=True, fp8=True),)


def merge(device: torch.device, family: str) -> Results:
    outs, lses = zip(*(forward(device, family) for _ in range(2)), strict=True)
    return cuteflash.merge_attn_states(outs[0], lses[0], outs[1], lses[1])


CALLS = (forward, backward, packed, decode, append, latent_decode, fp8, merge)


def assert_same(first: Results, second: Results) -> None:
    """Bit for bit, and on the second device."""
    for a, b in zip(first, second, strict=True):
        assert b.device == SECOND
        assert torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_another_device_than_the_current_one(call: Callable[..., Results], family: str) -> None:
    first = call(FIRST, family)
    with torch.cuda.device(FIRST):
        assert_same(first, call(SECOND, family))
        assert torch.cuda.current_device() == FIRST.index
    with torch.cuda.device(SECOND):
        assert_same(first, call(SECOND, family))
        again = call(FIRST, family)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if not a.isnan().any())


@pytest.mark.parametrize("call", [forward, packed, decode, latent_decode])
def test_devices_that_work_at_the_same_time(call: Callable[..., Results], family: str) -> None:
    """What launches of a device wait for and count in is that device's own."""
    first = call(FIRST, family)
    found = [call(device, family) for _ in range(TIMES) for device in (FIRST, SECOND)]
    for results in found[1::2]:
        assert_same(first, results)


@pytest.mark.parametrize("call", [forward, decode])
def test_a_graph_of_the_second_device(call: Callable[..., Results], family: str) -> None:
    first = call(FIRST, family)
    case = CASE if call is forward else Case(seqlen_q=1, heads=8, kv_heads=2, head_dim=128, causal=True, lse=True)
    paged = Paged(KEYS, 64, case, num_splits=0)
    tensors, inputs = paged.build(SECOND)[0], CASE.inputs(SECOND)

    def captured() -> Results:
        if call is decode:
            return paged.call(tensors, family)
        found: Results = cuteflash.flash_attn_func(*inputs, **CASE.options(), family=family)
        return found

    with torch.cuda.device(SECOND):
        captured()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = captured()
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(first, results)


def test_layers_on_two_devices(family: str) -> None:
    """A model cut in two: gradients come back through both."""

    def step(*devices: torch.device) -> Results:
        leaves = [x.requires_grad_() for x in CASE.inputs(FIRST)]
        q, k, v = (x.to(devices[0]) for x in leaves)
        attend = {"causal": True, "family": family, "deterministic": True}
        middle = cuteflash.flash_attn_func(q, k, v, **attend)
        out = cuteflash.flash_attn_func(*(x.to(devices[1]) for x in (middle, k, v)), **attend)
        return torch.autograd.grad(out.float().square().mean(), leaves)

    for found, expected in zip(step(FIRST, SECOND), step(FIRST, FIRST), strict=True):
        assert torch.equal(found, expected)


def test_tensors_of_two_devices_are_refused() -> None:
    q, k, v = CASE.inputs(FIRST)
    with pytest.raises(ValueError, match=r"v\.device is cuda:1"):
        cuteflash.flash_attn_func(q, k, v.to(SECOND))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 300, 900], dtype=torch.int32, device=FIRST)
    with pytest.raises(ValueError, match=r"cu_seqlens_k\.device is cuda:1"):
        cuteflash.flash_attn_varlen_func(*packed, ends, ends.to(SECOND))


def test_a_process_of_the_second_device_leaves_the_first_one_alone() -> None:
    """As a rank of a training job that sees all GPUs: each context takes hundreds of megabytes."""
    program = """
import torch, cuteflash
from cuda.bindings import driver

def active():
    return driver.cuDevicePrimaryCtxGetState(0)[2]

torch.cuda.set_device(1)
q, k, v = (torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
before = active()
cuteflash.flash_attn_func(q, k, v, causal=True).square().mean().backward()
torch.cuda.synchronize()
assert not before, "torch has made a context"
assert not active(), "a launch has made a context"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_two_processes_have_the_gradients_of_one(wrap: Wrap, tmp_path: pathlib.Path) -> None:
    """With NCCL; as exact as bf16 attention is."""
    torch.testing.assert_close(together("cuda", wrap, tmp_path), alone(FIRST), atol=1e-4, rtol=2e-2)
