"""The gallery: a page for every shipped row, an index, a comparison of two rows, the playground, the study path."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from cuteflash.output import make_directory, write_file

from .command import page_text, read_scene, scene_json, study_path
from .measured import apart, kin, speed
from .page import PAGE, page_data
from .rows import ShippedRow, named, shipped_rows, worst_ways
from .scene import Scene

TITLE = "cuteflash layouts"
# Pages beside those of the rows: name, which is also the name of their view, and title.
COMMON_PAGES = {
    "index": TITLE,
    "compare": f"{TITLE}: two rows",
    "playground": f"{TITLE}: playground",
    "learn": f"{TITLE}: study path",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One row of the gallery: its scene as JSON values and its entry in the index."""

    scene: dict[str, Any]
    summary: dict[str, Any]


def chosen_rows(
    operation: str, targets: Collection[str], families: Collection[str], head_dims: Collection[int] | None
) -> list[ShippedRow]:
    """The shipped rows of an operation, targets, families and head dims of Q and K (None: all), in the tables' order.

    A row whose kernel has several parts comes with each of them. ValueError if none is left.
    """
    rows = [
        row
        for row in shipped_rows(operation)
        if row.target in targets
        and row.family in families
        and (head_dims is None or named(row.problem, row.choice).head_dim in head_dims)
    ]
    if not rows:
        raise ValueError("no row of the shipped tables is left by the given options")
    return rows


def make_entry(row: ShippedRow) -> Entry:
    """Reads one row; with the compiler's register count if the disk cache has the kernel."""
    scene = read_scene(row.problem, row.target, row.choice, part=row.part)
    return Entry(scene_json(scene), _summary(row, scene))


def page_count(rows: int) -> int:
    """Number of pages of a gallery of `rows` rows."""
    return rows + len(COMMON_PAGES)


def write_site(directory: pathlib.Path, entries: Iterable[Entry]) -> Iterator[pathlib.Path]:
    """Writes every page of the gallery into `directory`, which is made if it is missing; yields each page's path.

    ValueError if the system refuses to write.
    """
    entries = list(entries)
    gallery = [entry.summary for entry in entries]
    scenes = {entry.scene["id"]: entry.scene for entry in entries}
    make_directory(directory)
    for entry in entries:
        path = directory / entry.summary["file"]
        write_file(path, page_text(entry.scene, gallery))
        yield path
    lessons = study_path()
    shown = {"compare": scenes, "learn": lessons.scenes}
    for view, title in COMMON_PAGES.items():
        numbers = lessons.lessons if view == "learn" else None
        data = page_data(view, [view], None, shown.get(view), gallery=gallery, lessons=numbers)
        path = directory / f"{view}.html"
        write_file(path, PAGE.render(title, data))
        yield path


def _summary(row: ShippedRow, scene: Scene) -> dict[str, Any]:
    kernel = scene.kernel
    return {
        "id": scene.id,
        "title": scene.title,
        "arch": row.target,
        "family": row.family,
        "kernel": kernel["name"],
        "head_dim": kernel["head_dim"],
        "head_dim_v": kernel["head_dim_v"],
        "mask": ", ".join(row.masks),
        "dtype": ", ".join(row.dtypes),
        "lengths": ", ".join(row.lengths),
        "features": ", ".join(row.features),
        "part": kernel["part"],
        "file": f"{scene.id}.html",
        "tile": f"{scene.sizes['m']}x{scene.sizes['n']}",
        "threads": kernel["threads"],
        "smem_bytes": scene.budget["smem"]["total"],
        "worst_ways": worst_ways(scene),
        "apart": apart(row.peers, row.choice.traits),
        "speed": speed(row.choice.row),
        "kin": kin(row.peers, row.choice.row, row.part),
    }
