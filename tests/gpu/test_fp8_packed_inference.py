"""Packed sequences of 16 bits through FP8 in one call, and with scales of 128 tokens: each is what it is alone."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash import Fp8
from tests.gpu.checks import Case, poisoned, rms
from tests.gpu.packed import Packed, around_tiles, one_long, tiny, zipf

pytestmark = pytest.mark.gpu

ERROR = 0.08  # relative, of normal values: see `test_fp8_inference.ROUNDING`
MASKS = {"full": Case(lse=True), "causal": Case(lse=True, causal=True), "window": Case(lse=True, window=(70, 30))}
USED = ((100, 0, 1, 0, 39, 513), (0, 128, 0, 250, 60, 1024))
LENGTHS = ((130, 0, 1, 128, 40, 700), (5, 129, 0, 256, 60, 1100))


def shuffled(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(random.Random(1).sample(lengths, len(lengths)))


def attend(packed: Packed, inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    given = packed.vectors(inputs[0].device) | packed.case.options() | options
    with poisoned():
        return cuteflash.flash_attn_varlen_func(*inputs, **given)


def check(packed: Packed, device: torch.device, fp8: Any = True) -> None:
    """Each sequence is as exact as 8 bits are; all other rows are 0 and -inf."""
    inputs = packed.inputs(device)
    out, lse = attend(packed, inputs, fp8=fp8)
    exact, exact_lse = packed.reference(inputs, torch.float32)
    assert_close(packed, out, exact, ERROR)
    assert ((lse - exact_lse).nan_to_num(0.0).abs() <= 0.3).all()
    assert torch.equal(lse == float("-inf"), exact_lse == float("-inf"))


def assert_close(packed: Packed, out: Tensor, exact: Tensor, error: float) -> None:
    """The relative error of all sequences together is small, that of each at most twice that; other rows are 0."""
    seen = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    for i, span in enumerate(packed.spans("q")):
        seen[span] = True
        if span.start < span.stop:
            assert rms(out[span].double() - exact[span]) <= 2 * error * rms(exact[span]), f"sequence {i}"
    assert rms(out[seen].double() - exact[seen]) <= error * rms(exact[seen])
    assert (out[~seen] == 0).all()


@pytest.mark.parametrize("used", [(None, None), USED], ids=["all", "used"])
@pytest.mark.parametrize(
    ("head_dims", "mask"), [((64, 64), "causal"), ((128, 128), "full"), ((192, 128), "window"), ((256, 256), "causal")]
)
def test_one_call(head_dims: tuple[int, int], mask: str, used: Any, hopper: torch.device) -> None:
    dims = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    case = dataclasses.replace(MASKS[mask], heads=4, kv_heads=2, **dims)
    check(Packed(*LENGTHS, case, *used, rest_q=37, rest_k=70), hopper)


@pytest.mark.parametrize("lengths", [zipf, one_long, tiny, around_tiles])
def test_lengths(lengths: Any, hopper: torch.device) -> None:
    chosen = lengths(random.Random(5))
    case = Case(lse=True, causal=True, head_dim=128, heads=8, kv_heads=2)
    check(Packed(chosen, shuffled(chosen), case), hopper, Fp8(hadamard=64))


def quantised(inputs: Any, vectors: dict[str, Any], case: Case, transpose_v: bool) -> dict[str, Any]:
    """A call's arguments, with scales of 128 tokens."""
    some = cuteflash.quantize_qkv(*inputs, granularity="block", transpose_v=transpose_v, **vectors)
    scales = {"q_descale": some.q_descale, "k_descale": some.k_descale, "v_descale": some.v_descale}
    operands = {"q": some.q, "k": some.k, "v": some.vt if transpose_v else some.v, "transposed_v": transpose_v}
    return operands | scales | vectors | case.options()


BLOCK_CASES = {
    "full": Case(lse=True, head_dim=128),
    "causal": Case(lse=True, head_dim=64, causal=True),
    "window": Case(lse=True, head_dim=160, head_dim_v=144, window=(300, 70)),
    "softcap": Case(lse=True, head_dim=96, causal=True, softcap=5.0),
    "latent": Case(lse=True, head_dim=192, head_dim_v=128, causal=True),
    "packed": Case(lse=True, head_dim=128, heads=8, kv_heads=2, pack_gqa=True),
    "not packed": Case(lse=True, head_dim=128, heads=6, kv_heads=2),
}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("case", BLOCK_CASES)
def test_each_128_tokens_may_have_scales(case: str, is_transposed: bool, hopper: torch.device) -> None:
    """Blocks differ in size by up to 4, and sequences by 2."""
    used = USED if is_transposed else (None, None)
    packed = Packed(*LENGTHS, BLOCK_CASES[case], *used, rest_q=37, rest_k=70)
    inputs = packed.inputs(hopper)
    for side, x, step in zip("qkk", inputs, (1, 1, 2), strict=True):
        for i, span in enumerate(packed.spans(side)):
            rows = torch.arange(span.stop - span.start, device=hopper)
            x[span] *= torch.exp2(rows // 128 * step % 3 - 1.0 - i % 2)[:, None, None].to(x.dtype)
    given = quantised(inputs, packed.vectors(hopper), packed.case, is_transposed)
    with poisoned():
        out, lse = cuteflash.flash_attn_varlen_func(**given)
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
    exact, exact_lse = (x.to(hopper) for x in cuteflash.flash_attn_varlen_func(**on_cpu))
    assert_close(packed, out, exact, 0.035)
    torch.testing.assert_close(lse, exact_lse, atol=5e-3, rtol=2e-4)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_graph_replays_with_other_lengths(has_blocks: bool, hopper_gpu: torch.device) -> None:
    choose, total, batch = random.Random(8), 900, 10

    def some() -> Packed:
        ends = [0, *sorted(choose.randint(0, total) for _ in range(batch))]
        lengths = tuple(end - begin for begin, end in itertools.pairwise(ends))
        rest = total - ends[-1]
        return Packed(lengths, case=Case(lse=True, causal=True, head_dim=128), rest_q=rest, rest_k=rest)

    static = some()
    inputs, vectors = static.inputs(hopper_gpu), static.vectors(hopper_gpu)

    def call() -> tuple[Tensor, Tensor]:
        if has_blocks:
            return cuteflash.flash_attn_varlen_func(**quantised(inputs, vectors, static.case, True))
        return cuteflash.flash_attn_varlen_func(*inputs, **vectors, **static.case.options(), fp8=True)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for seed in range(1, 4):
        packed = some()
        for x, source in zip(inputs, packed.inputs(hopper_gpu, seed), strict=True):
            x.copy_(source)
        for name, source in packed.vectors(hopper_gpu).items():
            if source is not None:
                vectors[name].copy_(source)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        exact, exact_lse = packed.reference(inputs, torch.float32)
        assert rms(out.double() - exact) <= ERROR * rms(exact)
        assert ((lse - exact_lse).nan_to_num(0.0).abs() <= 0.3).all()


def test_no_call_waits_for_the_gpu(hopper_gpu: torch.device) -> None:
    packed = Packed(*LENGTHS, Case(lse=True, head_dim=128), *USED)
    inputs, vectors = packed.inputs(hopper_gpu), packed.vectors(hopper_gpu)
    before = torch.cuda.get_sync_debug_mode()
    for mode in (before, "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            cuteflash.flash_attn_varlen_func(*inputs, **vectors, fp8=True)
        finally:
            torch.cuda.set_sync_debug_mode(before)


def test_what_is_not_a_number_stays_in_its_sequence(hopper: torch.device) -> None:
    packed = Packed(LENGTHS[1], case=Case(lse=True, head_dim=64, heads=4, kv_heads=2), rest_q=40, rest_k=40)
    inputs = packed.inputs(hopper)
    clean, clean_lse = attend(packed, inputs, fp8=True)
    for x in inputs:
        for span in packed.spans("q")[1::2]:
            x[span] = float("nan")
    out, lse = attend(packed, inputs, fp8=True)
    for span in packed.spans("q")[::2]:
        assert torch.equal(out[span], clean[span]) and torch.equal(lse[:, span], clean_lse[:, span])
