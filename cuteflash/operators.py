"""Operators of `torch.ops.cuteflash`, each defined from one specification.

The schema comes from the tensors and the options' class. An operator has implementations for CUDA, CPU, fake and nested
tensors and for autograd; all others are refused in words. It is defined through `torch.library.Library`, whose call
costs a third of what the `custom_op` decorator's does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints

import torch
from torch import Tensor, is_grad_enabled

from cuteflash import torch_internals
from cuteflash.autograd import not_differentiable
from cuteflash.torch_internals import DispatchKeySet, OpOverload
from cuteflash.transforms import check_no_tangents

NAMESPACE = "cuteflash"
OTHER_KEYS = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")  # the first has no nested tensors

library = torch.library.Library(NAMESPACE, "DEF")


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """What an operator is made from.

    Attributes:
        name: below `torch.ops.cuteflash`.
        tensors: names of its tensors, which come first.
        optional: names of further tensors, each of which may be None, which is its default.
        mutates: names of those tensors that it writes to.
        options: a NamedTuple class with a default for each field: the arguments after the tensors.
        returns: its result, as the annotation of a function.
        check: takes the tensors and the options; raises if no implementation can take them.
        cuda: takes all arguments, flat and without defaults that were left out: it is called for every launch.
        cpu, fake: take the tensors and the options.
        transforms: registers what torch's transforms and modes do with it.
        differentiable: runs a call that needs a gradient inside an autograd node; takes an implementation and all its
            arguments, flat. None if its results have no gradient, which is then an error if one is asked for.
        with_gradients: the operator, defined before, that runs instead if a call needs a gradient; None is itself.
    """

    name: str
    tensors: tuple[str, ...]
    options: type[Any]
    returns: Any
    check: Callable[..., None]
    cuda: Callable[..., Any]
    cpu: Callable[..., Any]
    fake: Callable[..., Any]
    transforms: Callable[[torch.library.Library, OpOverload], None]
    optional: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    differentiable: Callable[..., Any] | None = None
    with_gradients: Operator | None = None

    @property
    def schema(self) -> str:
        """Name, arguments and result, as torch writes them."""
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        hints, defaults = get_type_hints(self.options), self.options._field_defaults
        parameters = [inspect.Parameter(name, positional, annotation=Tensor) for name in self.tensors]
        parameters += [
            inspect.Parameter(name, positional, annotation=Tensor | None, default=None) for name in self.optional
        ]
        parameters += [
            inspect.Parameter(name, positional, annotation=hints[name], default=defaults[name])
            for name in self.options._fields
        ]

        def prototype() -> None: ...

        prototype.__signature__ = inspect.Signature(parameters, return_annotation=self.returns)  # type: ignore[attr-defined]
        arguments = torch.library.infer_schema(prototype, mutates_args=self.mutates)
        return self.name + arguments.replace("SymInt", "int")  # no option is a size, to be traced as a symbol

    def flat_cpu(self, *arguments: Any) -> Any:
        """The implementation for a CPU, with flat arguments."""
        return self.cpu(*self.split(arguments))

    def split(self, arguments: tuple[Any, ...], **named: Any) -> tuple[Any, ...]:
        """The tensors, also those left out, then the options as one."""
        names = (*self.tensors, *self.optional)
        given = dict(zip(names, arguments, strict=False)) | {name: named.pop(name) for name in names if name in named}
        return *(given.get(name) for name in names), self.options(*arguments[len(names) :], **named)


def define(operator: Operator) -> OpOverload:
    """Define an operator with all its implementations."""
    name = operator.name
    library.define(operator.schema)
    op = overload(operator)

    def fake(*arguments: Any, **named: Any) -> Any:
        return operator.fake(*operator.split(arguments, **named))

    def elsewhere(*arguments: Any, **named: Any) -> NoReturn:
        operator.check(*operator.split(arguments, **named))
        first, kind = arguments[0], type(arguments[0]).__name__
        raise NotImplementedError(f"{operator.tensors[0]}.device is {first.device} with {kind}; supported: cuda, cpu")

    library.impl(name, operator.cuda, "CUDA")
    library.impl(name, operator.flat_cpu, "CPU")
    for key in OTHER_KEYS:
        library.impl(name, elsewhere, key)
    nested = torch_internals.nested_tensor_class()
    if nested is not None:
        torch.library.register_torch_dispatch(
            op, nested, lambda cls, op, types, args, kwargs: elsewhere(*args, **kwargs), lib=library
        )
    library.impl(name, _autograd(operator), "Autograd", with_keyset=True)
    torch.library.register_fake(op, fake, lib=library)
    operator.transforms(library, op)
    return op


def overload(operator: Operator) -> OpOverload:
    """A defined operator as torch calls it."""
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), operator.name).default
    return op


def _autograd(operator: Operator) -> Callable[..., Any]:
    names = (*operator.tensors, *operator.optional)
    differentiable = operator.differentiable or functools.partial(not_differentiable, operator.name)
    mutated = tuple(names.index(name) for name in operator.mutates)
    plain, with_gradients = _implementations(operator), _implementations(operator.with_gradients or operator)

    def autograd(keyset: DispatchKeySet, *arguments: Any) -> Any:
        if torch_internals.is_forward_ad_active():
            check_no_tangents(dict(zip(names, arguments, strict=False)))
        if is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[: len(names)]):
            implementation = with_gradients(keyset)
            if not torch_internals.are_functorch_transforms_active():
                return differentiable(implementation, *arguments)
            with torch_internals.single_level_autograd():
                return differentiable(torch_internals.seen_by_outer_levels(implementation), *arguments)
        if mutated:
            note_writes(*(arguments[i] for i in mutated))
        return plain(keyset)(*arguments)

    return autograd


def note_writes(*tensors: Tensor) -> None:
    """Tell autograd that tensors are written to: a backward that saved one of them then raises."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _implementations(operator: Operator) -> Callable[[DispatchKeySet], Callable[..., Any]]:
    """From the keys of a call to what runs after autograd."""
    op = overload(operator)
    # Plain tensors with no mode active: what the dispatcher would call next, without the 4 us of asking it again.
    direct = {
        torch_internals.plain_keys("CUDA"): operator.cuda,
        torch_internals.plain_keys("CPU"): operator.flat_cpu,
    }

    def implementation(keyset: DispatchKeySet) -> Callable[..., Any]:
        return direct.get(keyset.raw_repr()) or functools.partial(torch_internals.below_autograd, op, keyset)

    return implementation
