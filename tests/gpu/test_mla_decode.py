"""The latent-attention decode on a GPU, against the definition; all that no sequence uses is NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cuteflash.dispatch import MLA_ROWS
from cuteflash.traits.arch import Family, arch_of_capability
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.rows_mla_sm80 import ROWS as SM80_ROWS
from tests.gpu.checks import assert_close_to
from tests.gpu.latent import LatentCase, check, reference, run

pytestmark = pytest.mark.gpu

AROUND_PAGES = (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 1000)
SMOKE = [
    LatentCase((64,), num_splits=1),
    LatentCase((128, 256), 64, num_splits=1),
    LatentCase((100, 640), 64),
    LatentCase((4096,), 128),
]
CASES = [
    *(LatentCase(AROUND_PAGES, heads, num_splits=splits) for heads in (16, 128) for splits in (0, 1)),
    *(LatentCase((5, 700, 129), heads) for heads in (1, 3, 40, 65, 100)),
    *(LatentCase((700, 1, 2, 64, 65, 66, 191), heads, seqlen_q=tokens) for heads in (16, 40) for tokens in (2, 5)),
    LatentCase((300, 70), 128, seqlen_q=3),
    LatentCase((300, 70), 16, seqlen_q=3, causal=False),
    *(LatentCase(AROUND_PAGES, 32, page_size=size) for size in (0, 128, 256)),
    LatentCase((300, 64, 1), 16, page_size=0, spare=0, num_splits=1),
    *(LatentCase((300, 64, 1000), 64, dtype="fp16", logits=logits) for logits in (1.0, 30.0)),
    LatentCase((300, 64, 1000), 64, logits=30.0),
    LatentCase((20000,), 16),
    LatentCase((20000, 3), 128, num_splits=2),
    LatentCase((3000, *(70,) * 150), 16),
    *(LatentCase((700, 31, 33, 0), heads, seqlen_q=3) for heads in (5, 6, 10, 11, 21, 22)),  # around 16, 32, 64 rows
    *(LatentCase((3000, *(70,) * 150), heads) for heads in (40, 65)),
    LatentCase((40000, *(70,) * 150), 16),  # more parts of one sequence than a warp has lanes
    *(LatentCase((1000,) * 100, heads) for heads in (16, 32, 128)),  # many tiles with two parts
    *(LatentCase(tuple(max(8192 // n, 1) for n in range(1, 129)), heads) for heads in (16, 40, 128)),
]
ROW_CASES = [LatentCase((129, 0, 1, 700, 64), heads, seqlen_q=tokens) for heads, tokens in ((1, 1), (16, 1), (40, 3))]


@pytest.mark.smoke
@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_small(case: LatentCase, family: Family, cuda: torch.device) -> None:
    check(case, cuda, family)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case: LatentCase, family: Family, cuda: torch.device) -> None:
    check(case, cuda, family)


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
@pytest.mark.parametrize("row", SM80_ROWS, ids=lambda row: f"{row.tile_m}x{row.tile_n}")
def test_rows_that_other_devices_take(
    row: MlaTraitsSm80, case: LatentCase, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the sm80 family, also those for devices with less shared memory and for other numbers of heads."""
    found = dataclasses.replace(row, least_rows=1)
    if found.check(arch_of_capability(*torch.cuda.get_device_capability(cuda))) is not None:
        pytest.skip("does not fit this device")
    monkeypatch.setitem(MLA_ROWS, "sm80", (found,))
    check(case, cuda, "sm80")


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_runs_are_bitwise_equal(heads: int, family: Family, cuda: torch.device) -> None:
    case = LatentCase((4113, 700, 1, 0, 129), heads, seqlen_q=2)
    inputs = case.inputs(cuda)
    first = run(case, inputs, family)
    for _ in range(1000):
        again = run(case, inputs, family)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("lengths", [(3000,), (300,) * 100], ids=["many parts", "two parts"])
def test_parts_of_any_size(lengths: tuple[int, ...], dtype: str, family: Family, cuda: torch.device) -> None:
    """Columns of V that are large, and others that are small; scores come from the columns that are not V's."""
    case = LatentCase(lengths, 64, dtype=dtype)
    q, cache, table, sizes = case.inputs(cuda)
    q[..., :512] = 0
    largest = 2.0**12 if dtype == "fp16" else 2.0**110
    cache[..., :256] *= largest
    cache[..., 256:512] /= largest
    plain = run(case, (q, cache, table, sizes), family)[0]
    exact = reference(q, cache, table, case, torch.float32)[0]
    low = reference(q, cache, table, case, q.dtype)[0]
    for left in (slice(0, 256), slice(256, 512)):
        scale = exact[..., left].abs().max()
        assert_close_to(
            (plain[..., left].float() / scale).to(q.dtype), exact[..., left] / scale, low[..., left] / scale
        )


def test_strides_of_queries_and_lengths_that_change(family: Family, cuda: torch.device) -> None:
    """Q of another layout, and other lengths, with the plan of the first call."""
    from cuteflash.mla_planning import CudaMlaDecode

    case = LatentCase((500, 300), 16, seqlen_q=2)
    q, cache, table, lengths = case.inputs(cuda)
    decode = CudaMlaDecode()
    options = {"softmax_scale": 0.1, "causal": True, "num_splits": 0, "family": family}
    expected = decode(q, cache, table, lengths, **options)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((2, 2, 16, 600), torch.nan, dtype=q.dtype, device=cuda)
    wide[..., :576] = q
    for other in (heads_first, wide[..., :576]):
        assert all(torch.equal(a, b) for a, b in zip(decode(other, cache, table, lengths, **options), expected))
    shorter = torch.tensor([70, 300], dtype=torch.int32, device=cuda)
    out, _ = decode(q, cache, table, shorter, **options)
    assert torch.equal(out[1], expected[0][1]) and not torch.equal(out[0], expected[0][0])


def test_a_graph_replays_with_other_lengths(family: Family, cuda: torch.device) -> None:
    from cuteflash.mla_planning import CudaMlaDecode

    case = LatentCase((2000, 300), 16)
    q, cache, table, lengths = case.inputs(cuda)
    decode = CudaMlaDecode()
    options = {"softmax_scale": 0.1, "causal": True, "num_splits": 0, "family": family}
    eager = decode(q, cache, table, lengths, **options)
    shorter = torch.tensor([100, 299], dtype=torch.int32, device=cuda)
    expected = decode(q, cache, table, shorter, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(q, cache, table, lengths, **options)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    lengths.copy_(shorter)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
