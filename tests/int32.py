"""Host integers that behave as the kernels' 32-bit ones must: arithmetic that would wrap or round otherwise fails."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

LARGEST = 2**31 - 1


def _checked(operation: Callable[[int, int], int], *, divides: bool = False) -> Any:
    def forward(self: int, other: int) -> Int32:
        # The hardware rounds quotients towards zero, Python down: they agree where nothing is negative.
        assert not divides or (self >= 0 and other > 0), f"{operation.__name__}({int(self)}, {int(other)})"
        return Int32(operation(int(self), int(other)))

    def reflected(self: int, other: int) -> Int32:
        return forward(other, self)

    return forward, reflected


class Int32(int):
    """A Python int whose sums, products and quotients stay below 2**31 and divide non-negative values only."""

    def __new__(cls, value: int) -> Int32:
        assert -LARGEST - 1 <= value <= LARGEST, f"{value} does not fit into 32 bits"
        return super().__new__(cls, value)

    __add__, __radd__ = _checked(operator.add)
    __sub__, __rsub__ = _checked(operator.sub)
    __mul__, __rmul__ = _checked(operator.mul)
    __floordiv__, __rfloordiv__ = _checked(operator.floordiv, divides=True)
    __mod__, __rmod__ = _checked(operator.mod, divides=True)
