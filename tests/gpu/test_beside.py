"""Results while other launches begin on the same GPU: those of a call alone, bit for bit.

Where a launch begins, a multiprocessor holds up loads from shared memory that are on their way, but neither arrivals at
barriers nor what TMA brings.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.traits.arch import Family
from tests.gpu.checks import Case, assert_repeats
from tests.gpu.gradients import upstream
from tests.gpu.latent import LatentCase, run
from tests.gpu.packed import Packed
from tests.gpu.paged import Paged
from tests.gpu.test_fp8 import Operands8

pytestmark = pytest.mark.gpu

CALLS = 6000
AT_ONCE = 100  # calls between two looks at what runs beside them
LAUNCHES = 1000  # beside, of a few microseconds each,
NUMBERS = 1 << 20  # that are added to: blocks for every multiprocessor

Results = tuple[Tensor, ...]


class Beside:
    """Short launches, one after the other, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.graph = torch.cuda.CUDAGraph()
        self.done = torch.cuda.Event()
        self.numbers = torch.zeros(NUMBERS, device=device)
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(LAUNCHES):
                self.numbers.add_(1.0)

    def go_on(self) -> None:
        """Launch more of them if those before are done."""
        if self.done.query():
            with torch.cuda.stream(self.stream):
                self.graph.replay()
                self.done.record()


@pytest.fixture
def beside(cuda: torch.device) -> Iterator[Beside]:
    """Launches that go on as long as the test asks for them."""
    found = Beside(cuda)
    yield found
    found.stream.synchronize()


def assert_undisturbed(call: Callable[[], Results], beside: Beside, names: tuple[str, ...] = ("out", "lse")) -> None:
    """Many calls beside other launches give what the first one gave, which nothing ran beside."""
    first = call()
    torch.cuda.synchronize()
    number = itertools.count()

    def disturbed() -> Results:
        if next(number) % AT_ONCE == 0:
            beside.go_on()
        return call()

    assert_repeats(first, disturbed, names, CALLS)


@pytest.mark.parametrize("longest", [32, 64, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_packed_forward(head_dim: int, longest: int, family: str, beside: Beside, cuda: torch.device) -> None:
    """Many tiles of few steps: each tile's Q is loaded over that of the tile before, which is held in registers."""
    choose = random.Random(0)
    lengths = tuple(choose.randint(0, longest) for _ in range(150))
    case = Case(lse=True, heads=4, kv_heads=2, head_dim=head_dim)
    packed = Packed(lengths, tuple(reversed(lengths)), case)
    inputs = packed.inputs(cuda)
    arguments = packed.vectors(cuda) | case.options() | {"family": family}

    def call() -> Results:
        out, lse = cuteflash.flash_attn_varlen_func(*inputs, **arguments)
        return out, lse

    assert_undisturbed(call, beside)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["V", "transposed V"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_forward(head_dim: int, is_transposed: bool, beside: Beside, hopper_gpu: torch.device) -> None:
    """V as stored is loaded by warps that turn it, and TMA brings the next tile of it to the same place."""
    case = Case(300, batch=8, heads=8, head_dim=head_dim, lse=True)
    operands = Operands8.of(case, hopper_gpu)
    v = operands.transposed_v() if is_transposed else operands.v
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), operands.scales, strict=True))
    options = case.options() | scales | {"transposed_v": is_transposed}

    def call() -> Results:
        out, lse = cuteflash.flash_attn_func(operands.q, operands.k, v, **options)
        return out, lse

    assert_undisturbed(call, beside)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backward(head_dim: int, family: str, beside: Beside, cuda: torch.device) -> None:
    case = Case(300, batch=8, heads=8, head_dim=head_dim, lse=True)
    inputs = case.inputs(cuda)
    given = upstream(inputs, case)
    out, lse = cuteflash.flash_attn_func(*inputs, **case.options(), family=family)

    def call() -> Results:
        options = None, None, -1, -1, 0.0, family
        found: Results = torch.ops.cuteflash.bwd(given.out, *inputs, out, lse, *options, deterministic=True)
        return found

    assert_undisturbed(call, beside, ("dq", "dk", "dv"))


@pytest.mark.parametrize("e4m3", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_decode(seqlen_q: int, e4m3: bool, family: str, beside: Beside, cuda: torch.device) -> None:
    """Launches of such calls also begin beside each other."""
    keys = tuple(random.Random(0).randint(1, 1500) for _ in range(100))
    case = Case(seqlen_q=seqlen_q, heads=8, kv_heads=2, causal=True, lse=True, head_dim=128)
    paged = Paged(keys, 64, case, e4m3=e4m3)
    tensors, _ = paged.build(cuda)

    def call() -> Results:
        found: Results = paged.call(tensors, family)
        return found

    assert_undisturbed(call, beside)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_decode(heads: int, family: Family, beside: Beside, cuda: torch.device) -> None:
    case = LatentCase(tuple(random.Random(0).randint(1, 1500) for _ in range(100)), heads)
    inputs = case.inputs(cuda)
    assert_undisturbed(lambda: run(case, inputs, family), beside)
