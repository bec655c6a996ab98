"""Parses the text of a layout into a tree whose nodes record their positions. layouts/text.py evaluates the tree.

    input      := tv | expression
    tv         := "TV" layout "on" shape
    expression := call | composed | layout
    call       := NAME "(" argument ("," argument)* ")"        a name of FUNCTIONS
    argument   := expression | tiler                           an integer is a layout, too
    tiler      := "(" element ("," element)* ")"               element := INTEGER | layout | tiler
    composed   := swizzle ("o" INTEGER)? "o" layout
    swizzle    := ("S" | "Sw") "<" INTEGER "," INTEGER "," "-"? INTEGER ">"
    layout     := shape (":" stride)?
    shape      := INTEGER | "(" shape ("," shape)* ")"         extents are at least 1; stride likewise, from 0
    INTEGER    := "_"? [0-9]+                                  C++ CuTe prints static integers as _8
    NAME       := [A-Za-z] [A-Za-z0-9_]*
    space, tab and line ends separate

The first wrong token is reported, so all text before an error's position is ASCII and counts the same everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator
from typing import Final, TypeAlias

from .messages import MAX_DEPTH, MAX_INTEGER, MAX_TEXT, message

_CONTEXT: Final = 60  # characters of the line that an error shows on either side


class LayoutTextError(ValueError):
    """Layout text that cannot be evaluated. `str` shows the line with carets below the error.

    Attributes: `text`, all of it; `position`, the 0-based character; `length`, how many characters are at fault (0 at
    the end of the text); `message`, without the drawing.
    """

    def __init__(self, text: str, position: int, length: int, words: str) -> None:
        self.text = text
        self.position = position
        self.length = length
        self.message = words
        begin = max(text.rfind("\n", 0, position) + 1, position - _CONTEXT)
        line = text[begin : position + _CONTEXT].split("\n", 1)[0].expandtabs(1)
        column = position - begin
        carets = "^" * max(1, min(length, len(line) - column))
        super().__init__(f"{words}\n  {line}\n  {' ' * column}{carets}")


class LayoutSyntaxError(LayoutTextError):
    """Text outside the grammar. `expected` says what is allowed at `position`."""

    def __init__(self, text: str, position: int, length: int, words: str, expected: str) -> None:
        super().__init__(text, position, length, words)
        self.expected = expected


class Kind(enum.Enum):
    """Kinds of arguments that a function takes."""

    LAYOUT = "layout, with or without a swizzle"
    PLAIN = "layout without a swizzle"
    TILER = "layout without a swizzle, tuple (mode by mode) or integer"
    INTEGER = "integer"


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function; the last `optional` of them may be left out."""

    kinds: tuple[Kind, ...]
    optional: int = 0


_DIVIDE = Signature((Kind.LAYOUT, Kind.TILER))
_PRODUCT = Signature((Kind.PLAIN, Kind.TILER))
_PLAIN_PRODUCT = Signature((Kind.PLAIN, Kind.PLAIN))
_MAP = Signature((Kind.LAYOUT,))
_PLAIN_MAP = Signature((Kind.PLAIN,))
FUNCTIONS: Final[dict[str, Signature]] = {
    "compose": _DIVIDE,
    "complement": Signature((Kind.PLAIN, Kind.INTEGER), optional=1),
    "divide": _DIVIDE,
    "zipped_divide": _DIVIDE,
    "tiled_divide": _DIVIDE,
    "flat_divide": _DIVIDE,
    "product": _PRODUCT,
    "zipped_product": _PRODUCT,
    "tiled_product": _PRODUCT,
    "flat_product": _PRODUCT,
    "blocked_product": _PLAIN_PRODUCT,
    "raked_product": _PLAIN_PRODUCT,
    "right_inverse": _PLAIN_MAP,
    "left_inverse": _PLAIN_MAP,
    "coalesce": _MAP,
    "flatten": _MAP,
    "filter": _PLAIN_MAP,
}
ALIASES: Final = {"composition": "compose", "logical_divide": "divide", "logical_product": "product"}  # CuTe's names


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """An integer at text[start:end]."""

    start: int
    end: int
    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Nest:
    """A parenthesised list: a shape, a stride, or a tiler if it contains a LayoutNode at any depth."""

    start: int
    end: int
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutNode:
    """`shape:stride`."""

    start: int
    end: int
    shape: Number | Nest
    stride: Number | Nest


@dataclasses.dataclass(frozen=True, slots=True)
class SwizzleNode:
    """`S<bits,base,shift>`."""

    start: int
    end: int
    bits: int
    base: int
    shift: int


@dataclasses.dataclass(frozen=True, slots=True)
class ComposedNode:
    """`swizzle o offset o layout`; the offset is 0 if none is written."""

    start: int
    end: int
    swizzle: SwizzleNode
    offset: int
    layout: Item


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A function of FUNCTIONS (`name` is never an alias) with as many arguments as it takes."""

    start: int
    end: int
    name: str
    arguments: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TVNode:
    """`TV layout on shape`."""

    start: int
    end: int
    layout: Item
    shape: Item


Item: TypeAlias = Number | Nest | LayoutNode  # a Number or Nest is a shape without a stride, or a tiler
Expression: TypeAlias = Item | ComposedNode | Call
Node: TypeAlias = Expression | TVNode | SwizzleNode


def parse(text: str) -> Expression | TVNode:
    """The tree of a layout text. Raises LayoutSyntaxError at the first character outside the grammar."""
    return _Parser(text).input()


def has_layouts(item: Item) -> bool:
    """Whether a nest holds a layout, so that it can only be a tiler."""
    return isinstance(item, LayoutNode) or (isinstance(item, Nest) and any(map(has_layouts, item.items)))


def quoted(source: str) -> str:
    """A piece of the text for messages, cut to 40 characters."""
    return f"'{source}'" if len(source) <= 40 else f"'{source[:37]}...'"


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "integer", "name", "end" or the character itself
    start: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


_TOKEN = re.compile(r"[ \t\r\n]*(?:(?P<integer>_?[0-9]+)|(?P<name>[A-Za-z][A-Za-z0-9_]*)|(?P<other>[^ \t\r\n]))")
_OPERAND = "an integer or '('"


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        word = match[kind]
        yield _Token(word if kind == "other" else kind, match.start(kind), word)
    yield _Token("end", len(text), "")


class _Parser:
    """Recursive descent, one method a rule, one token of lookahead (two after the `o` of a swizzle)."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_TEXT:
            words = message("too_long", limit=MAX_TEXT)
            raise LayoutSyntaxError(text, MAX_TEXT, len(text) - MAX_TEXT, words, "the end of the text")
        self.tokens = list(_tokens(text))
        self.at = 0
        self.depth = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def input(self) -> Expression | TVNode:
        is_tv = self.token.kind == "name" and self.token.text == "TV"
        node = self.thread_value() if is_tv else self.expression()
        if self.token.kind != "end":
            ends_in_shape = not is_tv and isinstance(node, Number | Nest) and not has_layouts(node)
            raise self.unexpected("':' or the end of the text" if ends_in_shape else "the end of the text")
        return node

    def thread_value(self) -> TVNode:
        start = self.take("name", "'TV'").start
        layout = self.layout()
        self.word("on")
        shape = self.item(_OPERAND, least=1)
        return TVNode(start, shape.end, layout, shape)

    def expression(self) -> Expression:
        token = self.token
        if token.kind == "name":
            return self.composed() if token.text in ("S", "Sw") else self.call()
        if token.kind in ("integer", "("):
            return self.layout(tilers=True)
        raise self.unexpected("a layout or a function")

    def call(self) -> Call:
        token = self.take("name", "a function")
        name = ALIASES.get(token.text, token.text)
        if name not in FUNCTIONS:
            words = message("function", name=quoted(token.text), known=", ".join(FUNCTIONS))
            raise LayoutSyntaxError(self.text, token.start, len(token.text), words, "a function")
        signature = FUNCTIONS[name]
        self.open()
        arguments = [self.expression()]
        while len(arguments) < len(signature.kinds):
            optional = len(arguments) >= len(signature.kinds) - signature.optional
            if optional and self.token.kind != ",":
                break
            self.take(",", "','")
            arguments.append(self.expression())
        more = len(arguments) < len(signature.kinds)
        return Call(token.start, self.close("',' or ')'" if more else "')'"), name, tuple(arguments))

    def composed(self) -> ComposedNode:
        swizzle = self.swizzle()
        self.word("o")
        offset = 0
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        if self.token.kind == "integer" and following.text == "o":
            offset = self.number(_OPERAND).value
            self.word("o")
        layout = self.layout()
        return ComposedNode(swizzle.start, layout.end, swizzle, offset, layout)

    def swizzle(self) -> SwizzleNode:
        start = self.take("name", "'S'").start
        self.take("<", "'<'")
        bits = self.number("an integer").value
        self.take(",", "','")
        base = self.number("an integer").value
        self.take(",", "','")
        sign = 1
        if self.token.kind == "-":
            self.at += 1
            sign = -1
        shift = sign * self.number("an integer").value
        return SwizzleNode(start, self.take(">", "'>'").end, bits, base, shift)

    def layout(self, tilers: bool = False) -> Item:
        """A shape with or without a stride; with `tilers` also a list that holds layouts."""
        shape = self.item(_OPERAND, least=1, tilers=tilers)
        if self.token.kind != ":" or isinstance(shape, LayoutNode) or has_layouts(shape):
            return shape
        return self.strided(shape)

    def strided(self, shape: Number | Nest) -> LayoutNode:
        self.take(":", "':'")
        stride = self.item(_OPERAND, least=0)
        assert not isinstance(stride, LayoutNode)  # item() makes those only for tilers
        return LayoutNode(shape.start, stride.end, shape, stride)

    def item(self, expected: str, least: int, tilers: bool = False) -> Item:
        """An integer of at least `least`, or a list of items; with `tilers` those in the list may have strides."""
        if self.token.kind == "integer":
            return self.number(expected, least)
        if self.token.kind != "(":
            raise self.unexpected(expected)
        start = self.open()
        items: list[Item] = []
        while not items or self.token.kind == ",":
            if items:
                self.at += 1
            item = self.item(_OPERAND, least, tilers)
            if tilers and self.token.kind == ":" and not isinstance(item, LayoutNode) and not has_layouts(item):
                item = self.strided(item)
            items.append(item)
        return Nest(start, self.close("',' or ')'"), tuple(items))

    def number(self, expected: str, least: int = 0) -> Number:
        token = self.take("integer", expected)
        digits = token.text.lstrip("_").lstrip("0") or "0"
        if len(digits) > len(str(MAX_INTEGER)) or int(digits) > MAX_INTEGER:
            words = message("too_large", found=quoted(token.text), limit=MAX_INTEGER)
            expected = f"an integer up to {MAX_INTEGER}"
            raise LayoutSyntaxError(self.text, token.start, len(token.text), words, expected)
        if int(digits) < least:
            raise self.unexpected("a positive integer", token)
        return Number(token.start, token.end, int(digits))

    def open(self) -> int:
        """Consumes a '(' and returns its position."""
        token = self.take("(", "'('")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            words = message("too_deep", limit=MAX_DEPTH)
            raise LayoutSyntaxError(self.text, token.start, 1, words, f"at most {MAX_DEPTH} levels")
        return token.start

    def close(self, expected: str) -> int:
        """Consumes a ')' and returns its end."""
        self.depth -= 1
        return self.take(")", expected).end

    def word(self, word: str) -> None:
        if self.token.kind != "name" or self.token.text != word:
            raise self.unexpected(f"'{word}'")
        self.at += 1

    def take(self, kind: str, expected: str) -> _Token:
        token = self.token
        if token.kind != kind:
            raise self.unexpected(expected)
        self.at += 1
        return token

    def unexpected(self, expected: str, token: _Token | None = None) -> LayoutSyntaxError:
        token = token or self.token
        found = quoted(token.text) if token.text else "the end of the text"
        words = message("expected", expected=expected, found=found)
        return LayoutSyntaxError(self.text, token.start, len(token.text), words, expected)
