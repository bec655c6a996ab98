"""One self-contained HTML page from the files of `layouts/web/` and the data of its scenes."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1
TEMPLATE = "page.html"
STYLES = ("style.css", "playground.css", "lessons.css", "views.css")
# In this order: a file uses the names that those before it define.
SCRIPTS = (
    "core.js",
    "scroller.js",
    "algebra.js",
    "text.js",
    "scene.js",
    "coloring.js",
    "marks.js",
    "draw.js",
    "panelhead.js",
    "panel.js",
    "flow.js",
    "inspector.js",
    "stepper.js",
    "toolbar.js",
    "kernel.js",
    "banks.js",
    "bankmap.js",
    "bits.js",
    "banktables.js",
    "bankview.js",
    "budget.js",
    "compare.js",
    "compareview.js",
    "gallery.js",
    "playmodel.js",
    "playgrid.js",
    "playground.js",
    "lessons-kit.js",
    "lessons-layouts.js",
    "lessons-banks.js",
    "lessons-pipelines.js",
    "lessons-warpgroups.js",
    "lessons-softmax.js",
    "lessons-loops.js",
    "lessons.js",
    "app.js",
)
ROW_VIEWS = ("kernel", "banks", "budget", "playground", "learn")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
SLOT = re.compile(r"\{\{(\w+)\}\}")


def page_data(
    view: str,
    views: Sequence[str],
    scene: str | None = None,
    scenes: Mapping[str, Any] | None = None,
    *,
    gallery: Sequence[Mapping[str, Any]] | None = None,
    lessons: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the page's script reads.

    Args:
        view: the view that opens without a hash in the address.
        views: the views that have a tab.
        scene: id of the page's own row.
        scenes: scenes as JSON values, by id.
        gallery: what is known of each row that has a page.
        lessons: the numbers of the study path.
    """
    return {
        "schema": SCHEMA,
        "view": view,
        "views": list(views),
        "scenes": dict(scenes or {}),
        "scene": scene,
        "gallery": None if gallery is None else list(gallery),
        "lessons": lessons,
    }


def make_page(title: str, data: Mapping[str, Any]) -> str:
    """The whole page as HTML; it refers to nothing outside itself.

    Raises:
        FileNotFoundError: a file of the page is not installed.
        ValueError: a script or style would end its own element, or the data holds NaN or infinity.
    """
    contents = {
        "title": html.escape(title),
        "style": _joined(STYLES, "</style"),
        "script": _joined(SCRIPTS, "</script"),
        "data": _script_safe_json(data),
    }
    template = COMMENT.sub("", _read(TEMPLATE))  # the template's comment names the slots too
    return SLOT.sub(lambda slot: contents[slot[1]], template)


def _joined(names: Sequence[str], forbidden: str) -> str:
    texts = []
    for name in names:
        text = _read(name)
        if forbidden in text or "<!--" in text:
            raise ValueError(f"layouts/web/{name} contains {forbidden} or <!--, which would end or hide what follows")
        texts.append(text.strip())
    return "\n\n".join(texts)


def _script_safe_json(data: Mapping[str, Any]) -> str:
    """Compact JSON without `<`: neither an end tag nor a comment can begin in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _read(name: str) -> str:
    return (importlib.resources.files("layouts") / "web" / name).read_text(encoding="utf-8")
