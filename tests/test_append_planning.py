"""From a call to the launch of the appending kernel, with a kernel that only takes notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuteflash import append_ops, append_planning
from cuteflash.append_ops import append_and_count, append_now, rotate_now
from cuteflash.append_planning import addressable, append_problem, check_sizes, lengths_after, rotary_problem
from cuteflash.append_problem import AppendOptions, AppendScalars, AppendTensors, RotaryOptions
from cuteflash.calls import Known
from cuteflash.validate_append import AppendInputs, RotaryInputs
from tests.appended import FP8, random_call, tables


class Notes:
    """A kernel that keeps the arguments of its launches, named."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[AppendTensors] = []
        self.scalars: list[AppendScalars] = []
        self.problems: list[Any] = []
        monkeypatch.setattr(append_planning, "current_target", lambda _: "sm_90a")
        monkeypatch.setattr(append_planning, "kernel_of", self.kernel_of)
        for name in ("known_appends", "known_rotations"):
            monkeypatch.setattr(append_ops, name, Known())

    def kernel_of(self, problem: Any, target: str) -> Any:
        self.problems.append(problem)
        return self.launch

    def launch(self, *arguments: Any) -> None:
        count = len(AppendTensors._fields)
        self.tensors.append(AppendTensors(*arguments[:count]))
        self.scalars.append(AppendScalars(*arguments[count:]))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    return Notes(monkeypatch)


@pytest.mark.parametrize("seed", range(1, 13))
def test_each_tensor_arrives_as_what_it_is(notes: Notes, seed: int) -> None:
    call = random_call(seed)
    inputs, options = AppendInputs(**call.tensors), AppendOptions(**call.options)
    out = append_now(inputs, options)
    (tensors,), (scalars,), (problem,) = notes.tensors, notes.scalars, notes.problems
    for name in set(AppendTensors._fields) & set(AppendInputs._fields) - {"k_descale", "v_descale"}:
        assert getattr(tensors, name) is getattr(inputs, name), name
    assert tensors.cos is inputs.rotary_cos and tensors.sin is inputs.rotary_sin and tensors.q_out is out
    assert scalars == (0, 0 if options.fixed_q else 1, 1.0)
    if inputs.k_cache.dtype == FP8:
        shape = (inputs.batch, inputs.k_cache.shape[2])
        assert tensors.k_descale.shape == tensors.v_descale.shape == shape
    for field, name in {"is_paged": "page_table", "has_batch_idx": "cache_batch_idx", "appends": "k"}.items():
        assert getattr(problem, field) == (getattr(inputs, name) is not None)
    if out is not None:
        assert inputs.q is not None
        assert out.shape == inputs.q.shape and out.is_contiguous()


def test_lengths_strides_and_values_need_no_new_kernel(notes: Notes) -> None:
    problems = set()
    for tokens in (1, 7):
        k = torch.zeros(2, tokens, 3, 64).bfloat16()
        cache = torch.zeros(4, 8 * tokens, 3, 64).bfloat16()
        inputs = AppendInputs(cache, cache, k, k, torch.zeros(2, dtype=torch.int32))
        problems.add(append_problem(inputs, AppendOptions()))
        problems.add(append_problem(inputs, AppendOptions(rotary_interleaved=True, fixed_q=True)))
    assert len(problems) == 1


def test_a_launch_is_planned_once(notes: Notes) -> None:
    call = random_call(3)
    for _ in range(3):
        append_now(AppendInputs(**call.tensors), AppendOptions(**call.options))
    assert len(notes.tensors) == 3 and len(notes.problems) == 1


@pytest.mark.parametrize("ends", [None, [0, 3, 3]])
def test_tokens_after_the_call_are_counted_by_the_kernel(notes: Notes, ends: list[int] | None) -> None:
    cu_seqlens = ends if ends is None else torch.tensor(ends, dtype=torch.int32)
    k = torch.zeros(*((2, 3) if ends is None else (3,)), 3, 64).bfloat16()
    cache, seqlens = torch.zeros(2, 8, 3, 64).bfloat16(), torch.tensor([4, 5], dtype=torch.int32)
    inputs = AppendInputs(cache, cache, k, k, seqlens, cu_seqlens_k_new=cu_seqlens)
    for _ in range(2):
        rotated, after = append_and_count(inputs, AppendOptions())
        assert rotated is None and after is notes.tensors[-1].seqlens_after
        assert after.shape == seqlens.shape and after.dtype == seqlens.dtype and after is not seqlens
    assert append_now(inputs, AppendOptions()) is None and notes.tensors[-1].seqlens_after is None
    assert [problem.counts for problem in notes.problems] == [True, False]
    assert lengths_after(seqlens, k, cu_seqlens).tolist() == ([7, 8] if ends is None else [7, 5])


def test_without_new_tokens_there_is_no_kernel_that_counts(notes: Notes) -> None:
    k, q = torch.zeros(2, 0, 3, 64).bfloat16(), torch.zeros(2, 1, 3, 64).bfloat16()
    cache, seqlens = torch.zeros(2, 8, 3, 64).bfloat16(), torch.tensor([4, 5], dtype=torch.int32)
    rotary = tables(16, 32)
    for more in ({}, {"q": q, **rotary}):
        rotated, after = append_and_count(AppendInputs(cache, cache, k, k, seqlens, **more), AppendOptions())
        assert torch.equal(after, seqlens) and (rotated is None) == (not more)
    assert [problem.counts for problem in notes.problems] == [False]


def test_nothing_is_launched_for_nothing(notes: Notes) -> None:
    k = torch.zeros(2, 0, 3, 64).bfloat16()
    cache = torch.zeros(4, 8, 3, 64).bfloat16()
    assert append_now(AppendInputs(cache, cache, k, k, torch.zeros(2, dtype=torch.int32)), AppendOptions()) is None
    assert not notes.problems


def test_scalars_of_a_rotation(notes: Notes) -> None:
    x, (cos, sin) = torch.zeros(2, 5, 3, 64).half(), tables(32, 48).values()
    out = rotate_now(RotaryInputs(x, cos, sin), RotaryOptions(offset=7, fixed=True, inverse=True))
    (tensors,), (scalars,), (problem,) = notes.tensors, notes.scalars, notes.problems
    assert (tensors.q is x, tensors.q_out is out, tensors.cache_seqlens) == (True, True, None)
    assert scalars == (7, 0, -1.0)
    assert not problem.appends and not problem.has_seqlens and problem.rotary_dim == 48
    offsets = torch.zeros(2, dtype=torch.int32)
    other = rotary_problem(RotaryInputs(x, cos, sin, offsets), RotaryOptions(interleaved=True, inverse=True))
    assert other.has_seqlens and other.rotary_interleaved


def test_more_rows_than_a_kernel_can_number_are_refused() -> None:
    x = torch.zeros(1, 1, 1, 16).half().expand(2**15, 2**12, 16, 16)
    with pytest.raises(ValueError, match=f"the new tokens have {2**31} pieces of 16 columns"):
        check_sizes(x)


def test_tables_that_a_kernel_cannot_load_are_copied() -> None:
    table = torch.randn(16, 40)
    assert addressable(table[:, 8:24]).data_ptr() == table[:, 8:24].data_ptr()
    for other in (table[:, 1:17], torch.randn(16, 19)[:, :16], table[:, :32:2]):
        copy = addressable(other)
        assert copy.is_contiguous() and torch.equal(copy, other) and copy.data_ptr() != other.data_ptr()
