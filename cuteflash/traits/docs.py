"""The descriptions of attributes in the docstring of a class: the texts that explain traits."""

from __future__ import annotations

import inspect
import re

ATTRIBUTE = re.compile(r"^ {4}(\w+(?:, \w+)*): ")


def attribute_docs(kind: type) -> dict[str, str]:
    """The sentences of a class's docstring on its attributes, by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        start = ATTRIBUTE.match(line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, line[start.end() :].strip())
        elif names and line.startswith(" " * 8):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found
