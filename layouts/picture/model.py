"""The content of a static picture (`Table`) and its shapes (`Picture`); independent of scenes and file formats."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Literal

from .colors import INK, MUTED, ink

TEXT_CELLS = 128 * 128  # most cells that are drawn with their text: files with more grow large and cannot be read
GROUP = 8  # rows and columns between two lines: 8 rows of 16 bytes are a core matrix of 16-bit elements
MARGIN = 12.0
LINE_HEIGHT = 16.0
TEXT_SIZE = 11.0
CELL_TEXT_SIZE = 9.0
TITLE_SIZE = 14.0
CELL_HEIGHT = 16.0
BARE_CELL = 6.0  # edge of a cell without text
CHARACTER = 0.6  # width of a character in units of its size, an upper estimate for digits and capitals
MIN_WIDTH = 480.0
SWATCH = 12.0
REMARK_CHARACTERS = 110


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """One panel's content, rows x cols cells.

    Attributes:
        title: heading of the picture.
        remarks: lines below the title.
        row_axis, col_axis: what the coordinates count.
        labels: text of every cell, [row][col].
        tips: a description of every cell, for tooltips.
        fills: colour of every cell, "#rrggbb".
        legend: (text, colour), the meaning of each colour.
    """

    title: str
    remarks: tuple[str, ...]
    row_axis: str
    col_axis: str
    labels: list[list[str]]
    tips: list[list[str]]
    fills: list[list[str]]
    legend: tuple[tuple[str, str], ...]

    @property
    def rows(self) -> int:
        return len(self.labels)

    @property
    def cols(self) -> int:
        return len(self.labels[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `tip` describes it in words."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """One line of text, centred vertically on `y`; `anchor` says which end of it is at `x`."""

    x: float
    y: float
    text: str
    size: float = TEXT_SIZE
    fill: str = INK
    anchor: Literal["start", "middle", "end"] = "start"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A thin straight line."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """Shapes in pixels, origin at the upper left; painted in the order of the fields."""

    title: str
    width: float
    height: float
    cells: tuple[Rect, ...]
    lines: tuple[Line, ...]
    cell_texts: tuple[Text, ...]
    swatches: tuple[Rect, ...]
    texts: tuple[Text, ...]


def lay_out(table: Table) -> Picture:
    """Places a table: title and remarks, column numbers, cells with row numbers, legend.

    A table of more than `TEXT_CELLS` cells is drawn without their text, and a remark says so.
    """
    with_text = table.rows * table.cols <= TEXT_CELLS
    remarks = [line for remark in table.remarks for line in textwrap.wrap(remark, REMARK_CHARACTERS)]
    if not with_text:
        remarks.append(f"More than {TEXT_CELLS} cells: drawn without their text.")
    heading = [Text(MARGIN, MARGIN + LINE_HEIGHT / 2, table.title, TITLE_SIZE)]
    heading += [
        Text(MARGIN, MARGIN + (1.5 + index) * LINE_HEIGHT, remark, fill=MUTED) for index, remark in enumerate(remarks)
    ]
    widest = max(len(label) for row in table.labels for label in row)
    grid = _Grid(
        left=MARGIN + TEXT_SIZE * CHARACTER * (len(str(table.rows)) + 1) + LINE_HEIGHT,
        top=MARGIN + (3 + len(remarks)) * LINE_HEIGHT,
        step_x=round(widest * CELL_TEXT_SIZE * CHARACTER + 6) if with_text else BARE_CELL,
        step_y=CELL_HEIGHT if with_text else BARE_CELL,
        rows=table.rows,
        cols=table.cols,
    )
    text_width = max(len(text.text) * text.size * CHARACTER for text in heading)
    width = max(grid.right, MARGIN + text_width, MIN_WIDTH) + MARGIN
    swatches, legend_texts, bottom = _legend(table, grid.bottom + LINE_HEIGHT, width)
    return Picture(
        title=table.title,
        width=width,
        height=bottom + MARGIN,
        cells=tuple(grid.cells(table)),
        lines=tuple(grid.lines()),
        cell_texts=tuple(grid.texts(table)) if with_text else (),
        swatches=tuple(swatches),
        texts=(*heading, *grid.coordinates(table), *legend_texts),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Grid:
    """Positions of the cells."""

    left: float
    top: float
    step_x: float
    step_y: float
    rows: int
    cols: int

    @property
    def right(self) -> float:
        return self.left + self.cols * self.step_x

    @property
    def bottom(self) -> float:
        return self.top + self.rows * self.step_y

    def cells(self, table: Table) -> Iterator[Rect]:
        for row in range(self.rows):
            y = self.top + row * self.step_y
            for col in range(self.cols):
                x = self.left + col * self.step_x
                yield Rect(x, y, self.step_x, self.step_y, table.fills[row][col], table.tips[row][col])

    def texts(self, table: Table) -> Iterator[Text]:
        for row in range(self.rows):
            y = self.top + (row + 0.5) * self.step_y
            for col in range(self.cols):
                x = self.left + (col + 0.5) * self.step_x
                colour = ink(table.fills[row][col])
                yield Text(x, y, table.labels[row][col], CELL_TEXT_SIZE, colour, "middle")

    def lines(self) -> Iterator[Line]:
        for row in range(0, self.rows + 1, GROUP):
            y = self.top + row * self.step_y
            yield Line(self.left, y, self.right, y)
        for col in range(0, self.cols + 1, GROUP):
            x = self.left + col * self.step_x
            yield Line(x, self.top, x, self.bottom)

    def coordinates(self, table: Table) -> Iterator[Text]:
        """Row and column numbers, as many as there is room for, and the axes' names."""
        every_row = 1 if self.step_y >= TEXT_SIZE else GROUP
        every_col = 1 if self.step_x >= TEXT_SIZE * CHARACTER * 3 else GROUP
        yield Text(self.left, self.top - 1.5 * LINE_HEIGHT, f"{table.col_axis} (columns)", fill=MUTED)
        yield Text(MARGIN, self.top - 0.5 * LINE_HEIGHT, table.row_axis, fill=MUTED)
        for row in range(0, self.rows, every_row):
            yield Text(self.left - 4, self.top + (row + 0.5) * self.step_y, str(row), fill=MUTED, anchor="end")
        for col in range(0, self.cols, every_col):
            x = self.left + (col + 0.5) * self.step_x
            yield Text(x, self.top - 0.5 * LINE_HEIGHT, str(col), fill=MUTED, anchor="middle")


def _legend(table: Table, top: float, width: float) -> tuple[list[Rect], list[Text], float]:
    """Swatches with their texts, wrapped at `width`, and the bottom of the last line."""
    swatches, texts = [], []
    x, y = MARGIN, top
    for text, fill in table.legend:
        needed = SWATCH + 4 + len(text) * TEXT_SIZE * CHARACTER + 12
        if x > MARGIN and x + needed > width:
            x, y = MARGIN, y + LINE_HEIGHT
        swatches.append(Rect(x, y + (LINE_HEIGHT - SWATCH) / 2, SWATCH, SWATCH, fill, text))
        texts.append(Text(x + SWATCH + 4, y + LINE_HEIGHT / 2, text))
        x += needed
    return swatches, texts, y + LINE_HEIGHT
