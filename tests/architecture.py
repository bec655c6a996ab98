"""Checks a source tree against the project's layering and soft sizes, from its syntax alone.

`test_architecture.py` runs these over `cuteflash/` and over small synthetic trees with one planted violation each.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping

from cuteflash.compile.imports import imported

# Lowest first. A module imports from its own layer and from layers of lower rank; equal rank means siblings, which
# never import each other. The longest matching prefix decides ("kernels.sm80" before "kernels").
RANKS: dict[str, int] = {
    "files": 0,
    "install": 0,
    "startup": 0,
    "output": 0,
    "page": 0,
    "version": 0,
    "operands": -2,
    "problem": -1,
    "quantize_problem": 0,
    "append_problem": 0,
    "schedule_problem": 0,
    "mla_problem": 0,
    "arguments": 1,
    "problem_names": 1,
    "traits": 1,
    "usertable": 2,
    "torch_internals": 2,
    "strides": 2,
    "validate": 2,
    "validate_fp8": 3,
    "validate_packed": 3,
    "validate_fp8_packed": 4,
    "validate_kvcache": 4,
    "validate_quantize": 4,
    "validate_append": 4,
    "validate_append_values": 5,
    "validate_mla": 5,
    "validate_mla_prefill": 6,
    "coerce": 3,
    "reference": 2,
    "core": 2,
    "core.tile_numbers": -1,
    "core.split_slots": -1,
    "core.workspace": 0,  # sizes that traits, planning and kernels share
    "atoms": 2,
    "renaming": 3,
    "unsupported": 3,
    "kernels": 3,
    "kernels.common": 3,
    "kernels.sm80": 4,
    "kernels.sm90": 4,
    "compile": 5,
    "dispatch": 5,
    "autograd": 6,
    "calls": 3,
    "transforms": 6,
    "split_planning": 6,
    "schedule_planning": 6,
    "schedule_ops": 11,
    "scheduling": 13,
    "planning": 7,
    "bwd_planning": 8,
    "operators": 7,
    "ops": 9,
    "fp8_planning": 9,
    "packed_planning": 9,
    "kvcache_planning": 10,
    "quantize_planning": 9,
    "append_planning": 9,
    "mla_planning": 9,
    "fp8_packed_planning": 10,
    "fp8_inference_ops": 10,
    "fp8_ops": 10,
    "packed_ops": 10,
    "sink_ops": 11,
    "append_ops": 10,
    "kvcache_ops": 11,
    "kvcache_steps": 10,
    "mla_ops": 11,
    "mla_prefill_ops": 11,
    "mla_prefill_planning": 10,
    "limits": 6,
    "paged_api": 12,
    "append": 13,
    "combine": 13,
    "kvcache_api": 13,
    "fp8_packed_ops": 11,
    "quantize_ops": 11,
    "fp8_packed_inference_ops": 12,
    "api": 13,
    "packed_api": 13,
    "quantize": 13,
    "mla": 14,
    "mla_prefill": 14,
    "packing": 14,
    "nn": 15,
    "integrations": 15,
    "compat": 15,
    "tune": 16,
    "companions": 16,  # what lies beside cuteflash/ is the command line's to load, nobody else's
    "cli": 17,
    "__main__": 18,
    "": 18,  # cuteflash/__init__.py, the public face
}
STDLIB_ONLY = (
    "append_problem",
    "schedule_problem",
    "arguments",
    "core.workspace",
    "files",
    "install",
    "operands",
    "mla_problem",
    "output",
    "page",
    "problem",
    "quantize_problem",
    "problem_names",
    "startup",
    "traits",
    "version",
)
PLAIN_PACKAGES = ("benchmarks", "layouts", "tests")  # a wheel installs none by this name: see cuteflash.companions

FILE_LINES = 400
FUNCTION_LINES = 60
ROLE_LINES = 120  # traced device functions: a role's main loop reads best in one piece
PARAMETERS = 8  # positional ones; beyond that, a bundle


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """One parsed file: its dotted name below the package ("" is the package itself) and its syntax tree."""

    name: str
    path: pathlib.Path
    tree: ast.Module
    lines: int


def load(package: pathlib.Path) -> list[Module]:
    """Every Python file under `package`, parsed."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        source = path.read_text()
        modules.append(Module(".".join(parts), path, ast.parse(source), source.count("\n")))
    return modules


def layer_of(name: str) -> str | None:
    """The layer a module below the package belongs to; None where RANKS does not know it."""
    if not name:
        return ""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANKS), None)


def imports(module: Module, package: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a module imports, wherever in the file, also by literal name."""
    anchor = [package, *(module.name.split(".") if module.name else [])]
    if module.path.name != "__init__.py":
        anchor.pop()
    for line, base, name in imported(module.tree, ".".join(anchor)):
        child = f"{base}.{name}"
        yield line, child if child in known else base


def import_violations(root: pathlib.Path, package: str = "cuteflash") -> list[str]:
    """Each upward, sideways or otherwise forbidden import under `root / package`, in words."""
    modules = load(root / package)
    known = {f"{package}.{module.name}".rstrip(".") for module in modules}
    found = []
    for module in modules:
        layer = layer_of(module.name)
        if layer is None:
            found.append(f"{package}.{module.name}: no layer; give it a rank in tests/architecture.py")
            continue
        for line, target in imports(module, package, known):
            reason = _reason(layer, target, package)
            if reason:
                found.append(f"{module.path.relative_to(root)}:{line}: imports {target}: {reason}")
    return found


def _reason(layer: str, target: str, package: str) -> str | None:
    top, _, rest = target.partition(".")
    if top in PLAIN_PACKAGES:
        return f"{layer or package} may not import {top}/ by this name"
    if top != package:
        if layer in STDLIB_ONLY and top not in sys.stdlib_module_names:
            return f"{layer} imports the standard library only"
        return None
    other = layer_of(rest)
    if other is None:
        return "no such layer"
    if other == layer or RANKS[other] < RANKS[layer]:
        return None
    return f"{layer or package} may not import {'sideways' if RANKS[other] == RANKS[layer] else 'upward'}"


def size_violations(root: pathlib.Path, package: str, exceptions: Mapping[str, str]) -> list[str]:
    """Files, functions and parameter lists over the soft sizes; `exceptions` maps "path[:function]" to a reason."""
    found = []
    used = set()

    def note(key: str, text: str) -> None:
        if key in exceptions:
            used.add(key)
        else:
            found.append(f"{key}: {text}")

    for module in load(root / package):
        path = module.path.relative_to(root).as_posix()
        if module.lines > FILE_LINES:
            note(path, f"{module.lines} lines, at most {FILE_LINES}")
        for name, node in functions(module.tree):
            limit = ROLE_LINES if is_traced(node) else FUNCTION_LINES
            length = code_lines(node)
            if length > limit:
                note(f"{path}:{name}", f"{length} lines, at most {limit}")
            parameters = positional_parameters(node)
            if parameters > PARAMETERS:
                note(f"{path}:{name}", f"{parameters} parameters, at most {PARAMETERS}")
    return found + [f"{key}: excepted for no reason any more" for key in exceptions if key not in used]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if hasattr(node, "name") and isinstance(node.name, str) else prefix
        yield from functions(node, inner)


def is_traced(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the DSL traces the function: it carries `@cute.jit` or `@cute.kernel`."""
    decorators = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return any(isinstance(item, ast.Attribute) and item.attr in ("jit", "kernel") for item in decorators)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def positional_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that can be given by position, less `self` and `cls`."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
