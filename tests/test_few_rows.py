"""Few query rows on e4m3 caches: who gets the rows of these kernels, what they check, and that they do not spill."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from cuteflash import split_planning
from cuteflash.arguments import FwdOptions
from cuteflash.dispatch import choose_shipped
from cuteflash.operands import Operands
from cuteflash.problem import FwdProblem, Scores, Storage
from cuteflash.traits.arch import get_arch
from cuteflash.traits.few_sm90 import WARPS, FwdTraitsFewSm90
from cuteflash.traits.row import ROW_HEAD_DIMS
from cuteflash.traits.tables import FEW_ROWS
from tests.gpu.checks import Case
from tests.gpu.paged import Paged
from tests.test_kvcache_ops import CPU, NUM_SMS, Gpu

ARCH = get_arch("sm_90a")
ROWS = FEW_ROWS["sm90"]
LOOKED_UP = Storage("varlen", "paged", used_k=True, has_page_table=True, has_cache_batch_idx=True, has_leftpad=True)
HARD, UNCUT = (Scores(mask, softcap=True, sink="fp32") for mask in ("window", "causal"))


def problem_of(head_dim: int, scores: Scores = HARD, **more: Any) -> FwdProblem:
    operands = Operands("bf16", "bf16", "bf16", head_dim, head_dim, 4, cache_dtype="e4m3")
    return FwdProblem(operands, scores, LOOKED_UP, has_lse=True, is_split=True, **more)


def traits_of(head_dim: int, tile_rows: int | None, scores: Scores = HARD) -> Any:
    return choose_shipped(problem_of(head_dim, scores), "sm_90a", "sm90", "decode", tile_rows).traits


@pytest.mark.parametrize("head_dim", ROW_HEAD_DIMS)
def test_rows_of_a_tile_decide(head_dim: int) -> None:
    """Up to 8 rows; of narrow heads up to 16, of the narrowest up to 32; others, and calls of unknown rows, have 64."""
    most = 32 if head_dim <= 64 else 16 if head_dim <= 128 else 8
    for scores in (HARD, UNCUT):
        for tile_rows in (1, 7, 8, 9, 16, 17, 32, 33, 64, None):
            traits = traits_of(head_dim, tile_rows, scores)
            assert traits.check(ARCH) is None
            if tile_rows is not None and tile_rows <= most:
                assert isinstance(traits, FwdTraitsFewSm90) and tile_rows <= traits.tile_m <= max(8, 2 * tile_rows)
            else:
                assert traits.tile_m == 64


def test_calls_that_do_not_split_keys_have_other_rows() -> None:
    whole = dataclasses.replace(problem_of(128), is_split=False)
    assert choose_shipped(whole, "sm_90a", "sm90", "decode", 4).traits.tile_m == 64


def test_every_row_is_chosen() -> None:
    found = {traits_of(dim, rows, scores) for dim in ROW_HEAD_DIMS for rows in (8, 16, 32) for scores in (HARD, UNCUT)}
    assert {row.traits for row in ROWS} <= found


def test_shared_memory_is_not_used_twice() -> None:
    for row in ROWS:
        plan = row.traits.smem_plan
        regions = sorted(plan.values(), key=lambda region: region.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(regions))
        assert plan["barriers"].end <= row.traits.smem_arrival.start < row.traits.smem_arrival.end <= plan["q"].start
        assert set(plan) == {"barriers", "q", "k", "v", "found"} and regions[-1].end == row.traits.smem_bytes


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tile_m": 12}, "tile_m 12 is not multiples of 8 rows"),
        ({"tile_m": 0}, "tile_m 0 is not multiples of 8 rows"),
        ({"tile_n": 96}, "tile_n 96 is not 16 or 32 keys for each of 8 warps"),
        ({"tile_n": 384}, "tile_n 384 is not 16 or 32 keys for each of 8 warps"),
        ({"head_dim": 48}, "head_dim 48 is not a multiple of 32"),
        ({"kv_stage": 1}, "kv_stage 1 is below 2"),
        ({"kv_stage": 20}, "bytes of shared memory"),
        ({"tile_m": 64}, "fragments take 432 registers a thread, 216 less 24"),
    ],
    ids=str,
)
def test_traits_that_cannot_run(change: dict[str, int], complaint: str) -> None:
    assert complaint in str(dataclasses.replace(traits_of(128, 8), **change).check(ARCH))


@pytest.mark.parametrize("head_dim", ROW_HEAD_DIMS)
def test_matrices_are_loaded_without_bank_conflicts(head_dim: int) -> None:
    """Eight lanes bring the addresses of one matrix; each row of a tile is part of one matrix of each 16 columns."""
    pytest.importorskip("cutlass")
    from cuteflash.kernels.sm90.swizzle import CHUNK, swizzled

    for first, chunk in itertools.product(range(0, 32, 8), range(head_dim // CHUNK)):
        together = {swizzled(first + row, chunk, 128, head_dim) // CHUNK % 8 for row in range(8)}
        assert len(together) == 8


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """See `Gpu`."""
    return Gpu(monkeypatch)


@pytest.mark.parametrize(
    ("queries", "heads", "pack_gqa", "packed", "few"),
    [
        (1, 8, None, None, True),
        (2, 8, None, None, True),
        (4, 8, None, None, True),
        (5, 8, None, None, False),
        (9, 8, False, None, True),
        (17, 8, False, None, False),
        (1, 8, None, (1, 1, 2, 0), True),
        (1, 8, None, (1, 1, 3, 0), False),
    ],
    ids=str,
)
def test_a_launch_of_few_rows(
    queries: int,
    heads: int,
    pack_gqa: bool | None,
    packed: tuple[int, ...] | None,
    few: bool,
    gpu: Gpu,
    monkeypatch: Any,
) -> None:
    """Four heads of a KV head share a tile. Of packed queries only a mean of one says that all rows are few."""
    chosen: list[Any] = []

    def compiled(kernel_cls: Any, traits: Any, problem: FwdProblem, target: str) -> Any:
        chosen.append(traits)
        return gpu._compiled(kernel_cls, traits, problem, target)

    counters = torch.zeros(NUM_SMS, dtype=torch.int32)
    monkeypatch.setattr(split_planning, "compiled", compiled)
    monkeypatch.setattr(split_planning.arrivals, "of", lambda device, blocks: counters)
    case = Case(seqlen_q=queries, heads=heads, kv_heads=2, head_dim=128)
    tensors = Paged((300, 0, 17, 9), 16, case, packed, e4m3=True).build(CPU)[0]
    gpu.fwd(*tensors.values(), *FwdOptions(num_splits=3, pack_gqa=pack_gqa))
    assert [isinstance(traits, FwdTraitsFewSm90) for traits in chosen] == [few]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_rows_do_not_spill(row: Any, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.dispatch import kernel_class

    traits = row.traits
    problem = problem_of(traits.head_dim)
    compiled = request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, "sm_90a")
    compiled.assert_clean()
    products = (traits.head_dim + traits.head_dim_v) // 16 * (traits.tile_n // WARPS // 16) * (traits.tile_m // 8)
    assert compiled.count(r"HMMA\.16816\.F32 ") == products
    # Q, K and V leave shared memory before TMA may bring what follows, see `Ring.release_loaded`.
    assert compiled.times(r"fence\.proxy\.async\.shared::cta;\s+bar\.warp\.sync") == 3
