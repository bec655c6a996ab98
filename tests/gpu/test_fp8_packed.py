"""Packed sequences of 8-bit operands on Hopper: each is what it would be alone, whatever lies beside it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.compile import compiler
from cuteflash.problem import DENSE, PACKED, Storage
from cuteflash.reference.fp8 import permuted_keys
from cuteflash.traits.length_class import LengthClass, length_class_of_packed
from cuteflash.tune.fp8_accuracy import kernel_model
from tests.gpu.checks import Case, poisoned, rms
from tests.gpu.packed import Lengths, Packed, around_tiles, one_long, tiny, uniform, zipf
from tests.gpu.pairwise import every_pair
from tests.gpu.test_fp8 import FP8, LARGEST, Operands8, traits_of

pytestmark = pytest.mark.gpu

MASKS = {"full": Case(lse=True), "causal": Case(lse=True, causal=True), "window": Case(lse=True, window=(70, 30))}
NAN = 0x7F  # of e4m3
SAME = 1e-3  # of the rms of O: what other instructions of the same arithmetic may change
BOTH_FORMS_OF_V = pytest.mark.parametrize("is_transposed", [False, True])


@dataclasses.dataclass
class Packed8:
    """Packed sequences of 8 bits with a scale for each sequence and KV head; NaN wherever nothing may be read."""

    packed: Packed
    q: Tensor
    k: Tensor
    v: Tensor
    scales: list[Tensor]

    @classmethod
    def of(cls, packed: Packed, device: torch.device, seed: int = 0, dtype: torch.dtype = FP8) -> Packed8:
        """A call's inputs, quantised."""
        inputs = packed.inputs(device, seed)
        kv_heads = inputs[1].shape[1]
        quantised, scales = [], []
        for x, side in zip(inputs, "qkk", strict=True):
            scale = torch.full((len(packed.lengths_q), kv_heads), float("nan"), device=device)
            result = torch.full(x.shape, float("nan"), device=device)
            for i, span in enumerate(packed.spans(side)):
                by_head = x[span].float().unflatten(1, (kv_heads, -1))
                peak = by_head.abs().amax((0, 2, 3)) if span.stop > span.start else x.new_ones(kv_heads).float()
                scale[i] = peak / LARGEST
                result[span] = (by_head / scale[i, :, None, None]).flatten(1, 2)
            quantised.append(result.to(dtype))
            scales.append(scale)
        return cls(packed, *quantised, scales)

    @property
    def case(self) -> Case:
        return self.packed.case

    def transposed_v(self) -> Tensor:
        """V^T: zeros up to whole 16s of each sequence's keys, NaN beyond."""
        total, heads, columns = self.v.shape
        batch = len(self.packed.keys)
        vt = torch.full((heads, columns, (total // 128 + batch) * 128), float("nan"), device=self.v.device)
        begin = 0
        for i, (span, length) in enumerate(zip(self.packed.spans("k"), self.packed.keys, strict=True)):
            keys = span.stop - span.start
            rows = torch.zeros(heads, columns, -(-keys // 16) * 16, device=self.v.device)
            rows[..., :keys] = self.v[span].permute(1, 2, 0).float()
            start = (begin // 128 + i) * 128
            vt[..., start : start + rows.shape[2]] = permuted_keys(rows)
            begin += length
        return vt.to(self.v.dtype)

    def arguments(self, is_transposed: bool, **options: Any) -> dict[str, Any]:
        """Of `flash_attn_varlen_func`."""
        descales = dict(zip(("q_descale", "k_descale", "v_descale"), self.scales, strict=True))
        given = {"q": self.q, "k": self.k, "v": self.transposed_v() if is_transposed else self.v} | descales
        given |= self.packed.vectors(self.q.device) | {"transposed_v": is_transposed}
        return given | self.case.options() | options

    def attend(self, is_transposed: bool, **options: Any) -> tuple[Tensor, Tensor]:
        """O and LSE of the library, into poisoned memory."""
        given = self.arguments(is_transposed, **options)
        with poisoned():
            return cuteflash.flash_attn_varlen_func(**given)

    def alone(self, i: int) -> Operands8 | None:
        """Sequence `i` as a batch of one; None if it has no query that counts."""
        of_q, of_k = self.packed.spans("q")[i], self.packed.spans("k")[i]
        if of_q.start == of_q.stop:
            return None
        operands = (x[None, span] for x, span in ((self.q, of_q), (self.k, of_k), (self.v, of_k)))
        return Operands8(*operands, [scale[i : i + 1] for scale in self.scales])

    def rounding(
        self, operands: Operands8, is_transposed: bool, storage: Storage, lengths: LengthClass | None = None
    ) -> tuple[Any, ...]:
        """On what P's rounding depends of the row that runs a call: blocks of keys, and which of them keep maxima."""
        model = kernel_model(traits_of(self.case, operands, is_transposed, storage, lengths))
        return *model[:3], model.fixed is not None and model.fixed.masked

    def expected(self, operands: Operands8, is_transposed: bool, **options: Any) -> tuple[Tensor, Tensor]:
        """O and LSE of one sequence, of a dense call or, if P is rounded otherwise there, of `packed_alone`."""
        lengths = length_class_of_packed(len(self.q), len(self.k), len(self.packed.keys))
        own = self.rounding(operands, is_transposed, PACKED, lengths)
        if self.rounding(operands, is_transposed, DENSE) == own:
            return operands.attend(self.case, is_transposed, **options)
        return self.packed_alone(operands, is_transposed, **options)

    def packed_alone(self, operands: Operands8, is_transposed: bool, **options: Any) -> tuple[Tensor, Tensor]:
        """O and LSE of one sequence as the only one of a packed call that has rows.

        The call has as many sequences and rows as this batch, and so its kernel.
        """
        s_q, s_k, batch = operands.q.shape[1], operands.k.shape[1], len(self.packed.keys)
        rest_q, rest_k, none = len(self.q) - s_q, len(self.k) - s_k, (0,) * (batch - 1)
        q, k, v = (
            torch.nn.functional.pad(x[0].float(), (0, 0, 0, 0, 0, rest), value=float("nan")).to(x.dtype)
            for x, rest in ((operands.q, rest_q), (operands.k, rest_k), (operands.v, rest_k))
        )
        packed = Packed((s_q, *none), (s_k, *none), self.case, rest_q=rest_q, rest_k=rest_k)
        alone = Packed8(packed, q, k, v, [scale.expand(batch, -1).contiguous() for scale in operands.scales])
        out, lse = alone.attend(is_transposed, **options)
        return out[None, :s_q], lse[None, :, :s_q]

    def assert_right(self, out: Tensor, lse: Tensor, *, is_transposed: bool, **options: Any) -> None:
        """Each sequence is what it is alone, about what its definition says; all other rows are 0 and -inf."""
        counts = torch.zeros(len(out), dtype=torch.bool, device=out.device)
        errors, exact_squares, rows = 0.0, 0.0, 0
        for i, span in enumerate(self.packed.spans("q")):
            operands = self.alone(i)
            if operands is None:
                continue
            counts[span] = True
            expected, expected_lse = self.expected(operands, is_transposed, **options)
            assert torch.isfinite(out[span]).all()
            assert rms(out[span].float() - expected[0].float()) <= SAME * rms(expected), f"sequence {i}"
            torch.testing.assert_close(lse[:, span], expected_lse[0], atol=1e-5, rtol=1e-5)
            exact, exact_lse = operands.exact(self.case)
            torch.testing.assert_close(lse[:, span], exact_lse[0], atol=2e-3 + 2e-3 * self.case.softcap, rtol=1e-3)
            elements = exact.numel()
            errors, rows = errors + rms(out[span].double() - exact[0]) ** 2 * elements, rows + elements
            exact_squares += rms(exact) ** 2 * elements
        assert errors <= 0.045**2 * exact_squares  # of few keys P's rounding shows more than of many
        assert (out[~counts] == 0).all() and (lse[:, ~counts] == float("-inf")).all()

    def check(self, is_transposed: bool, **options: Any) -> None:
        """Run it and judge it."""
        self.assert_right(*self.attend(is_transposed, **options), is_transposed=is_transposed)


def shuffled(lengths: Lengths, seed: int) -> Lengths:
    others = list(lengths)
    random.Random(seed).shuffle(others)
    return tuple(others)


@every_pair(head_dim=[64, 128, 256], mask=tuple(MASKS), is_transposed=[False, True])
def test_masks(head_dim: int, mask: str, is_transposed: bool, hopper: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim, heads=4, kv_heads=2, pack_gqa=False)
    lengths = around_tiles(random.Random(head_dim))
    Packed8.of(Packed(lengths, shuffled(lengths, 1), case, rest_q=37, rest_k=70), hopper).check(is_transposed)


@BOTH_FORMS_OF_V
@pytest.mark.parametrize("lengths", [uniform, zipf, one_long, tiny])
def test_lengths(lengths: Any, is_transposed: bool, hopper: torch.device) -> None:
    chosen = lengths(random.Random(5))
    case = Case(lse=True, causal=True, head_dim=128, pack_gqa=False)
    Packed8.of(Packed(chosen, shuffled(chosen, 2), case), hopper).check(is_transposed)


@BOTH_FORMS_OF_V
@pytest.mark.parametrize("head_dims", [(16, 16), (32, 64), (80, 96), (160, 160), (192, 128), (192, 176), (224, 208)])
def test_head_dims(head_dims: tuple[int, int], is_transposed: bool, hopper: torch.device) -> None:
    case = Case(lse=True, causal=True, head_dim=head_dims[0], head_dim_v=head_dims[1], heads=2)
    Packed8.of(Packed((130, 0, 1, 70, 260), (260, 3, 129, 64, 128), case), hopper).check(is_transposed)


@BOTH_FORMS_OF_V
def test_e5m2(is_transposed: bool, hopper: torch.device) -> None:
    packed = Packed((130, 0, 70), (260, 129, 31), Case(lse=True, causal=True, head_dim=128, heads=2), rest_q=3)
    Packed8.of(packed, hopper, dtype=torch.float8_e5m2).check(is_transposed)


@BOTH_FORMS_OF_V
@pytest.mark.parametrize("heads", [(8, 2), (7, 1)], ids=str)
def test_packed_heads(heads: tuple[int, int], is_transposed: bool, hopper: torch.device) -> None:
    case = Case(lse=True, causal=True, head_dim=128, heads=heads[0], kv_heads=heads[1], pack_gqa=True)
    lengths = uniform(random.Random(3))
    Packed8.of(Packed(lengths, shuffled(lengths, 4), case, rest_q=5), hopper).check(is_transposed)


@BOTH_FORMS_OF_V
def test_only_rows_in_use_count(is_transposed: bool, hopper: torch.device) -> None:
    choose = random.Random(4)
    lengths = [around_tiles(choose) for _ in range(2)]
    used = [tuple(choose.randint(0, n) for n in side) for side in lengths]
    case = Case(lse=True, window=(70, 30), head_dim=128, heads=4, kv_heads=2, pack_gqa=False)
    for used_q, used_k in ((None, used[1]), (used[0], None), (used[0], used[1])):
        Packed8.of(Packed(*lengths, case, used_q, used_k, rest_q=70, rest_k=9), hopper).check(is_transposed)


@BOTH_FORMS_OF_V
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_error_is_as_modelled(head_dim: int, is_transposed: bool, hopper: torch.device) -> None:
    case = Case(lse=True, causal=True, head_dim=head_dim, heads=2)
    given = Packed8.of(Packed((130, 20, 65), (260, 129, 64), case), hopper)
    out, _ = given.attend(is_transposed)
    for i, span in enumerate(given.packed.spans("q")):
        operands = given.alone(i)
        assert operands is not None
        exact, _ = operands.exact(case)
        modelled = exact
        if hopper.type == "cuda":
            modelled = operands.modelled(case, traits_of(case, operands, is_transposed))
        assert rms(out[span].double() - exact[0]) <= 1.3 * rms(modelled - exact) + 2**-9 * rms(exact)


@BOTH_FORMS_OF_V
@pytest.mark.parametrize("logits", [0.1, 16.0])
def test_scores_of_any_spread(logits: float, is_transposed: bool, hopper: torch.device) -> None:
    """Maxima that are fixed would saturate P if they were not repaired; the last tiles have rows past the end."""
    case = Case(lse=True, head_dim=128, logits=logits, heads=2)
    Packed8.of(Packed((70, 200, 3), (900, 513, 640), case), hopper).check(is_transposed)


@every_pair(head_dim=[64, 128], mask=tuple(MASKS), pack_gqa=[False, True], is_transposed=[False, True])
def test_what_is_not_a_number_stays_in_its_sequence(
    head_dim: int, mask: str, pack_gqa: bool, is_transposed: bool, hopper: torch.device
) -> None:
    lengths = (5, 130, 1, 64, 200, 17, 128, 90, 33)
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim, heads=4, kv_heads=2, pack_gqa=pack_gqa)
    given = Packed8.of(Packed(lengths, tuple(reversed(lengths)), case, rest_q=40, rest_k=40), hopper)
    clean, clean_lse = given.attend(is_transposed)
    for of_q, of_k in list(zip(given.packed.spans("q"), given.packed.spans("k"), strict=True))[1::2]:
        for x, span in ((given.q, of_q), (given.k, of_k), (given.v, of_k)):
            x.view(torch.uint8)[span] = NAN
    out, lse = given.attend(is_transposed)
    for span in given.packed.spans("q")[::2]:
        assert torch.equal(out[span], clean[span])
        assert torch.equal(lse[:, span], clean_lse[:, span])
    assert (out[sum(lengths) :] == 0).all() and (lse[:, sum(lengths) :] == float("-inf")).all()


@BOTH_FORMS_OF_V
def test_rows_after_the_last_sequence_are_zero_whatever_its_scales(
    is_transposed: bool, hopper_gpu: torch.device
) -> None:
    given = Packed8.of(Packed((50, 0), (90, 0), Case(lse=True), rest_q=200, rest_k=10), hopper_gpu)
    for scale in given.scales:
        scale[1] = float("nan")  # of a sequence without rows
    mean = torch.full((2, 3, 64), 5.0, device=hopper_gpu)
    out, lse = given.attend(is_transposed, v_mean=mean)
    assert torch.isfinite(out[:50]).all()
    assert (out[50:] == 0).all() and (lse[:, 50:] == float("-inf")).all()


@BOTH_FORMS_OF_V
def test_a_mean_of_v_is_that_of_its_sequence(is_transposed: bool, hopper: torch.device) -> None:
    case = Case(lse=True, causal=True, head_dim=64, head_dim_v=80, heads=4, kv_heads=2)
    packed = Packed((130, 0, 40), (100, 7, 260), case, rest_q=20)
    given = Packed8.of(packed, hopper)
    plain, lse = given.attend(is_transposed)
    mean = 3 * torch.randn(3, 2, 80, generator=torch.Generator(hopper).manual_seed(1), device=hopper)
    out, lse_too = given.attend(is_transposed, v_mean=mean)
    expected = plain.float()
    for i, span in enumerate(packed.spans("q")):
        added = mean[i].repeat_interleave(2, dim=0).expand(span.stop - span.start, -1, -1)
        expected[span] += added.masked_fill((lse[:, span] == float("-inf")).mT[..., None], 0.0)
    assert ((out - expected).abs() <= 2**-8 * (plain.abs() + expected.abs())).all()
    assert torch.equal(lse, lse_too)


def test_softcap_and_fp16(hopper: torch.device) -> None:
    case = Case(lse=True, head_dim=64, softcap=5.0, logits=4.0)
    given = Packed8.of(Packed((100, 3), (200, 70), case), hopper)
    for is_transposed in (False, True):
        out, lse = given.attend(is_transposed, out_dtype=torch.float16)
        assert out.dtype == torch.float16
        given.assert_right(out, lse, is_transposed=is_transposed, out_dtype=torch.float16)


@BOTH_FORMS_OF_V
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_with_many_tiles_repeat_bit_for_bit(
    head_dim: int, is_transposed: bool, hopper_gpu: torch.device
) -> None:
    """Each block has several tiles, short and long: loads, turns and what is handed out run ahead of each other."""
    choose = random.Random(6)
    lengths = (*(choose.choice((1, 40, 200, 700, 1500)) for _ in range(60)), 0, 2100)
    case = Case(lse=True, causal=True, head_dim=head_dim, heads=16, kv_heads=4)
    given = Packed8.of(Packed(lengths, case=case), hopper_gpu)
    arguments = given.arguments(is_transposed)
    first, first_lse = cuteflash.flash_attn_varlen_func(**arguments)
    for i in (0, 17, 61):
        operands, span = given.alone(i), given.packed.spans("q")[i]
        assert operands is not None
        exact, _ = operands.exact(case)
        assert rms(first[span].double() - exact[0]) <= 0.07 * rms(exact)
    assert torch.isfinite(first).all()
    for _ in range(20):
        out, lse = cuteflash.flash_attn_varlen_func(**arguments)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


@BOTH_FORMS_OF_V
def test_a_graph_replays_with_other_lengths(is_transposed: bool, hopper_gpu: torch.device) -> None:
    choose, total, batch = random.Random(8), 900, 10

    def some() -> Packed:
        inner = sorted(choose.randint(0, total) for _ in range(batch - 1))
        cuts = [0, *inner, choose.randint(inner[-1], total)]
        lengths = tuple(end - begin for begin, end in itertools.pairwise(cuts))
        rest = total - cuts[-1]
        return Packed(lengths, case=Case(lse=True, causal=True, pack_gqa=False), rest_q=rest, rest_k=rest)

    static = Packed8.of(some(), hopper_gpu).arguments(is_transposed)
    cuteflash.flash_attn_varlen_func(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cuteflash.flash_attn_varlen_func(**static)
    for seed in range(1, 4):
        given = Packed8.of(some(), hopper_gpu, seed)
        for name, source in given.arguments(is_transposed).items():
            if isinstance(source, Tensor):
                static[name].copy_(source)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        given.assert_right(out, lse, is_transposed=is_transposed)


def test_other_lengths_compile_nothing_and_no_call_waits(
    hopper_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(lse=True, causal=True)
    Packed8.of(Packed((40, 50, 60), case=case), hopper_gpu).check(False)

    def compiles(*arguments: object, **named: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "_obtain_and_load", compiles)
    for lengths in ((60, 50, 41), (33, 70), (100, 0, 0, 100, 20)):
        arguments = Packed8.of(Packed(lengths, case=case), hopper_gpu).arguments(
            False, max_seqlen_q=120, max_seqlen_k=120
        )
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuteflash.flash_attn_varlen_func(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode(before)
