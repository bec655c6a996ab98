"""The latent-attention decode of the sm80 family without a GPU: what it compiles to, its rows, layouts and plans."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from cuteflash import dispatch, mla_planning
from cuteflash.dispatch import choose_mla, kernel_class
from cuteflash.mla_problem import MlaProblem, MlaScalars, MlaTensors
from cuteflash.traits.arch import ARCHS, get_arch
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.rows_mla_sm80 import ROWS

cutlass = pytest.importorskip("cutlass")
from cutlass import cute  # noqa: E402

from cuteflash.kernels.sm80.mla_decode import FlashMlaDecodeSm80  # noqa: E402
from tests.kernel_store import KernelStore  # noqa: E402

AMPERE = get_arch("sm_80")
PROBLEM = MlaProblem("bf16")
PROBLEMS = [
    PROBLEM,
    MlaProblem("fp16"),
    MlaProblem("bf16", is_paged=False),
    MlaProblem("bf16", is_split=False),
    MlaProblem("fp16", is_paged=False, is_split=False),
]
NUMBERS = (1, 16, 17, 32, 33, 64, 640)  # query rows of a sequence
TILES = {
    "sm_80": [(16, 64), (16, 64), (32, 64), (32, 64), (64, 32), (64, 32), (64, 32)],
    "sm_86": [(16, 32), (16, 32), *[(32, 32)] * 5],
}
TILES |= {"sm_90a": TILES["sm_80"], "sm_89": TILES["sm_86"], "sm_120": TILES["sm_86"]}
BANKS_OF_CHUNK, PHASE_ROWS = 8, 8  # 16 bytes each


def cases() -> list[Any]:
    """(target, row, problem): every row of every target, every problem with a row, and all in turn."""
    turns = itertools.cycle(PROBLEMS)
    found = []
    for target in TILES:
        rows = dict.fromkeys(choose_mla(PROBLEM, rows, target, "sm80") for rows in NUMBERS)
        problems = [(row, next(turns)) for row in rows]
        if target == "sm_80":  # whose rows are those of sm_90a, too
            problems += [(next(iter(rows)), problem) for problem in PROBLEMS]
        found += [
            pytest.param(target, row, problem, id=f"{target}-{row.tile_m}x{row.tile_n}-{problem}")
            for row, problem in dict.fromkeys(problems)
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("target", "row", "problem"), cases())
def test_rows_use_ampere_instructions_and_do_not_spill(
    kernels: KernelStore, target: str, row: MlaTraitsSm80, problem: MlaProblem
) -> None:
    compiled = kernels(FlashMlaDecodeSm80, row, problem, target)
    compiled.assert_clean()
    scores = row.tile_m // 16 * (row.tile_n // 8) * 36  # products of 16 rows, 8 keys and 16 columns
    values = row.tile_m // 16 * (512 // 8) * (row.tile_n // 16)
    assert compiled.count("HMMA.16816.F32") == (scores + values) // row.num_warps
    assert compiled.count("LDGSTS.E.BYPASS")  # cp.async past L1
    assert compiled.count(r"LDSM\.16\.M88\.4") and compiled.count(r"LDSM\.16\.MT88\.4")
    assert not compiled.times(r"wgmma|cp\.async\.bulk")
    assert bool(compiled.times(r"griddepcontrol\.wait")) == row.early_launch
    assert bool(compiled.times(r"st\.global\.L2::cache_hint\.v4")) == problem.is_split  # of parts


@pytest.mark.parametrize("target", TILES)
def test_rows_are_chosen_by_what_a_sequence_asks_and_a_device_has(target: str) -> None:
    assert set(TILES) == set(ARCHS)
    found = [choose_mla(PROBLEM, rows, target, "sm80") for rows in NUMBERS]
    assert [(row.tile_m, row.tile_n) for row in found] == TILES[target]
    assert all(kernel_class(row) is FlashMlaDecodeSm80 for row in found)
    assert {row.early_launch for row in found} == {target == "sm_90a"}
    best = [choose_mla(PROBLEM, rows, target) for rows in NUMBERS]
    few = NUMBERS.index(17) if target == "sm_90a" else len(NUMBERS)
    assert best[:few] == found[:few]  # without a family, too
    assert all(type(row) is MlaTraitsSm90 for row in best[few:])


def test_every_row_is_taken_somewhere() -> None:
    chosen = {choose_mla(PROBLEM, rows, target, "sm80") for rows, target in itertools.product(NUMBERS, ARCHS)}
    assert chosen == set(ROWS)


def test_errors_name_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="family is 'sm90', which sm_80 does not run; it runs: sm80"):
        choose_mla(PROBLEM, 16, "sm_80", "sm90")
    with pytest.raises(ValueError, match="family is 'sm70'; allowed: sm80, sm90"):
        choose_mla(PROBLEM, 16, "sm_80", "sm70")  # type: ignore[arg-type]
    monkeypatch.setitem(dispatch.MLA_ROWS, "sm80", ROWS[1:2])
    with pytest.raises(NotImplementedError, match="on sm_86 in bf16: 64x32 needs 111360 bytes of shared memory, sm_86"):
        choose_mla(PROBLEM, 64, "sm_86")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tile_m}x{row.tile_n}")
def test_shared_memory_is_planned(row: MlaTraitsSm80) -> None:
    plan = row.smem_plan
    page = row.tile_n * 576 * 2
    assert plan["pages"].nbytes == row.kv_stage * page
    assert all(plan[name].start % 1024 == 0 for name in ("q", "p", "halves", "pages"))
    # What is kept of Q in registers lies over P, halves of S and the stage of keys that is loaded last.
    others = 576 - row.q_kept * row.k_parts * 32
    assert plan["q"].start == 0 and plan["p"].start == -(-others // 64) * row.tile_m * 64 * 2
    assert plan["q"].end <= plan["pages"].start + page
    apart = [plan[name] for name in ("p", "halves", "pages", "maxima", "factors")]
    assert all(one.end <= other.start for one, other in itertools.pairwise(apart))
    assert row.smem_bytes == plan["factors"].end
    assert plan["maxima"].nbytes == row.tile_m * row.key_groups * 4
    assert plan["halves"].nbytes == (row.tile_m * row.tile_n * 4 if row.k_parts == 2 else 0)
    assert row.warps_m * row.warps_n * row.k_parts == row.num_warps and row.steps * row.k_parts * 32 == 576


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tile_m": 24}, "tile_m 24 is not 16 rows for each warp, or each of 2, 4, .. of 8"),
        ({"tile_m": 48}, "tile_m 48 is not"),
        ({"k_parts": 3}, "k_parts 3 is not 1, or 2 of 4 warps with the same query rows"),
        ({"num_warps": 2, "k_parts": 2}, "k_parts 2 is not 1, or 2 of 1 warps"),
        ({"tile_n": 16}, "tile_n 16 is not a divisor of 64 and a multiple of 8 keys for each of 4 warps"),
        ({"tile_n": 96}, "tile_n 96 is not"),
        ({"tile_m": 48, "tile_n": 32, "num_warps": 6}, "tile_n 32 is not a multiple of 24, which 192 threads copy"),
        ({"kv_stage": 1}, "kv_stage 1 is below 2"),
        ({"q_kept": 19}, "q_kept 19, chains 1 are not 0 to 18, and 1, 2 or 4"),
        ({"k_parts": 2}, "q_kept 12, chains 1 are not 0 to 9"),
        ({"chains": 3}, "chains 3"),
        ({"tile_m": 64, "tile_n": 32, "q_kept": 12}, "q_kept 12: Q ends at 73728, beyond the first stage of keys"),
        ({"headroom": 9.0}, "headroom 9.0 is not 0 to 8"),
        ({"early_launch": True}, "early_launch: sm_80 has no programmatic dependent launch"),
        ({"kv_stage": 3}, "needs 238208 bytes of shared memory, sm_80 has 166912"),
        (
            {"tile_m": 64, "tile_n": 32, "q_kept": 0, "num_warps": 4},
            "take 272 registers a thread, 255 less 16 for addresses are there",
        ),
    ],
)
def test_traits_say_why_they_do_not_fit(changed: dict[str, Any], complaint: str) -> None:
    traits = MlaTraitsSm80(32, 64, q_kept=12)
    assert traits.check(AMPERE) is None
    assert complaint in str(dataclasses.replace(traits, **changed).check(AMPERE))


def on_host(probe: Any) -> None:
    """Run `probe` where layouts can be made and evaluated."""
    cute.jit(preprocess=False)(probe)()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tile_m}x{row.tile_n}")
def test_v_is_the_first_columns_of_k(row: MlaTraitsSm80) -> None:
    def probe() -> None:
        kernel = FlashMlaDecodeSm80(row, PROBLEM)
        keys, values = kernel.smem_layout_k(), kernel.smem_layout_v()
        for key, column, stage in itertools.product((0, 1, 9, row.tile_n - 1), (0, 8, 65, 511), range(row.kv_stage)):
            assert keys((key, column, stage)) == values((key, column, stage))
        for column in (0, 8, 72, 504):  # an ldmatrix reads 8 rows of 16 bytes at once, of K and of V
            chunks = {values((key, column, 1)) // 8 % BANKS_OF_CHUNK for key in range(PHASE_ROWS)}
            assert len(chunks) == PHASE_ROWS

    on_host(probe)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tile_m}x{row.tile_n}")
def test_warps_share_keys_and_columns(row: MlaTraitsSm80) -> None:
    """Each warp has 16 rows and neighbouring keys of S; of O all rows and 32 neighbouring columns at a time."""

    def owned(layout: Any, rows: int, warp: int) -> tuple[set[int], set[int]]:
        lanes = range(32 * warp, 32 * warp + 32)
        places = [layout((thread, value)) for thread in lanes for value in range(cute.size(layout, mode=[1]))]
        return {place % rows for place in places}, {place // rows for place in places}

    def probe() -> None:
        kernel = FlashMlaDecodeSm80(row, PROBLEM)
        scores, out = kernel.tiled_mma_s().tv_layout_C_tiled, kernel.tiled_mma_pv().tv_layout_C_tiled
        products = kernel.tiled_mma_qk().tv_layout_C_tiled
        keys = row.tile_n // row.key_groups
        for warp in range(row.num_warps):
            group, part = warp % row.warps_m, warp // row.warps_m
            expected = set(range(16 * group, 16 * group + 16)), set(range(keys * part, keys * part + keys))
            assert owned(scores, row.tile_m, warp) == expected
            assert owned(out, 16, warp) == (set(range(16)), set(range(32 * warp, 32 * warp + 32)))
            # Of the product with K it has, with the warp that has the other columns, the keys of both.
            rows, both = owned(products, row.tile_m, group + part // row.k_parts * row.warps_m)
            assert rows == expected[0] and expected[1] <= both and len(both) == keys * row.k_parts

    on_host(probe)


@pytest.mark.parametrize(
    ("target", "heads", "tile"), [("sm_80", 8, (16, 64)), ("sm_86", 20, (32, 32)), ("sm_80", 128, (64, 32))]
)
def test_a_plan_has_tiles_and_steps_of_its_row(
    monkeypatch: pytest.MonkeyPatch, target: str, heads: int, tile: tuple[int, int]
) -> None:
    launches: list[tuple[MlaTensors, MlaScalars]] = []

    def launch(*arguments: Any) -> None:
        count = len(MlaTensors._fields)
        launches.append((MlaTensors(*arguments[:count]), MlaScalars(*arguments[count:])))

    def compiled(kernel_cls: type, traits: MlaTraitsSm80, problem: MlaProblem, found: str) -> Any:
        assert (kernel_cls, (traits.tile_m, traits.tile_n), found) == (FlashMlaDecodeSm80, tile, target)
        return launch

    monkeypatch.setattr(mla_planning, "compiled", compiled)
    monkeypatch.setattr(mla_planning, "current_target", lambda index: target)
    monkeypatch.setattr(mla_planning, "_multiprocessors", lambda device: 108)
    counters = torch.zeros(7, dtype=torch.int32)
    monkeypatch.setattr(mla_planning.arrivals, "of", lambda device, blocks: counters if blocks > 1 else None)
    batch = 100
    q, cache = (torch.empty(*shape, 576, dtype=torch.bfloat16) for shape in ((batch, 2, heads), (batch, 640, 1)))
    lengths = torch.zeros(batch, dtype=torch.int32)
    options: dict[str, Any] = {"softmax_scale": 0.1, "causal": True, "num_splits": 0}
    out, _ = mla_planning.CudaMlaDecode()(q, cache, None, lengths, **options)
    ((tensors, scalars),) = launches
    m_blocks = -(-2 * heads // tile[0])
    assert out.shape == (batch, 2, heads, 512)
    assert tensors.partials.shape == (2 * scalars.shares * m_blocks * tile[0] * (512 + 1),)
    assert tensors.arrivals is counters
    assert scalars.tile_cost == MlaTraitsSm80.tile_cost * 64 // tile[1]
