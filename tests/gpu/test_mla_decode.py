"""The latent-attention decode on a GPU, against the definition; all that no sequence uses is NaN."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.latent import LatentCase, check, run

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
    *(LatentCase((3000, *(70,) * 150), heads) for heads in (40, 65)),  # a block merges two rows, and four
    LatentCase((40000, *(70,) * 150), 16),  # more parts of one sequence than a block loads at a time
]


@pytest.mark.smoke
@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_small(case: LatentCase, hopper_gpu: torch.device) -> None:
    check(case, hopper_gpu)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case: LatentCase, hopper_gpu: torch.device) -> None:
    check(case, hopper_gpu)


@pytest.mark.parametrize("heads", [16, 128])
def test_runs_are_bitwise_equal(heads: int, hopper_gpu: torch.device) -> None:
    case = LatentCase((4113, 700, 1, 0, 129), heads, seqlen_q=2)
    inputs = case.inputs(hopper_gpu)
    first = run(case, inputs)
    for _ in range(1000):
        again = run(case, inputs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_strides_of_queries_and_lengths_that_change(hopper_gpu: torch.device) -> None:
    """Q of another layout, and other lengths, with the plan of the first call."""
    from cuteflash.mla_planning import CudaMlaDecode

    case = LatentCase((500, 300), 16, seqlen_q=2)
    q, cache, table, lengths = case.inputs(hopper_gpu)
    decode = CudaMlaDecode()
    options = {"softmax_scale": 0.1, "causal": True, "num_splits": 0}
    expected = decode(q, cache, table, lengths, **options)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((2, 2, 16, 600), torch.nan, dtype=q.dtype, device=hopper_gpu)
    wide[..., :576] = q
    for other in (heads_first, wide[..., :576]):
        assert all(torch.equal(a, b) for a, b in zip(decode(other, cache, table, lengths, **options), expected))
    shorter = torch.tensor([70, 300], dtype=torch.int32, device=hopper_gpu)
    out, _ = decode(q, cache, table, shorter, **options)
    assert torch.equal(out[1], expected[0][1]) and not torch.equal(out[0], expected[0][0])


def test_a_graph_replays_with_other_lengths(hopper_gpu: torch.device) -> None:
    from cuteflash.mla_planning import CudaMlaDecode

    case = LatentCase((2000, 300), 16)
    q, cache, table, lengths = case.inputs(hopper_gpu)
    decode = CudaMlaDecode()
    options = {"softmax_scale": 0.1, "causal": True, "num_splits": 0}
    eager = decode(q, cache, table, lengths, **options)
    shorter = torch.tensor([100, 299], dtype=torch.int32, device=hopper_gpu)
    expected = decode(q, cache, table, shorter, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(q, cache, table, lengths, **options)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    lengths.copy_(shorter)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
