"""Puts measured rows into tables: the user's own, which dispatch prefers, and the shipped ones, as readable Python.

A sweep measures some head dims, masks, dtypes and length classes. Its rows go above those that a table has; a row that
no problem reaches any more goes, and everything that was not measured stays as it is. Rows need not serve all features,
but a table does, for every problem.
"""

from __future__ import annotations

import inspect
import itertools
import pathlib
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from cuteflash import usertable
from cuteflash.dispatch import offers, pairs_of
from cuteflash.mla_problem import AnyProblem
from cuteflash.problem import DTYPES, FEATURES, FP8_DTYPES, MASK_KINDS, UNBOUNDED
from cuteflash.problem_names import problem_id
from cuteflash.traits import row as vocabulary
from cuteflash.traits.arch import get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, TableKey, kind_of
from cuteflash.traits.tables import MODULES
from cuteflash.traits.values import default_values
from cuteflash.tune.operations import FORMS, SPECS, TASKS, Rows, Spec, Task, shipped_rows, task_of_traits
from cuteflash.usertable import MeasuredRow, TableError

# What `cuteflash.traits.row` calls a row's masks, dtypes, lengths and features.
WORDS = {name: name.upper() for name in (*MASK_KINDS, *DTYPES, *FP8_DTYPES, *LENGTH_CLASSES, *FEATURES)}
LINE = 120  # columns of a source line


def write_user(table: TableKey, measured: Sequence[MeasuredRow]) -> pathlib.Path:
    """Puts measured rows above those of the user's table and returns its path.

    A table that cannot be used is replaced, with a TableWarning.

    Raises:
        TableError: the target does not run a row, or the table cannot be written.
    """
    _check(table, measured)
    newest: dict[Row, MeasuredRow] = {}
    for own in (*measured, *usertable.load(table)):
        newest.setdefault(own.row, own)
    tasks = [task for task in TASKS if SPECS[task].operation == table.operation]
    shipped = dict.fromkeys(row for task in tasks for row in shipped_rows(task, table))
    kept = _reached(newest, {table: [*newest, *shipped]})
    return usertable.write(table, [newest[row] for row in kept])


def write_shipped(
    table: TableKey, measured: Sequence[MeasuredRow], directory: pathlib.Path | None = None
) -> pathlib.Path:
    """Puts measured rows above those of the file of a shipped table's own rows and returns its path.

    Args:
        measured: of one set of element types.
        directory: the file's; if it is missing there, it is made of the shipped rows. None is this package's.

    Raises:
        TableError: the target does not run a row, a problem would have no row, or the file cannot be read as rows or
            not be written.
    """
    _check(table, measured)
    (dtypes,) = {own.row.traits.dtypes for own in measured} or {DTYPES}
    module = own_module(table, dtypes)
    shipped = pathlib.Path(str(module.__file__))
    path = shipped if directory is None else directory / shipped.name
    newest = [own.row.measured(own.gpu, own.date, round(own.tflops)) for own in measured]
    rows = dict.fromkeys([*newest, *read_shipped(path if path.exists() else shipped)])
    tables = {
        key: [row for part in modules for row in (rows if part is module else part.ROWS)]
        for key, modules in MODULES.items()
        if module in modules
    }
    heads = [key for key in tables if module in own_modules(key)]
    try:
        path.write_text(render(heads, _reached(rows, tables)))
    except LookupError as error:
        raise TableError(f"{path} has {error}; add one, below the others") from error
    except OSError as error:
        raise TableError(f"the shipped rows {path} cannot be written: {error}") from error
    return path


def own_modules(table: TableKey) -> tuple[ModuleType, ...]:
    """The modules of a table's own rows, which its sweeps write: of each set of element types the first."""
    found: dict[tuple[str, ...], ModuleType] = {}
    for module in MODULES[table]:
        found.setdefault(module.ROWS[0].traits.dtypes, module)
    return tuple(found.values())


def own_module(table: TableKey, dtypes: tuple[str, ...]) -> ModuleType:
    """That of the rows of some element types."""
    return next(module for module in own_modules(table) if module.ROWS[0].traits.dtypes == dtypes)


def read_shipped(path: pathlib.Path) -> tuple[Row, ...]:
    """A file's rows. TableError if the file does not define any."""
    try:
        rows: tuple[Row, ...] = runpy.run_path(str(path))["ROWS"]
        if not rows or not all(isinstance(row, Row) for row in rows):
            raise ValueError("ROWS has other elements than rows, or none")
        return rows
    except Exception as error:  # whatever an edited file may raise when it is run
        raise TableError(f"{path} is not a table of rows ({type(error).__name__}: {error})") from error


def render(tables: Sequence[TableKey], rows: Iterable[Row]) -> str:
    """The Python source of a file of shipped rows, in the project's format.

    Args:
        tables: those whose own rows these are, of one operation and family.
        rows: in order.
    """
    kept = list(rows)
    body = "".join(_lines(kind_of(row.traits), _arguments(row), row) for row in kept)
    makers = sorted({kind_of(row.traits) for row in kept})
    words = sorted((word for word in WORDS.values() if re.search(rf"\b{word}\b", body)), key=str.lower)  # as ruff does
    names = [*words, "Row", *makers]
    titles = ", ".join(map(str, tables))
    titles += " for 8-bit operands" if any(row.traits.dtypes != DTYPES for row in kept) else ""
    return (
        f'"""Rows of {titles}.\n\n'
        "`cuteflash sweep apply --shipped` rewrites this file; `measured` says what a sweep found for a row.\n"
        '"""\n\n'
        "from __future__ import annotations\n\n"
        f"{_import(names)}\n"
        f"ROWS: tuple[Row, ...] = (\n{body})\n"
    )


def _import(names: Sequence[str]) -> str:
    """The import of `names` from the rows' vocabulary, as ruff breaks its lines."""
    start = f"from {vocabulary.__name__} import "
    line = start + ", ".join(names)
    if len(line) > LINE:
        line = start + "(\n" + "".join(f"    {name},\n" for name in names) + ")"
    return f"{line}\n"


def _check(table: TableKey, measured: Iterable[MeasuredRow]) -> None:
    for row in (own.row for own in measured):
        traits = row.traits
        if (traits.operation, traits.family) != (table.operation, table.family):
            reason: str | None = f"it is of the {traits.family} family's {traits.operation}"
        else:
            reason = traits.check(get_arch(table.target))
        if reason is not None:
            raise TableError(f"row {row.title} is not for {table}: {reason}")


def _reached(rows: Iterable[Row], tables: Mapping[TableKey, Sequence[Row]]) -> list[Row]:
    """Those of `rows` that run a problem in one of the tables, by head dims. LookupError: no row runs some problem."""
    rows = list(rows)
    tasks = {task_of_traits(row.traits) for row in rows}
    # Of all the problems few rows come: by identity first, since a row's hash is that of all its traits.
    chosen = {id(row): row for key, every in tables.items() for task in tasks for row in _choices(key, every, task)}
    reached = set(chosen.values())
    return sorted((row for row in rows if row in reached), key=lambda row: (row.traits.head_dim, row.traits.head_dim_v))


def _choices(table: TableKey, rows: Sequence[Row], task: Task) -> Iterator[Row]:
    """The rows that run each problem, length class and number of query rows of a task, all features first.

    Also those that follow a row that does not serve any number of blocks.
    """
    arch, spec = get_arch(table.target), SPECS[task]
    numbers = [number for one in spec.classes_of_rows for number in _numbers(one)]
    made_for: dict[tuple[int, int], list[Row]] = {}  # by head dims: a problem asks few of all rows
    for row in rows:
        made_for.setdefault((row.traits.head_dim, row.traits.head_dim_v), []).append(row)
    for problem in _problems(spec):
        mask, dtype = problem.scores.mask, problem.operands.row_dtype
        every = (row for pair in pairs_of(problem) for row in made_for.get(pair, ()))
        some = [row for row in every if mask in row.masks and dtype in row.dtypes]  # for all classes of lengths
        for lengths, number in itertools.product(LENGTH_CLASSES, numbers):
            offered = offers(some, problem, lengths, arch, number)
            found = [row for row, _, reason in offered if reason is None]
            yield from found
            if not found and task not in FORMS:  # rows that split keys need not serve every pair of head dims
                raise LookupError(f"no row of {table} for {problem_id(problem)}, lengths {lengths}")


def _problems(spec: Spec) -> Iterator[AnyProblem]:
    """Every problem of a task, first those with all features."""
    sizes = range(len(spec.features), -1, -1)
    every = [some for size in sizes for some in itertools.combinations(spec.features, size)]
    pairs = [spec.latent_dims] if spec.latent_dims else itertools.product(ROW_HEAD_DIMS, ROW_HEAD_DIMS)
    for asked, pair, mask, dtype in itertools.product(every, pairs, spec.masks, spec.dtypes):
        yield spec.asking(spec.problem(dtype, *pair, mask), asked)


def _numbers(class_of_rows: Rows) -> Iterator[int]:
    """Numbers of query rows that stand for a class; beyond all others an even and an odd number of tiles."""
    least, most = class_of_rows
    if most < UNBOUNDED or least == 1:
        yield most
    else:
        yield from (least, 2 * least)


def _arguments(row: Row) -> list[str]:
    """Of the call that makes a row, without what the function does by itself."""
    traits = row.traits
    kind = kind_of(traits)
    maker = inspect.signature(getattr(vocabulary, kind))
    parameters = {name: one for name, one in maker.parameters.items() if one.kind is not one.VAR_KEYWORD}
    positional = [name for name, one in parameters.items() if one.default is one.empty]
    arguments = [str(getattr(traits, name)) for name in positional]
    for name, every in (("masks", MASK_KINDS), ("dtypes", traits.dtypes), ("lengths", LENGTH_CLASSES), ("without", ())):
        served = getattr(row, name)
        if served != every:
            words = " + ".join(WORDS[one] for one in served)
            arguments.append(words if name == "masks" else f"{name}={words}")
    arguments += [f"{name}={getattr(row, name):g}" for name in ("waves", "filled") if getattr(row, name)]
    defaults: dict[str, Any] = {"head_dim_v": traits.head_dim, **default_values(kind)}
    defaults |= {name: one.default for name, one in parameters.items() if hasattr(traits, name)}
    for name, default in defaults.items():
        if name not in positional and getattr(traits, name) != default:
            arguments.append(f"{name}={_source(getattr(traits, name))}")
    return arguments


def _source(value: Any) -> str:
    """A value in Python, as ruff quotes it."""
    return repr(value).replace("'", '"')


def _argument_line(argument: str) -> str:
    """An argument on a line of its own; the words of a sum that is too long have a line each."""
    line = f"        {argument},\n"
    return line if len(line) <= LINE + 1 else line.replace(" + ", "\n        + ")


def _lines(maker: str, arguments: Sequence[str], row: Row) -> str:
    """One row in the tuple, as ruff breaks its lines."""
    call, every = f"    {maker}({', '.join(arguments)})", f"        {', '.join(arguments)}\n"
    measured = ", ".join(map(_source, row.measurement or ()))
    end = f".measured({measured})" if measured else ""
    if len(f"{call}{end},") <= LINE:
        return f"{call}{end},\n"
    if end and len(f"{call}.measured(") <= LINE:
        return f"{call}.measured(\n        {measured}\n    ),\n"
    if len(every) > LINE + 1:
        every = "".join(_argument_line(one) for one in arguments)
    return f"    {maker}(\n{every}    ){end},\n"
