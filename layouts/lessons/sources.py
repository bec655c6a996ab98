"""Source text of the real functions, and the lines that a step refers to."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Consecutive lines of a function.

    Attributes:
        name: of the function.
        file: relative to the repository, or to the directory that holds the package.
        first: line number of `lines[0]` in the file.
    """

    name: str
    file: str
    first: int
    lines: tuple[str, ...]

    def line(self, text: str) -> int:
        """Index in `lines` of the one line that contains `text`; ValueError if there is not exactly one."""
        found = [index for index, line in enumerate(self.lines) if text in line]
        if len(found) != 1:
            raise ValueError(f"{self.name} in {self.file} has {len(found)} lines with {text!r}, expected one")
        return found[0]

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "file": self.file, "first": self.first, "lines": list(self.lines)}


def definition_of(function: Callable[..., Any]) -> tuple[pathlib.Path, str, ast.FunctionDef]:
    """The file of a function, its text, and the definition in it. OSError if the source is not installed.

    The definition is found by name: a function that was compiled as a part of a kernel has a rewritten body.
    """
    plain = inspect.unwrap(function)
    path = pathlib.Path(inspect.getsourcefile(plain) or "").resolve()
    text = path.read_text()
    found: ast.AST = ast.parse(text)
    for name in plain.__qualname__.split("."):
        (found,) = (node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == name)
    assert isinstance(found, ast.FunctionDef)
    return path, text, found


def source_of(function: Callable[..., Any], start: str | None = None) -> Source:
    """The source of a function, decorators included; from the line that contains `start` on, if that is given.

    ValueError if `start` is not in exactly one line; OSError if the source is not installed.
    """
    path, text, found = definition_of(function)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    lines = "\n".join(text.splitlines()[first - 1 : found.end_lineno])
    file = path.relative_to(_ROOT).as_posix()
    name = inspect.unwrap(function).__qualname__
    whole = Source(name, file, first, tuple(textwrap.dedent(lines).splitlines()))
    if start is None:
        return whole
    skipped = whole.line(start)
    kept = textwrap.dedent("\n".join(whole.lines[skipped:])).splitlines()
    return Source(whole.name, file, first + skipped, tuple(kept))
