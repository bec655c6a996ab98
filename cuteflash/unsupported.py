"""Arguments that other libraries have and cuteflash does not support yet: refused by name, before anything runs."""

from __future__ import annotations

from torch import Tensor

from cuteflash.validate import shown

Allowed = tuple[object, ...]
NOTHING: Allowed = (None,)
ZERO: Allowed = (0,)


def refuse(**arguments: tuple[object, Allowed]) -> None:
    """Raise for the first argument, given as (its value, the values that are supported), with another value.

    Raises:
        NotImplementedError: naming the argument, its value and what is supported.
    """
    for name, (value, allowed) in arguments.items():
        if isinstance(value, Tensor):  # not compared, not printed: both would synchronise the host with the GPU
            described = f"a tensor of shape {tuple(value.shape)}"
        elif value in allowed:
            continue
        else:
            described = shown(value)
        raise NotImplementedError(f"{name} is {described}; cuteflash supports {' or '.join(map(repr, allowed))}")
