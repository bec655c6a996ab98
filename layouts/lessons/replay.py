"""Runs functions of a kernel on the host, from their source text, with stand-ins for all that they call."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from .sources import Source, definition_of, source_of


class Anything:
    """A stand-in for values that the order of calls does not depend on."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *arguments: object, **keywords: object) -> Self:
        return self


class Replay:
    """Functions as plain Python: without decorators, with `stand_ins` and each other as their only names.

    A call without a stand-in raises NameError: the kernel has changed, and the stand-ins have to follow.

    Attributes:
        functions, sources: by name.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]], stand_ins: Mapping[str, Any]) -> None:
        names = dict(stand_ins)
        self.functions: dict[str, Callable[..., Any]] = {}
        self.sources: dict[str, Source] = {}
        for function in functions:
            path, _, node = definition_of(function)
            node.decorator_list = []
            code = compile(ast.Module([node], []), str(path), "exec", flags=annotations.compiler_flag)
            exec(code, names)
            self.functions[node.name] = names[node.name]
            self.sources[node.name] = source_of(function)
        self._names_of_code = {function.__code__: name for name, function in self.functions.items()}

    def place(self) -> tuple[str, int]:
        """For a stand-in: the function that called it, and the index of the calling line in its source."""
        frame = sys._getframe(1)
        while frame.f_code not in self._names_of_code:
            if frame.f_back is None:
                raise RuntimeError("no replayed function is running")
            frame = frame.f_back
        name = self._names_of_code[frame.f_code]
        return name, frame.f_lineno - self.sources[name].first
