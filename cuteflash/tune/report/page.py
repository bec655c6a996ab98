"""The report's page: its files in `web/`, in their order."""

from __future__ import annotations

from cuteflash.page import Page

PAGE = Page(
    package="cuteflash.tune.report",
    styles=("style.css", "charts.css"),
    scripts=(
        "core.js",
        "model.js",
        "state.js",
        "winners.js",
        "funnel.js",
        "detail.js",
        "parallel.js",
        "effects.js",
        "peers.js",
        "candidates.js",
        "app.js",
    ),
    content="report",
    bar='<nav id="contents" aria-label="Sections"></nav>',
)
