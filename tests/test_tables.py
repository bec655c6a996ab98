"""The shipped tables: every problem has a row, and every row compiles without a complaint for its own target."""

from __future__ import annotations

import itertools

import pytest

from cuteflash.compile import build
from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.problem import DTYPES, HEAD_DIM_MAX, HEAD_DIM_STEP, MASK_KINDS, FwdProblem
from cuteflash.traits.arch import ARCHS, Family, get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import ROW_HEAD_DIMS, Traits
from cuteflash.traits.tables import TABLES

TABLES = pytest.mark.parametrize(("target", "family"), TABLES, ids="/".join)
HEAD_DIMS = range(HEAD_DIM_STEP, HEAD_DIM_MAX + 1, HEAD_DIM_STEP)


def test_every_arch_has_a_table_for_each_of_its_families() -> None:
    assert set(TABLES) == {(arch.name, family) for arch in ARCHS.values() for family in arch.families}


@TABLES
def test_every_row_can_run(target: str, family: Family) -> None:
    for row in TABLES["fwd", target, family]:
        assert row.traits.family == family
        assert row.traits.check(get_arch(target)) is None, row
        assert {row.traits.head_dim, row.traits.head_dim_v} <= set(ROW_HEAD_DIMS)
    assert len(set(TABLES["fwd", target, family])) == len(TABLES["fwd", target, family])


@TABLES
@pytest.mark.parametrize("mask", MASK_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_has_a_row(target: str, family: Family, mask: str, dtype: str) -> None:
    for head_dim, head_dim_v, lengths in itertools.product(HEAD_DIMS, HEAD_DIMS, LENGTH_CLASSES):
        traits = choose_shipped(FwdProblem.dense(dtype, head_dim, head_dim_v, mask), target, family, lengths).traits
        assert traits.family == family
        assert 0 <= traits.head_dim - head_dim < 32
        assert 0 <= traits.head_dim_v - head_dim_v < 32
        assert traits.check(get_arch(target)) is None


@TABLES
def test_every_problem_has_a_row_that_serves_softcap_and_lse(target: str, family: Family) -> None:
    for head_dim, head_dim_v in itertools.product(ROW_HEAD_DIMS, ROW_HEAD_DIMS):
        for mask, dtype, lengths in itertools.product(MASK_KINDS, DTYPES, LENGTH_CLASSES):
            problem = FwdProblem.dense(dtype, head_dim, head_dim_v, mask, softcap=True, lse=True)
            row = choose_shipped(problem, target, family, lengths).row
            assert row.softcap and row.lse


def row_kernels() -> list[tuple[str, Traits, FwdProblem]]:
    """Each kernel of the tables once: target, traits and, of the problems that it runs, the most demanding one."""
    kernels: dict[tuple[str, Traits], FwdProblem] = {}
    for (_, target, family), rows in TABLES.items():
        made_for = dict.fromkeys((row.traits.head_dim, row.traits.head_dim_v) for row in rows)
        hardest_first = itertools.product(
            (True, False), (True, False), reversed(MASK_KINDS), reversed(DTYPES), LENGTH_CLASSES
        )
        for (softcap, lse, mask, dtype, lengths), head_dims in itertools.product(hardest_first, made_for):
            problem = FwdProblem.dense(dtype, *head_dims, mask, softcap=softcap, lse=lse)
            kernels.setdefault((target, choose_shipped(problem, target, family, lengths).traits), problem)
    return [(*key, problem) for key, problem in kernels.items()]


def row_id(kernel: tuple[str, Traits, FwdProblem]) -> str:
    target, traits, problem = kernel
    dims = f"{traits.head_dim}x{traits.head_dim_v}-{traits.tile_m}x{traits.tile_n}"
    extras = "-softcap" * problem.scores.softcap + "-lse" * problem.has_lse
    return f"{target}-{traits.family}-{dims}-{problem.scores.mask}-{problem.operands.qk_dtype}{extras}"


@pytest.mark.parametrize("kernel", row_kernels(), ids=row_id)
def test_a_row_compiles_without_complaint(
    kernel: tuple[str, Traits, FwdProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, traits, problem = kernel
    monkeypatch.setenv("CUTEFLASH_CACHE", "0")
    report = build(kernel_class(traits), traits, problem, target)
    assert report.complaints == ()
    assert report.resources.stack_bytes == 0
