"""The descriptions of attributes in the docstring of a class: the texts that explain traits."""

from __future__ import annotations

import inspect
import re

ATTRIBUTE = re.compile(r"^ {4}(\w+(?:, \w+)*): ")


def attribute_docs(kind: type) -> dict[str, str]:
    """The sentences of the docstrings of a class, and of those that it extends, on its attributes, by name."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found |= _described(inspect.cleandoc(one.__doc__ or ""))
    return found


def _described(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        start = ATTRIBUTE.match(line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, line[start.end() :].strip())
        elif names and line.startswith(" " * 8):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found
