"""Puts measured rows into tables: the user's own, which dispatch prefers, and the shipped ones, as readable Python.

A sweep measures some head dims, masks, dtypes and length classes. Its rows go above those that a table has; a row that
no problem reaches any more goes, and everything that was not measured stays as it is. Rows need not serve softcap or
lse, but a table does, for every problem.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import pathlib
import runpy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

from cuteflash import usertable
from cuteflash.dispatch import offers
from cuteflash.problem import DTYPES, MASK_KINDS, FwdProblem, problem_id
from cuteflash.traits import row as vocabulary
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES, LengthClass
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, TableKey
from cuteflash.traits.tables import MODULES, TABLES
from cuteflash.usertable import MeasuredRow, TableError

MAKERS: dict[Family, Callable[..., Row]] = {"sm80": vocabulary.fwd_sm80, "sm90": vocabulary.fwd_sm90}
POSITIONAL = ("head_dim", "tile_m", "tile_n", "num_warps")  # of a maker's arguments, those that every row gives
# What `cuteflash.traits.row` calls a row's masks, dtypes, lengths and features.
WORDS = {
    "full": "FULL",
    "causal": "CAUSAL",
    "window": "WINDOW",
    "fp16": "FP16",
    "bf16": "BF16",
    "decode": "DECODE",
    "short": "SHORT",
    "long": "LONG",
    "softcap": "SOFTCAP",
    "lse": "LSE",
}
EXTRAS = ("softcap", "lse")  # of a problem, which a row may not serve
LINE = 120  # columns of a source line


@dataclasses.dataclass(frozen=True, slots=True)
class NotedRow:
    """A shipped row and the comment beside it, without its #."""

    row: Row
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """What stands around some rows in a table that they are part of."""

    table: TableKey
    above: Sequence[Row] = ()
    below: Sequence[Row] = ()


class HasRow(Protocol):
    """`NotedRow` and `MeasuredRow`."""

    @property
    def row(self) -> Row: ...

    @property
    def note(self) -> str: ...


Entry = TypeVar("Entry", bound=HasRow)


def write_user(table: TableKey, measured: Sequence[MeasuredRow]) -> pathlib.Path:
    """Puts measured rows into the user's table and returns its path.

    What the table had stays where these rows leave it something to run, see `rejudged`. A table that cannot be used is
    replaced, with a TableWarning.

    Raises:
        TableError: a row is not one that the target runs, or the table cannot be written.
    """
    _check(table, measured)
    stacks = [Stack(table, below=TABLES[table])]
    own = rejudged(measured, usertable.load(table), stacks)
    return usertable.write(table, merged(own, stacks))


def write_shipped(
    table: TableKey, measured: Sequence[MeasuredRow], directory: pathlib.Path | None = None
) -> pathlib.Path:
    """Puts measured rows into the file of a shipped table's own rows and returns its path.

    The file's rows stay, with the comments beside them, where any table that has the file is left something to run by
    them, see `rejudged`; its other comments do not.

    Args:
        directory: where the file lies or, where it is missing, is made of the shipped rows; None is this package's.

    Raises:
        TableError: a row is not one that the target runs, a problem would have no row, or the file cannot be read as
            rows or not be written.
    """
    _check(table, measured)
    module = MODULES[table][0]
    shipped = pathlib.Path(str(module.__file__))
    path = shipped if directory is None else directory / shipped.name
    stacks = [_stack(key, path.name) for key, modules in MODULES.items() if module in modules]
    newest = [NotedRow(own.row, own.note) for own in measured]
    rows = rejudged(newest, read_shipped(path if path.exists() else shipped), stacks)
    for stack in stacks:
        for words in _unserved(rows, stack):
            raise TableError(f"{path} has no row of {stack.table} for {words}; add one, below the others")
    heads = [stack.table for stack in stacks if not stack.above]
    try:
        path.write_text(render(heads, simplified(merged(rows, stacks), stacks)))
    except OSError as error:
        raise TableError(f"the shipped rows {path} cannot be written: {error}") from error
    return path


def read_shipped(path: pathlib.Path) -> list[NotedRow]:
    """A file's rows, each with the comment behind it. TableError where the file is not of that form."""
    try:
        source = path.read_text()
        rows: tuple[Row, ...] = runpy.run_path(str(path))["ROWS"]
        calls = next(_row_calls(ast.parse(source)))
        lines = source.splitlines()
        notes = [lines[(call.end_lineno or 1) - 1][call.end_col_offset or 0 :] for call in calls]
        return [
            NotedRow(row, note.lstrip(",").lstrip().removeprefix("# ")) for row, note in zip(rows, notes, strict=True)
        ]
    except Exception as error:  # whatever an edited file may raise when it is run
        raise TableError(f"{path} is no table of rows ({type(error).__name__}: {error})") from error


def rejudged(newest: Sequence[Entry], older: Sequence[Entry], stacks: Iterable[Stack]) -> list[Entry]:
    """The newest rows and below them the older ones, without softcap or lse where the newest have found against it.

    That is where a newest row of the same traits serves a mask and dtype without it, and none serves them with it: the
    kernel is the same, and what the older row says was found for an older source or compiler. Only a row that was
    measured loses it, which has a note, and only where every problem still has a row.
    """
    rows, stacks = [*newest, *older], list(stacks)
    for place, name in itertools.product(range(len(newest), len(rows)), EXTRAS):
        entry: Any = rows[place]
        if entry.note and name not in entry.row.without and _refuted(entry.row, name, newest):
            changed = list(rows)
            changed[place] = dataclasses.replace(
                entry, row=dataclasses.replace(entry.row, without=(*entry.row.without, name))
            )
            if not any(words for stack in stacks for words in _unserved(changed, stack)):
                rows = changed
    return rows


def merged(rows: Iterable[Entry], stacks: Iterable[Stack]) -> list[Entry]:
    """Of `rows`, where the first wins, those that some problem reaches in one of the tables; by head dims."""
    entries: dict[Row, Entry] = {}
    for entry in rows:
        entries.setdefault(entry.row, entry)
    reached = {row for stack in stacks for row in _reached(tuple(entries), stack)}
    kept = [entry for row, entry in entries.items() if row in reached]
    return sorted(kept, key=lambda entry: _head_dims(entry.row))


def simplified(rows: Sequence[NotedRow], stacks: Iterable[Stack]) -> list[NotedRow]:
    """`rows` without those in whose absence every problem of the tables would run with the same traits.

    Such a row's note goes to those of `rows` that take over, are made for the same head dims and serve no softcap or
    lse that it did not: the measurement is no proof of those. Of several notes the uppermost row's stays, which is the
    newest.
    """
    left = [noted.row for noted in rows]
    chains = [chain for stack in stacks for chain in _chains(left, stack)]
    notes = {noted.row: (place, noted.note) for place, noted in enumerate(rows) if noted.note}
    while True:
        count = len(left)
        for row in list(left):
            heirs = _heirs(row, chains)
            if heirs is not None:
                left = [one for one in left if one is not row]
                chains = [[offer for offer in chain if offer[0] is not row] for chain in chains]
                for heir in heirs:
                    if row in notes and _head_dims(heir) == _head_dims(row) and _extras(heir) <= _extras(row):
                        notes[heir] = min(notes[row], notes.get(heir, notes[row]))
        if len(left) == count:
            return [NotedRow(row, notes[row][1] if row in notes else "") for row in left]


def _head_dims(row: Row) -> tuple[int, int]:
    return row.traits.head_dim, row.traits.head_dim_v


def _refuted(row: Row, name: str, newest: Iterable[HasRow]) -> bool:
    alike = [new.row for new in newest if new.row.traits == row.traits]
    for mask, dtype in itertools.product(row.masks, row.dtypes):
        serve = [name not in new.without for new in alike if mask in new.masks and dtype in new.dtypes]
        if serve and not any(serve):
            return True
    return False


def _extras(row: Row) -> set[str]:
    return set(EXTRAS) - set(row.without)


def _heirs(row: Row, chains: Iterable[list[tuple[Row, Any]]]) -> set[Row] | None:
    """What would run with the same traits in a row's place; None where some problem would run with others."""
    heirs = set()
    for chain in chains:
        if chain[0][0] is row:  # an equal row of another file is an heir like any other
            if len(chain) < 2 or chain[1][1] != chain[0][1]:
                return None
            heirs.add(chain[1][0])
    return heirs


def render(tables: Sequence[TableKey], rows: Sequence[NotedRow]) -> str:
    """The Python source of a file of shipped rows, in the project's format.

    Args:
        tables: those whose own rows these are.
        rows: of one family, in order.
    """
    titles = ", ".join(f"{table.target}/{table.family}" for table in tables)
    calls = [_call(noted.row) for noted in rows]
    used = {word for call in calls for word in WORDS.values() if word in call}
    names = [*sorted(used), "Row", MAKERS[tables[0].family].__name__]
    body = "".join(_lines(call, noted.note) for call, noted in zip(calls, rows, strict=True))
    return (
        f'"""Forward rows of {titles}.\n\n'
        "`cuteflash sweep apply --shipped` rewrites this file; what was measured with a row stands beside it.\n"
        '"""\n\n'
        "from __future__ import annotations\n\n"
        f"from {vocabulary.__name__} import {', '.join(names)}\n\n"
        f"ROWS: tuple[Row, ...] = (\n{body})\n"
    )


def _check(table: TableKey, measured: Iterable[MeasuredRow]) -> None:
    for row in (own.row for own in measured):
        made_for = row.traits.family
        reason = (
            f"it is of the {made_for} family" if made_for != table.family else row.traits.check(get_arch(table.target))
        )
        if reason is not None:
            raise TableError(f"row {row.title} is not for {table}: {reason}")


def _stack(table: TableKey, file: str) -> Stack:
    """What stands around the rows of `file` in a shipped table."""
    modules = MODULES[table]
    names = [pathlib.Path(str(module.__file__)).name for module in modules]
    at = names.index(file)
    above, below = ([row for module in part for row in module.ROWS] for part in (modules[:at], modules[at + 1 :]))
    return Stack(table, above, below)


def _reached(rows: Sequence[Row], stack: Stack) -> Iterator[Row]:
    """What runs each problem in a table with `rows` in their place, of these and of all others."""
    for chain in _chains(rows, stack):
        yield chain[0][0]


def _chains(rows: Sequence[Row], stack: Stack) -> Iterator[list[tuple[Row, Any]]]:
    """For each problem of a table with `rows` in their place, what could run it: (row, its traits), the first runs it.

    Problems that nothing runs are left out.
    """
    for softcap, lse in itertools.product((False, True), repeat=2):
        for _, _, chain in _offered(rows, stack, softcap, lse):
            if chain:
                yield chain


def _unserved(entries: Iterable[HasRow], stack: Stack) -> Iterator[str]:
    """The problems of a table with these rows in their place that nothing runs, in words."""
    # What serves softcap and lse together serves problems without them as well.
    for problem, lengths, chain in _offered([entry.row for entry in entries], stack, softcap=True, lse=True):
        if not chain:
            yield f"{problem_id(problem)}, lengths {lengths}"


def _offered(
    rows: Sequence[Row], stack: Stack, softcap: bool, lse: bool
) -> Iterator[tuple[FwdProblem, LengthClass, list[tuple[Row, Any]]]]:
    """Each problem with these extras, and lengths, of a table with `rows` in their place, and what could run it."""
    arch, every = get_arch(stack.table.target), [*stack.above, *rows, *stack.below]
    for head_dim, head_dim_v, mask, dtype in itertools.product(ROW_HEAD_DIMS, ROW_HEAD_DIMS, MASK_KINDS, DTYPES):
        problem = FwdProblem.dense(cast(Any, dtype), head_dim, head_dim_v, cast(Any, mask), softcap=softcap, lse=lse)
        for lengths in LENGTH_CLASSES:
            found = offers(every, problem, lengths, arch)
            yield problem, lengths, [(row, traits) for row, traits, reason in found if reason is None]


def _row_calls(tree: ast.Module) -> Iterator[list[ast.expr]]:
    """The elements of the tuple that a module calls ROWS."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ROWS" and isinstance(node.value, ast.Tuple):
            yield node.value.elts


def _call(row: Row) -> str:
    """The call that makes a row, without what the maker does by itself."""
    traits = row.traits
    maker = MAKERS[traits.family]
    positional = [name for name in POSITIONAL if name in inspect.signature(maker).parameters]
    arguments = [str(getattr(traits, name)) for name in positional]
    if row.masks != MASK_KINDS:
        arguments.append(_words(row.masks))
    arguments += [f"dtypes={_words(row.dtypes)}"] if row.dtypes != DTYPES else []
    arguments += [f"lengths={_words(row.lengths)}"] if row.lengths != LENGTH_CLASSES else []
    arguments += [f"without={_words(row.without)}"] if row.without else []
    arguments += [f"head_dim_v={traits.head_dim_v}"] if traits.head_dim_v != traits.head_dim else []
    defaults = {field.name: field.default for field in dataclasses.fields(traits)}
    defaults |= {name: parameter.default for name, parameter in inspect.signature(maker).parameters.items()}
    for name, default in defaults.items():
        if hasattr(traits, name) and name not in (*positional, "head_dim_v") and getattr(traits, name) != default:
            arguments.append(f"{name}={getattr(traits, name)!r}")
    return f"{maker.__name__}({', '.join(arguments)})"


def _words(names: Sequence[str]) -> str:
    return " + ".join(WORDS[name] for name in names)


def _lines(call: str, note: str) -> str:
    """One row in the tuple: on one line or, where that is too long, its arguments on one or more of their own."""
    note = f"  # {note}" if note else ""
    if len(f"    {call},{note}") <= LINE:
        return f"    {call},{note}\n"
    maker, arguments = call.removesuffix(")").split("(", 1)
    if len(f"        {arguments}") <= LINE:
        return f"    {maker}(\n        {arguments}\n    ),{note}\n"
    return f"    {maker}(\n" + "".join(f"        {one},\n" for one in arguments.split(", ")) + f"    ),{note}\n"
