"""Which candidate has a layout page: each page of a gallery names its row."""

from __future__ import annotations

import os
import pathlib
import urllib.parse
from typing import Any, NamedTuple

from cuteflash.page import data_of

INDEX = "index.html"


class LayoutPage(NamedTuple):
    """The page of one row: what that is compiled for, its traits, the problem shown, the page's title and address."""

    target: str
    family: str
    traits: dict[str, Any]
    mask: str
    dtype: str
    title: str
    href: str


def layout_pages(directory: pathlib.Path, lies_in: pathlib.Path) -> list[LayoutPage]:
    """The row pages of a gallery; `lies_in` is the directory that links start from.

    Raises:
        ValueError: it is not a gallery, or one of its pages cannot be read.
    """
    if not (directory / INDEX).is_file():
        raise ValueError(f"layouts is {str(directory)!r}, which has no {INDEX}; `cuteflash layouts --all -o` makes it")
    start = os.path.relpath(directory.resolve(), lies_in.resolve())
    pages = []
    for path in sorted(directory.glob("*.html")):
        page = _page(path, urllib.parse.quote(pathlib.PurePath(start, path.name).as_posix()))
        if page is not None:
            pages.append(page)
    return pages


def _page(path: pathlib.Path, href: str) -> LayoutPage | None:
    """What a page shows; None if that is not one row."""
    try:
        data = data_of(path.read_text(encoding="utf-8"))
        if data is None or not data.get("scene"):
            return None
        scene = data["scenes"][data["scene"]]
        kernel = scene["kernel"]
        names = (kernel["arch"], kernel["family"], kernel["traits"], kernel["mask"], kernel["dtype"])
        return LayoutPage(*names, title=scene["title"], href=href)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"layouts has {path}, which cannot be read: {type(error).__name__}: {error}") from error
