"""The work behind `cuteflash layouts` for one row: its page, its scene as JSON, pictures of its panels."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cuteflash.compile import build, cache_dir
from cuteflash.compile.cache import Entry
from cuteflash.compile.key import cache_key
from cuteflash.dispatch import Choice
from cuteflash.output import make_directory, write_file

from .lessons import lesson_data, lesson_scenes
from .page import PAGE, ROW_VIEWS, page_data
from .picture import Table, ascii, colors, lay_out, make_table, panels, part_of
from .rows import Drawn, make_scene
from .scene import Scene

Json = dict[str, Any]
SUFFIXES = {"svg": "svg", "png": "png", "ascii": "txt"}
TERMINAL_CROP = (32, 32)  # rows and columns of a tile that a terminal gets


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """How pictures show their panels; in a set of panels, one that lacks the colouring or stage uses its default.

    Attributes:
        color: one of `layouts.picture.COLORS`; None leaves it to the panel.
        stage: which buffer of tiles with several.
        swizzled: False shows addresses without the swizzle.
    """

    color: str | None = None
    stage: int | None = None
    swizzled: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class StudyPath:
    """The numbers of the lessons, and the scenes that their panels show, by id; JSON values."""

    lessons: Json
    scenes: dict[str, Json]


def read_scene(
    problem: Drawn, target: str, choice: Choice, compile_now: bool = False, part: str | None = None
) -> Scene:
    """The scene of a problem on a target, as the dispatcher chose to run it; of a part of its kernel, by default the
    first.

    It includes the compiler's register count if the disk cache has the kernel, and always with `compile_now`.
    """
    request: Any = (choice.kernel_cls, choice.traits, problem, target)
    root = cache_dir()
    cached = root is not None and Entry(root, cache_key(*request)).read()[0] is not None
    report = build(*request) if cached or compile_now else None
    return make_scene(problem, target, choice, report, part)


def scene_json(scene: Scene) -> Json:
    """The scene as JSON values, lists for tuples, as a reader of the JSON gets it."""
    values: Json = json.loads(json.dumps(scene.as_dict()))
    return values


def page_text(scene: Json, gallery: Sequence[Json] | None = None) -> str:
    """One self-contained page that opens on the kernel view; `gallery` has a site's data on all its rows."""
    path = study_path()
    scenes = path.scenes | {scene["id"]: scene}
    data = page_data("kernel", ROW_VIEWS, scene["id"], scenes, gallery=gallery, lessons=path.lessons)
    return PAGE.render(scene["title"], data)


@functools.cache
def study_path() -> StudyPath:
    """The data that every page with the study path embeds for it."""
    scenes = [scene_json(read_scene(*row)) for row in lesson_scenes().values()]
    return StudyPath(lesson_data(), {scene["id"]: scene for scene in scenes})


def scene_text(scene: Json) -> str:
    """The scene as JSON text, one line."""
    return json.dumps(scene, separators=(",", ":"), ensure_ascii=False) + "\n"


def panel_text(scene: Json, panel: str | None, view: View, width: int, cropped: bool) -> str:
    """One panel as text, lines of `width` characters; if cropped to what a terminal can show, a remark says so.

    ValueError: no panel is chosen, none has that name, or it lacks the colouring or stage.
    """
    if panel is None:
        raise ValueError(f"panel is not given; {scene['id']} has: {', '.join(panels(scene))}; all of them with -o DIR")
    return ascii.render(_table(scene, panel, view), width, TERMINAL_CROP if cropped else None)


def write_panel(scene: Json, panel: str, form: str, view: View, output: pathlib.Path) -> None:
    """One panel as "svg", "png" or "ascii". ValueError: no such panel, or it lacks the colouring or stage."""
    write_file(output, _renderer(form)(_table(scene, panel, view)))


def write_panels(scene: Json, form: str, view: View, directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Every panel into `directory`, which is made if it is missing; yields their paths.

    ValueError if no panel has the colouring or the stage.
    """
    names = panels(scene)
    _check_somewhere(scene, names, view)
    render = _renderer(form)
    make_directory(directory)
    for name in names:
        part = part_of(scene, name)
        color = view.color if view.color in colors(part) else None
        stage = view.stage if view.stage is not None and view.stage < part.stages else None
        path = directory / f"{name}.{SUFFIXES[form]}"
        write_file(path, render(_table(scene, name, View(color, stage, view.swizzled))))
        yield path


def require(form: str) -> None:
    """Imports what a format needs, so that a missing package is reported before the work."""
    if form in SUFFIXES:
        _renderer(form)


def _check_somewhere(scene: Json, names: list[str], view: View) -> None:
    parts = [part_of(scene, name) for name in names]
    known = dict.fromkeys(color for part in parts for color in colors(part))
    if view.color is not None and view.color not in known:
        raise ValueError(f"color is {view.color!r}; the panels of {scene['id']} have: {', '.join(known)}")
    stages = max(part.stages for part in parts)
    if view.stage is not None and view.stage >= stages:
        raise ValueError(f"stage is {view.stage}; the panels of {scene['id']} have at most: {_upto(stages)}")


def _upto(stages: int) -> str:
    return ", ".join(map(str, range(stages)))


def _table(scene: Json, panel: str, view: View) -> Table:
    return make_table(scene, panel, view.color, view.stage or 0, view.swizzled)


def _renderer(form: str) -> Callable[[Table], str | bytes]:
    module = importlib.import_module(f".picture.{form}", __package__)
    render: Callable[[Any], str | bytes] = module.render
    return render if form == "ascii" else lambda table: render(lay_out(table))
