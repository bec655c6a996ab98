"""The search space is wide, finite and says why what cannot run cannot run."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from typing import Any

import pytest

from cuteflash import cli, tune
from cuteflash.compile import build
from cuteflash.dispatch import kernel_class
from cuteflash.problem import BwdProblem, FwdProblem, Operation
from cuteflash.traits.arch import ARCHS, FAMILIES, Family, get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.candidates import SM80_TILE_N, SM90_TILE_N
from cuteflash.traits.row import kind_of, kinds_of
from cuteflash.traits.sm80 import ADDRESS_REGS, FwdTraitsSm80
from cuteflash.traits.tables import tables_of
from cuteflash.traits.values import field_types, literals
from cuteflash.tune.cells import Cell, parse_cell
from cuteflash.tune.operations import SWEPT, enumerate_traits

HEAD_DIMS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
PAIRS: list[tuple[str, Family]] = [("sm_80", "sm80"), ("sm_90a", "sm80"), ("sm_90a", "sm90")]
MOST = 3300  # what a laptop can still compile over night


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize(("target", "family"), PAIRS)
@pytest.mark.parametrize("operation", SWEPT)
def test_at_least_200_are_considered_and_each_rejection_has_a_reason(
    operation: Operation, target: str, family: Family, head_dims: tuple[int, int]
) -> None:
    judged = [(one, one.check(get_arch(target))) for one in enumerate_traits(operation, family, *head_dims)]
    assert 200 <= len(judged) <= MOST
    runnable = [traits for traits, reason in judged if reason is None]
    reasons = [reason for _, reason in judged if reason is not None]
    assert len(runnable) >= 50 and reasons
    for reason in reasons:
        assert re.search(r"\d|overlap", reason) and "\n" not in reason, reason
        assert len(reason) < 200
    for traits, _ in judged:
        assert (traits.family, traits.head_dim, traits.head_dim_v) == (family, *head_dims)


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operation", SWEPT)
def test_each_candidate_comes_once(operation: Operation, family: Family, head_dims: tuple[int, int]) -> None:
    candidates = list(enumerate_traits(operation, family, *head_dims))
    assert len(set(candidates)) == len(candidates)


def values_of_candidates(operation: Operation, family: Family) -> dict[tuple[str, str], set[object]]:
    """(kind, field) → the values that candidates of head dim 128 have."""
    found: dict[tuple[str, str], set[object]] = collections.defaultdict(set)
    for traits in enumerate_traits(operation, family, 128, 128):
        for name, value in dataclasses.asdict(traits).items():
            found[kind_of(traits), name].add(value)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operation", SWEPT)
def test_every_tunable_trait_takes_several_values(operation: Operation, family: Family) -> None:
    values = values_of_candidates(operation, family)
    assert {kind for kind, _ in values} == kinds_of(operation, family).keys()
    # The switches of the ablation ladder that only take something away are timed there.
    fixed = {"head_dim", "head_dim_v", "async_copy", "eager_loads", "fused_softmax"}
    types = {(kind, name): type_ for kind in kinds_of(operation, family) for name, type_ in field_types(kind).items()}
    numbers = ("tile_", "_stage", "stages", "_warps", "blocks_per_sm", "exp_rows_before_wait")
    tuned = {
        (kind, name)
        for (kind, name), type_ in types.items()
        if type_ is bool or literals(type_) or any(part in name for part in numbers)
    }
    assert {name for kind, name in tuned if len(values[kind, name]) < 2} <= fixed
    for kind in kinds_of(operation, family):
        assert len(values[kind, "tile_m"]) >= 3
        for name, type_ in field_types(kind).items():
            assert set(literals(type_)) <= values[kind, name]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_tiles_and_stages_are_multiplied_out(family: Family) -> None:
    values = values_of_candidates("fwd", family)
    assert values[f"fwd_{family}", "tile_n"] == set(SM80_TILE_N if family == "sm80" else SM90_TILE_N)
    assert len(values[f"fwd_{family}", "kv_stage"]) == 3


@pytest.mark.parametrize("operation", SWEPT)
def test_every_shipped_row_is_a_candidate_or_compiles_to_one(operation: Operation) -> None:
    spaces: dict[Any, set[object]] = {}
    for (_, target, _), rows in tables_of(operation).items():
        for row in rows:
            place = operation, row.traits.family, row.traits.head_dim, row.traits.head_dim_v
            space = spaces.get(place) or spaces.setdefault(place, set(enumerate_traits(*place)))
            same: set[object] = {row.traits}
            # Fewer resident blocks, if they leave as many registers.
            if isinstance(row.traits, FwdTraitsSm80 | BwdTraitsSm80):
                fewer = (dataclasses.replace(row.traits, blocks_per_sm=n) for n in range(1, row.traits.blocks_per_sm))
                limit = row.traits.register_limit(get_arch(target))
                same |= {traits for traits in fewer if traits.register_limit(get_arch(target)) == limit}
            assert same & space, row.traits


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("operation", SWEPT)
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
    for operation, count in (("fwd", 3), ("bwd", 2)):  # its Spec and its Trial, and the default of commands
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


def test_unknown_families_are_named() -> None:
    with pytest.raises(ValueError, match=r"family is 'sm70'; allowed: sm80, sm90"):
        next(enumerate_traits("fwd", "sm70", 64, 64))  # type: ignore[arg-type]
