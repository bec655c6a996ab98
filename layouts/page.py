"""The explorer's page: its files in `layouts/web/`, in their order, and the data that its script reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuteflash.dispatch import KERNELS
from cuteflash.page import Page
from cuteflash.traits.docs import attribute_docs

SCHEMA = 1
PAGE = Page(
    package=__name__.rpartition(".")[0],
    styles=("style.css", "playground.css", "lessons.css", "views.css"),
    scripts=(
        "core.js",
        "scroller.js",
        "explain.js",
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
        "indexview.js",
        "playmodel.js",
        "playway.js",
        "playgrid.js",
        "playground.js",
        "lessons-kit.js",
        "lessons-timeline.js",
        "lessons-layouts.js",
        "lessons-banks.js",
        "lessons-pipelines.js",
        "lessons-warpgroups.js",
        "lessons-softmax.js",
        "lessons-loops.js",
        "lessons-backward.js",
        "lessons-fp8.js",
        "lessons-decode.js",
        "lessons-latent.js",
        "lessons.js",
        "app.js",
    ),
    content="view",
    bar='<div role="tablist" id="tabs" aria-label="Views"></div>',
)
ROW_VIEWS = ("kernel", "banks", "budget", "playground", "learn")


def page_data(
    view: str,
    views: Sequence[str],
    scene: str | None = None,
    scenes: Mapping[str, Any] | None = None,
    *,
    gallery: Sequence[Mapping[str, Any]] | None = None,
    lessons: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The data that the page's script reads; descriptions of each kernel's traits are included.

    Args:
        view: the view that opens if the address has no hash.
        views: the views that have a tab.
        scene: id of the page's own row.
        scenes: scenes as JSON values, by id.
        gallery: facts on each row that has a page.
        lessons: the numbers of the study path.
    """
    described: dict[str, dict[str, str]] = {}
    for kind, (_, name) in KERNELS.items():  # a kernel may have traits of several kinds
        described[name] = described.get(name, {}) | attribute_docs(kind)
    return {
        "schema": SCHEMA,
        "view": view,
        "views": list(views),
        "scenes": dict(scenes or {}),
        "scene": scene,
        "gallery": None if gallery is None else list(gallery),
        "lessons": lessons,
        "traits": described,
    }
