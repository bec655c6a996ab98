"""Pictures as PNG, one pixel a unit."""

from __future__ import annotations

import functools
import io
import math

from PIL import Image, ImageDraw, ImageFont

from .colors import LINE, PAPER
from .model import Picture, Rect

ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def render(picture: Picture) -> bytes:
    """The picture as a PNG file of ceil(width) x ceil(height) pixels."""
    image = Image.new("RGB", (math.ceil(picture.width), math.ceil(picture.height)), PAPER)
    draw = ImageDraw.Draw(image)
    for rect in picture.cells:
        draw.rectangle(_corners(rect), fill=rect.fill, outline=LINE if picture.cell_texts else None)
    for line in picture.lines:
        draw.line((line.x1, line.y1, line.x2, line.y2), fill=LINE, width=1)
    for rect in picture.swatches:
        draw.rectangle(_corners(rect), fill=rect.fill)
    for text in (*picture.cell_texts, *picture.texts):
        draw.text((text.x, text.y), text.text, fill=text.fill, font=_font(text.size), anchor=ANCHORS[text.anchor])
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def _corners(rect: Rect) -> tuple[float, float, float, float]:
    """Pillow's rectangles include their last row and column."""
    return rect.x, rect.y, rect.x + rect.width - 1, rect.y + rect.height - 1


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
