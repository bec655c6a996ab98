"""Kernels whose K and V lie in a cache, cross-compiled: what they load with, and that they spill nothing."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import FwdProblem, MaskKind, Storage, StorageKind
from cuteflash.traits.sm90 import FwdTraitsSm90
from tests.kernel_store import KernelStore

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


@pytest.mark.parametrize("head_dims", [(96, 96), (128, 128), (160, 160), (192, 128), (224, 224)], ids=str)
def test_a_box_of_few_rows_may_hold_all_columns(kernels: KernelStore, head_dims: tuple[int, int]) -> None:
    """A box for each page of K and of V instead of one for each slab of columns, and K's products page by page."""
    boxes = {}
    for is_wide in (False, True):
        storage = dataclasses.replace(BOXES, wide_boxes=is_wide)
        asked = dataclasses.replace(problem(storage, head_dims, "full"), is_split=True)
        choice = choose_shipped(asked, "sm_90a")
        assert isinstance(choice.traits, FwdTraitsSm90)
        compiled = kernels(choice.kernel_cls, choice.traits, asked, "sm_90a")
        compiled.assert_clean()
        boxes[is_wide] = compiled.count(r"UTMALDG\.5D")
        keys = 16 if is_wide else choice.traits.tile_n
        assert compiled.count("HGMMA") == sum(compiled.count(f"HGMMA.64x{n}x16") for n in {keys, head_dims[1]})
    places, rest = divmod(boxes[True], choice.traits.tile_n // 16)  # where K or V is loaded
    assert rest == 0 and places >= 3 and boxes[False] > boxes[True]


@pytest.mark.parametrize(("cache_dtype", "page_rows"), [(None, 0), (None, 16), ("e4m3", 0), ("e4m3", 64)])
def test_lengths_of_whole_caches_are_not_added_up(
    kernels: KernelStore, cache_dtype: Literal["e4m3"] | None, page_rows: int
) -> None:
    """The host knows them. Nothing is looked up before the launch ahead has ended."""
    for used_k, has_cache_batch_idx in ((False, False), (False, True), (True, False)):
        storage = dataclasses.replace(
            BOXES, used_k=used_k, page_rows=page_rows, has_cache_batch_idx=has_cache_batch_idx
        )
        asked = problem(storage, mask="full")
        operands = dataclasses.replace(asked.operands, cache_dtype=cache_dtype, packed_heads=4)
        asked = dataclasses.replace(asked, operands=operands, is_split=True)
        choice = choose_shipped(asked, "sm_90a")
        compiled = kernels(choice.kernel_cls, choice.traits, asked, "sm_90a")
        compiled.assert_clean()
        assert bool(compiled.times(r"shfl\.sync\.up")) == used_k
        assert not compiled.times(r"ld\.global|cp\.async", before="griddepcontrol.wait")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_sm80(kernels: KernelStore, target: str) -> None:
    for mask in ("full", "causal"):
        asked = problem(ROWS, mask=mask)
        choice = choose_shipped(asked, target, "sm80")
        kernels(choice.kernel_cls, choice.traits, asked, target).assert_clean()
