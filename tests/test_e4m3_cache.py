"""16-bit queries on e4m3 caches: rows and who gets them, how warps share a tile, launches, errors; on a CPU results."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import append_kv, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, split_planning
from cuteflash.arguments import FwdArguments, FwdOptions
from cuteflash.compat import flash_attn_interface
from cuteflash.dispatch import choose_shipped
from cuteflash.kvcache_planning import check_target
from cuteflash.operands import Operands
from cuteflash.problem import DENSE, FwdProblem, Scores, Storage
from cuteflash.traits.arch import get_arch
from cuteflash.traits.cache_sm90 import CHUNK, LANES, WARPS, FwdTraitsCacheSm90, Share
from cuteflash.traits.row import ROW_HEAD_DIMS
from cuteflash.traits.tables import CACHE_ROWS
from tests.gpu.checks import Case
from tests.gpu.paged import E4M3, Paged
from tests.test_kvcache_ops import CPU, NUM_SMS, Gpu

KVCACHE_LSE = torch.ops.cuteflash.kvcache_fwd_lse.default
HEAD_DIMS = [*((d, d) for d in ROW_HEAD_DIMS), (192, 128), (256, 64)]
LENGTHS = ("decode", "long")
LOOKED_UP = Storage("varlen", "paged", used_k=True, has_page_table=True, has_cache_batch_idx=True, has_leftpad=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """See `Gpu`."""
    return Gpu(monkeypatch)


def problem_of(head_dims: tuple[int, int], *, hard: bool, is_split: bool) -> FwdProblem:
    """What asks the most, or the least, of a row."""
    operands = Operands(
        "bf16" if hard else "fp16", *["bf16" if hard else "fp16"] * 2, *head_dims, 4, cache_dtype="e4m3"
    )
    if not hard:
        return FwdProblem(operands, is_split=is_split)
    return FwdProblem(operands, Scores("window", softcap=True, sink="fp32"), LOOKED_UP, True, is_split)


def kernels(hard: bool) -> dict[FwdTraitsCacheSm90, FwdProblem]:
    """Each kernel that is chosen, once."""
    found: dict[Any, FwdProblem] = {}
    for head_dims, is_split, lengths in itertools.product(HEAD_DIMS, (True, False), LENGTHS):
        problem = problem_of(head_dims, hard=hard, is_split=is_split)
        found.setdefault(choose_shipped(problem, "sm_90a", "sm90", lengths).traits, problem)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("hard", [False, True])
def test_every_head_dim_has_a_row(hard: bool) -> None:
    for head_dims, is_split, lengths in itertools.product(HEAD_DIMS, (True, False), LENGTHS):
        problem = problem_of(head_dims, hard=hard, is_split=is_split)
        traits = choose_shipped(problem, "sm_90a", "sm90", lengths).traits  # type: ignore[arg-type]
        assert isinstance(traits, FwdTraitsCacheSm90) and traits.splits == is_split
        assert traits.check(get_arch("sm_90a")) is None
        plain = dataclasses.replace(problem, operands=dataclasses.replace(problem.operands, cache_dtype=None))
        assert not isinstance(choose_shipped(plain, "sm_90a", "sm90").traits, FwdTraitsCacheSm90)


def test_every_row_is_chosen() -> None:
    chosen = {dataclasses.replace(traits, head_dim=0, head_dim_v=0) for traits in kernels(hard=True)}
    rows = [row.traits for row in CACHE_ROWS["sm90"]]
    assert {dataclasses.replace(traits, head_dim=0, head_dim_v=0) for traits in rows} <= chosen


@pytest.mark.slow
@pytest.mark.parametrize("traits", kernels(hard=True), ids=str)
def test_rows_do_not_spill(traits: FwdTraitsCacheSm90, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.dispatch import kernel_class

    problem = kernels(hard=True)[traits]
    compiled = request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, "sm_90a")
    compiled.assert_clean()
    assert compiled.count("F2FP.F16.E4M3.UNPACK_B")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"warp_specialized": False}, "need warp_specialized"),
        ({"converting_warpgroups": 3}, "2 consumer and 3 converting warpgroups"),
        ({"q_in_regs": False}, "key_warpgroups needs one tile of 64 rows, q_in_regs"),
        ({"tile_n": 48}, "tile_n 48 is not multiples of 16 keys for 2"),
        ({"tile_n": 32, "head_dim": 32}, "tile_n 32 with 32 columns is not whole units"),
        ({"stored_stage": 0}, "stored_stage 0 is below 1"),
        ({"stored_stage": 20}, "bytes of shared memory"),
        ({"splits": False, "fixed_max": True}, "no fixed_max"),
        ({"blocks_per_sm": 2}, "one block a multiprocessor"),
    ],
    ids=str,
)
def test_traits_that_cannot_run(change: dict[str, Any], complaint: str) -> None:
    traits = choose_shipped(problem_of((128, 128), hard=True, is_split=True), "sm_90a", "sm90", "decode").traits
    assert complaint in str(dataclasses.replace(traits, **change).check(get_arch("sm_90a")))


def test_shared_memory_is_not_used_twice() -> None:
    for traits in kernels(hard=True):
        plan = traits.smem_plan
        last = plan.pop("o")
        handed = plan.pop("handed", last)
        assert handed.start == last.start
        if traits.share_q_o:
            assert last.start == plan["q"].start
        else:
            plan["o"] = last
        regions = sorted(plan.values(), key=lambda region: region.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(regions))
        assert max(last.end, handed.end, regions[-1].end) <= traits.smem_bytes
        assert set(plan) >= {"stored_k", "stored_v", "k", "v", "q"}


@pytest.mark.parametrize("tile_n", [32, 64, 96, 128])
@pytest.mark.parametrize("head_dim", ROW_HEAD_DIMS)
def test_warps_convert_each_chunk_once_without_bank_conflicts(head_dim: int, tile_n: int) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.kernels.sm90.convert import place
    from cuteflash.kernels.sm90.swizzle import swizzle_bytes, swizzled

    share = Share.of(tile_n, head_dim)
    if share is None:
        pytest.skip("not whole units for each warp")
    in_unit = [place(share, lane) for lane in range(LANES)]
    places = [
        (unit * share.rows + row, column * share.chunks + chunk)
        for unit in range(WARPS * share.row_units)
        for column in range(share.columns)
        for row, chunk in in_unit
    ]
    assert sorted(places) == list(itertools.product(range(tile_n), range(head_dim // CHUNK)))
    for width in (head_dim, 2 * head_dim):
        for (row, chunk), unit in itertools.product(in_unit, range(WARPS * share.row_units)):
            step = unit * share.rows * swizzle_bytes(width)
            assert swizzled(unit * share.rows + row, chunk, tile_n, width) == swizzled(row, chunk, tile_n, width) + step
    for first in range(0, len(places), 8):
        together = places[first : first + 8]
        stored = [swizzled(row, chunk, tile_n, head_dim) for row, chunk in together]
        assert len({at // CHUNK % 8 for at in stored}) == 8
        for half in range(2):
            converted = [swizzled(row, 2 * chunk + half, tile_n, 2 * head_dim) for row, chunk in together]
            assert len({at // CHUNK % 8 for at in converted}) == 8


# Launches.


def test_a_launch_gets_the_scales(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(NUM_SMS, dtype=torch.int32)
    monkeypatch.setattr(split_planning, "compiled", gpu._compiled)
    monkeypatch.setattr(split_planning.arrivals, "of", lambda device, blocks: counters)
    tensors = Paged((300, 0, 17, 9), 16, Case(seqlen_q=2, heads=4, kv_heads=2), e4m3=True).build(CPU)[0]
    for num_splits in (1, 3):
        gpu.fwd_lse(*tensors.values(), *FwdOptions(num_splits=num_splits))
        problem, arguments = gpu.launches.pop()
        assert (problem.operands.cache_dtype, problem.operands.qk_dtype) == ("e4m3", "bf16")
        assert (problem.operands.k_dtype, problem.operands.product_dtype) == ("e4m3", "fp16")
        assert problem.features >= {"e4m3_cache", "varlen"} and problem.storage.page_rows == 16
        found = FwdArguments.of((*arguments, None), is_split=num_splits > 1)
        assert found.scales.q_descale is None and found.scales.v_mean is None
        assert torch.equal(found.scales.k_descale, tensors["k_descale"])
        assert torch.equal(found.scales.v_descale, tensors["v_descale"])
        assert len(found.flat()) == len(arguments) + 1


def test_whole_dense_caches_have_no_vectors(gpu: Gpu) -> None:
    tensors = Paged((64, 64), None, Case(heads=4, kv_heads=2), all_used=True, slack=0, e4m3=True).build(CPU)[0]
    gpu.fwd(*(tensors | {"k_descale": torch.ones(2)}).values())
    problem, arguments = gpu.launches.pop()
    assert problem.storage == DENSE
    found = FwdArguments.of((*arguments, None))
    assert found.scales.k_descale.shape == (2, 2) and found.packed.seqused_k is None


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_targets_that_do_not_convert_refuse_by_name(target: str) -> None:
    with pytest.raises(NotImplementedError, match=f"target is {target}; .* needs sm_89 or later"):
        check_target(target)
    for other in ("sm_89", "sm_90a", "sm_120"):
        check_target(other)


# Results on a CPU, where tests/gpu/test_e4m3_cache.py runs as well.


def cached(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = {"q": torch.randn(2, 3, 4, 32, generator=generator).to(dtype)}
    given |= {name: torch.randn(2, 20, 2, 32, generator=generator).to(E4M3) for name in ("k_cache", "v_cache")}
    return given | {name: torch.rand(2, 2, generator=generator) + 0.1 for name in ("k_descale", "v_descale")}


def meant(given: dict[str, Tensor], name: str) -> Tensor:
    return given[f"{name}_cache"].float() * given[f"{name}_descale"][:, None, :, None]


def test_an_element_stands_for_itself_times_its_scale() -> None:
    given = cached()
    expected = flash_attn_func(given["q"], meant(given, "k"), meant(given, "v"), causal=True)
    assert torch.equal(flash_attn_with_kvcache(**given, causal=True), expected)
    one = given | {name: given[name][0].clone() for name in ("k_descale", "v_descale")}
    both = given | {name: given[name][:1].expand(2, 2) for name in ("k_descale", "v_descale")}
    assert torch.equal(flash_attn_with_kvcache(**one), flash_attn_with_kvcache(**both))
    assert flash_attn_with_kvcache(**cached(torch.bfloat16)).dtype == torch.bfloat16


def test_what_is_appended_is_quantised() -> None:
    given, by_hand = cached(), cached()
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    new = {"k": given["q"][:, :, :2] * 2, "v": given["q"][:, :, 2:]}
    found = flash_attn_with_kvcache(**given, **new, cache_seqlens=lengths, causal=True)
    caches = {name: x for name, x in by_hand.items() if name != "q"}
    append_kv(**caches, **new, cache_seqlens=lengths)
    assert all(torch.equal(given[name].view(torch.uint8), by_hand[name].view(torch.uint8)) for name in caches)
    assert torch.equal(found, flash_attn_with_kvcache(**by_hand, cache_seqlens=lengths + 3, causal=True))


def test_packed_queries_on_pages() -> None:
    given = cached()
    table, ends = torch.arange(10, dtype=torch.int32).reshape(2, 5), torch.tensor([0, 3, 6], dtype=torch.int32)
    pages = [given[name].reshape(10, 4, 2, 32) for name in ("k_cache", "v_cache")]
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    scales = {name: given[name] for name in ("k_descale", "v_descale")}
    named = {"cu_seqlens_q": ends, "seqused_k": lengths, "page_table": table}
    found = flash_attn_varlen_func(given["q"].flatten(0, 1), *pages, **named, **scales, causal=True)
    expected = flash_attn_with_kvcache(**given, cache_seqlens=lengths, causal=True)
    assert torch.equal(found, expected.flatten(0, 1))
    with pytest.raises(NotImplementedError, match="q_descale"):
        flash_attn_varlen_func(given["q"].flatten(0, 1), *pages, **named, **scales, q_descale=torch.ones(2, 2))


def test_flash_attention_3() -> None:
    given = cached()
    theirs = flash_attn_interface.flash_attn_with_kvcache
    assert torch.equal(theirs(**given, causal=True), flash_attn_with_kvcache(**given, causal=True))
    ones = {"k_descale": torch.ones(2), "v_descale": given["v_descale"]}
    bare = {name: x for name, x in given.items() if name != "k_descale"}
    assert torch.equal(theirs(**bare), flash_attn_with_kvcache(**given | ones))
    with pytest.raises(NotImplementedError, match="q_descale"):
        theirs(**given, q_descale=given["k_descale"])
    halves = given | {name: given[name].float() for name in ("k_cache", "v_cache")}
    with pytest.raises(NotImplementedError, match="k_descale"):
        theirs(**halves)


def test_autocast_leaves_caches_alone() -> None:
    given = cached()
    with torch.autocast("cpu", torch.bfloat16):
        found = flash_attn_with_kvcache(**given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), flash_attn_with_kvcache(**given), atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_opcheck_and_compile() -> None:
    tensors = Paged((5, 0, 17), 4, Case(seqlen_q=3, head_dim=16, heads=4, kv_heads=2), e4m3=True).build(CPU)[0]
    # Not test_schema: torch compares tensors by arithmetic that it does not have for 8 bits.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(KVCACHE_LSE, tuple(tensors.values()), test_utils=utils)
    given = cached()
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given, causal=True), flash_attn_with_kvcache(**given, causal=True))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scale": ({"k_descale": None}, ValueError, "k_descale is None; allowed with caches of torch.float8_e4m3fn"),
    "one cache": (
        {"v_cache": lambda t: t["v_cache"].float()},
        TypeError,
        "v_cache.dtype is torch.float32; allowed: torch",
    ),
    "16 bits": (
        {name: lambda t: t["q"][:, :, :2] for name in ("k_cache", "v_cache")},
        ValueError,
        "k_descale is given with caches of torch.float32; allowed with torch.float8_e4m3fn only",
    ),
    "e5m2": (
        {"k_cache": lambda t: t["k_cache"].to(torch.float8_e5m2)},
        TypeError,
        "k_cache.dtype is torch.float8_e5m2",
    ),
    "scale's type": ({"v_descale": lambda t: t["v_descale"].half()}, TypeError, "v_descale.dtype is torch.float16"),
    "scale's shape": (
        {"v_descale": torch.ones(2, 3)},
        ValueError,
        r"v_descale.shape is \(2, 3\); allowed: \(2, 2\), \(batch, kv_heads\) or \(kv_heads,\)",
    ),
    "scale's rank": ({"v_descale": torch.ones(())}, ValueError, r"v_descale.shape is \(\); allowed: \(2,\)"),
    "zero": ({"k_descale": torch.tensor([1.0, 0.0])}, ValueError, r"k_descale\[0, 1\] is 0.0; allowed"),
    "NaN": ({"v_descale": torch.tensor([torch.nan, 1.0])}, ValueError, r"v_descale\[0, 0\] is nan; allowed"),
    "head dim": (
        {name: lambda t, name=name: t[name][..., :24] for name in ("q", "k_cache", "v_cache")},
        ValueError,
        r"q.shape\[3\] \(head_dim\) is 24; allowed: multiples of 16 up to 256",
    ),
    "meta": ({"k_cache": lambda t: t["k_cache"].to("meta")}, ValueError, "k_cache.device is meta; allowed: cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_refused(name: str) -> None:
    change, error, message = BAD[name]
    given = cached()
    changed = given | {key: make(given) if callable(make) else make for key, make in change.items()}
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**changed)
