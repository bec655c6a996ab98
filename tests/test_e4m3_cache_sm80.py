"""16-bit queries on e4m3 caches in the sm80 family: its rows, and where its lanes find and put elements."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import pytest
import torch

from cuteflash.dispatch import choose_shipped
from cuteflash.operands import Operands
from cuteflash.problem import FwdProblem, Scores, Storage
from cuteflash.traits.arch import get_arch
from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from cuteflash.traits.row import ROW_HEAD_DIMS
from cuteflash.traits.tables import CACHE_ROWS

TARGETS = ("sm_89", "sm_120", "sm_90a")
HEAD_DIMS = [*((d, d) for d in ROW_HEAD_DIMS), (192, 128), (256, 64)]
LENGTHS = ("decode", "long")
LOOKED_UP = Storage("varlen", "paged", used_k=True, has_page_table=True, has_cache_batch_idx=True, has_leftpad=True)


def problem_of(head_dims: tuple[int, int], *, hard: bool, is_split: bool) -> FwdProblem:
    """What asks the most, or the least, of a row."""
    operands = Operands(*["bf16" if hard else "fp16"] * 3, *head_dims, 4, cache_dtype="e4m3")
    if not hard:
        return FwdProblem(operands, is_split=is_split)
    scores = Scores("window", softcap=True, sink="fp32", tree=is_split)
    return FwdProblem(operands, scores, LOOKED_UP, True, is_split)


def traits_of(head_dims: tuple[int, int], target: str, is_split: bool = True, lengths: Any = "decode") -> Any:
    problem = problem_of(head_dims, hard=True, is_split=is_split)
    return choose_shipped(problem, target, "sm80", lengths).traits


def kernels() -> list[tuple[str, FwdTraitsCacheSm80, FwdProblem]]:
    """Each row that is chosen, with the problem that asks the most of it; those of several targets for one, in turn."""
    found: dict[FwdTraitsCacheSm80, dict[str, FwdProblem]] = {}
    for target, head_dims, is_split, lengths in itertools.product(TARGETS, HEAD_DIMS, (True, False), LENGTHS):
        traits = traits_of(head_dims, target, is_split, lengths)
        found.setdefault(traits, {}).setdefault(target, problem_of(head_dims, hard=True, is_split=is_split))
    chosen = []
    for i, (traits, problems) in enumerate(found.items()):
        target, problem = list(problems.items())[i % len(problems)]
        chosen.append((target, traits, problem))
    return chosen


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("hard", [False, True])
def test_every_head_dim_has_a_row(hard: bool, target: str) -> None:
    for head_dims, is_split, lengths in itertools.product(HEAD_DIMS, (True, False), LENGTHS):
        problem = problem_of(head_dims, hard=hard, is_split=is_split)
        traits = choose_shipped(problem, target, "sm80", lengths).traits  # type: ignore[arg-type]
        assert isinstance(traits, FwdTraitsCacheSm80) and traits.splits == is_split
        assert traits.check(get_arch(target)) is None
        plain = dataclasses.replace(problem, operands=dataclasses.replace(problem.operands, cache_dtype=None))
        assert not isinstance(choose_shipped(plain, target, "sm80").traits, FwdTraitsCacheSm80)


def test_every_row_is_chosen() -> None:
    chosen = {dataclasses.replace(traits, head_dim=0, head_dim_v=0) for _, traits, _ in kernels()}
    rows: list[Any] = [row.traits for row in CACHE_ROWS["sm80"]]
    assert {dataclasses.replace(traits, head_dim=0, head_dim_v=0) for traits in rows} <= chosen


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_targets_without_the_instruction_have_no_row(target: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{target} has no instruction that converts e4m3"):
        traits_of((128, 128), target)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "traits", "problem"), kernels(), ids=str)
def test_rows_do_not_spill(
    target: str, traits: FwdTraitsCacheSm80, problem: FwdProblem, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.dispatch import kernel_class

    compiled = request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, target)
    compiled.assert_clean()
    assert compiled.count("F2FP.F16.E4M3.UNPACK_B")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"head_dim": 48}, "head_dim 48 is not a multiple of 32"),
        ({"head_dim_v": 80}, "head_dim_v 80 is not a multiple of 32"),
        ({"fused_softmax": False}, "need eager_loads, async_copy and fused_softmax"),
        ({"head_dim": 96, "tile_n": 32}, "128 threads copy 64 rows at once: tile_n 32 is not a multiple"),
        ({"kv_stage": 20}, "bytes of shared memory"),
        ({"tile_m": 40}, "tile_m 40 is not a multiple of 16 rows x 4 warps"),
    ],
    ids=str,
)
def test_traits_that_cannot_run(change: dict[str, Any], complaint: str) -> None:
    changed = dataclasses.replace(traits_of((128, 128), "sm_89"), **change)
    assert complaint in str(changed.check(get_arch("sm_89")))


def test_keys_and_values_take_a_byte_each() -> None:
    for target, traits, _ in kernels():
        plan = traits.smem_plan
        assert plan["k"].nbytes == traits.kv_stage * traits.tile_n * traits.head_dim
        assert plan["v"].nbytes == traits.kv_stage * traits.tile_n * traits.head_dim_v
        assert plan["q"].end <= plan["v"].start < plan["v"].end <= plan["k"].start
        assert traits.smem_bytes <= get_arch(target).smem_per_block


# Where lanes find and put elements, by the kernel's own functions.


@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_elements_of_swizzled_tiles_are_found(head_dim: int) -> None:
    """By coordinates where the layout has them, and in whole groups of four."""
    pytest.importorskip("cutlass")
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    from cuteflash.kernels.sm80.cache_mma import QUAD
    from cuteflash.kernels.sm80.fwd import FlashFwdSm80

    kernel = FlashFwdSm80(
        traits_of((head_dim, head_dim), "sm_89"), problem_of((head_dim,) * 2, hard=True, is_split=True)
    )
    rows = kernel.traits.tile_m

    @cute.jit
    def fill(by_place, by_index):  # type: ignore[no-untyped-def]  # names of this function are not found
        layout = kernel.smem_layout_q()
        for i in cutlass.range(cute.size(by_place)):
            by_place[i] = cutlass.Int32(cute.crd2idx((i % rows, i // rows), layout))
            by_index[i] = cutlass.Int32(layout(i))

    found, expected = (torch.full((rows * head_dim,), -1, dtype=torch.int32) for _ in range(2))
    fill(from_dlpack(found), from_dlpack(expected))
    assert torch.equal(found, expected)
    assert sorted(found.tolist()) == list(range(rows * head_dim))
    groups = found.view(head_dim, rows).T.reshape(rows, -1, QUAD)
    assert bool((groups - groups[..., :1] == torch.arange(QUAD)).all() and (groups[..., 0] % QUAD == 0).all())


@pytest.mark.parametrize("lane", [0, 3, 30])
def test_accumulators_of_o_are_neighbours(lane: int) -> None:
    """A lane's elements of a row are four neighbours of each 16 columns, in order."""
    pytest.importorskip("cutlass")
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    from cuteflash.kernels.sm80.cache_mma import columns_of_out, quads_view

    columns = 64

    @cute.jit
    def fill(found, order):  # type: ignore[no-untyped-def]  # likewise
        acc = cute.make_rmem_tensor(((2, 2), 1, columns // 8), cutlass.Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = cutlass.Float32(i)
        out = quads_view(acc)
        f = types.SimpleNamespace(thread=lane, out=out)
        of_row = columns_of_out(f, cute.make_identity_tensor((16, columns)))  # type: ignore[arg-type]
        for c in cutlass.range_constexpr(cute.size(out.shape[1])):
            found[c] = cutlass.Int32(of_row[0, c][1])
            for r in cutlass.range_constexpr(2):
                order[r, c] = cutlass.Int32(out[r, c])

    found = torch.full((columns // 4,), -1, dtype=torch.int32)
    order = torch.full((2, columns // 4), -1, dtype=torch.int32)
    fill(from_dlpack(found), from_dlpack(order))
    t = lane % 4
    assert found.tolist() == [16 * i + 4 * t + e for i in range(columns // 16) for e in range(4)]
    # Element (b, r) of group n of eight columns is the (b + 2 r + 4 n)-th; groups 2 i and 2 i + 1 have the even and
    # the odd ones of 16 columns, of which b is the 2 t + b-th.
    meant = [[e // 2 + 2 * r + 4 * (2 * i + e % 2) for i in range(columns // 16) for e in range(4)] for r in range(2)]
    assert order.tolist() == meant
