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
Run = Callable[[], Results]
Prepare = Callable[[torch.device, str], Run]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
TIMES = 20
CASE = Case(300, batch=3, heads=4, kv_heads=2, head_dim=128, causal=True, lse=True)
KEYS = (1, 5000, 64, 700)


def forward(device: torch.device, family: str) -> Run:
    inputs, options = CASE.inputs(device), CASE.options()
    return lambda: cuteflash.flash_attn_func(*inputs, **options, family=family)


def backward(device: torch.device, family: str) -> Run:
    inputs = CASE.inputs(device)
    given = dense.upstream(inputs, CASE)
    return lambda: dense.gradients(inputs, given, CASE, family, deterministic=True)


def packed(device: torch.device, family: str) -> Run:
    sequences = Packed((5, 0, 300, 64, 1000), case=Case(heads=2, lse=True))
    inputs, vectors = sequences.inputs(device), sequences.vectors(device)
    given = packed_gradients.upstream(sequences, inputs)
    return lambda: packed_gradients.gradients(sequences, inputs, given, family, deterministic=True, vectors=vectors)


def decode(device: torch.device, family: str) -> Run:
    """Keys split among blocks that wait for each other, through a table of pages."""
    case = Case(seqlen_q=1, heads=8, kv_heads=2, head_dim=128, causal=True, lse=True)
    paged = Paged(KEYS, 64, case, num_splits=0)
    tensors, _ = paged.build(device)
    return lambda: paged.call(tensors, family)


def latent_decode(device: torch.device, family: str) -> Run:
    case = latent.LatentCase(KEYS, heads=64)
    inputs = case.inputs(device)
    return lambda: latent.run(case, inputs, family)


def merge(device: torch.device, family: str) -> Run:
    states = (*forward(device, family)(), *forward(device, family)())
    return lambda: cuteflash.merge_attn_states(*states)


def append(device: torch.device) -> Run:
    torch.manual_seed(0)  # of the caches
    given = random_call(1, (torch.bfloat16,)).on(device)

    def run() -> Results:
        arguments = given.arguments
        q = cuteflash.append_kv(**arguments)
        caches = arguments["k_cache"], arguments["v_cache"]
        return caches if q is None else (q, *caches)

    return run


def fp8(device: torch.device) -> Run:
    """The quantiser's kernels and attention."""
    inputs = CASE.inputs(device)
    return lambda: (cuteflash.flash_attn_func(*inputs, causal=True, fp8=True),)


def assert_same(first: Results, second: Results, device: torch.device = SECOND) -> None:
    """Bit for bit, and on the device."""
    for a, b in zip(first, second, strict=True):
        assert b.device == device
        assert torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def check_beside_the_current_device(prepare: Callable[[torch.device], Run]) -> None:
    """The second device gives what the first one gives, whichever of them is current."""
    runs = {device: prepare(device) for device in (FIRST, SECOND)}
    first = runs[FIRST]()
    for current in (FIRST, SECOND):
        with torch.cuda.device(current):
            for device, run in runs.items():
                assert_same(first, run(), device)
            assert torch.cuda.current_device() == current.index


@pytest.mark.parametrize("prepare", [forward, backward, packed, decode, latent_decode, merge])
def test_tensors_of_another_device_than_the_current_one(prepare: Prepare, family: str) -> None:
    check_beside_the_current_device(lambda device: prepare(device, family))


def test_appending_on_another_device_than_the_current_one() -> None:
    check_beside_the_current_device(append)


def test_8_bits_on_another_device_than_the_current_one(hopper_gpu: torch.device) -> None:
    check_beside_the_current_device(fp8)


@pytest.mark.parametrize("prepare", [forward, packed, decode, latent_decode])
def test_devices_that_work_at_the_same_time(prepare: Prepare, family: str) -> None:
    """What launches of a device wait for and count in is that device's own."""
    runs = {device: prepare(device, family) for device in (FIRST, SECOND)}
    first = runs[FIRST]()
    found = [(device, run()) for _ in range(TIMES) for device, run in runs.items()]  # looked at when all are launched
    for device, results in found:
        assert_same(first, results, device)


@pytest.mark.parametrize("prepare", [forward, decode])
def test_a_graph_of_the_second_device(prepare: Prepare, family: str) -> None:
    first, run = prepare(FIRST, family)(), prepare(SECOND, family)
    with torch.cuda.device(SECOND):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
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
