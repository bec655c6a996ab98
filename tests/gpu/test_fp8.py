"""8-bit operands on Hopper: no error is larger than what P's rounding and the accumulator are modelled to cause."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DENSE, FwdProblem, MaskKind, Operands, Scores, Storage
from cuteflash.reference.fp8 import dequantised, permuted_keys
from cuteflash.reference.fp8_accumulator import modelled_attention
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.tune.fp8_accuracy import allowed_rms, kernel_model
from tests.gpu.checks import Case, poisoned, reference, rms
from tests.gpu.pairwise import every_pair

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
MASKS = {"full": Case(), "causal": Case(causal=True), "window": Case(window=(70, 30))}


@dataclasses.dataclass(frozen=True)
class Operands8:
    """Q, K and V of 8 bits with their scales, and what they stand for in fp64."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: list[Tensor]

    @classmethod
    def of(cls, case: Case, device: torch.device, mean: float = 0.0, dtype: torch.dtype = FP8) -> Operands8:
        """A case's inputs, quantised with a scale for each KV head."""
        q, k, v = case.inputs(device)
        kv_heads = k.shape[2]
        quantised, scales = [], []
        for x in (q.float(), k.float(), v.float() + mean):
            scale = x.unflatten(2, (kv_heads, -1)).abs().amax((1, 3, 4)) / LARGEST
            scales.append(scale)
            spread = scale.repeat_interleave(x.shape[2] // kv_heads, dim=1)[:, None, :, None]
            quantised.append((x / spread).to(dtype))
        return cls(*quantised, scales)

    @classmethod
    def by_kernels(cls, *tensors: Tensor, **options: Any) -> tuple[Operands8, Tensor | None]:
        """What `cuteflash.quantize_qkv` makes of Q, K and V, and V's mean if it is subtracted."""
        some = cuteflash.quantize_qkv(*tensors, **options)
        assert some.v is not None
        return cls(some.q, some.k, some.v, [some.q_descale, some.k_descale, some.v_descale]), some.v_mean

    def exact(self, case: Case) -> tuple[Tensor, Tensor]:
        """O and LSE by definition."""
        tensors = (dequantised(x, scale) for x, scale in zip((self.q, self.k, self.v), self.scales, strict=True))
        return reference(*tensors, case, torch.float64)

    def transposed_v(self) -> Tensor:
        """V^T, with zeros after the last key."""
        batch, keys, heads, columns = self.v.shape
        vt = torch.zeros(batch, heads, columns, -(-keys // 128) * 128, device=self.v.device)
        vt[..., :keys] = self.v.permute(0, 2, 3, 1).float()
        return permuted_keys(vt).to(self.v.dtype).contiguous()

    def attend(self, case: Case, is_transposed: bool, **options: Any) -> tuple[Tensor, Tensor]:
        """O and LSE of the library, into poisoned memory."""
        q_descale, k_descale, v_descale = self.scales
        with poisoned():
            return cuteflash.flash_attn_func(
                self.q,
                self.k,
                self.transposed_v() if is_transposed else self.v,
                q_descale=q_descale,
                k_descale=k_descale,
                v_descale=v_descale,
                transposed_v=is_transposed,
                **case.options() | {"return_lse": True} | options,
            )

    def modelled(self, case: Case, traits: FwdTraitsFp8Sm90) -> Tensor:
        """O as the kernel with these traits is expected to compute it."""
        left, right = case.window
        return modelled_attention(
            self.q,
            self.k,
            self.v,
            self.scales,
            (self.q.shape[3] ** -0.5, left, 0 if case.causal else right),
            kernel_model(traits),
        )


def traits_of(
    case: Case,
    operands: Operands8,
    is_transposed: bool,
    storage: Storage = DENSE,
    lengths: LengthClass | None = None,
) -> Any:
    """Those of the row that runs a call with the case's mask; `lengths`: its class, by default the operands'."""
    made = Operands.of("e4m3", operands.q.shape[3], operands.v.shape[3])
    made = dataclasses.replace(made, transposed_v=is_transposed)
    mask: MaskKind = "causal" if case.causal else "full" if case.window == (-1, -1) else "window"
    lengths = lengths or length_class_of(operands.q.shape[1], operands.k.shape[1])
    return choose_shipped(FwdProblem(made, Scores(mask), storage, has_lse=True), "sm_90a", "sm90", lengths).traits


def assert_as_modelled(
    case: Case, device: torch.device, *, mean: float = 0.0, is_transposed: bool = False, dtype: torch.dtype = FP8
) -> None:
    """The error of O is at most what the model and the rounding of O allow; the latter is all that a CPU does."""
    operands = Operands8.of(case, device, mean, dtype)
    out, lse = operands.attend(case, is_transposed)
    exact, exact_lse = operands.exact(case)
    modelled = exact
    if device.type == "cuda":
        modelled = operands.modelled(case, traits_of(case, operands, is_transposed))
    assert torch.isfinite(out).all()
    assert rms(out.double() - exact) <= allowed_rms(modelled, exact)
    # Scores are sums of 8-bit products, too: each instruction cuts 33 terms at 13 fraction bits of the largest.
    torch.testing.assert_close(lse, exact_lse, atol=2e-3, rtol=1e-3)


@every_pair(head_dim=[64, 128, 256], mask=tuple(MASKS), is_transposed=[False, True])
def test_masks(head_dim: int, mask: str, is_transposed: bool, hopper: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim, seqlen_q=200, seqlen_k=333, heads=4, kv_heads=2)
    assert_as_modelled(case, hopper, is_transposed=is_transposed)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("head_dims", [(16, 16), (32, 64), (80, 96), (112, 144), (176, 176), (192, 128), (224, 208)])
def test_head_dims(head_dims: tuple[int, int], is_transposed: bool, hopper: torch.device) -> None:
    head_dim, head_dim_v = head_dims
    case = Case(causal=True, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=130, seqlen_k=260, batch=1, heads=2)
    assert_as_modelled(case, hopper, is_transposed=is_transposed)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_e5m2(head_dim: int, is_transposed: bool, hopper: torch.device) -> None:
    case = Case(causal=True, head_dim=head_dim, seqlen_q=200, seqlen_k=333, heads=4, kv_heads=2)
    assert_as_modelled(case, hopper, is_transposed=is_transposed, dtype=torch.float8_e5m2)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 700), (5, 129), (64, 127), (127, 16), (300, 17)])
def test_lengths(seqlen_q: int, seqlen_k: int, is_transposed: bool, hopper: torch.device) -> None:
    for causal in (False, True):
        case = Case(causal=causal, head_dim=128, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=8, kv_heads=2)
        assert_as_modelled(case, hopper, is_transposed=is_transposed)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_with_many_tiles(head_dim: int, hopper: torch.device) -> None:
    """Each block has several tiles, whose loads run ahead of each other."""
    tokens = 1024 if hopper.type == "cuda" else 64
    for causal, is_transposed in itertools.product((False, True), (False, True)):
        case = Case(causal=causal, head_dim=head_dim, seqlen_q=tokens, batch=4, heads=40, kv_heads=8)
        operands = Operands8.of(case, hopper)
        out, _ = operands.attend(case, is_transposed)
        for head in (0, 17, 39):
            kv_head = head // 5
            one = Operands8(
                operands.q[-1:, :, head : head + 1].contiguous(),
                operands.k[-1:, :, kv_head : kv_head + 1].contiguous(),
                operands.v[-1:, :, kv_head : kv_head + 1].contiguous(),
                [scale[-1:, kv_head : kv_head + 1].contiguous() for scale in operands.scales],
            )
            exact, _ = one.exact(case)
            assert torch.isfinite(out).all()
            assert rms(out[-1:, :, head : head + 1].double() - exact) <= 0.035 * rms(exact)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_that_begins_before_v_is_transposed_waits_for_it(head_dim: int, hopper_gpu: torch.device) -> None:
    """Equal to what it computes of a V^T that is given, call after call, whatever lay in V^T's memory before."""
    case = Case(causal=True, head_dim=head_dim, seqlen_q=4096, batch=2, heads=16, kv_heads=16)
    operands = Operands8.of(case, hopper_gpu)
    others = [dataclasses.replace(operands, v=operands.v.flip(0, 1)), operands]
    expected = [one.attend(case, is_transposed=True) for one in others]
    for _ in range(10):
        for one, right in zip(others, expected, strict=True):
            for found, wanted in zip(one.attend(case, is_transposed=False), right, strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_v_that_is_transposed_may_come_from_the_launch_before(head_dim: int, hopper_gpu: torch.device) -> None:
    """The kernel that transposes V is launched beside what writes V, too, and waits for its end."""
    case = Case(causal=True, head_dim=head_dim, seqlen_q=4096, batch=2, heads=16, kv_heads=16)
    operands = Operands8.of(case, hopper_gpu)
    others = [dataclasses.replace(operands, v=operands.v.flip(0, 1)), operands]
    expected = [one.attend(case, is_transposed=True) for one in others]
    written = dataclasses.replace(operands, v=torch.empty_like(operands.v))
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), operands.scales, strict=True))
    for _ in range(10):
        for one, right in zip(others, expected, strict=True):
            written.v.view(torch.uint8).copy_(one.v.view(torch.uint8))
            out = cuteflash.flash_attn_func(written.q, written.k, written.v, **scales, **case.options())
            assert torch.equal(out, right[0])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("logits", [0.1, 4.0, 16.0])
def test_scores_of_any_spread(logits: float, head_dim: int, hopper: torch.device) -> None:
    """Maxima that are fixed would saturate P if they were not repaired."""
    case = Case(head_dim=head_dim, logits=logits, seqlen_q=128, seqlen_k=1500, batch=1, heads=2)
    assert_as_modelled(case, hopper, is_transposed=True)


@pytest.mark.parametrize("place", [0, 700])
def test_sinks(place: int, hopper: torch.device) -> None:
    case = Case(head_dim=128, kind="sink:30", place=place, seqlen_q=128, seqlen_k=1500, batch=1, heads=2, causal=True)
    assert_as_modelled(case, hopper, is_transposed=True)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_over_many_keys_keep_a_mean(head_dim: int, is_transposed: bool, hopper: torch.device) -> None:
    keys = 16384 if hopper.type == "cuda" else 512
    case = Case(head_dim=head_dim, seqlen_q=64, seqlen_k=keys, batch=1, heads=1)
    operands = Operands8.of(case, hopper, mean=1.0)
    out, _ = operands.attend(case, is_transposed)
    exact, _ = operands.exact(case)
    assert rms(out.double() - exact) <= 5e-3 * rms(exact)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 144), (192, 128), (256, 240)])
def test_a_mean_of_v_is_added_to_rows_that_see_a_key(
    head_dims: tuple[int, int], is_transposed: bool, hopper: torch.device
) -> None:
    (head_dim, head_dim_v), window = head_dims, (50, 20)
    for seqlen_q, causal in ((1, False), (300, False), (300, True)):
        case = Case(
            head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q, seqlen_k=140, heads=4, kv_heads=2,
            causal=causal, window=(-1, -1) if causal else window,
        )  # fmt: skip
        operands = Operands8.of(case, hopper)
        plain, lse = operands.attend(case, is_transposed)
        generator = torch.Generator(hopper).manual_seed(1)
        v_mean = 3 * torch.randn(2, 2, head_dim_v, generator=generator, device=hopper)
        out, lse_too = operands.attend(case, is_transposed, v_mean=v_mean)
        added = v_mean[:, None].repeat_interleave(2, dim=2)
        expected = plain.float() + added.masked_fill((lse == -math.inf).mT[..., None], 0.0)
        assert ((out - expected).abs() <= 2**-8 * (plain.abs() + expected.abs())).all()
        assert torch.equal(lse, lse_too)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_one_level_keeps_the_mean_of_a_smoothed_v(is_transposed: bool, hopper: torch.device) -> None:
    keys = 16384 if hopper.type == "cuda" else 512
    case = Case(head_dim=256, seqlen_q=64, seqlen_k=keys, batch=1, heads=1)
    q, k, v = case.inputs(hopper)
    v = v + 1
    operands, v_mean = Operands8.by_kernels(q, k, v, smooth_v=True)
    assert v_mean is not None
    out, _ = operands.attend(case, is_transposed, v_mean=v_mean)
    exact = operands.exact(case)[0] + v_mean[:, None]
    assert rms(out.double() - exact) <= 5e-3 * rms(exact)


BLOCK_CASES = {
    "full": Case(head_dim=128, seqlen_q=300, seqlen_k=1100),
    "causal": Case(head_dim=64, causal=True, seqlen_q=700),
    "window": Case(head_dim=160, head_dim_v=144, window=(300, 70), seqlen_q=500),
    "softcap": Case(head_dim=96, causal=True, softcap=5.0, seqlen_q=130, seqlen_k=400),
    "latent": Case(head_dim=192, head_dim_v=128, causal=True, seqlen_q=200, seqlen_k=1300),
    "packed": Case(head_dim=128, seqlen_q=5, seqlen_k=900, heads=8, kv_heads=2),
    "not packed": Case(head_dim=128, seqlen_q=5, seqlen_k=900, heads=6, kv_heads=2),
}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("case", BLOCK_CASES)
def test_each_128_tokens_may_have_scales(case: str, is_transposed: bool, hopper: torch.device) -> None:
    """Blocks differ in size by up to 4, which moves maxima of rows. 8-bit products of larger scores are inexact."""
    one = BLOCK_CASES[case]
    tensors = []
    for x, step in zip(one.inputs(hopper), (1, 1, 2), strict=True):
        block = torch.arange(x.shape[1], device=hopper) // 128
        tensors.append(x * torch.exp2((block * step % 3 - 1).float())[:, None, None].to(x.dtype))
    operands, _ = Operands8.by_kernels(*tensors, granularity="block")
    out, lse = operands.attend(one, is_transposed)
    exact, exact_lse = operands.exact(one)
    assert torch.isfinite(out).all()
    assert rms(out.double() - exact) <= 0.035 * rms(exact)
    torch.testing.assert_close(lse, exact_lse, atol=5e-3, rtol=2e-4)


def test_softcap_and_fp16(hopper: torch.device) -> None:
    case = Case(head_dim=64, softcap=5.0, logits=4.0, seqlen_q=100, seqlen_k=200)
    operands = Operands8.of(case, hopper)
    out, lse = operands.attend(case, False, out_dtype=torch.float16)
    exact, exact_lse = operands.exact(case)
    assert out.dtype == torch.float16
    assert rms(out.double() - exact) <= 0.035 * rms(exact)
    torch.testing.assert_close(lse, exact_lse, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_nan_stays_in_its_rows(is_transposed: bool, hopper: torch.device) -> None:
    case = Case(head_dim=128, seqlen_q=256, seqlen_k=300, heads=4, kv_heads=2)
    operands = Operands8.of(case, hopper)
    operands.q[1, 77, 2, 5] = float("nan")
    operands.v[0, 299, 1, 9] = float("nan")
    out, _ = operands.attend(case, is_transposed)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[1, 77, 2] = True
    expected[0, :, 2:, 9] = True
    assert torch.equal(out.isnan(), expected)
