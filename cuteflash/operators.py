"""Operators of `torch.ops.cuteflash`, each defined from one specification.

The schema comes from the tensors and the options' class. An operator has implementations for CUDA, CPU, fake and nested
tensors and for autograd; all others are refused in words. It is defined through `torch.library.Library`, whose call
costs a third of what the `custom_op` decorator's does.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints

import torch
from torch import Tensor, is_grad_enabled

from cuteflash import torch_internals
from cuteflash.torch_internals import DispatchKeySet, OpOverload
from cuteflash.transforms import NO_BACKWARD, check_derivatives

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
        options: a NamedTuple class with a default for each field: the arguments after the tensors.
        returns: its result, as the annotation of a function.
        check: takes the tensors and the options; raises if no implementation can take them.
        cuda: takes all arguments, flat and without defaults that were left out: it is called for every launch.
        cpu, fake: take the tensors and the options.
        transforms: registers what torch's transforms and modes do with it.
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
        arguments = torch.library.infer_schema(prototype, mutates_args=())
        return self.name + arguments.replace("SymInt", "int")  # no option is a size, to be traced as a symbol

    def split(self, arguments: tuple[Any, ...], **named: Any) -> tuple[Any, ...]:
        """The tensors, also those left out, then the options as one."""
        names = (*self.tensors, *self.optional)
        given = dict(zip(names, arguments, strict=False)) | {name: named.pop(name) for name in names if name in named}
        return *(given.get(name) for name in names), self.options(*arguments[len(names) :], **named)


class _ForwardOnly(torch.autograd.Function):
    """The autograd node of a forward without a backward: an error if gradients are asked for, not silence."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, keyset: DispatchKeySet, *arguments: Any) -> Any:
        return torch_internals.below_autograd(op, keyset, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{NO_BACKWARD}: call it under torch.no_grad() or torch.inference_mode(), or detach the inputs"
        )


def define(operator: Operator) -> OpOverload:
    """Define an operator with all its implementations."""
    name = operator.name
    library.define(operator.schema)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def cpu(*arguments: Any) -> Any:
        return operator.cpu(*operator.split(arguments))

    def fake(*arguments: Any, **named: Any) -> Any:
        return operator.fake(*operator.split(arguments, **named))

    def elsewhere(*arguments: Any, **named: Any) -> NoReturn:
        operator.check(*operator.split(arguments, **named))
        first, kind = arguments[0], type(arguments[0]).__name__
        raise NotImplementedError(f"{operator.tensors[0]}.device is {first.device} with {kind}; supported: cuda, cpu")

    library.impl(name, operator.cuda, "CUDA")
    library.impl(name, cpu, "CPU")
    for key in OTHER_KEYS:
        library.impl(name, elsewhere, key)
    nested = torch_internals.nested_tensor_class()
    if nested is not None:
        torch.library.register_torch_dispatch(
            op, nested, lambda cls, op, types, args, kwargs: elsewhere(*args, **kwargs), lib=library
        )
    library.impl(name, _autograd(operator, op, cpu), "Autograd", with_keyset=True)
    torch.library.register_fake(op, fake, lib=library)
    operator.transforms(library, op)
    return op


def _autograd(operator: Operator, op: OpOverload, cpu: Callable[..., Any]) -> Callable[..., Any]:
    count = len(operator.tensors)
    # Plain tensors with no mode active: what the dispatcher would call next, without the 4 us of asking it again.
    direct = {
        torch_internals.plain_keys("CUDA"): operator.cuda,
        torch_internals.plain_keys("CPU"): cpu,
    }

    def autograd(keyset: DispatchKeySet, *arguments: Any) -> Any:
        needs_grad = is_grad_enabled() and any(x.requires_grad for x in arguments[:count])
        if needs_grad or torch_internals.is_forward_ad_active():
            check_derivatives(dict(zip(operator.tensors, arguments, strict=False)), needs_grad)
        if needs_grad:
            return _ForwardOnly.apply(op, keyset, *arguments)  # type: ignore[no-untyped-call]
        implementation = direct.get(keyset.raw_repr())
        if implementation is not None:
            return implementation(*arguments)
        return torch_internals.below_autograd(op, keyset, *arguments)

    return autograd
