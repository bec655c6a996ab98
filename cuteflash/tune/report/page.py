"""One self-contained HTML page from the files of `web/` and the report's data."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

TEMPLATE = "page.html"
STYLES = ("style.css", "charts.css")
# In this order: a file uses the names that those before it define.
SCRIPTS = (
    "core.js",
    "model.js",
    "state.js",
    "winners.js",
    "funnel.js",
    "detail.js",
    "parallel.js",
    "effects.js",
    "roofline.js",
    "candidates.js",
    "app.js",
)
SLOT = re.compile(r"\{\{(\w+)\}\}")


def make_page(data: Mapping[str, Any]) -> str:
    """The page as HTML.

    Raises:
        FileNotFoundError: a file of the page is not installed.
        ValueError: a script or style would end its own element, or the data holds NaN or infinity.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    contents = {
        "title": html.escape(data["title"]),
        "style": _joined(STYLES, "</style"),
        "script": _joined(SCRIPTS, "</script"),
        "data": text.replace("<", "\\u003c"),  # neither an end tag nor a comment can begin in it
    }
    return SLOT.sub(lambda slot: contents[slot[1]], _read(TEMPLATE))


def _joined(names: Sequence[str], forbidden: str) -> str:
    texts = {name: _read(name).strip() for name in names}
    for name, text in texts.items():
        if forbidden in text or "<!--" in text:
            raise ValueError(f"report/web/{name} contains {forbidden} or <!--, which would end or hide what follows")
    return "\n\n".join(texts.values())


def _read(name: str) -> str:
    return (importlib.resources.files("cuteflash.tune.report") / "web" / name).read_text(encoding="utf-8")
