"""Pictures as SVG: one `<rect>` a cell, cells and texts of one colour in one group, so that files stay small."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape, quoteattr

from .colors import LINE, PAPER
from .model import Line, Picture, Rect, Text

TIP_CELLS = 4096  # most cells that are drawn with tooltips
FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def render(picture: Picture) -> str:
    """The picture as one SVG document; its cells are the rects of the group `cells`, with tooltips up to TIP_CELLS."""
    width, height = _number(picture.width), _number(picture.height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family={quoteattr(FONT)}>',
            f"<title>{escape(picture.title)}</title>",
            f'<path fill="{PAPER}" d="M0 0H{width}V{height}H0z"/>',
            f'<g id="cells" stroke="{LINE}" stroke-width="0.5">',
            *_rects(picture.cells, with_tips=len(picture.cells) <= TIP_CELLS),
            "</g>",
            f'<path stroke="{LINE}" stroke-width="1.5" d="{"".join(map(_stroke, picture.lines))}"/>',
            '<g dominant-baseline="central">',
            *_texts(picture.cell_texts),
            *_texts(picture.texts),
            "</g>",
            '<g id="legend">',
            *_rects(picture.swatches, with_tips=False),
            "</g>",
            "</svg>\n",
        ]
    )


def _rects(rects: Iterable[Rect], with_tips: bool) -> Iterator[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for rect in rects:
        place = f'x="{_number(rect.x)}" y="{_number(rect.y)}"'
        size = f'width="{_number(rect.width)}" height="{_number(rect.height)}"'
        end = f"><title>{escape(rect.tip)}</title></rect>" if with_tips and rect.tip else "/>"
        groups[rect.fill].append(f"<rect {place} {size}{end}")
    for fill, items in groups.items():
        yield f'<g fill="{fill}">'
        yield from items
        yield "</g>"


def _texts(texts: Iterable[Text]) -> Iterator[str]:
    groups: dict[tuple[str, float, str], list[str]] = defaultdict(list)
    for text in texts:
        line = f'<text x="{_number(text.x)}" y="{_number(text.y)}">{escape(text.text)}</text>'
        groups[text.fill, text.size, text.anchor].append(line)
    for (fill, size, anchor), items in groups.items():
        yield f'<g fill="{fill}" font-size="{_number(size)}" text-anchor="{anchor}">'
        yield from items
        yield "</g>"


def _stroke(line: Line) -> str:
    return f"M{_number(line.x1)} {_number(line.y1)}L{_number(line.x2)} {_number(line.y2)}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
