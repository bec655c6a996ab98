"""Which files of a package a module imports, directly or not, from their syntax alone: nothing is imported here."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Iterator


def imported(tree: ast.AST, anchor: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name) of everything that a file imports, wherever in it, also by a literal name.

    Args:
        tree: its syntax.
        anchor: the package that a relative import starts from.

    `name` is what is taken from the module, which may be a module itself; None if it is the whole module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, anchor)
            yield from ((node.lineno, base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value, None


def _absolute(node: ast.ImportFrom, anchor: str) -> str:
    if not node.level:
        return node.module or ""
    parts = anchor.split(".")
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def files_imported_by(modules: Iterable[str], package: pathlib.Path) -> list[pathlib.Path]:
    """The files below `package` that importing these modules reads, in the order of their paths.

    The package's own `__init__.py` counts only if a file imports it by name: every import runs it, and it imports the
    public functions.

    Args:
        modules: dotted names.
        package: directory of a package, whose name is that of the directory.
    """
    waiting = [file for module in modules for file in _files(module, package)]
    found: set[pathlib.Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            anchor = ".".join(file.parent.relative_to(package.parent).parts)
            waiting += [other for name in names_imported_by(file, anchor) for other in _files(name, package)]
    return sorted(found)


def names_imported_by(file: pathlib.Path, anchor: str) -> list[str]:
    """The dotted names that a file imports; the last part may be what a module defines. `anchor` as in `imported`."""
    found = imported(ast.parse(file.read_bytes()), anchor)
    return [f"{module}.{name}" if name else module for _, module, name in found]


def _files(name: str, package: pathlib.Path) -> Iterator[pathlib.Path]:
    """The files that importing `name` reads: its module, and `__init__.py` of each package on the way."""
    top, *parts = name.split(".")
    if top != package.name:
        return
    steps = [package.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    files = [step / "__init__.py" if step.is_dir() else step.with_suffix(".py") for step in steps]
    if not files or not files[0].exists():  # the package itself, or what it defines
        yield package / "__init__.py"
    yield from (file for file in files if file.is_file())
