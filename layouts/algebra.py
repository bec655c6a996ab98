"""CuTe's layout algebra in plain Python, evaluated with numpy: the module that the rest of the package imports.

`Layout`, `Swizzle` and `ComposedLayout` are values (layouts/layout.py), `coalesce`, `composition`, `complement` and the
inverses treat them as functions (layouts/maps.py), and the divides and products build tilings from those
(layouts/tiling.py). Errors are ValueErrors (`AlgebraError`) that say what was given; all messages are in
layouts/messages.py.
"""

from __future__ import annotations

from .layout import (
    AlgebraError,
    ComposedLayout,
    Coordinate,
    IntTuple,
    Layout,
    Swizzle,
    compact,
    concatenate,
    congruent,
    leaves,
    product,
    text_of,
)
from .maps import (
    Tiler,
    coalesce,
    complement,
    composition,
    filter,
    filter_zeros,
    flatten,
    group,
    left_inverse,
    right_inverse,
    select,
)
from .tiling import (
    Operand,
    Trace,
    blocked_product,
    flat_divide,
    flat_product,
    logical_divide,
    logical_product,
    raked_product,
    tiled_divide,
    tiled_product,
    zipped_divide,
    zipped_product,
)

__all__ = [
    "AlgebraError",
    "ComposedLayout",
    "Coordinate",
    "IntTuple",
    "Layout",
    "Operand",
    "Swizzle",
    "Tiler",
    "Trace",
    "blocked_product",
    "coalesce",
    "compact",
    "complement",
    "composition",
    "concatenate",
    "congruent",
    "filter",
    "filter_zeros",
    "flat_divide",
    "flat_product",
    "flatten",
    "group",
    "leaves",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "product",
    "raked_product",
    "right_inverse",
    "select",
    "text_of",
    "tiled_divide",
    "tiled_product",
    "zipped_divide",
    "zipped_product",
]
