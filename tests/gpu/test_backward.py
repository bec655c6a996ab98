"""The backward kernels compute the gradients of attention: head dims, masks, heads, lengths, softcap, LSE, strides.

Tests are grouped so that many share a compiled kernel: lengths, windows and scales are no part of one.
"""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.arguments import BwdOptions
from tests.gpu.checks import Case, assert_repeats, poisoned
from tests.gpu.gradients import Upstream, assert_right, check, gradients, small, upstream
from tests.gpu.test_forward import EDGES, HEAD_DIM_PAIRS, HEAD_DIMS, LENGTHS, MASKS, WINDOWS
from tests.gpu.test_memory import BEYOND, LAYOUTS, interleaved

pytestmark = pytest.mark.gpu

GROUPED = Case(113, 203, heads=4, kv_heads=2, causal=True)
RANDOM_CASES = 208


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", [(113, 203), (300, 300)], ids=str)
def test_every_kind_of_head_dim(head_dim: int, lengths: tuple[int, int], family: str, device: torch.device) -> None:
    check(small(device, Case(*lengths, head_dim=head_dim, causal=True)), family, device)


@pytest.mark.parametrize("head_dim", [24, 64, 96, 128, 192, 256])
def test_half_precision(head_dim: int, family: str, device: torch.device) -> None:
    check(small(device, Case(177, 263, head_dim=head_dim, dtype="fp16")), family, device)


@pytest.mark.parametrize("pair", HEAD_DIM_PAIRS, ids=str)
def test_value_head_dim_may_differ(pair: tuple[int, int], family: str, device: torch.device) -> None:
    check(small(device, Case(150, 260, head_dim=pair[0], head_dim_v=pair[1], causal=True)), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [pair for pair in LENGTHS if max(pair) < 1000 or min(pair) == 1], ids=str)
def test_lengths(lengths: tuple[int, int], head_dim: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim)
    check(small(device, case), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("rows", ["tiny", "small", "brief", "short", "moderate", "long"])
def test_rows_of_every_class_compute_all_lengths(
    rows: str, head_dim: int, mask: str, family: str, cuda: torch.device
) -> None:
    for lengths in (*((n, n) for n in EDGES), (203, 113), (517, 20), (20, 517), (517, 517)):
        case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim)
        inputs = dataclasses.replace(case, heads=4, kv_heads=2).inputs(cuda)
        given = upstream(inputs, case)
        options = BwdOptions(None, *case.bounds, family=family, lengths=rows)
        with poisoned():
            out, lse = torch.ops.cuteflash.fwd_lse(*inputs, None, *case.bounds)
            got = torch.ops.cuteflash.bwd(given.out, *inputs, out, lse, given.lse, *options)
        assert_right(inputs, given, case, got)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(1023, 1024), (1100, 108), (108, 1100), (2049, 2049)], ids=str)
def test_many_blocks(lengths: tuple[int, int], mask: str, family: str, cuda: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=128)
    check(case, family, cuda)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(3100, 70), (90, 3200)], ids=str)
def test_long_loops(
    lengths: tuple[int, int], head_dim: int, mask: str, dtype: str, family: str, cuda: torch.device
) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, dtype=dtype)
    check(dataclasses.replace(case, heads=4, kv_heads=2), family, cuda)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_loops_of_more_blocks_than_run_at_once(head_dim: int, mask: str, family: str, cuda: torch.device) -> None:
    check(dataclasses.replace(MASKS[mask], seqlen_q=3200, head_dim=head_dim, batch=1, heads=8), family, cuda)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(113, 203), (203, 113), (517, 517)], ids=str)
def test_windows(window: tuple[int, int], lengths: tuple[int, int], family: str, device: torch.device) -> None:
    check(small(device, Case(*lengths, window=window, lse=True)), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 300), (70, 200), (333, 333)], ids=str)
def test_grouped_heads(
    heads: tuple[int, int], lengths: tuple[int, int], mask: str, family: str, device: torch.device
) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], batch=1)
    check(dataclasses.replace(case, heads=heads[0], kv_heads=heads[1]), family, device)


@pytest.mark.parametrize("pack_gqa", [True, False])
def test_packed_heads_of_the_forward_change_nothing(pack_gqa: bool, family: str, device: torch.device) -> None:
    check(dataclasses.replace(GROUPED, pack_gqa=pack_gqa), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [5.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap(head_dim: int, softcap: float, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=140, seqlen_k=270, head_dim=head_dim)
    check(small(device, dataclasses.replace(case, softcap=softcap, logits=4.0)), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 77), (113, 203), (203, 113)], ids=str)
def test_the_gradient_of_lse(
    lengths: tuple[int, int], head_dim: int, mask: str, family: str, device: torch.device
) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, lse=True)
    check(small(device, case), family, device)


def test_lse_alone_may_have_a_gradient(family: str, device: torch.device) -> None:
    case = dataclasses.replace(GROUPED, lse=True)
    inputs = case.inputs(device)
    given = upstream(inputs, case)
    leaves = [x.requires_grad_() for x in inputs]
    _, lse = cuteflash.flash_attn_func(*leaves, family=family, **case.options())
    got = torch.autograd.grad(lse, leaves, given.lse)
    assert_right(inputs, Upstream(torch.zeros_like(given.out), given.lse), case, got)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_that_see_nothing_get_and_give_no_gradient(poison: float, family: str, device: torch.device) -> None:
    case = small(device, Case(200, 70, causal=True, lse=True))
    inputs = case.inputs(device)
    given = upstream(inputs, case)
    assert given.lse is not None
    given.lse[:, :, :130] = poison  # LSE is -inf there: lse.square(), say, has no finite gradient
    got = gradients(inputs, given, case, family)
    assert (got[0][:, :130] == 0).all()
    assert_right(inputs, given, case, got)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_logits(head_dim: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=333, head_dim=head_dim, logits=30.0)
    check(small(device, case), family, device)


def test_one_kernel_serves_other_scales_and_windows(family: str, device: torch.device) -> None:
    for scale in (None, 1.0, 0.03, 2.5):
        check(small(device, Case(90, 130, scale=scale, causal=True)), family, device)
    for window in ((4, 4), (50, 0), (0, 50)):
        check(small(device, Case(90, 130, window=window)), family, device)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0}], ids=str)
def test_empty_dimensions(shape: dict[str, int], family: str, device: torch.device) -> None:
    case = dataclasses.replace(Case(16, 16, lse=True), **shape)
    inputs = case.inputs(device)
    got = gradients(inputs, upstream(inputs, case), case, family)
    assert [x.shape for x in got] == [x.shape for x in inputs]
    assert all((x == 0).all() for x in got)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_the_inputs(layout, family: str, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    q, k, v = (layout(x) for x in GROUPED.inputs(device))
    given = upstream((q, k, v), GROUPED)
    assert_right((q, k, v), given, GROUPED, gradients((q, k, v), given, GROUPED, family))


def of_sum(x: Tensor) -> Tensor:
    return x.new_ones(()).expand(x.shape)


def head_dim_second(x: Tensor) -> Tensor:
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def odd_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :4]], dim=-1)[..., : x.shape[3]]


def odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("layout", [*LAYOUTS, of_sum, head_dim_second, odd_rows, odd_address])
def test_any_strides_of_the_upstream_gradients(layout, family: str, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    case = dataclasses.replace(GROUPED, lse=True)
    inputs = case.inputs(device)
    out, lse = upstream(inputs, case)
    assert lse is not None
    for given in (Upstream(layout(out), lse.mT.contiguous().mT), Upstream(layout(out), of_sum(lse))):
        assert_right(inputs, given, case, gradients(inputs, given, case, family))


def test_batch_strides_beyond_32_bits(family: str, cuda: torch.device) -> None:
    case = Case(130, 170, heads=2, causal=True)
    inputs = case.inputs(cuda)
    given = upstream(inputs, case)
    room = torch.empty(BEYOND + 4_000_000, dtype=torch.bfloat16, device=cuda)

    def far(x: Tensor, index: int) -> Tensor:
        view = room.as_strided(x.shape, (BEYOND + 64, x.shape[2] * x.shape[3], x.shape[3], 1), index * 1_000_000)
        return view.copy_(x)

    q, k, v = (far(x, index) for index, x in enumerate(inputs))
    given = Upstream(far(given.out, 3), None)
    assert_right((q, k, v), given, case, gradients((q, k, v), given, case, family))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_and_workspace_beyond_32_bits(deterministic: bool, family: str, cuda: torch.device) -> None:
    heads, head_dim = 64, 256
    case = Case(BEYOND // (heads * head_dim) + 100, 64, head_dim=head_dim, batch=1, heads=heads, kv_heads=1)
    k, v = (torch.randn(1, 64, 1, head_dim, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    q = torch.randn(1, case.seqlen_q, heads, head_dim, dtype=torch.bfloat16, device=cuda)
    dout = torch.randn_like(q)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cuteflash.flash_attn_func(*leaves, family=family, deterministic=deterministic)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert dq.numel() > BEYOND
    for rows in (slice(0, 50), slice(-50, None)):  # dK and dV are sums over all rows
        assert_right((q[:, rows], k, v), Upstream(dout[:, rows], None), case, (dq[:, rows],))
    assert all(torch.isfinite(part).all() for part in (dk, dv, *dq.split(4096, dim=1)))


def test_parts_of_one_tensor_get_its_gradient(family: str, device: torch.device) -> None:
    case = Case(90, heads=2, causal=True)
    inputs = case.inputs(device)
    given = upstream(inputs, case)
    packed = torch.stack(inputs, dim=2).requires_grad_()
    out = cuteflash.flash_attn_func(*packed.unbind(2), family=family, **case.options())
    (gradient,) = torch.autograd.grad(out, packed, given.out)
    assert_right(inputs, given, case, gradient.unbind(2))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_only_what_needs_a_gradient_gets_one(needed: tuple[int, ...], family: str, device: torch.device) -> None:
    inputs = GROUPED.inputs(device)
    given = upstream(inputs, GROUPED)
    expected = gradients(inputs, given, GROUPED, family, deterministic=True)
    leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate(inputs)]
    options = GROUPED.options() | {"family": family, "deterministic": True}
    cuteflash.flash_attn_func(*leaves, **options).backward(given.out)
    for i, (x, wanted) in enumerate(zip(leaves, expected, strict=True)):
        assert (x.grad is None) == (i not in needed)
        assert x.grad is None or torch.equal(x.grad, wanted)


DETERMINISTIC = {
    "full": Case(517, batch=2, heads=4),
    "causal": Case(517, batch=2, heads=4, causal=True, head_dim=128),
    "window": Case(517, batch=2, heads=4, window=(100, 30)),
    "grouped": Case(300, 517, heads=8, kv_heads=2, causal=True),
    "softcap and lse": Case(300, heads=4, softcap=10.0, lse=True, head_dim=128),
    "wide": Case(300, heads=4, causal=True, head_dim=256),
    "value dim": Case(300, heads=4, head_dim=192, head_dim_v=128),
    "many tiles": Case(1500, batch=2, heads=16, kv_heads=8, causal=True, head_dim=96),
    # Rows with turns of their own.
    "fp16": Case(300, 517, dtype="fp16", heads=4, kv_heads=2),
    "head dim 32": Case(300, 517, heads=4, kv_heads=2, causal=True, head_dim=32),
    "head dim 128": Case(300, 517, heads=4, kv_heads=2, head_dim=128),
    "fp16, head dim 128": Case(300, 517, dtype="fp16", heads=4, kv_heads=2, causal=True, head_dim=128),
    "wide full": Case(300, 517, heads=4, kv_heads=2, head_dim=256),
    "wide window": Case(300, 517, heads=4, kv_heads=2, window=(100, 30), head_dim=256),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_gradients_are_right_and_bitwise_equal(name: str, family: str, device: torch.device) -> None:
    case = small(device, DETERMINISTIC[name])
    inputs = case.inputs(device)
    given = upstream(inputs, case)
    first = gradients(inputs, given, case, family, deterministic=True)
    assert_right(inputs, given, case, first)
    assert_repeats(first, lambda: gradients(inputs, given, case, family, deterministic=True))


def test_torchs_deterministic_mode_is_ours(family: str, device: torch.device) -> None:
    inputs = GROUPED.inputs(device)
    leaves = [x.requires_grad_() for x in inputs]
    given = upstream(inputs, GROUPED)
    expected = gradients(inputs, given, GROUPED, family, deterministic=True)
    out = cuteflash.flash_attn_func(*leaves, family=family, **GROUPED.options())
    torch.use_deterministic_algorithms(True)
    try:
        got = torch.autograd.grad(out, leaves, given.out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


class Code(NamedTuple):
    """What changes the generated code; each of them is compiled once."""

    head_dims: tuple[int, int]
    dtype: str = "bf16"
    mask: str = "full"
    softcap: bool = False
    lse: bool = False
    deterministic: bool = False


CODES = (
    Code((64, 64)),
    Code((64, 64), mask="causal", lse=True),
    Code((64, 64), mask="window", deterministic=True),
    Code((64, 64), "fp16", "causal", softcap=True),
    Code((128, 128), mask="causal"),
    Code((128, 128), mask="window", lse=True),
    Code((128, 128), "fp16", deterministic=True),
    Code((128, 128), mask="causal", softcap=True, lse=True, deterministic=True),
    Code((96, 96), mask="causal"),
    Code((80, 80), "fp16", "window", softcap=True, lse=True),
    Code((256, 256), mask="causal"),
    Code((256, 256), "fp16", "window", lse=True),
    Code((192, 128), mask="causal"),
    Code((40, 72), mask="window", softcap=True),
    Code((24, 256), lse=True, deterministic=True),
    Code((160, 32), "fp16", "causal"),
)


def random_case(choose: random.Random, code: Code, largest: int) -> Case:
    """A combination of all that a kernel takes at run time, with lengths from 1 to `largest`."""

    def length() -> int:
        edge = choose.choice([1, 16, 64, 80, 96, 128, 192, 256])
        return max(1, min(largest, choose.choice([choose.randint(1, largest), edge + choose.randint(-1, 1)])))

    kv_heads = choose.choice([1, 1, 2, 3])
    sides = [-1, 0, 1, 7, 64, 100]
    window = choose.choice(sides), choose.choice(sides[1:])
    return Case(
        seqlen_q=length(),
        seqlen_k=length(),
        head_dim=code.head_dims[0],
        head_dim_v=code.head_dims[1],
        dtype=code.dtype,
        batch=choose.choice([1, 2, 3]),
        heads=kv_heads * choose.choice([1, 1, 2, 4]),
        kv_heads=kv_heads,
        causal=code.mask == "causal",
        window=window if code.mask == "window" else (-1, -1),
        softcap=choose.choice([3.0, 20.0]) if code.softcap else 0.0,
        scale=choose.choice([None, None, 0.05, 0.5]),
        pack_gqa=False,
        lse=code.lse,
        logits=choose.choice([1.0, 1.0, 1.0, 8.0]),
    )


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_random_combinations(seed: int, family: str, device: torch.device) -> None:
    choose, code = random.Random(seed), CODES[seed % len(CODES)]
    case = random_case(choose, code, largest=700 if device.type == "cuda" else 40)
    inputs = case.inputs(device, seed)
    if choose.random() < 0.3:
        inputs = tuple(interleaved(x) for x in inputs)
    given = upstream(inputs, case, seed)
    assert_right(inputs, given, case, gradients(inputs, given, case, family, code.deterministic))
