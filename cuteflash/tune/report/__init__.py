"""A sweep as one self-contained HTML page: its verdict, winners, peers, what each trait is worth, every candidate.

collect   from the database to JSON values, those of a page
slots     who wins what, against the default and the peers
verdict   that in a sentence; of what was never timed what the analytic score says
columns   long lists of traits and reasons, written small
links     which candidate has a layout page
page      which files of `web/` show those values
"""

from __future__ import annotations

import pathlib

from cuteflash.tune.report.collect import Scope, collect
from cuteflash.tune.report.links import layout_pages
from cuteflash.tune.report.page import PAGE
from cuteflash.tune.store import Store

__all__ = ["Scope", "make_report"]


def make_report(
    store: Store,
    scope: Scope | None = None,
    layouts_dir: pathlib.Path | None = None,
    lies_in: pathlib.Path = pathlib.Path(),
) -> str:
    """The report on what the store knows, as HTML that refers to nothing outside itself but layout pages.

    Args:
        store: the sweep's database.
        scope: what it is about; None is everything.
        layouts_dir: a gallery that `cuteflash layouts --all` wrote; its pages are linked to from their rows.
        lies_in: the directory where the report will lie, from which the links start.

    Raises:
        ValueError: nothing was swept for this scope, or `layouts_dir` is not such a gallery.
        StoreError: the database cannot be read.
    """
    pages = layout_pages(layouts_dir, lies_in) if layouts_dir is not None else []
    data = collect(store, scope or Scope(), pages)
    return PAGE.render(data["title"], data)
