"""Pictures as text: a table with coordinates, broken into blocks of columns that fit the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .model import Table


def render(table: Table, width: int = 80, crop: tuple[int, int] | None = None) -> str:
    """The table as lines of at most `width` characters, or more if a single column is wider.

    Args:
        table: the table to print, without its colours and legend.
        width: characters of a line.
        crop: (rows, cols) to print at most; a remark says what was left out.
    """
    rows, cols = (min(table.rows, crop[0]), min(table.cols, crop[1])) if crop else (table.rows, table.cols)
    lines = [line for text in (table.title, *table.remarks) for line in textwrap.wrap(text, width)]
    if (rows, cols) != (table.rows, table.cols):
        lines.append(f"Cropped: rows 0 to {rows - 1} of {table.rows}, columns 0 to {cols - 1} of {table.cols}.")
    return "\n".join([*lines, *_blocks(table, rows, cols, width)]) + "\n"


def _blocks(table: Table, rows: int, cols: int, width: int) -> Iterator[str]:
    corner = f"{table.row_axis} \\ {table.col_axis}"
    first = max(len(corner), len(str(rows - 1)))
    cell = max(len(str(cols - 1)), *(len(label) for row in table.labels[:rows] for label in row[:cols]))
    per_block = max(1, (width - first) // (cell + 1))
    for start in range(0, cols, per_block):
        block = range(start, min(start + per_block, cols))
        yield ""
        yield " ".join([f"{corner:>{first}}", *(f"{col:>{cell}}" for col in block)])
        for row in range(rows):
            yield " ".join([f"{row:>{first}}", *(f"{table.labels[row][col]:>{cell}}" for col in block)])
