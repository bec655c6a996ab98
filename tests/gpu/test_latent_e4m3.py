"""Latent attention from a cache of e4m3 on a GPU, against the definition; all that no sequence uses is NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cuteflash import append_latents, dispatch, flash_mla_decode
from cuteflash.traits.arch import arch_of_capability
from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3
from cuteflash.traits.rows_mla_e4m3 import ROWS
from tests.gpu.checks import assert_close_to, poisoned
from tests.gpu.latent import SCALE, LatentCase, reference

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
AROUND_PAGES = (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 1000)
SMOKE = [LatentCase((64,), num_splits=1), LatentCase((100, 640), 64), LatentCase((4096,), 128)]
CASES = [
    *(LatentCase(AROUND_PAGES, heads, num_splits=splits) for heads in (16, 128) for splits in (0, 1)),
    *(LatentCase((5, 700, 129), heads) for heads in (1, 3, 40, 65, 100)),
    *(LatentCase((700, 1, 2, 64, 65, 66, 191), heads, seqlen_q=tokens) for heads in (16, 40) for tokens in (2, 5)),
    LatentCase((300, 70), 16, seqlen_q=3, causal=False),
    *(LatentCase(AROUND_PAGES, 32, page_size=size) for size in (0, 128, 256)),
    *(LatentCase((300, 64, 1000), 64, dtype="fp16", logits=logits) for logits in (1.0, 30.0)),
    LatentCase((300, 64, 1000), 16, logits=30.0),
    LatentCase((20000,), 16),
    LatentCase((20000, 3), 128, num_splits=2),
    LatentCase((3000, *(70,) * 150), 16),
]
ROW_CASES = [LatentCase((129, 0, 1, 700, 64), heads, seqlen_q=tokens) for heads, tokens in ((1, 1), (16, 1), (40, 3))]


@pytest.fixture(autouse=True)
def converts(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("does not convert e4m3")


def inputs_of(case: LatentCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Those of the case with a cache of e4m3, and a descale for each sequence."""
    q, cache, table, lengths = case.inputs(device)
    descale = torch.rand(len(case.lengths), generator=torch.Generator(device).manual_seed(1), device=device) + 0.5
    return q, cache.to(FP8), table, lengths, descale


def run(case: LatentCase, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    q, cache, table, lengths, descale = inputs
    with poisoned():
        return flash_mla_decode(
            q,
            cache,
            lengths,
            page_table=table,
            softmax_scale=SCALE,
            causal=case.causal,
            num_splits=case.num_splits,
            return_lse=True,
            descale=descale,
        )


def check(case: LatentCase, device: torch.device) -> None:
    """Run a case and judge every element."""
    inputs = inputs_of(case, device)
    q, cache, table, _, descale = inputs
    out, lse = run(case, inputs)
    found, low = [], []
    values = cache.float()
    for i, length in enumerate(case.lengths):  # the definition has one scale
        alone = dataclasses.replace(case, lengths=(length,))
        if table is None:
            rows, of_table = values[i : i + 1], None
        else:
            rows = values[table[i, : -(-length // case.page_size)].long()]
            of_table = torch.arange(len(rows), device=device)[None]
        rows = rows * descale[i]
        found.append(reference(q[i : i + 1], rows, of_table, alone, torch.float32))
        low.append(reference(q[i : i + 1], rows, of_table, alone, q.dtype)[0])
    exact, exact_lse = (torch.cat(x) for x in zip(*found, strict=True))
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert_close_to(out, exact, torch.cat(low))
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_small(case: LatentCase, device: torch.device) -> None:
    check(case, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case: LatentCase, device: torch.device) -> None:
    check(case, device)


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tile_m}x{row.tile_n}")
def test_rows_that_other_devices_take(
    row: MlaTraitsE4m3, case: LatentCase, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row, also those for devices with less shared memory and for other numbers of heads."""
    found = dataclasses.replace(row, least_rows=1)
    if found.check(arch_of_capability(*torch.cuda.get_device_capability(cuda))) is not None:
        pytest.skip("does not fit this device")
    monkeypatch.setitem(dispatch.MLA_E4M3_ROWS, "sm80", (found,))
    monkeypatch.setattr("cuteflash.mla_ops.mla_decode_cuda.decode._plans", {})
    check(case, cuda)


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_runs_are_bitwise_equal(heads: int, cuda: torch.device) -> None:
    case = LatentCase((4113, 700, 1, 0, 129), heads, seqlen_q=2)
    inputs = inputs_of(case, cuda)
    first = run(case, inputs)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case, inputs), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_any_size(dtype: torch.dtype, cuda: torch.device) -> None:
    """Rows of Q that differ by many powers of two, and the softmax's scale with them."""
    case = LatentCase((300, 65), 16, dtype="bf16" if dtype == torch.bfloat16 else "fp16")
    q, cache, table, lengths, descale = inputs_of(case, cuda)
    sizes = torch.logspace(-4, 0, 16, device=cuda).view(16, 1)
    named = {"page_table": table, "descale": descale, "softmax_scale": SCALE}
    for factor in (2.0**-10, 1.0, 2.0**10):
        small = (q * sizes * factor).to(dtype)
        out, lse = flash_mla_decode(small, cache, lengths, **named | {"softmax_scale": SCALE / factor}, return_lse=True)
        same = (q * sizes).to(dtype)
        expected, expected_lse = flash_mla_decode(
            same.float().cpu(),
            cache.cpu(),
            lengths.cpu(),
            **{name: x.cpu() if isinstance(x, Tensor) else x for name, x in named.items()},
            return_lse=True,
        )
        torch.testing.assert_close(out.float().cpu(), expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=2e-2, rtol=2e-3)


def test_a_graph_appends_and_attends(cuda: torch.device) -> None:
    case = LatentCase((2000, 300), 16)
    q, cache, table, lengths, descale = inputs_of(case, cuda)
    row = torch.randn(2, 1, 576, device=cuda, dtype=q.dtype)
    named = {"page_table": table, "descale": descale}

    def step() -> Tensor:
        append_latents(cache, row, lengths - 1, **named)
        return flash_mla_decode(q, cache, lengths, **named, softmax_scale=SCALE)

    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert torch.equal(found, eager)
    lengths.copy_(torch.tensor([100, 299], dtype=torch.int32))
    expected = step()
    graph.replay()
    assert torch.equal(found, expected) and not torch.equal(found, eager)
