"""The search space is wide, finite and says why what cannot run cannot run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import pytest

from cuteflash import cli, tune
from cuteflash.compile import build
from cuteflash.core.tile import is_lone
from cuteflash.dispatch import kernel_class
from cuteflash.problem import FP8_DTYPES, OPERATIONS, BwdProblem, FwdProblem, MaskKind, Operation
from cuteflash.traits.arch import ARCHS, FAMILIES, Family, get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.candidates import SM80_TILE_N, SM90_TILE_N
from cuteflash.traits.row import Traits, kind_of, kinds_of
from cuteflash.traits.sm80 import ADDRESS_REGS, FwdTraitsSm80
from cuteflash.traits.tables import row_sets, tables_of
from cuteflash.traits.values import field_types, literals
from cuteflash.tune.cells import Cell, parse_cell
from cuteflash.tune.cuda_backend import gate_cells
from cuteflash.tune.operations import (
    FORMS,
    SPECS,
    SWEPT,
    TASKS,
    Task,
    enumerate_traits,
    made_for,
    swept_kernel,
    task_of,
)

HEAD_DIMS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
TARGETS: tuple[tuple[str, Family], ...] = (("sm_80", "sm80"), ("sm_90a", "sm80"), ("sm_90a", "sm90"))
PAIRS: list[tuple[Task, Family]] = [
    (task, family) for task in TASKS for family in FAMILIES if family in SPECS[task].candidates
]
MOST = 3500  # what a laptop can still compile over night


def dims_of(task: Task) -> list[tuple[int, int]]:
    """Head dims of a task; latents have theirs."""
    latent = SPECS[task].latent_dims
    return HEAD_DIMS if latent is None else [latent]


@pytest.mark.parametrize(
    ("task", "family", "head_dims"), [(*pair, head_dims) for pair in PAIRS for head_dims in dims_of(pair[0])]
)
def test_at_least_200_are_considered_once_and_each_rejection_has_a_reason(
    task: Task, family: Family, head_dims: tuple[int, int]
) -> None:
    candidates = list(enumerate_traits(task, family, *head_dims))
    assert 200 <= len(candidates) == len(set(candidates)) <= MOST
    assert all(made_for(traits) == (task, family, head_dims) for traits in candidates)
    for target in (target for target, runs in TARGETS if runs == family):
        found = [traits.check(get_arch(target)) for traits in candidates]
        reasons = [reason for reason in found if reason is not None]
        assert len(found) - len(reasons) >= 50
        assert reasons or (task, family) == ("mla", "sm90")  # whose tile is given: all of it fits
        for reason in reasons:
            assert re.search(r"\d|overlap", reason) and "\n" not in reason, reason
            assert len(reason) < 200


@functools.cache
def values_of_candidates(task: Task, family: Family) -> dict[tuple[str, str], set[object]]:
    """(kind, field) → the values that candidates of head dims 64 and 128 have."""
    found: dict[tuple[str, str], set[object]] = collections.defaultdict(set)
    for traits in itertools.chain(*(enumerate_traits(task, family, size, size) for size in (64, 128))):
        for name, value in dataclasses.asdict(traits).items():
            found[kind_of(traits), name].add(value)
    return found


@pytest.mark.parametrize(("task", "family"), PAIRS)
def test_every_tunable_trait_takes_several_values(task: Task, family: Family) -> None:
    values, spec = values_of_candidates(task, family), SPECS[task]
    kinds = kinds_of(spec.operation, family, spec.dtypes, of_cache=task == "cache")
    assert {kind for kind, _ in values} == kinds.keys()
    # The switches of the ablation ladder that only take something away are timed there.
    fixed = {"head_dim", "head_dim_v", "async_copy", "eager_loads", "fused_softmax"}
    fixed |= {"splits"}  # which a task has or does not have
    fixed |= {"blocks_per_sm"} if family == "sm90" and task != "decode" else set()
    if task in FORMS:  # one tile of 64 rows by one warpgroup, or by four warps; blocks that share the keys of all tiles
        fixed |= {"tile_m", "num_warps", "pingpong", "persistent", "longest_first", "cutlass_symbol"}
        fixed |= {"warp_specialized", "fixed_max", "repair_apart", "q_stage", "p_in_regs"}
        fixed |= {"overlap", "rescale_in_product"} if task == "cache" else set()
    if spec.dtypes == FP8_DTYPES:  # of which 8-bit operands allow one value, and a task has one
        fixed |= {"warp_specialized", "overlap", "p_in_regs", "share_q_o", "turns_v"}
        fixed |= set() if "turned_v" in spec.always else {"stored_v_stage", "stages_o"}
    types = {(kind, name): type_ for kind in kinds for name, type_ in field_types(kind).items()}
    numbers = ("tile_", "_stage", "stages", "_warps", "blocks_per_sm", "exp_rows_before_wait")
    tuned = {
        (kind, name)
        for (kind, name), type_ in types.items()
        if type_ is bool or literals(type_) or any(part in name for part in numbers)
    }
    assert {name for kind, name in tuned if len(values[kind, name]) < 2} <= fixed
    for kind in kinds:
        assert "tile_m" not in field_types(kind) or len(values[kind, "tile_m"]) >= (1 if task in FORMS else 3)
        for name, type_ in field_types(kind).items():
            assert set(literals(type_)) <= values[kind, name]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_tiles_and_stages_are_multiplied_out(family: Family) -> None:
    values = values_of_candidates("fwd", family)
    assert values[f"fwd_{family}", "tile_n"] == set(SM80_TILE_N if family == "sm80" else SM90_TILE_N)
    assert len(values[f"fwd_{family}", "kv_stage"]) == 3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_shipped_row_is_a_candidate_or_compiles_to_one(operation: Operation) -> None:
    spaces: dict[Any, set[object]] = {}
    for (_, target, _), _, rows in row_sets(operation):
        for row in rows:
            if isinstance(row.traits, FwdTraitsCacheSm90) and not row.traits.splits:
                continue  # of many queries, or of a cache that one block reads: not swept
            task, family, head_dims = place = made_for(row.traits)
            space = spaces.get(place) or spaces.setdefault(place, set(enumerate_traits(task, family, *head_dims)))
            same: set[object] = {row.traits}
            # Fewer resident blocks, if they leave as many registers.
            if isinstance(row.traits, FwdTraitsSm80 | BwdTraitsSm80):
                fewer = (dataclasses.replace(row.traits, blocks_per_sm=n) for n in range(1, row.traits.blocks_per_sm))
                limit = row.traits.register_limit(get_arch(target))
                same |= {traits for traits in fewer if traits.register_limit(get_arch(target)) == limit}
            assert same & space, row.traits


def grouped(every: Iterable[Traits]) -> dict[tuple[Task, Family, tuple[int, int]], set[Traits]]:
    """Traits by what they are made for."""
    found: dict[Any, set[Traits]] = collections.defaultdict(set)
    for traits in every:
        found[made_for(traits)].add(traits)
    return found


@pytest.mark.parametrize("task", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shipped_row_of_few_queries_is_a_candidate(task: Task, family: Family) -> None:
    rows = (SPECS[task].shipped or {}).get(family, ())
    for (of_task, of_family, head_dims), traits in grouped(row.traits for row in rows).items():
        assert traits <= set(enumerate_traits(of_task, of_family, *head_dims))


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_resident_blocks_are_considered_where_they_change_the_register_limit(
    operation: Operation, head_dims: tuple[int, int]
) -> None:
    a100, seen = get_arch("sm_80"), set()
    for traits in enumerate_traits(operation, "sm80", *head_dims):
        assert isinstance(traits, FwdTraitsSm80 | BwdTraitsSm80)
        code = dataclasses.replace(traits, blocks_per_sm=1), traits.register_limit(a100)
        assert code not in seen
        seen.add(code)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_nowhere_stands_for_its_variants(family: Family) -> None:
    """A tile that no architecture holds is considered in one form for each place of its operands, not in all."""
    hopeless = collections.Counter(
        (traits.tile_m, traits.tile_n, traits.kv_stage, getattr(traits, "num_warps", 0))
        for traits in enumerate_traits("fwd", family, 256, 256)
        if all(traits.check(arch) for arch in ARCHS.values())
    )
    assert max(hopeless.values()) <= 7  # Q in registers, shared with O, twice or plain; P in registers or not


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"blocks_per_sm": 3},
            "3 blocks of 65536 + 1024 bytes of shared memory need 199680, one SM of sm_80 has 167936",
        ),
        ({"tile_n": 128, "q_in_regs": True, "kv_stage": 1}, "take 320 registers a thread, 255 less 16"),
        ({"num_warps": 8, "tile_n": 48}, "256 threads copy 32 rows of head_dim at once: tile_m 128 or tile_n 48"),
    ],
)
def test_sm80_says_with_numbers_what_does_not_fit(change: dict[str, Any], reason: str) -> None:
    good = FwdTraitsSm80(128, 64, 128, 128, num_warps=4)
    assert good.check(get_arch("sm_80")) is None
    assert reason in (dataclasses.replace(good, **change).check(get_arch("sm_80")) or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "traits",
    [
        FwdTraitsSm80(128, 48, 128, 128, q_in_regs=True),
        FwdTraitsSm80(64, 48, 128, 128, num_warps=4, q_in_regs=True, blocks_per_sm=4),
    ],
    ids=["by-thread", "by-residency"],
)
def test_what_is_pruned_for_registers_would_spill(traits: FwdTraitsSm80, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest misses: one k-block less of fragments and the estimate would let them through."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTEFLASH_CACHE", "0")
    assert "registers a thread" in (traits.check(get_arch("sm_90a")) or "")
    assert traits.accumulator_regs - 16 <= traits.register_limit(get_arch("sm_90a")) - ADDRESS_REGS
    report = build(kernel_class(traits), traits, FwdProblem.dense("bf16", 128, 128), "sm_90a")
    assert report.resources.spill_store_bytes > 0


def test_an_operation_is_named_where_it_is_registered_and_nowhere_else() -> None:
    sources = [*pathlib.Path(tune.__file__).parent.rglob("*.py"), *pathlib.Path(cli.__file__).parent.glob("sweep*.py")]
    # Its task, its Spec and its Trial, and the default of commands.
    for operation, count in (("fwd", 4), ("bwd", 3), ("fwd e4m3", 3), ("fwd e4m3 vt", 3)):
        named = {path.name: path.read_text().count(f'"{operation}"') for path in sources}
        assert sum(named.values()) == named["operations.py"] + named["trials.py"] == count


def test_cells_of_another_operation_follow_its_registration() -> None:
    forward, other = (Cell(64, "full", 512, operation=name, head_dim_v=32) for name in ("fwd", "bwd"))
    assert other.flops == other.batch * other.heads * 512**2 * (6 * 64 + 4 * 32)
    assert dataclasses.replace(other, head_dim_v=64).flops == 2.5 * dataclasses.replace(forward, head_dim_v=64).flops
    assert other.nbytes == 2 * forward.nbytes  # Q, K, V, O and a gradient of each
    assert other.problem == BwdProblem.dense("bf16", 64, 32)
    assert (other.label, other.id) == (f"bwd {forward.label}", f"bwd {forward.id}")
    assert parse_cell("64x32:512:full", operation="bwd") == other


def test_cells_of_few_queries_are_tasks_of_their_own() -> None:
    size: dict[str, Any] = {"tokens": 4 * 8192, "hidden": 32 * 128, "group": 4}
    decode, cache = (Cell(128, "full", 8192, seqlen_q=1, form=form, **size) for form in FORMS[:2])
    assert [cell.task for cell in (decode, cache)] == ["decode", "cache"]
    assert (decode.batch, decode.heads, decode.kv_heads, decode.lengths) == (4, 32, 8, "decode")
    assert decode.problem.features == {"split"} and cache.problem.features == {"split", "e4m3_cache"}
    assert decode.problem.operands.packed_heads == 4
    assert decode.label == "decode D128 full 1x8192 batch 4 heads 32/8"
    assert decode.id == "decode D128 full 1x8192 batch 4 heads 32/8 bf16"
    assert len({cell.id for cell in (decode, cache, dataclasses.replace(decode, group=8))}) == 3
    assert decode.flops == 4 * 4 * 32 * 8192 * 128  # of all query heads
    of_queries, of_keys = 4 * 32 * 2 * 128, 4 * 8 * 8192 * 2 * 128  # elements of Q and O, of K and V
    assert decode.nbytes == 2 * (of_queries + of_keys) and cache.nbytes == 2 * of_queries + of_keys
    with pytest.raises(ValueError, match="group is 5; allowed: 1 or, of "):
        dataclasses.replace(decode, group=5)
    with pytest.raises(ValueError, match="group is 2"):
        Cell(128, "full", 8192, group=2)
    with pytest.raises(ValueError, match="dtype is 'e4m3'; allowed for decode: fp16, bf16"):
        dataclasses.replace(decode, dtype="e4m3")


def test_cells_of_8_bit_operands_are_tasks_of_their_own() -> None:
    half, stored, given = (
        Cell(64, "full", 512),
        Cell(64, "full", 512, "e4m3"),
        parse_cell("64:512:full", "e4m3", transposed_v=True),
    )
    assert [cell.task for cell in (half, stored, given)] == ["fwd", "fwd e4m3", "fwd e4m3 vt"]
    assert [cell.problem.features for cell in (half, stored, given)] == [frozenset(), {"turned_v"}, frozenset()]
    assert given.problem == dataclasses.replace(
        stored.problem, operands=dataclasses.replace(stored.problem.operands, transposed_v=True)
    )
    assert (stored.label, given.label) == ("D64 full 512 e4m3", "D64 full 512 e4m3 vt")
    assert stored.id.replace("e4m3", "e4m3 vt") == given.id
    assert stored.flops == half.flops and stored.nbytes == half.nbytes * 5 // 8  # Q, K, V of 1 byte, O of 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"transposed_v": True}, "transposed_v is True with dtype bf16; allowed with: e4m3"),
        ({"dtype": "e4m3", "operation": "bwd"}, "dtype is 'e4m3'; allowed for bwd: fp16, bf16"),
        ({"dtype": "e4m3", "head_dim_v": 24}, "head_dim_v is 24 with e4m3; allowed: multiples of 16"),
        ({"dtype": "e5m2"}, "dtype is 'e5m2'; allowed for fwd: fp16, bf16, e4m3"),
    ],
)
def test_tasks_that_do_not_exist_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cell(64, "full", 512, **fields)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_rows_serve_their_own_task_alone(dtype: str) -> None:
    """A measured row that turns V does not take calls that give V^T from a faster row."""
    for table, rows in tables_of("fwd").items():
        for row, is_transposed in itertools.product(rows, (False, True)):
            if dtype in row.dtypes and (dtype == "e4m3" or not is_transposed):
                task = task_of("fwd", dtype, is_transposed)
                problem = SPECS[task].problem(dtype, 64, 64, row.masks[0])
                assert row.serves(problem, row.lengths[0]) == (made_for(row.traits)[0] == task), (table, row)


def test_unknown_families_are_named() -> None:
    with pytest.raises(ValueError, match=r"family is 'sm70'; allowed: sm80, sm90"):
        next(enumerate_traits("fwd", "sm70", 64, 64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"family is 'sm80'; allowed for fwd e4m3: sm90"):
        next(enumerate_traits("fwd e4m3", "sm80", 64, 64))


def test_a_sweep_offers_each_kernel_once() -> None:
    assert len(set(SWEPT)) == len(SWEPT)
    assert {swept_kernel(name)[0] for name in SWEPT} >= {"fwd", "bwd", "mla"}


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    "traits",
    [
        BwdTraitsSm80(32, 64, 64, 64, num_warps=4, s_warps=2, dkv_warps=2, stages=1, lone_tiles=True),
        BwdTraitsSm90(64, 128, 64, 64, lone_tiles=True),
    ],
    ids=lambda traits: traits.family,
)
def test_gates_of_traits_with_code_for_lone_tiles_have_some_and_others(traits: Any, mask: MaskKind) -> None:
    problem = BwdProblem.dense("bf16", 64, 64, mask)
    cells = gate_cells(problem, traits)
    lone = [is_lone(cell.seqlen_q, cell.seqlen, mask, traits.tile_n) for cell in cells]
    assert sum(lone) == 2
    assert cells[: len(cells) - 2] == gate_cells(problem, dataclasses.replace(traits, lone_tiles=False))
    assert not any(lone[:-2]) and all(cell.seqlen % 8 for cell in cells)
