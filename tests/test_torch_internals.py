"""A torch that lacks private names which have a substitute: the same results, and nothing refused passes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import utils as functorch_utils
from torch.autograd import forward_ad
from torch.nested._internal import nested_tensor

from cuteflash import operators, ops, torch_internals, transforms
from tests.test_ops import FWD_LSE, qkv
from tests.test_transforms import CudaTensor

MODES = {
    "_len_torch_dispatch_stack": torch._C,
    "_is_tracing": torch._C,
    "_dispatch_tls_is_dispatch_key_included": torch._C,
    "_are_functorch_transforms_active": torch._C,
    "_is_torch_function_mode_enabled": torch._C,
    "_current_level": forward_ad,
}
NAMES = MODES | {
    "_is_fwd_grad_enabled": torch._C,
    "_set_fwd_grad_enabled": forward_ad,
    "enable_single_level_autograd_function": functorch_utils,
    "_ExcludeDispatchKeyGuard": torch._C,
    "NestedTensor": nested_tensor,
}
numbers = itertools.count()


@contextlib.contextmanager
def lacking(names: Iterable[str]) -> Iterator[ModuleType]:
    """A copy of the module, loaded while torch lacks these names."""
    spec = importlib.util.spec_from_file_location("internals_copy", torch_internals.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(NAMES[name], name)
        spec.loader.exec_module(copy)
        yield copy


def test_a_torch_that_has_them_all_is_not_taken_for_an_older_one() -> None:
    assert torch_internals.KNOWS_MODES
    assert torch_internals.nested_tensor_class() is nested_tensor.NestedTensor


@pytest.mark.parametrize(
    "name", ["api", "autograd", "ops", "operators", "planning", "transforms", "validate", "integrations/sdpa"]
)
def test_no_other_module_uses_private_names(name: str) -> None:
    source = (pathlib.Path(torch_internals.__file__).parent / f"{name}.py").read_text()
    assert re.findall(r"(?:from torch|\btorch|forward_ad)(?:\.\w+)*\._[a-zA-Z]\w*", source) == []


@pytest.mark.parametrize("name", NAMES)
def test_without_a_name_the_module_loads_and_says_so(name: str) -> None:
    with lacking([name]) as copy:
        assert (name not in MODES) == copy.KNOWS_MODES
        assert (copy.nested_tensor_class() is None) == (name == "NestedTensor")
        assert copy.is_forward_ad_active() == (name == "_current_level")
        assert copy.is_fwd_grad_enabled() and not copy.are_functorch_transforms_active()
        with copy.below_autocast("cpu"):
            assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", MODES)
def test_without_the_means_to_know_modes_each_call_goes_through_the_dispatcher(name: str) -> None:
    with lacking([name]) as copy:
        assert not copy.is_plain_cuda_call(*[CudaTensor()] * 3)


@pytest.mark.parametrize("name", ["_set_fwd_grad_enabled", "enable_single_level_autograd_function"])
def test_without_the_means_for_functional_gradients_they_are_refused(name: str) -> None:
    message = f"torch.func.* with torch {re.escape(torch.__version__)}"
    with lacking([name]) as copy, pytest.raises(NotImplementedError, match=message):
        copy.single_level_autograd()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize("has_class", [True, False])
def test_a_direct_node_has_the_gradients_of_its_function(has_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function = type("Doubled", (Double,), {})
    if not has_class:
        monkeypatch.setattr(torch_internals, "_private", lambda owner, name: None)
    x = torch.ones(3, requires_grad=True)
    out = torch_internals.direct_node(function)(x)
    (found,) = torch.autograd.grad(out, x, torch.arange(3.0))
    assert torch.equal(out, 2 * x) and torch.equal(found, 2 * torch.arange(3.0))
    assert (type(out.grad_fn).apply is function.backward) == has_class


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The operator with LSE, as a torch without any of the names defines it."""
    with lacking(NAMES) as copy:
        pass
    for module in (operators, transforms):
        monkeypatch.setattr(module, "torch_internals", copy)
    return operators.define(dataclasses.replace(ops.FWD_LSE, name=f"fwd_lse_{next(numbers)}"))


def test_without_the_names_results_are_the_same(op: Any) -> None:
    tensors = qkv(dtype=torch.float32)
    expected = FWD_LSE(*tensors, 0.3, 4, 1)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            got = op(*tensors, 0.3, 4, 1)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    mapped = torch.vmap(lambda *x: op(*x, 0.3, 4, 1))(*(x[None] for x in tensors))
    assert all(torch.equal(x[0], y) for x, y in zip(mapped, expected, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert op(*tensors)[0].dtype == torch.bfloat16


def test_without_the_names_gradients_are_the_same(op: Any) -> None:
    q, k, v = qkv(dtype=torch.float32)
    q.requires_grad_()
    got, expected = (torch.autograd.grad(one(q, k, v)[0].sum(), q)[0] for one in (op, FWD_LSE))
    assert torch.equal(got, expected)


def test_without_the_names_other_derivatives_are_refused(op: Any) -> None:
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="functorch"):  # torch's own words, as transforms are not known to be active
        torch.func.grad(lambda q: op(q, k, v)[0].sum())(q)
    with pytest.raises(NotImplementedError, match="q has a tangent"):
        torch.func.jvp(lambda q: op(q, k, v)[0], (q,), (q,))
