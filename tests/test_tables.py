"""The shipped tables: every problem has a row, and every row compiles without a complaint for its own target."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.problem import (
    DENSE,
    DTYPES,
    FP8_OPERANDS,
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    MASK_KINDS,
    OPERATIONS,
    PACKED,
    Fp8Dtype,
    FwdProblem,
    Operands,
    Problem,
    Scores,
    Storage,
)
from cuteflash.traits.arch import ARCHS, get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import ROW_HEAD_DIMS, TableKey, Traits
from cuteflash.traits.tables import TABLES
from tests.cubins import PROBLEMS, Case, row_kernels
from tests.kernel_store import KernelStore
from tests.spills import is_allowed, kernel_id

EACH_TABLE = pytest.mark.parametrize("table", TABLES, ids=str)
HEAD_DIMS = range(HEAD_DIM_STEP, HEAD_DIM_MAX + 1, HEAD_DIM_STEP)
# Head dims choose a row by what they are padded to: all pairs of that, and every head dim with itself and the smallest.
HEAD_DIM_PAIRS = [
    *itertools.product(ROW_HEAD_DIMS, ROW_HEAD_DIMS),
    *((one, one) for one in HEAD_DIMS),
    *((one, HEAD_DIM_STEP) for one in HEAD_DIMS),
    *((HEAD_DIM_STEP, one) for one in HEAD_DIMS),
]


def test_every_arch_has_a_table_for_each_of_its_families() -> None:
    every = {(arch.name, family) for arch in ARCHS.values() for family in arch.families}
    assert set(TABLES) == {TableKey(operation, *one) for operation in OPERATIONS for one in every}


@EACH_TABLE
def test_every_row_can_run(table: TableKey) -> None:
    for row in TABLES[table]:
        assert row.traits.family == table.family
        assert row.traits.check(get_arch(table.target)) is None, row
        assert {row.traits.head_dim, row.traits.head_dim_v} <= set(ROW_HEAD_DIMS)
    assert len(set(TABLES[table])) == len(TABLES[table])


@EACH_TABLE
@pytest.mark.parametrize("mask", MASK_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_has_a_row(table: TableKey, mask: str, dtype: str) -> None:
    make, _ = PROBLEMS[table.operation]
    for (head_dim, head_dim_v), lengths in itertools.product(HEAD_DIM_PAIRS, LENGTH_CLASSES):
        problem = make(dtype, head_dim, head_dim_v, mask)
        traits = choose_shipped(problem, table.target, table.family, lengths).traits
        assert traits.family == table.family
        assert 0 <= traits.head_dim - head_dim < 32
        assert 0 <= traits.head_dim_v - head_dim_v < 32
        assert traits.check(get_arch(table.target)) is None


@pytest.mark.parametrize("storage", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("transposed_v", [False, True])
@pytest.mark.parametrize("dtype", FP8_OPERANDS)
def test_every_problem_of_8_bits_has_a_row(dtype: Fp8Dtype, transposed_v: bool, storage: Storage) -> None:
    for head_dim, head_dim_v in HEAD_DIM_PAIRS:
        if head_dim % 16 or head_dim_v % 16:
            continue
        operands = Operands.of(dtype, head_dim, head_dim_v)
        operands = dataclasses.replace(operands, transposed_v=transposed_v, has_v_mean=True)
        for mask, lengths in itertools.product(MASK_KINDS, LENGTH_CLASSES):
            problem = FwdProblem(operands, Scores(mask, softcap=True), storage, has_lse=True)
            choice = choose_shipped(problem, "sm_90a", "sm90", lengths)
            assert choice.traits.element_bytes == 1
            assert transposed_v or choice.traits.turns_v
            if max(head_dim, head_dim_v) <= 160 or (head_dim, head_dim_v) == (192, 128):
                by_block = dataclasses.replace(operands, has_block_scales=True)
                problem = dataclasses.replace(problem, operands=by_block)
                assert 128 % choose_shipped(problem, "sm_90a", "sm90", lengths).traits.tile_n == 0


@EACH_TABLE
@pytest.mark.parametrize("storage", [DENSE, PACKED], ids=["dense", "packed"])
def test_every_problem_has_a_row_that_serves_all_features(table: TableKey, storage: Storage) -> None:
    make, features = PROBLEMS[table.operation]
    for head_dim, head_dim_v in itertools.product(ROW_HEAD_DIMS, ROW_HEAD_DIMS):
        for mask, dtype, lengths in itertools.product(MASK_KINDS, DTYPES, LENGTH_CLASSES):
            problem = make(dtype, head_dim, head_dim_v, mask, **dict.fromkeys(features, True))
            problem = dataclasses.replace(problem, storage=storage)
            row = choose_shipped(problem, table.target, table.family, lengths).row
            assert problem.features.isdisjoint(row.without)


def compiled_rows() -> list[Case]:
    """Every kernel of the tables for one target that has it, and every third of those that others have, too."""
    first: set[tuple[Traits, Problem]] = set()
    cases, again = [], []
    for case in sorted(row_kernels(), key=lambda case: case.target == "sm_90a"):  # Ampere's rows for Ampere
        kernel = case.traits, case.problem
        (again if kernel in first else cases).append(case)
        first.add(kernel)
    return [*cases, *again[::3]]


@pytest.mark.slow
@pytest.mark.parametrize("case", compiled_rows(), ids=lambda case: case.name)
def test_a_row_compiles_without_complaint(case: Case, kernels: KernelStore) -> None:
    kernel_cls = kernel_class(case.traits)
    compiled = kernels(kernel_cls, case.traits, case.problem, case.target)
    assert is_allowed(compiled.resources, kernel_id(kernel_cls, case.traits, case.problem, case.target))
    assert compiled.found(r"\.target (\w+)") == (case.target,)
    product = {"sm80": "mma.sync.aligned.m16n8k16", "sm90": "wgmma.mma_async"}[case.traits.family]
    assert compiled.found(re.escape(product))
