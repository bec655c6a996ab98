"""Kernels whose K and V lie in a cache, cross-compiled: what they load with, and that they spill nothing."""

from __future__ import annotations

import dataclasses

import pytest

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import FwdProblem, MaskKind, Storage, StorageKind
from tests.cross_compile import KernelStore

pytestmark = pytest.mark.slow

BOXES = Storage("dense", "paged", used_k=True, page_rows=16, has_page_table=True)
ROWS = dataclasses.replace(BOXES, page_rows=0, has_cache_batch_idx=True, has_leftpad=True)


def problem(storage: Storage, head_dims: tuple[int, int] = (128, 128), mask: MaskKind = "causal") -> FwdProblem:
    return dataclasses.replace(FwdProblem.dense("bf16", *head_dims, mask, lse=True), storage=storage)


# Each source of keys with each head dim and with each kind of queries, and each kind of queries with each head dim.
SM90 = [((64, 64), "dense"), ((128, 128), "varlen"), ((192, 128), "varlen"), ((256, 256), "dense")]


@pytest.mark.parametrize(("head_dims", "q_of_boxes"), SM90, ids=str)
def test_sm90(kernels: KernelStore, head_dims: tuple[int, int], q_of_boxes: StorageKind) -> None:
    q_of_rows: StorageKind = "varlen" if q_of_boxes == "dense" else "dense"
    for storage, q in ((BOXES, q_of_boxes), (ROWS, q_of_rows)):
        asked = problem(dataclasses.replace(storage, q=q), head_dims)
        choice = choose_shipped(asked, "sm_90a")
        compiled = kernels(choice.kernel_cls, choice.traits, asked, "sm_90a")
        compiled.assert_clean()
        assert bool(compiled.count("LDGSTS")) == (storage is ROWS)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_sm80(kernels: KernelStore, target: str) -> None:
    for mask in ("full", "causal"):
        asked = problem(ROWS, mask=mask)
        choice = choose_shipped(asked, target, "sm80")
        kernels(choice.kernel_cls, choice.traits, asked, target).assert_clean()
