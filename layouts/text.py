"""Evaluates layout text, the playground's language: `divide(S<3,3,3> o (8,64):(64,1), (8,8))`.

`parse` gives the tree (grammar in layouts/syntax.py), `evaluate` the value and every step on the way. As the second
argument of compose, of a divide or of a product, `(4,8)` without a stride is a tiler and works mode by mode, as in
CuTe; `(4,8):(1,4)` is a layout. Everywhere else `(4,8)` is the compact column-major layout.

Steps come in the order of evaluation and are named:

    layout                        ()                         a layout written out
    swizzle                       (swizzle, offset, layout)  a swizzled layout, written or carried through a function
    tv                            (layout, shape)
    compose complement coalesce
    flatten filter right_inverse
    left_inverse                  the function's arguments   complement always with its size
    concatenate                   the modes
    regroup                       what is taken apart

divide is complement(T, size L), concatenate, compose, for each mode of a tiler and then concatenate; product is
complement(A, size A * cosize B), compose, concatenate; the other divides and products add a regroup if modes move.
The value is the last step's result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, TypeAlias

from . import algebra
from .algebra import AlgebraError, ComposedLayout, IntTuple, Layout, Operand, Swizzle, Tiler, congruent, text_of
from .messages import MAX_INTEGER, MAX_SHOWN, message
from .syntax import (
    FUNCTIONS,
    Call,
    ComposedNode,
    Expression,
    Item,
    Kind,
    LayoutNode,
    LayoutSyntaxError,
    LayoutTextError,
    Nest,
    Node,
    Number,
    TVNode,
    has_layouts,
    parse,
    quoted,
)

__all__ = ["LayoutSyntaxError", "LayoutTextError", "Result", "Step", "ThreadValue", "evaluate", "parse"]


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadValue:
    """A TV layout: (thread, value) -> row + rows * column of a tile of `shape`, with every offset inside the tile."""

    layout: Layout
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"TV {self.layout} on {text_of(self.shape)}"


Value: TypeAlias = Layout | ComposedLayout | ThreadValue


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operation, written at text[start:end], its operands and its result. Names: see the module."""

    start: int
    end: int
    operation: str
    operands: tuple[Operand, ...]
    result: Value


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The evaluation of a text: its value, and the steps that lead to it (the last one's result is the value)."""

    value: Value
    steps: tuple[Step, ...]


def evaluate(text: str) -> Result:
    """The value of a layout text and its steps.

    Raises LayoutSyntaxError if the text is outside the grammar, and LayoutTextError if it cannot be evaluated (strides
    that are not nested like the shape, an operation that does not exist for its operands, a layout of more than
    MAX_SHOWN elements): its position is the argument at fault.
    """
    evaluator = _Evaluator(text)
    node = parse(text)
    value = evaluator.thread_value(node) if isinstance(node, TVNode) else evaluator.expression(node)
    return Result(value, tuple(evaluator.steps))


_TRACED: Final[dict[str, Callable[..., Layout | ComposedLayout]]] = {
    "divide": algebra.logical_divide,
    "zipped_divide": algebra.zipped_divide,
    "tiled_divide": algebra.tiled_divide,
    "flat_divide": algebra.flat_divide,
    "product": algebra.logical_product,
    "zipped_product": algebra.zipped_product,
    "tiled_product": algebra.tiled_product,
    "flat_product": algebra.flat_product,
    "blocked_product": algebra.blocked_product,
    "raked_product": algebra.raked_product,
}
_SINGLE: Final[dict[str, Callable[..., Layout | ComposedLayout]]] = {
    "compose": algebra.composition,
    "complement": algebra.complement,
    "right_inverse": algebra.right_inverse,
    "left_inverse": algebra.left_inverse,
    "coalesce": algebra.coalesce,
    "flatten": algebra.flatten,
    "filter": algebra.filter,
}


class _Evaluator:
    def __init__(self, text: str) -> None:
        self.text = text
        self.steps: list[Step] = []

    def expression(self, node: Expression) -> Layout | ComposedLayout:
        if isinstance(node, Call):
            return self.call(node)
        if isinstance(node, ComposedNode):
            return self.composed(node)
        return self.layout(node)

    def thread_value(self, node: TVNode) -> ThreadValue:
        layout = self.layout(node.layout)
        shape = _integers(node.shape)
        if layout.rank != 2:
            raise self.error(node.layout, "tv_rank", layout=layout)
        if not isinstance(shape, tuple) or not congruent(shape, (0, 0)):
            raise self.error(node.shape, "tv_shape", shape=text_of(shape))
        rows, columns = algebra.leaves(shape)
        if rows * columns > MAX_SHOWN:
            raise self.error(node.shape, "size", layout=text_of(shape), limit=MAX_SHOWN)
        if layout.cosize() > rows * columns:
            reach, size = layout.cosize() - 1, rows * columns
            raise self.error(node.layout, "tv_reach", layout=layout, reach=reach, shape=text_of(shape), size=size)
        value = ThreadValue(layout, (rows, columns))
        self.steps.append(Step(node.start, node.end, "tv", (layout, shape), value))
        return value

    def composed(self, node: ComposedNode) -> ComposedLayout:
        try:
            swizzle = Swizzle(node.swizzle.bits, node.swizzle.base, node.swizzle.shift)
        except AlgebraError as error:
            raise self.located(node.swizzle, str(error)) from None
        layout = self.layout(node.layout)
        value = ComposedLayout(swizzle, node.offset, layout)
        self.step(node, "swizzle", (swizzle, node.offset, layout), value)
        return value

    def layout(self, node: Item) -> Layout:
        """A layout written out, or a shape alone, which is compact."""
        if not isinstance(node, LayoutNode):
            if has_layouts(node):
                raise self.error(node, "tiler_alone")
            value = Layout(_integers(node))
        else:
            self.check_congruent(node.shape, node.stride)
            value = Layout(_integers(node.shape), _integers(node.stride))
        self.step(node, "layout", (), value)
        return value

    def check_congruent(self, shape: Item, stride: Item) -> None:
        """Raises at the outermost part of the stride that is not nested like its part of the shape."""
        if isinstance(shape, Nest) and isinstance(stride, Nest) and len(shape.items) == len(stride.items):
            for part, step in zip(shape.items, stride.items):
                self.check_congruent(part, step)
        elif not isinstance(shape, Number) or not isinstance(stride, Number):
            given = {"stride": text_of(_integers(stride)), "shape": text_of(_integers(shape))}
            raise self.error(stride, "congruent", **given)

    def call(self, node: Call) -> Layout | ComposedLayout:
        kinds = FUNCTIONS[node.name].kinds
        operands = [self.argument(node.name, kind, part) for kind, part in zip(kinds, node.arguments)]
        if node.name == "complement" and len(operands) == 1 and isinstance(operands[0], Layout):
            operands.append(operands[0].cosize())
        try:
            if node.name in _TRACED:
                return _TRACED[node.name](*operands, lambda name, given, result: self.step(node, name, given, result))
            value = _SINGLE[node.name](*operands)
        except AlgebraError as error:
            raise self.located(node.arguments[error.argument], str(error)) from None
        self.step(node, node.name, tuple(operands), value)
        return value

    def argument(self, function: str, kind: Kind, node: Expression) -> Operand:
        given = quoted(self.text[node.start : node.end])
        if kind is Kind.INTEGER:
            if not isinstance(node, Number):
                raise self.error(node, "needs_integer", function=function, given=given)
            return node.value
        if kind is Kind.TILER and isinstance(node, Number | Nest):
            return self.tiler(node)
        if isinstance(node, Nest) and has_layouts(node):
            raise self.error(node, "needs_layout", function=function, given=given)
        value = self.expression(node)
        if kind is not Kind.LAYOUT and isinstance(value, ComposedLayout):
            raise self.error(node, "needs_plain", function=function, given=given)
        return value

    def tiler(self, node: Item) -> int | Layout | tuple[Tiler, ...]:
        if isinstance(node, Nest):
            return tuple(map(self.tiler, node.items))
        return node.value if isinstance(node, Number) else self.layout(node)

    def step(self, node: Node, operation: str, operands: tuple[Operand, ...], result: Layout | ComposedLayout) -> None:
        """Records a step; raises if its result is too large to show."""
        inner, offset = (result.layout, result.offset) if isinstance(result, ComposedLayout) else (result, 0)
        if inner.size() > MAX_SHOWN:
            raise self.error(node, "size", layout=result, limit=MAX_SHOWN)
        if inner.cosize() + offset > MAX_INTEGER:
            raise self.error(node, "reach", layout=result, limit=MAX_INTEGER)
        self.steps.append(Step(node.start, node.end, operation, operands, result))

    def error(self, node: Node, key: str, **values: object) -> LayoutTextError:
        return self.located(node, message(key, **values))

    def located(self, node: Node, words: str) -> LayoutTextError:
        return LayoutTextError(self.text, node.start, node.end - node.start, words)


def _integers(node: Item) -> IntTuple:
    """The nested tuple of a shape or stride."""
    if isinstance(node, Number):
        return node.value
    assert isinstance(node, Nest)  # the callers have checked that it contains no layout
    return tuple(map(_integers, node.items))
