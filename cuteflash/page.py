"""Self-contained HTML pages: the base in `cuteflash/web/`, and each kind's own styles, scripts and data."""

from __future__ import annotations

import dataclasses
import html
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

BASE = "cuteflash"  # its folder `web` contains the base of every page
TEMPLATE, STYLE, SCRIPT = "page.html", "base.css", "base.js"
SLOT = re.compile(r"\{\{(\w+)\}\}")
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """What the pages of one kind add to the base.

    Attributes:
        package: the package whose folder `web` contains the files.
        styles, scripts: names of the files, in this order, since a file uses what those before it define.
        content: a word for what the page shows: "report".
        bar: HTML for the top bar, beside title and theme.
    """

    package: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]
    content: str
    bar: str

    def render(self, title: str, data: Mapping[str, Any]) -> str:
        """A page as HTML; it refers to nothing outside itself.

        Args:
            data: JSON values, which the page's script reads.

        Raises:
            FileNotFoundError: a file of the page is not installed.
            ValueError: a script or style would end its own element, or the data holds NaN or infinity.
        """
        text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        contents = {
            "title": html.escape(title),
            "content": self.content,
            "bar": self.bar,
            "style": _joined([(BASE, STYLE), *((self.package, name) for name in self.styles)], "</style"),
            "script": _joined([(BASE, SCRIPT), *((self.package, name) for name in self.scripts)], "</script"),
            "data": text.replace("<", "\\u003c"),  # neither an end tag nor a comment can begin in it
        }
        return SLOT.sub(lambda slot: contents[slot[1]], read_web(BASE, TEMPLATE))


def data_of(page: str) -> Any:
    """The data in a page's HTML, None if it has none. ValueError if the data are not JSON."""
    found = DATA.search(page)
    return json.loads(found[1]) if found else None


def read_web(package: str, name: str) -> str:
    """A file of a package's folder `web`."""
    return (importlib.resources.files(package) / "web" / name).read_text(encoding="utf-8")


def _joined(files: Iterable[tuple[str, str]], forbidden: str) -> str:
    texts = []
    for package, name in files:
        text = read_web(package, name)
        if forbidden in text or "<!--" in text:
            raise ValueError(
                f"web/{name} of {package} contains {forbidden} or <!--, which would end or hide what follows"
            )
        texts.append(text.strip())
    return "\n\n".join(texts)
