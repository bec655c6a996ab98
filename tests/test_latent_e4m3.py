"""Latent attention with a cache of e4m3, without a GPU: results, refusals, rows, and what the kernel compiles to."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import append_latents, flash_mla_decode, mla_planning
from cuteflash.dispatch import choose_mla, kernel_class
from cuteflash.mla_problem import MlaProblem
from cuteflash.nn import MultiHeadLatentAttention
from cuteflash.traits.arch import get_arch
from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3
from cuteflash.traits.rows_mla_e4m3 import ROWS

FP8 = torch.float8_e4m3fn
MLA = torch.ops.cuteflash.mla_decode.default
HOPPER = get_arch("sm_90a")
PROBLEM = MlaProblem("bf16", is_e4m3=True)
PROBLEMS = [
    PROBLEM,
    MlaProblem("fp16", is_e4m3=True),
    MlaProblem("bf16", is_paged=False, is_e4m3=True),
    MlaProblem("fp16", is_paged=False, is_split=False, is_e4m3=True),
]
NUMBERS = (1, 16, 17, 32, 33, 64, 640)  # query rows of a sequence
TILES = {
    "sm_90a": [(16, 64), (16, 64), (32, 64), (32, 64), (64, 64), (64, 64), (64, 64)],
    "sm_89": [(16, 32), (16, 32), *[(32, 32)] * 5],
}
TILES["sm_120"] = TILES["sm_89"]
LENGTHS = (65, 0, 1, 128)
BATCH, PAGE = len(LENGTHS), 64


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(is_paged: bool = True, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Arguments by name; rows of no sequence are NaN, and table entries for them are no pages."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, 3, 5, 576, generator=generator).to(dtype)
    rows = torch.randn(BATCH, 128, 1, 576, generator=generator)
    for row, length in zip(rows, LENGTHS, strict=True):
        row[length:] = torch.nan
    descale = torch.rand(BATCH, generator=generator) + 0.5
    lengths = int32(*LENGTHS)
    if not is_paged:
        return {"q": q, "kv_cache": rows.to(FP8), "cache_seqlens": lengths, "page_table": None, "descale": descale}
    table = torch.randperm(2 * BATCH, generator=generator).view(BATCH, 2).int()
    pages = torch.empty(2 * BATCH, PAGE, 1, 576)
    pages[table.flatten().long()] = rows.view(-1, PAGE, 1, 576)
    for row, length in zip(table, LENGTHS, strict=True):
        row[-(-length // PAGE) :] = -1
    return {"q": q, "kv_cache": pages.to(FP8), "cache_seqlens": lengths, "page_table": table, "descale": descale}


def called(tensors: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    q, cache, lengths, *_ = tensors.values()
    named = {name: tensors[name] for name in ("page_table", "descale")} | options
    return flash_mla_decode(q, cache, lengths, **named, causal=True, return_lse=True)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_attention_to_the_cache_times_its_descale(is_paged: bool, dtype: torch.dtype) -> None:
    tensors = inputs(is_paged, dtype)
    out, lse = called(tensors)
    wide = inputs(False, dtype)
    rows = wide["kv_cache"].float() * wide["descale"].view(-1, 1, 1, 1)
    exact, exact_lse = flash_mla_decode(wide["q"].float(), rows, wide["cache_seqlens"], causal=True, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), exact, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, exact_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("descale", [torch.tensor(0.75), torch.tensor([0.75])], ids=["()", "(1,)"])
def test_one_descale_is_that_of_every_sequence(descale: Tensor) -> None:
    tensors = inputs()
    found = called(tensors | {"descale": descale})
    for a, b in zip(found, called(tensors | {"descale": torch.full((BATCH,), 0.75)}), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("descale", [torch.tensor(0.5), torch.rand(BATCH) + 0.25], ids=["one", "each"])
def test_rows_are_divided_by_the_descale_when_they_are_appended(descale: Tensor) -> None:
    tensors = inputs()
    cache, table = torch.zeros_like(tensors["kv_cache"]), torch.arange(2 * BATCH, dtype=torch.int32).view(BATCH, 2)
    rows = torch.randn(BATCH, 2, 576) * 200
    append_latents(cache, rows, int32(63, 0, 64, 5), page_table=table, descale=descale)
    expected = (rows / descale.view(-1, 1, 1)).clamp(-448, 448).to(FP8).float()
    for i, first in enumerate((63, 0, 64, 5)):
        found = cache[table[i].long()].flatten(0, 1)[first : first + 2, 0]
        torch.testing.assert_close(found.float(), expected[i], atol=0, rtol=0.13)  # the reference takes 1 / descale
    assert (cache.float() != 0).sum() <= 2 * BATCH * 576


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "none": (
        {"descale": None},
        ValueError,
        "descale is None; allowed with a kv_cache of torch.float8_e4m3fn: a tensor",
    ),
    "no tensor": ({"descale": 1.0}, TypeError, "descale is a float; allowed: a torch.Tensor"),
    "dtype": ({"descale": torch.ones(1).half()}, TypeError, "descale.dtype is torch.float16; allowed: torch.float32"),
    "shape": (
        {"descale": torch.ones(3)},
        ValueError,
        r"descale.shape is \(3,\); allowed: \(\), \(1,\), or \(4,\), the",
    ),
    "heads": ({"descale": torch.ones(4, 1)}, ValueError, r"descale.shape is \(4, 1\); allowed"),
    "device": (
        {"descale": torch.ones(1, device="meta")},
        ValueError,
        "descale.device is meta; allowed: cpu, that of kv",
    ),
    "cache": (
        {"kv_cache": torch.zeros(8, 64, 1, 576, dtype=torch.bfloat16)},
        ValueError,
        "descale is given with a kv_cache of torch.bfloat16; allowed with torch.float8_e4m3fn only",
    ),
    "e5m2": (
        {"kv_cache": torch.zeros(8, 64, 1, 576, dtype=torch.float8_e5m2)},
        TypeError,
        "kv_cache.dtype is torch.float8_e5m2; allowed: torch.float16, torch.bfloat16, torch.float8_e4m3fn",
    ),
    "q": (
        {"q": torch.zeros(4, 3, 5, 576, dtype=FP8)},
        TypeError,
        "q.dtype is torch.float8_e4m3fn; allowed: torch.floa",
    ),
    "656": (
        {"kv_cache": torch.zeros(8, 64, 1, 656, dtype=torch.uint8)},
        NotImplementedError,
        r"kv_cache.shape\[3\] is 656, FlashMLA's rows with scales for each 128 columns",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        called(inputs() | change)


@pytest.mark.parametrize(
    ("cache", "rows", "descale", "error", "message"),
    [
        (FP8, torch.bfloat16, None, ValueError, "descale is None; allowed with a kv_cache of torch.float8_e4m3fn"),
        (FP8, FP8, torch.ones(1), TypeError, "rows.dtype is torch.float8_e4m3fn; allowed: 16-bit rows"),
        (
            torch.bfloat16,
            torch.bfloat16,
            torch.ones(1),
            ValueError,
            "descale is given with a kv_cache of torch.bfloat1",
        ),
        (FP8, torch.bfloat16, 2.0, TypeError, "descale is a float; allowed: a torch.Tensor"),
    ],
)
def test_rows_that_are_not_appended(
    cache: torch.dtype, rows: torch.dtype, descale: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        append_latents(torch.zeros(2, 64, 1, 576, dtype=cache), torch.zeros(2, 1, 576, dtype=rows), 0, descale=descale)


@pytest.mark.slow
@pytest.mark.parametrize("is_paged", [False, True])
def test_opcheck(is_paged: bool) -> None:
    *tensors, descale = inputs(is_paged).values()
    # Not test_schema: torch compares tensors by arithmetic that it does not have for 8 bits.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(MLA, tuple(tensors), {"descale": descale}, test_utils=utils)


@pytest.mark.slow
def test_compiling_makes_one_graph() -> None:
    torch._dynamo.reset()

    def step(q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor, descale: Tensor, row: Tensor) -> Tensor:
        append_latents(cache, row, lengths, page_table=table, descale=descale)
        return flash_mla_decode(q, cache, lengths + 1, page_table=table, causal=True, descale=descale)

    q, cache, _, _, descale = inputs().values()
    table = torch.arange(2 * BATCH, dtype=torch.int32).view(BATCH, 2)
    cache = torch.zeros_like(cache)
    row = torch.randn(BATCH, 1, 576).bfloat16()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    mine = cache.clone()
    arguments = int32(3, 64, 0, 100), table, descale, row
    assert torch.equal(compiled(q, mine, *arguments), step(q, cache, *arguments))
    assert torch.equal(mine.view(torch.uint8), cache.view(torch.uint8))


@torch.no_grad()
def test_the_module_decodes_with_such_a_cache() -> None:
    torch.manual_seed(0)
    attention = MultiHeadLatentAttention(64, num_heads=2, qk_nope_head_dim=16, v_head_dim=16)
    x, descale = torch.randn(2, 12, 64), torch.tensor([0.02, 0.03])
    cache = torch.zeros(2, 64, 1, 576, dtype=FP8)
    whole, lengths = attention(x), int32(8, 8)
    attention(x[:, :8], kv_cache=cache, descale=descale)
    plain = attention(x[:, 8:], kv_cache=cache.clone(), cache_seqlens=lengths, absorbed=False, descale=descale)
    absorbed = attention(x[:, 8:], kv_cache=cache, cache_seqlens=lengths, descale=descale)
    torch.testing.assert_close(absorbed, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(absorbed, whole[:, 8:], atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match="descale is given without kv_cache; allowed: None"):
        attention(x, descale=descale)


def test_gradients_are_refused_by_name() -> None:
    tensors = inputs()
    tensors["descale"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"descale.requires_grad is True"):
        called(tensors)


# The kernel


def cases() -> list[Any]:
    """(target, row, problem): on Hopper every problem, and with each row each value that a problem has; one on Ada."""
    found = []
    for target in ("sm_90a", "sm_89"):
        rows = dict.fromkeys(choose_mla(PROBLEM, rows, target) for rows in NUMBERS)
        if target == "sm_89":
            found += [(target, row, PROBLEM) for row in rows]
            continue
        opposite = PROBLEMS[-1]  # in all from the first
        found += [(target, row, problem) for row in rows for problem in (PROBLEM, opposite)]
        found += [(target, row, problem) for row, problem in zip(rows, PROBLEMS[1:-1])]
    return [
        pytest.param(target, row, problem, id=f"{target}-{row.tile_m}x{row.tile_n}-{problem}")
        for target, row, problem in found
    ]


@pytest.mark.parametrize("row", dict.fromkeys(ROWS), ids=str)
def test_lanes_have_neighbouring_columns_of_o(row: MlaTraitsE4m3) -> None:
    """Of each 16 columns a product's first group of 8 has the even ones, its second one the odd ones."""
    pytest.importorskip("cutlass")
    from cuteflash.kernels.sm80.mla_e4m3_epilogue import quads_of

    found = {}
    for warp, lane in itertools.product(range(row.num_warps), range(4)):
        fragments = types.SimpleNamespace(warp=warp, lane=lane)
        for numbers, start in quads_of(types.SimpleNamespace(traits=row), fragments):
            for column, number in enumerate(numbers, start):
                group, (odd, pair) = number // 4, divmod(number % 4, 2)
                found[column] = warp * row.warp_columns + 16 * group + 2 * (2 * lane + pair) + odd
    assert found == {column: column for column in range(512)}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "row", "problem"), cases())
def test_rows_do_not_spill(kernels: Any, target: str, row: MlaTraitsE4m3, problem: MlaProblem) -> None:
    pytest.importorskip("cutlass")
    compiled = kernels(kernel_class(row), row, problem, target)
    compiled.assert_clean()
    scores = row.tile_m // 16 * (row.tile_n // 8) * 36  # products of 16 rows, 8 keys and 16 columns
    values = row.tile_m // 16 * (512 // 8) * (row.tile_n // 16)
    assert compiled.count("HMMA.16816.F32") == (scores + values) // row.num_warps
    groups = row.product_warps_m  # of warps, each of which converts all keys
    words = row.tile_n * groups * 576 // 4 + row.tile_n * 512 // 4
    assert compiled.count("F2FP.F16.E4M3.UNPACK_B") == 2 * words // row.num_threads
    assert compiled.count("LDGSTS.E.BYPASS")  # cp.async past L1
    assert compiled.count(r"LDSM\.16\.M88\.4") and compiled.count(r"LDSM\.16\.MT88\.4")


@pytest.mark.parametrize("target", TILES)
def test_rows_are_chosen_by_what_a_sequence_asks_and_a_device_has(target: str) -> None:
    found = [choose_mla(PROBLEM, rows, target) for rows in NUMBERS]
    assert [(row.tile_m, row.tile_n) for row in found] == TILES[target]
    assert found == [choose_mla(PROBLEM, rows, target, "sm80") for rows in NUMBERS]


def test_every_row_is_taken_somewhere() -> None:
    assert {choose_mla(PROBLEM, rows, target) for rows, target in itertools.product(NUMBERS, TILES)} == set(ROWS)


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_devices_without_the_conversion_are_refused(target: str) -> None:
    with pytest.raises(NotImplementedError, match=f"on {target} in an e4m3 cache: .*{target} does not convert e4m3"):
        choose_mla(PROBLEM, 16, target)


def test_the_sm90_family_has_none() -> None:
    with pytest.raises(NotImplementedError, match=r"no row of the sm90 family .* in an e4m3 cache: it has none"):
        choose_mla(PROBLEM, 16, "sm_90a", "sm90")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tile_m}x{row.tile_n}")
def test_shared_memory_is_planned(row: MlaTraitsE4m3) -> None:
    plan = row.smem_plan
    assert plan["q"].nbytes == row.tile_m * 576 * 2 and plan["pages"].nbytes == row.kv_stage * row.tile_n * 576
    assert all(plan[name].start % 1024 == 0 for name in ("q", "pages", "p"))
    assert all(one.end == other.start for one, other in itertools.pairwise(plan.values()))
    assert row.smem_bytes == plan["scales"].end


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tile_m": 24}, "tile_m 24 is not 16 rows for each warp, or each of 2, 4, .. of 8"),
        ({"num_warps": 16}, "num_warps 16 is not 1, 2, 4 or 8: each has multiples of 64 columns of O"),
        ({"k_parts": 3}, "k_parts 3 is not 1, or 2 of 4 warps with the same query rows"),
        ({"tile_n": 96}, "tile_n 96 is not a divisor of 64 and a multiple of 16 keys for each of 4 warps"),
        ({"tile_n": 32}, "tile_n 32 is not"),
        ({"kv_stage": 1}, "kv_stage 1 is below 2"),
        ({"q_kept": 37}, "q_kept 37, chains 1 are not 0 to 36, and 1, 2 or 4"),
        ({"k_parts": 2, "q_kept": 19}, "q_kept 19, chains 1 are not 0 to 18"),
        ({"trades_rows": True, "k_parts": 2}, "trades_rows is for tiles of 32 or 64 rows and k_parts 1, not 32, 2"),
        ({"trades_rows": True, "tile_m": 16}, "trades_rows is for tiles of 32 or 64 rows and k_parts 1, not 16, 1"),
        ({"chains": 3}, "chains 3"),
        ({"headroom": 9.0}, "headroom 9.0 is not 0 to 8"),
        ({"kv_stage": 6}, "bytes of shared memory, sm_90a has 232448"),
        ({"blocks_per_sm": 2, "k_parts": 2}, "2 blocks of 123648 + 1024 bytes of shared memory need 249344"),
        ({"blocks_per_sm": 2}, "fragments take 120 registers a thread, 128 less 16 for addresses are there"),
        ({"tile_m": 64, "q_kept": 36}, "fragments take 288 registers a thread, 255 less 16 for addresses are there"),
    ],
)
def test_traits_say_why_they_do_not_fit(changed: dict[str, Any], complaint: str) -> None:
    traits = MlaTraitsE4m3(32, 64, q_kept=12)
    assert traits.check(HOPPER) is None
    assert complaint in str(dataclasses.replace(traits, **changed).check(HOPPER))


def test_plans_have_as_many_shares_as_blocks_are_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_planning, "current_target", lambda index: "sm_90a")
    monkeypatch.setattr(mla_planning, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(mla_planning, "compiled", lambda *what: what)
    cache, table = torch.empty(1000, 64, 1, 576, dtype=FP8), torch.empty(3, 1000, dtype=torch.int32)
    row = choose_mla(PROBLEM, 16, "sm_90a")
    plan = mla_planning.plan_of(torch.empty(3, 1, 16, 576).bfloat16(), cache, table, (0.1, True, 0, None))
    assert plan.shares.count == 132 * row.blocks_per_sm // 3 * 3 or plan.shares.count == 132 * row.blocks_per_sm
    assert plan.kv_strides == (64 * 576, 576, 1)
