"""Every error message of the algebra and of the layout parser, in one place.

The same modules in JavaScript (`web/algebra.js`, `web/text.js`) report the same messages at the same positions, so that
an error reads the same in a terminal and in the playground. `{name}` is a field of `str.format`.
Layouts and shapes are filled in as CuTe text without spaces, as `str(layout)` and `text_of(shape)` write them.
"""

from __future__ import annotations

from typing import Final

MAX_SIZE: Final = 2**24  # elements: the most that `indices()` evaluates
MAX_SHOWN: Final = 2**20  # elements of any layout that appears while a text is evaluated
MAX_INTEGER: Final = 2**31  # integers in a text, and the reach (cosize) of any layout that appears
MAX_TEXT: Final = 4096  # characters
MAX_DEPTH: Final = 32  # parentheses and calls inside each other

MESSAGES: Final[dict[str, str]] = {
    # layouts and swizzles
    "empty": "a shape needs at least one mode",
    "integer": "expected an integer or nested integers, given {given}",
    "shape": "every extent of a shape must be at least 1, given {given}",
    "stride": "every stride must be at least 0, given {given}",
    "congruent": "stride {stride} is not nested like shape {shape}",
    "coordinate": "coordinate {given} does not fit shape {shape}",
    "negative": "a coordinate must not be negative, given {given}",
    "size": "{layout} has more than {limit} elements",
    "reach": "{layout} reaches beyond offset {limit}",
    "swizzle": "a swizzle needs bits >= 0, base >= 0, |shift| >= bits and base + bits + |shift| <= 31, given {swizzle}",
    "offset": "the offset of a swizzled layout must be at least 0, given {given}",
    "mode": "{layout} has no mode {mode}",
    "group": "cannot group modes {begin} to {end} of {layout}",
    # algebra
    "compose_stride": "cannot compose {left} with {mode}: stride {stride} and extent {extent} do not divide",
    "compose_shape": "cannot compose {left} with {mode}: shape {shape} is not a multiple of {step}",
    "compose_carry": "cannot compose {left} with {right}: the modes of {right} together overflow extent {extent}",
    "tiler_rank": "a tiler of {tiler} modes needs a layout of at least as many, given {layout}",
    "profile": "cannot coalesce {layout} by a profile of {modes} modes",
    "overlap": "the complement of {layout} does not exist: its modes overlap",
    "cotarget": "the complement needs a size of at least 1, given {given}",
    "left_inverse": "{layout} has no left inverse: strides {first} and {second} do not nest",
    "repeats": "{layout} has no left inverse: its modes overlap",
    # text: syntax
    "expected": "expected {expected}, found {found}",
    "too_long": "the text is longer than {limit} characters",
    "too_deep": "parentheses and calls are nested deeper than {limit}",
    "too_large": "integer {found} is larger than {limit}",
    # text: meaning
    "function": "unknown function {name}; known are {known}",
    "needs_layout": "{function} needs a layout here, given {given}",
    "needs_integer": "{function} needs an integer here, given {given}",
    "needs_plain": "{function} needs a layout without a swizzle here, given {given}",
    "tiler_alone": "a tuple of layouts is a tiler: it is understood only as the second argument of a function",
    "tv_rank": "a TV layout needs two modes (thread, value), given {layout}",
    "tv_shape": "a TV layout needs a shape of two extents, given {shape}",
    "tv_reach": "{layout} reaches element {reach}, but shape {shape} has {size}",
}


def message(key: str, **values: object) -> str:
    """The message `key` with `values` filled in."""
    return MESSAGES[key].format(**values)
