"""Traits from values that somebody wrote down, in a file or on a command line: each field is checked by its type."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, Literal

from cuteflash.traits.row import KINDS, Traits, kind_of


def make_traits(kind: str, values: Mapping[str, Any]) -> Traits:
    """Traits of a kind of `KINDS`; fields that are left out get their defaults.

    Raises:
        ValueError: no such kind; a field that it does not have, lacks, or that may not have such a value.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    types, defaults = field_types(kind), default_values(kind)
    unknown = [name for name in values if name not in types]
    if unknown:
        raise ValueError(f"{kind} does not have {', '.join(unknown)}; fields of {kind}: {', '.join(types)}")
    lacking = [name for name in types if name not in values and name not in defaults]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} is missing; fields of {kind}: {', '.join(types)}")
    return KINDS[kind](**{name: _checked(name, value, types[name]) for name, value in values.items()})


def _checked(name: str, value: Any, type_: Any) -> Any:
    """A field's value, with a tuple for a list. ValueError: it is none of the type's."""
    options, is_tuple = literals(type_), typing.get_origin(type_) is tuple
    # Compared exactly: JSON's true is not a number.
    if is_tuple:
        element, _ = typing.get_args(type_)
        is_right = isinstance(value, list | tuple) and all(type(one) is element for one in value)
    else:
        is_right = value in options if options else type(value) is type_
    if not is_right:
        allowed = f"list of {element.__name__}" if is_tuple else ", ".join(map(repr, options)) or type_.__name__
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
    return tuple(value) if is_tuple else value


def values_of(traits: Traits) -> dict[str, Any]:
    """The kind of traits, called `kind`, and the values of their fields."""
    kind = kind_of(traits)
    return {"kind": kind} | {name: getattr(traits, name) for name in field_types(kind)}


@functools.cache
def field_types(kind: str) -> dict[str, Any]:
    """The type of each field of a kind's traits."""
    types = typing.get_type_hints(KINDS[kind])
    return {field.name: types[field.name] for field in dataclasses.fields(KINDS[kind])}


@functools.cache
def default_values(kind: str) -> dict[str, Any]:
    """The default of each field that has one."""
    fields = dataclasses.fields(KINDS[kind])
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def literals(type_: Any) -> tuple[Any, ...]:
    """The values that a `Literal` lists; none of another type."""
    return typing.get_args(type_) if typing.get_origin(type_) is Literal else ()
