"""The quantising kernels without a GPU: what they compile to for sm_90a, their work and traits on host integers."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuteflash.kernels.common import quantize_shared, quantize_work
from cuteflash.kernels.common.quantize import Quantize
from cuteflash.kernels.common.quantize_shared import SharedVisit, shared_tiles
from cuteflash.kernels.common.quantize_turn import kept, written
from cuteflash.kernels.common.quantize_work import HeadTiles, Mix, Work
from cuteflash.quantize_planning import problem_of
from cuteflash.quantize_problem import Granularity, QuantizeOptions, QuantizeProblem
from cuteflash.traits.arch import BLOCK_SMEM, get_arch
from cuteflash.traits.quantize import COLUMNS, ROWS, SHARED_VISITS, TARGET, QuantizeTraits, traits_of
from cuteflash.validate_quantize import QuantizeInputs
from tests.kernel_store import KernelStore
from tests.slow import slow_but

EVERYTHING: dict[str, Any] = {"transposes_v": True, "smooths_v": True}
# Each case is there for what no other case compiles.
CASES = {
    "given": QuantizeProblem("bf16", 128, 128, has_scales=True, transposes_v=True),
    "given-blocks": QuantizeProblem("bf16", 96, 80, "block", has_scales=True, hadamard=32, rotary_dim=48),
    "head-smooth-rotated": QuantizeProblem("bf16", 256, 256, hadamard=256, rotary_dim=256, **EVERYTHING),
    "head-interleaved": QuantizeProblem("fp16", 128, 128, rotary_dim=64, rotary_interleaved=True, rotary_dtype="fp16"),
    "given-half": QuantizeProblem("bf16", 128, 128, has_scales=True, rotary_dim=64),
    "given-half-rotated": QuantizeProblem("bf16", 128, 128, has_scales=True, rotary_dim=96, hadamard=64),
    "block-grouped-half-rotated": QuantizeProblem(
        "bf16", 128, 128, "block", rotary_dim=96, hadamard=64, is_grouped=True, **EVERYTHING
    ),
    "head-turned": QuantizeProblem("bf16", 64, 64, rotary_dim=64, hadamard=64),
    "head-whole": QuantizeProblem("bf16", 96, 96, rotary_dim=96, hadamard=32, **EVERYTHING),
    "given-rotated": QuantizeProblem("fp16", 128, 128, has_scales=True, hadamard=64),
    "block-grouped": QuantizeProblem("bf16", 128, 128, "block", is_grouped=True),
    "block-mixed": QuantizeProblem("bf16", 128, 128, "block", hadamard=64),
    "block-grouped-mixed": QuantizeProblem("fp16", 64, 64, "block", hadamard=64, is_grouped=True),
    "head-mixed": QuantizeProblem("bf16", 256, 256, hadamard=64),
    "block": QuantizeProblem("bf16", 128, 128, "block", **EVERYTHING),
    "block-rotated": QuantizeProblem("bf16", 256, 256, "block", hadamard=256, rotary_dim=256, **EVERYTHING),
    "head-turned-mixed": QuantizeProblem("bf16", 64, 64, rotary_dim=64, hadamard=64, **EVERYTHING),
    "head-folded-turned-mixed": QuantizeProblem(
        "bf16", 128, 128, rotary_dim=128, hadamard=64, folds=True, **EVERYTHING
    ),
    "head-folded": QuantizeProblem("bf16", 128, 128, rotary_dim=64, hadamard=32, folds=True),
    "block-turned-mixed": QuantizeProblem("fp16", 256, 256, "block", rotary_dim=256, hadamard=64, **EVERYTHING),
    "block-grouped-turned-mixed": QuantizeProblem(
        "bf16", 128, 128, "block", rotary_dim=128, hadamard=64, is_grouped=True, **EVERYTHING
    ),
    "cluster": QuantizeProblem("bf16", 64, 64, "block", cluster=4, **EVERYTHING),
    "cluster-mixed": QuantizeProblem("bf16", 256, 256, "block", hadamard=64, cluster=8, transposes_v=True),
    "cluster-rotated": QuantizeProblem("fp16", 128, 128, "block", hadamard=32, cluster=3),
    "cluster-turned-mixed": QuantizeProblem(
        "bf16", 128, 128, "block", rotary_dim=128, hadamard=64, cluster=4, **EVERYTHING
    ),
    "shared-turned-mixed": QuantizeProblem(
        "bf16", 128, 128, rotary_dim=128, hadamard=64, measures_shared=True, is_packed=True, **EVERYTHING
    ),
    "given-turned-mixed": QuantizeProblem("bf16", 128, 64, has_scales=True, rotary_dim=128, hadamard=64),
    "packed-turned-mixed": QuantizeProblem(
        "bf16", 64, 64, "block", rotary_dim=64, rotary_dtype="bf16", hadamard=64, is_packed=True, **EVERYTHING
    ),
    "packed": QuantizeProblem("bf16", 128, 128, is_packed=True, has_used=True, to="e5m2", **EVERYTHING),
    "packed-block": QuantizeProblem("bf16", 256, 256, "block", rotary_dim=256, is_packed=True, **EVERYTHING),
}


@pytest.mark.parametrize("name", slow_but(CASES, "given", "block", "packed"))
def test_kernels_are_clean_and_load_16_bytes_at_a_time(kernels: KernelStore, name: str) -> None:
    problem = CASES[name]
    compiled = kernels(Quantize, traits_of(problem), problem, TARGET)
    compiled.assert_clean()
    assert compiled.count(r"LDG\.E\.128") and compiled.count(r"STG\.E\.128")
    assert not compiled.count(r"LDG\.E\.U16")
    # Two elements each, of 16 columns of a head of V and one of Q or K, 4 rows of each; without a rotary embedding of
    # heads that share a scale pairs, pairs again, and one that shares none.
    rows = 5 * ROWS if problem.is_grouped and not problem.rotary_dim else ROWS
    assert compiled.count(f"F2FP.SATFINITE.{problem.to.upper()}") == 8 * (rows + ROWS)


@pytest.mark.parametrize("name", slow_but([name for name in CASES if "turned-mixed" in name], "block-turned-mixed"))
def test_rows_with_a_rotary_embedding_are_mixed_without_a_shuffle(kernels: KernelStore, name: str) -> None:
    problem = CASES[name]
    traits = traits_of(problem)
    compiled = kernels(Quantize, traits, problem, TARGET)
    # Six products for each 16 of a thread's elements, each time that they are needed: for what is written, for scales
    # that have to be found, and again for those of elements that are not finite.
    uses = 1 + 2 * (not problem.has_scales)
    assert compiled.count("HMMA.16816.F32") >= 6 * ROWS * uses
    of_warp = 5  # shuffles for the largest number of a warp
    maxima = 2 if problem.scales_by_block else traits.measured + 3 if problem.measures_heads else 0
    assert compiled.count("SHFL") <= of_warp * maxima + 2  # and for what a warp has in common


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_traits_fit_a_multiprocessor(head_dim: int) -> None:
    arch = get_arch(TARGET)
    for granularity, has_scales, rotary_dim in itertools.product(("head", "block"), (False, True), (0, 16)):
        problem = QuantizeProblem("bf16", 16, head_dim, granularity, has_scales, rotary_dim=rotary_dim, **EVERYTHING)
        traits = traits_of(problem)
        assert traits.num_threads % 32 == 0 and traits.num_threads <= 512
        assert traits.resident * traits.num_threads <= arch.max_threads_per_sm
        assert traits.resident <= 32 and 0 < traits.carveout(head_dim) <= 100
        assert traits.smem_bytes <= arch.smem_per_block
        assert not problem.scales_by_block or traits.tokens == 128


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_cosines_and_sines_of_all_resident_blocks_fit(head_dim: int, granularity: Granularity) -> None:
    problem = QuantizeProblem("bf16", head_dim, head_dim, granularity, hadamard=64, rotary_dim=head_dim, **EVERYTHING)
    traits, arch = traits_of(problem), get_arch(TARGET)
    assert traits.centres_v and traits.tiles_of_v > 1
    assert traits.shared_bytes(problem) == 256 * traits.num_threads  # more than a tile of V^T
    assert bool(traits.measuring_bytes(problem)) is (granularity == "head")
    for blocks, nbytes in (
        (traits.resident, traits.shared_bytes(problem)),
        (traits.measuring, max(traits.measuring_bytes(problem), traits.smem_bytes)),
    ):
        assert nbytes <= arch.smem_per_block and blocks * (nbytes + BLOCK_SMEM) <= arch.smem_per_sm
    loaded = dataclasses.replace(problem, hadamard=32, transposes_v=False)  # for each head
    assert traits_of(loaded).shared_bytes(loaded) == 0


@pytest.mark.parametrize(
    ("first", "second"), [(0, 5), (5, 0), (1, 1), (7, 3), (3, 7), (1024, 2048), (4096, 2048), (9, 8)]
)
def test_every_block_of_a_mix_runs_once(first: int, second: int) -> None:
    mix = Mix.of(first, second)
    numbers = [int(mix.number(place, first)) for place in range(first + second)]
    assert len(numbers) == first + second
    assert [n for n in numbers if n < first] == list(range(first))
    assert [n for n in numbers if n >= first] == list(range(first, first + second))
    half = numbers[: (first + second) // 2]
    assert abs(sum(n < first for n in half) - first / 2) <= 1 + first / 6


def test_a_mix_backwards_is_the_same_order_from_its_end_on() -> None:
    work = Work(HeadTiles.of(2, 3, 4), HeadTiles.of(2, 3, 1), HeadTiles.of(2, 3, 1)).mixed()
    order = [int(work.number(place)) for place in range(work.size())]
    assert [int(work.number(place, is_backwards=True)) for place in range(work.size())] == order[::-1]
    assert [int(dataclasses.replace(work, mix=None).number(place)) for place in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4)])
def test_threads_of_a_row_bring_each_other_what_they_keep(sizes: tuple[int, int]) -> None:
    """Each finds its own pieces, and eight threads, 16 bytes each, write and read all banks."""
    (lanes, slots), threads = sizes, 64
    memory = {}
    for k, first in itertools.product(range(slots), range(0, threads, 8)):
        places = []
        for thread in range(first, first + 8):
            place, slot = written(thread, thread % lanes, k, sizes)
            memory[place, slot] = thread // lanes, k * lanes + thread % lanes
            places.append(place % 8)
        assert sorted(places) == list(range(8))
    for slot, first in itertools.product(range(slots), range(0, threads, 8)):
        places = [kept(thread, slot, sizes) for thread in range(first, first + 8)]
        assert sorted(place % 8 for place in places) == list(range(8))
        for thread, place in enumerate(places, first):
            assert memory[place, slot] == (thread // lanes, thread % lanes * slots + slot)


@pytest.mark.parametrize(
    ("heads", "granularity", "rotary", "expected"),
    [
        ((8, 8), "block", True, (1, False, False)),
        ((16, 4), "block", True, (4, False, False)),
        ((8, 2), "block", False, (4, False, False)),
        ((8, 1), "block", False, (8, False, False)),
        ((8, 2), "block", True, (4, False, False)),
        ((8, 1), "block", True, (1, True, False)),  # two heads of a block, of both batch entries, would share angles
        ((9, 1), "block", False, (1, True, False)),
        ((8, 2), "head", True, (1, False, False)),
        ((8, 2), "head", False, (1, False, False)),
        ((8, 8), "head", True, (1, False, False)),
    ],
)
def test_how_a_scale_of_several_heads_is_found(
    heads: tuple[int, int], granularity: Granularity, rotary: bool, expected: tuple[int, bool, bool]
) -> None:
    q, k = (torch.empty((2, 128, count, 64), dtype=torch.bfloat16) for count in heads)
    table = torch.empty((128, 32)) if rotary else None
    inputs = QuantizeInputs(q, k, k, rotary_cos=table, rotary_sin=table)
    problem = problem_of(inputs, QuantizeOptions(granularity))
    assert (problem.cluster, problem.is_grouped, problem.measures_shared) == expected
    packed = QuantizeInputs(q[0], k[0], k[0], cu_seqlens_q=torch.tensor([0, 128]), cu_seqlens_k=torch.tensor([0, 128]))
    packed = packed._replace(rotary_cos=table, rotary_sin=table)
    problem = problem_of(packed, QuantizeOptions(granularity))
    assert problem.cluster == 1
    assert problem.measures_shared == (granularity == "head" and rotary and heads[0] != heads[1])


@pytest.mark.parametrize(
    ("change", "granularity", "expected"),
    [
        ({}, "head", True),
        ({}, "block", False),
        ({"smooth_v": True}, "block", False),
        ({"rotary": False}, "head", False),
        ({"tokens": 8193}, "head", False),
        ({"tokens": 0}, "head", False),
        ({"head_dim": 48}, "head", False),
    ],
)
def test_which_blocks_put_parts_together(change: dict[str, Any], granularity: Granularity, expected: bool) -> None:
    asked = {"rotary": True, "tokens": 8192, "head_dim": 64, "smooth_v": False} | change
    x = torch.empty((1, asked["tokens"], 4, asked["head_dim"]), dtype=torch.bfloat16, device="meta")
    table = torch.empty((asked["tokens"], 16), device="meta") if asked["rotary"] else None
    inputs = QuantizeInputs(x, x, x, rotary_cos=table, rotary_sin=table)
    assert problem_of(inputs, QuantizeOptions(granularity, smooth_v=asked["smooth_v"])).folds is expected


def test_blocks_that_share_heads_have_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the numbers of heads, tiles and blocks, and none of them many more than it should have."""
    monkeypatch.setattr(quantize_work, "choose", lambda is_first, first, second: first if is_first else second)
    monkeypatch.setattr(quantize_shared, "choose", quantize_work.choose)
    monkeypatch.setattr(quantize_shared, "Int32", int)
    cases = [(4, 16, 4, 32), (4, 16, 16, 32), (3, 15, 5, 3), (1, 9, 1, 3), (16, 16, 2, 8), (2, 7, 7, 200), (1, 2, 1, 1)]
    for (batch, heads, kv_heads, tiles), together, of_k in itertools.product(cases, (False, True), (0, 8)):
        cluster = heads // kv_heads if together else 1
        if cluster == 1 and of_k:
            continue
        q, k = (SimpleNamespace(shape=(batch, tiles * 128, count, 64)) for count in (heads, kv_heads))
        tensors: Any = SimpleNamespace(q=q, k=k)
        found = shared_tiles(tensors, tiles, cluster, 2, (SHARED_VISITS, of_k))
        work = Work(*found[:2], HeadTiles.of(1, 1, 0), sharing=found[2])
        seen = []
        for number in range(work.first_v()):
            visit = SharedVisit.of(work, number, cluster, not of_k)
            assert visit.count <= 2 * SHARED_VISITS * (1 if cluster == 1 else 2)
            for step in range(visit.count):
                is_q, head, place = visit.head(step)
                seen.append((bool(is_q), place.batch, place.tile, head))
                assert place.head == (head // (heads // kv_heads) if is_q else head)
        every = itertools.product(range(batch), range(tiles))
        expected = [
            (x, *at, h) for at in every for x, count in ((True, heads), (False, kv_heads)) for h in range(count)
        ]
        assert sorted(seen) == sorted(expected)


def test_wrong_traits_and_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 48; allowed: 32, 64, 128"):
        QuantizeTraits(64, 48)
    problem = QuantizeProblem("bf16", 64, 64, "block")
    with pytest.raises(ValueError, match="tokens is 64; allowed with scales by block: 128"):
        Quantize(QuantizeTraits(64, 64), problem)
    with pytest.raises(ValueError, match="head_dim_v is 72; allowed: multiples of 16 up to 256"):
        dataclasses.replace(problem, head_dim_v=72)
    with pytest.raises(ValueError, match="dtype is 'fp8'; allowed: fp16, bf16"):
        dataclasses.replace(problem, dtype="fp8")


@pytest.mark.parametrize(
    ("problem", "rows", "rows_v", "size"),
    [
        (QuantizeProblem("bf16", 64, 64), 512, 512, 6 * 3 + 2 * 2 + 2 * 5),
        (QuantizeProblem("bf16", 64, 64, smooths_v=True), 512, 512, 6 * 3 + 2 * 2 + 2 * 5 * 3 * 64),
        (QuantizeProblem("bf16", 64, 64, rotary_dim=64), 128, 512, 6 * 3 + 2 * 2 + 2 * 5),
        (QuantizeProblem("bf16", 64, 64, rotary_dim=64, is_packed=True), 512, 512, 6 * 3 + 2 * 2 + 2 * 5),
        (QuantizeProblem("bf16", 64, 64, "block", smooths_v=True), 512, 256, 2 * 5 * 64),
    ],
)
def test_the_workspace_holds_each_part(problem: QuantizeProblem, rows: int, rows_v: int, size: int) -> None:
    traits = traits_of(problem)
    for each, is_v in ((rows, False), (rows_v, True)):
        assert [traits.parts(seqlen, is_v) for seqlen in (2 * each + 1, 2 * each - 1, 0)] == [3, 2, 1]
    assert traits.workspace_size(problem, 6, 2, (3, 2, 5)) == size


def test_magnitudes_of_rotated_elements_are_compared_without_a_sign(kernels: KernelStore) -> None:
    """Keys of values from 1 on have the highest bit."""
    problem = CASES["block-mixed"]
    compiled = kernels(Quantize, traits_of(problem), problem, TARGET)
    elements = COLUMNS * ROWS
    assert compiled.times(r"mad\.lo\.u32 .*, 2, 16777216;") == elements
    assert compiled.times(r"max\.u32 ") == elements  # and one for a thread without a finite one
