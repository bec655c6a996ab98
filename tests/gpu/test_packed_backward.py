"""Gradients of packed sequences: those of each sequence by itself, and 0 for rows that belong to none."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.compile import compiler
from tests.gpu.checks import Case, assert_repeats
from tests.gpu.gradients import Upstream
from tests.gpu.packed import DISTRIBUTIONS, Lengths, Packed
from tests.gpu.packed_gradients import assert_right, check, gradients, upstream

pytestmark = pytest.mark.gpu

# Of what changes the generated code the tests use few combinations: each of them is compiled.
MASKS = {
    "full": Case(lse=True),
    "causal": Case(lse=True, causal=True),
    "window": Case(lse=True, window=(70, 30)),
}
CAUSAL = MASKS["causal"]
FEW: Lengths = (5, 130, 1, 0, 64, 200, 17, 33)
FEW_ON_CPU: Lengths = (5, 0, 40, 1, 17)


def few(device: torch.device) -> Lengths:
    """Lengths for what does not depend on them."""
    return FEW if device.type == "cuda" else FEW_ON_CPU


def shuffled(lengths: Lengths, choose: random.Random) -> Lengths:
    return tuple(choose.sample(lengths, len(lengths)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_lengths(distribution: str, head_dim: int, mask: str, family: str, cuda: torch.device) -> None:
    choose = random.Random(distribution)
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim)
    lengths = DISTRIBUTIONS[distribution](choose)
    check(Packed(lengths, case=case), family, cuda)
    check(Packed(lengths, shuffled(lengths, choose), case), family, cuda)


def many_short(choose: random.Random) -> Lengths:
    return tuple(choose.randint(0, 200) for _ in range(250))


def empty_between(choose: random.Random) -> Lengths:
    return tuple(n for _ in range(100) for n in (choose.randint(1, 150), *(0,) * choose.randint(0, 70)))


def long_between(choose: random.Random) -> Lengths:
    return tuple(choose.sample((3000, 4100, *(choose.randint(0, 20) for _ in range(300))), 302))


def many_tiny(choose: random.Random) -> Lengths:
    return (16,) * 4096


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("lengths_of", [many_short, empty_between, long_between, many_tiny])
def test_many_tiles_for_each_block(
    lengths_of: Callable[[random.Random], Lengths], head_dim: int, deterministic: bool, family: str, cuda: torch.device
) -> None:
    choose = random.Random(head_dim)
    case = dataclasses.replace(CAUSAL, head_dim=head_dim, heads=12, kv_heads=12)
    packed = Packed(lengths_of(choose), case=case)
    inputs = packed.inputs(cuda)
    given = upstream(packed, inputs)
    got = gradients(packed, inputs, given, family, deterministic)
    assert_right(packed, inputs, given, got, choose.sample(range(len(packed.lengths_q)), 60))
    again = gradients(packed, inputs, given, family, deterministic)
    for gradient, repeated in list(zip(got, again, strict=True))[0 if deterministic else 1 :]:
        assert torch.equal(gradient, repeated)  # dK and dV are summed in registers


@pytest.mark.parametrize("mask", MASKS)
def test_queries_and_keys_of_other_lengths(mask: str, family: str, device: torch.device) -> None:
    for seed in range(3):
        lengths = few(device)
        check(Packed(lengths, shuffled(lengths, random.Random(seed)), MASKS[mask]), family, device, seed)


@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [("bf16", (96, 96)), ("fp16", (96, 96)), ("bf16", (192, 128)), ("bf16", (256, 256)), ("bf16", (40, 72))],
    ids=str,
)
def test_head_dims(head_dims: tuple[int, int], dtype: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(CAUSAL, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype)
    check(Packed(few(device), case=case), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (7, 1)], ids=str)
def test_grouped_heads(heads: tuple[int, int], mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], heads=heads[0], kv_heads=heads[1])
    lengths = few(device)
    check(Packed(lengths, shuffled(lengths, random.Random(2)), case), family, device)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_softcap(head_dim: int, family: str, device: torch.device) -> None:
    case = dataclasses.replace(CAUSAL, softcap=15.0, logits=4.0, head_dim=head_dim)
    check(Packed(few(device), case=case), family, device)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_a_gradient_of_lse(head_dim: int, family: str, device: torch.device) -> None:
    check(Packed(few(device), case=Case(causal=True, head_dim=head_dim)), family, device)


@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_only_rows_in_use_count(sides: str, family: str, device: torch.device) -> None:
    choose = random.Random(4)
    lengths = few(device)
    used = tuple(choose.randint(0, n) for n in lengths)
    case = dataclasses.replace(CAUSAL, heads=4, kv_heads=2)
    used_q, used_k = (used if side in sides else None for side in "qk")
    check(Packed(lengths, lengths, case, used_q, used_k, rest_q=70, rest_k=9), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rest", [1, 64, 300])
def test_rows_after_the_last_sequence_get_no_gradient(rest: int, mask: str, family: str, device: torch.device) -> None:
    check(Packed((50, 0, 60), (90, 30, 40), MASKS[mask], rest_q=rest, rest_k=rest), family, device)


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((0, 0), (3, 5)), ((3, 5), (0, 0)), ((), ())], ids=str)
@pytest.mark.parametrize("rest", [0, 4])
def test_nothing_to_see(lengths: tuple[Lengths, Lengths], rest: int, family: str, device: torch.device) -> None:
    packed = Packed(*lengths, rest_q=rest, rest_k=rest)
    inputs = packed.inputs(device)
    got = gradients(packed, inputs, upstream(packed, inputs), family)
    assert [x.shape for x in got] == [x.shape for x in inputs]
    assert all((x == 0).all() for x in got)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_not_a_number_stays_in_its_sequence(
    head_dim: int, value: float, deterministic: bool, family: str, device: torch.device
) -> None:
    lengths = few(device)
    case = dataclasses.replace(CAUSAL, head_dim=head_dim, heads=4, kv_heads=2)
    packed = Packed(lengths, tuple(reversed(lengths)), case, rest_q=40, rest_k=40)
    inputs = q, k, v = packed.inputs(device)
    given = upstream(packed, inputs)
    assert given.lse is not None
    for of_q, of_k in list(zip(packed.spans("q"), packed.spans("k"), strict=True))[1::2]:
        for x, span in ((q, of_q), (k, of_k), (v, of_k), (given.out, of_q), (given.lse.T, of_q)):
            x[span] = value
    got = gradients(packed, inputs, given, family, deterministic)
    assert_right(packed, inputs, given, got, range(0, len(lengths), 2))


DETERMINISTIC = {
    "causal": CAUSAL,
    "grouped": dataclasses.replace(CAUSAL, heads=8, kv_heads=2, head_dim=128),
    "window": dataclasses.replace(MASKS["window"], heads=4),
    "wide": dataclasses.replace(CAUSAL, head_dim=256),
    "head dim 96": dataclasses.replace(CAUSAL, heads=8, kv_heads=2, head_dim=96),
    "wide full": dataclasses.replace(MASKS["full"], heads=4, kv_heads=2, head_dim=256),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_gradients_are_right_and_bitwise_equal(name: str, family: str, device: torch.device) -> None:
    lengths = few(device) * (4 if device.type == "cuda" else 1)
    packed = Packed(lengths, shuffled(lengths, random.Random(5)), DETERMINISTIC[name])
    inputs = packed.inputs(device)
    given = upstream(packed, inputs)
    first = gradients(packed, inputs, given, family, deterministic=True)
    assert_right(packed, inputs, given, first)
    assert_repeats(first, lambda: gradients(packed, inputs, given, family, deterministic=True))


def test_torchs_deterministic_mode_is_ours(family: str, device: torch.device) -> None:
    packed = Packed(few(device), case=CAUSAL)
    inputs = packed.inputs(device)
    given = upstream(packed, inputs)
    expected = gradients(packed, inputs, given, family, deterministic=True)
    leaves = [x.requires_grad_() for x in inputs]
    result = cuteflash.flash_attn_varlen_func(*leaves, **packed.vectors(device), family=family, **CAUSAL.options())
    torch.use_deterministic_algorithms(True)
    try:
        got = torch.autograd.grad(result, leaves, given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def odd_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :4]], dim=-1)[..., : x.shape[2]]


def odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", [odd_rows, odd_address, heads_first])
def test_any_strides_of_the_upstream_gradients(layout, family: str, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    packed = Packed(few(device), case=CAUSAL)
    inputs = packed.inputs(device)
    out, lse = upstream(packed, inputs)
    assert lse is not None
    given = Upstream(layout(out), lse.T.contiguous().T)
    assert_right(packed, inputs, given, gradients(packed, inputs, given, family))


def test_parts_of_one_tensor_get_its_gradient(family: str, device: torch.device) -> None:
    packed = Packed(few(device), case=CAUSAL)
    inputs = packed.inputs(device)
    given = upstream(packed, inputs)
    qkv = torch.stack(inputs, dim=1).requires_grad_()
    cu = packed.vectors(device)["cu_seqlens_q"]
    result = cuteflash.flash_attn_varlen_qkvpacked_func(qkv, cu, family=family, causal=True, return_lse=True)
    (gradient,) = torch.autograd.grad(result, qkv, (given.out, given.lse))
    assert_right(packed, inputs, given, gradient.unbind(1))


def with_total(total: int, batch: int, seeds: range) -> Iterator[Packed]:
    """Sequences whose tensors all have the same sizes."""
    for seed in seeds:
        choose = random.Random(seed)
        inner = sorted(choose.randint(0, total) for _ in range(batch - 1))
        cuts = [0, *inner, choose.randint(inner[-1], total)]
        lengths = tuple(end - begin for begin, end in itertools.pairwise(cuts))
        yield Packed(lengths, case=CAUSAL, rest_q=total - cuts[-1], rest_k=total - cuts[-1])


def test_a_graph_replays_with_other_lengths(family: str, cuda: torch.device) -> None:
    first, *others = with_total(900, 10, range(6))
    static, vectors = first.inputs(cuda), first.vectors(cuda)
    given = upstream(first, static)
    gradients(first, static, given, family, vectors=vectors)  # compiled
    leaves = [x.requires_grad_() for x in static]
    options = CAUSAL.options() | {"family": family}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(cuteflash.flash_attn_varlen_func(*leaves, **vectors, **options), leaves, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(cuteflash.flash_attn_varlen_func(*leaves, **vectors, **options), leaves, given)
    for seed, packed in enumerate(others, start=1):
        inputs = packed.inputs(cuda, seed)
        fresh = upstream(packed, inputs, seed)
        with torch.no_grad():
            for target, source in zip((*leaves, *given), (*inputs, *fresh), strict=True):
                target.copy_(source)
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                vectors[name].copy_(packed.vectors(cuda)[name])
            for gradient in got:
                gradient.fill_(float("nan"))
        graph.replay()
        assert_right(packed, inputs, fresh, got)


def test_other_lengths_compile_nothing_and_wait_for_nothing(
    family: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Packed((40, 50, 60), case=CAUSAL), family, cuda)

    def compiles(*arguments: object, **named: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "_obtain_and_load", compiles)
    for lengths in ((60, 50, 41), (33, 70), (100, 0, 0, 100, 20)):
        packed = Packed(lengths, case=CAUSAL)
        inputs, vectors = packed.inputs(cuda), packed.vectors(cuda)
        given = upstream(packed, inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = gradients(packed, inputs, given, family, vectors=vectors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_right(packed, inputs, given, got)


RANDOM_CASES = 40


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_random_combinations(seed: int, family: str, device: torch.device) -> None:
    choose = random.Random(seed)
    largest = 400 if device.type == "cuda" else 20
    lengths_q, lengths_k = (
        tuple(choose.choice((0, 1, choose.randint(0, largest), choose.randint(0, 50))) for _ in range(7))
        for _ in range(2)
    )
    kv_heads = choose.choice((1, 2, 3))
    case = dataclasses.replace(
        choose.choice(list(MASKS.values())),
        heads=kv_heads * choose.choice((1, 2, 4)),
        kv_heads=kv_heads,
        head_dim=choose.choice((64, 128)),
        scale=choose.choice((None, 0.05, 0.5)),
        logits=choose.choice((1.0, 8.0)),
    )
    if case.window != (-1, -1):
        case = dataclasses.replace(case, window=(choose.choice((-1, 0, 7, 100)), choose.choice((1, 7, 100))))
    packed = Packed(lengths_q, lengths_k, case, rest_q=choose.choice((0, 33)), rest_k=choose.choice((0, 70)))
    check(packed, family, device, seed)
