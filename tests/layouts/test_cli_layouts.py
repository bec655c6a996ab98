"""`cuteflash layouts`: what it writes, and what it says to bad input before any work."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from cuteflash import output
from cuteflash.cli import build as building
from cuteflash.cli import layouts as command_line
from cuteflash.cli.app import app
from cuteflash.cli.build import Outcome
from cuteflash.compile import BuildReport, Resources
from cuteflash.dispatch import choose
from cuteflash.install import how_to_install
from cuteflash.traits.tables import tables_of
from layouts import command, site
from layouts.picture import COLORS
from layouts.rows import shipped_rows
from tests.layouts.test_page import LIMIT, data_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = ("--arch", "sm_80", "--head-dim", "64")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty current directory."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: Any, **more: Any) -> None:
        raise AssertionError("worked before the complaint")

    monkeypatch.setattr(command, "read_scene", work)
    monkeypatch.setattr(site, "read_scene", work)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["layouts", *arguments])


def names_in(directory: pathlib.Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_html_is_one_page_with_the_row(here: pathlib.Path) -> None:
    result = call("--kernel", "fwd", "--arch", "sm_90a", "--head-dim", "128", "--causal", "-o", "page.html")
    assert result.exit_code == 0, result.output
    assert names_in(here) == {"page.html"}
    text = (here / "page.html").read_text()
    assert len(text.encode()) < LIMIT
    data = data_of(text)
    scene = data["scenes"][data["scene"]]
    kernel = scene["kernel"]
    assert (kernel["arch"], kernel["head_dim"], kernel["mask"], kernel["dtype"]) == ("sm_90a", 128, "causal", "bf16")
    assert scene["title"] in result.stdout


def test_a_backward_row_has_its_own_lanes_and_the_words_of_its_own_traits(here: pathlib.Path) -> None:
    result = call("--kernel", "bwd", "--arch", "sm_90a", "--head-dim", "64", "-o", "page.html")
    assert result.exit_code == 0, result.output
    data = data_of((here / "page.html").read_text())
    scene = data["scenes"][data["scene"]]
    kernel = scene["kernel"]
    assert (kernel["operation"], kernel["name"], scene["loop"]) == ("bwd", "FlashBwdSm90", "query blocks")
    assert ["dQ"] in scene["lanes"]
    assert {part["tensor"] for part in scene["tiles"]} <= {tensor for lane in scene["lanes"] for tensor in lane}
    assert "product dQ" in data["traits"]["FlashBwdSm90"]["dq"]
    assert "K and V" in data["traits"]["FlashFwdSm90"]["kv_stage"]  # not hidden by the backward's


def test_a_kernel_in_two_passes_has_a_page_for_each(here: pathlib.Path) -> None:
    chosen = ("--kernel", "bwd", "--arch", "sm_90a", "--head-dim", "256")
    for options, part, loop in (
        ((), "pass for dK and dV", "query blocks"),
        (("--part", "dkv"), "pass for dK and dV", "query blocks"),
        (("--part", "dq"), "pass for dQ", "key blocks"),
    ):
        result = call(*chosen, *options, "--format", "json")
        assert result.exit_code == 0, result.output
        scene = json.loads(result.stdout)
        assert (scene["kernel"]["part"], scene["loop"]) == (part, loop)
        assert f"FlashBwdTwoPassSm90 · {part} · sm_90a" in scene["title"]
        assert {one["tensor"] for one in scene["tiles"]} <= {tensor for lane in scene["lanes"] for tensor in lane}
    refused = call(*chosen, "--part", "dk", "-o", "page.html")
    assert refused.exit_code == 2 and "FlashBwdTwoPassSm90 has the parts dkv, dq" in refused.stderr
    refused = call("--arch", "sm_90a", "--head-dim", "64", "--part", "dq", "-o", "page.html")
    assert refused.exit_code == 2 and "FlashFwdSm90 has no parts" in refused.stderr
    assert names_in(here) == set()


@pytest.mark.parametrize(("options", "has_stored"), [((), True), (("--transposed-v",), False)])
def test_a_row_of_8_bit_operands_has_v_as_it_is_given(options: tuple[str, ...], has_stored: bool) -> None:
    result = call("--arch", "sm_90a", "--head-dim", "64", "--dtype", "e4m3", *options, "--format", "json")
    assert result.exit_code == 0, result.output
    scene = json.loads(result.stdout)
    assert (scene["kernel"]["dtype"], scene["kernel"]["element_bytes"]) == ("e4m3", 1)
    assert ("sV_stored" in {tile["id"] for tile in scene["tiles"]}) == has_stored


def test_json_goes_to_stdout_or_into_a_file(here: pathlib.Path) -> None:
    options = ("--head-dim-v", "128", "--mask", "window", "--dtype", "fp16", "--family", "sm80", "--format", "json")
    shown = call("--arch", "sm_90a", "--head-dim", "192", *options)
    scene = json.loads(shown.stdout)
    kernel = scene["kernel"]
    assert (kernel["family"], kernel["head_dim"], kernel["head_dim_v"]) == ("sm80", 192, 128)
    assert (kernel["mask"], kernel["dtype"]) == ("window", "fp16")
    written = call("--arch", "sm_90a", "--head-dim", "192", *options, "-o", "scene.json")
    assert written.exit_code == 0
    assert json.loads((here / "scene.json").read_text()) == scene


def test_a_panel_as_text_goes_to_stdout(here: pathlib.Path) -> None:
    result = call(*ROW, "--format", "ascii", "--panel", "acc_S")
    assert result.exit_code == 0
    assert result.stdout.startswith("acc_S of FlashFwdSm80")
    assert "T0 V0" in result.stdout
    assert names_in(here) == set()


@pytest.mark.parametrize("form", ["svg", "png", "ascii"])
def test_a_panel_as_a_file(here: pathlib.Path, form: str) -> None:
    plain = call(*ROW, "--format", form, "--panel", "sK", "-o", "swizzled")
    assert plain.exit_code == 0, plain.output
    other = call(*ROW, "--format", form, "--panel", "sK", "--no-swizzle", "--color", "address", "-o", "unswizzled")
    assert other.exit_code == 0, other.output
    first, second = ((here / name).read_bytes() for name in ("swizzled", "unswizzled"))
    assert first != second
    if form == "png":
        assert Image.open(here / "swizzled").format == "PNG"


def test_all_panels_go_into_a_directory(here: pathlib.Path) -> None:
    result = call(*ROW, "--mask", "full", "--format", "ascii", "--color", "bank", "--stage", "1", "-o", "panels")
    assert result.exit_code == 0, result.output
    scene = json.loads(call(*ROW, "--format", "json").stdout)
    assert names_in(here / "panels") == {f"{part['id']}.txt" for part in (*scene["tiles"], *scene["fragments"])}
    assert "stage 1 of 2" in (here / "panels" / "sK.txt").read_text()
    assert "Colour: bank." in (here / "panels" / "sK.txt").read_text()
    assert "Colour: thread" in (here / "panels" / "acc_S.txt").read_text()


@pytest.mark.parametrize("output", ["new/folder/sK.txt", "new/folder/"])
def test_missing_directories_of_an_output_are_made(here: pathlib.Path, output: str) -> None:
    panel = () if output.endswith("/") else ("--panel", "sK")
    assert call(*ROW, "--format", "ascii", *panel, "-o", output).exit_code == 0
    assert "sK.txt" in names_in(here / "new" / "folder")


def test_compiled_registers_are_shown_once_the_cache_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(kernel_cls: type, traits: Any, problem: Any, target: str) -> BuildReport:
        built.append(problem)
        used = Resources(registers=168, stack_bytes=0, spill_store_bytes=0, spill_load_bytes=0)
        return BuildReport("k.K", target, traits, problem, 1.0, used, traits.smem_bytes, cached=False)

    monkeypatch.setattr(command, "build", build)
    without = json.loads(call(*ROW, "--format", "json").stdout)
    assert without["budget"]["registers"]["compiled"] is None
    assert built == []
    compiled = json.loads(call(*ROW, "--format", "json", "--compile").stdout)
    assert compiled["budget"]["registers"]["compiled"]["registers"] == 168
    assert len(built) == 1


@pytest.mark.slow
def test_registers_come_from_the_cache(here: pathlib.Path) -> None:
    compiled = call("--arch", "sm_80", "--head-dim", "32", "--format", "json", "--compile")
    cached = call("--arch", "sm_80", "--head-dim", "32", "--format", "json")
    assert cached.stdout == compiled.stdout
    assert json.loads(cached.stdout)["budget"]["registers"]["compiled"]["registers"] > 32


@pytest.mark.slow
def test_the_gallery_has_a_page_for_every_row_chosen(here: pathlib.Path) -> None:
    result = call("--all", "--arch", "sm_80,sm_90a", "--head-dim", "64,96", "-o", "site")
    assert result.exit_code == 0, result.output
    rows = [
        row for row in shipped_rows() if row.target in ("sm_80", "sm_90a") and row.problem.operands.head_dim in (64, 96)
    ]
    data = data_of((here / "site" / "index.html").read_text())
    assert data["view"] == "index"
    assert len(data["gallery"]) == len(rows)
    files = {entry["file"] for entry in data["gallery"]}
    assert len(files) == len(rows)
    assert names_in(here / "site") == files | {"index.html", "compare.html", "playground.html", "learn.html"}
    for entry in data["gallery"]:
        own = data_of((here / "site" / entry["file"]).read_text())
        scene = own["scenes"][own["scene"]]
        assert scene["id"] == entry["id"]
        assert entry["smem_bytes"] == scene["budget"]["smem"]["total"]
        traits = scene["kernel"]["traits"]
        assert entry["apart"].items() <= traits.items()
        assert entry["worst_ways"] >= 1
        assert own["gallery"] == data["gallery"]
    learn = data_of((here / "site" / "learn.html").read_text())
    assert set(learn["scenes"]) == set(learn["lessons"]["scenes"].values())
    assert set(data_of((here / "site" / "compare.html").read_text())["scenes"]) == {e["id"] for e in data["gallery"]}
    for name in names_in(here / "site"):
        assert (here / "site" / name).stat().st_size < LIMIT


def test_the_gallery_is_every_table_row_that_a_problem_reaches() -> None:
    rows = site.chosen_rows("fwd", [key.target for key in tables_of("fwd")], ["sm80", "sm90"], None)
    assert {row.peers.table for row in rows} == set(tables_of("fwd"))
    assert len({(row.target, row.family, row.choice.row) for row in rows}) == len(rows)


def test_a_latent_row_is_chosen_by_the_query_heads(here: pathlib.Path) -> None:
    names = []
    for asked in (("128",), ("64",), ("16",), ("16", "--family", "sm90")):
        result = call("--kernel", "mla", "--arch", "sm_90a", "--format", "json", "--heads", *asked)
        assert result.exit_code == 0, result.output
        scene = json.loads(result.stdout)
        names.append((scene["kernel"]["name"], scene["id"].split("bf16-")[1]))
        assert scene["lanes"] == [["Q", "Qr"], ["K", "Kr"], ["S", "P"], ["V"], ["O"]]
    hopper = "FlashMlaDecodeSm90"
    ampere = ("FlashMlaDecodeSm80", "16x64")
    assert names == [(hopper, "64x64"), (hopper, "64x64"), ampere, (hopper, "64x64")]
    result = call("--kernel", "mla", "--arch", "sm_90a", "--format", "json", "--heads", "64", "--e4m3-cache")
    assert json.loads(result.stdout)["kernel"]["name"] == "FlashMlaDecodeE4m3"
    result = call("--kernel", "mla", "--all", "--arch", "sm_86", "-o", "site")
    assert result.exit_code == 0 and "6 pages of 2 rows" in result.stdout


def test_a_row_that_splits_the_keys_of_an_8_bit_cache_is_asked_for_by_both() -> None:
    asked = ("--arch", "sm_90a", "--head-dim", "128", "--split", "--e4m3-cache", "--format", "json")
    result = call(*asked)
    assert result.exit_code == 0, result.output
    scene = json.loads(result.stdout)
    assert scene["kernel"]["features"] == ["split", "e4m3_cache"]
    assert {"sK_stored", "gO_part"} <= {tile["id"] for tile in scene["tiles"]}


@pytest.mark.parametrize("where", [("sm_89",), ("sm_120",), ("sm_90a", "--family", "sm80")], ids=" ".join)
def test_an_8_bit_cache_is_drawn_wherever_it_is_converted(where: tuple[str, ...]) -> None:
    result = call("--arch", *where, "--head-dim", "192", "--head-dim-v", "128", "--e4m3-cache", "--format", "json")
    assert result.exit_code == 0, result.output
    scene = json.loads(result.stdout)
    assert scene["id"] == f"{where[0]}-sm80-192x128-full-bf16-e4m3_cache"
    assert [tile["id"] for tile in scene["tiles"] if tile["element_bytes"] == 1] == ["gK", "gV", "sK", "sV"]


@pytest.mark.parametrize(
    ("query_rows", "drawn"), [("5", "8-rows"), ("16", "16-rows"), ("17", "32-rows"), ("33", "e4m3_cache")]
)
def test_few_query_rows_of_an_8_bit_cache_have_rows_of_their_own(query_rows: str, drawn: str) -> None:
    asked = ("--arch", "sm_90a", "--head-dim", "64", "--split", "--e4m3-cache", "--format", "json")
    result = call(*asked, "--query-rows", query_rows)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["id"].endswith(drawn)


def test_the_same_gallery_twice_is_the_same_files(here: pathlib.Path) -> None:
    options = ("--all", "--arch", "sm_86", "--head-dim", "32")
    for name in ("first", "second"):
        assert call(*options, "-o", name).exit_code == 0
    for path in (here / "first").iterdir():
        assert path.read_bytes() == (here / "second" / path.name).read_bytes()


def test_the_gallery_compiles_on_request_and_says_what_failed(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "run", lambda tasks, jobs: [Outcome(task, error="no such luck") for task in tasks])
    result = call("--all", "--arch", "sm_86", "--head-dim", "32", "--compile", "-o", "site")
    assert result.exit_code == 1
    assert "sm_86-sm80-32-full-bf16: no such luck" in result.stderr
    assert "no such luck" in result.stderr
    assert (here / "site" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-o", "x.html"), "layouts needs --head-dim, e.g. --head-dim 128, or --all"),
        ((*ROW, "--kernel", "both", "-o", "x"), "kernel is 'both'; allowed: fwd, bwd, mla"),
        (("--arch", "sm_75", "--head-dim", "64"), "arch is 'sm_75'; allowed: sm_80, sm_86, sm_89, sm_90a, sm_120"),
        (("--arch", "sm_80,sm_86", "--head-dim", "64"), "arch is 'sm_80,sm_86'; allowed: one of sm_80"),
        (("--arch", "sm_80", "--head-dim", "264"), "head_dim is 264; allowed: multiples of 8 up to 256"),
        (("--arch", "sm_80", "--head-dim", "x"), "head_dim is 'x'; allowed: comma-separated integers"),
        (("--arch", "sm_80", "--head-dim", "64,96"), "head_dim is '64,96'; allowed: one, or --all"),
        ((*ROW, "--head-dim-v", "7"), "head_dim_v is 7; allowed: multiples of 8 up to 256"),
        ((*ROW, "--mask", "alibi"), "mask is 'alibi'; allowed: full, causal, window"),
        ((*ROW, "--mask", "full", "--causal"), "mask and causal are both given"),
        ((*ROW, "--dtype", "fp32"), "dtype is 'fp32'; allowed: fp16, bf16, e4m3"),
        ((*ROW, "--kernel", "bwd", "--dtype", "e4m3"), "dtype is 'e4m3'; allowed: fp16, bf16"),
        ((*ROW, "--dtype", "e4m3"), "no row of fwd/sm_80/sm80 runs head_dim 64, head_dim_v 64, mask full, dtype e4m3"),
        ((*ROW, "--kernel", "bwd", "--split"), "--split is given with kernel bwd"),
        ((*ROW, "--kernel", "bwd", "--query-rows", "8"), "--query-rows is given with kernel bwd"),
        ((*ROW, "--e4m3-cache"), "no row of fwd/sm_80/sm80 runs head_dim 64"),
        ((*ROW, "--heads", "64"), "--heads is given without kernel mla"),
        (("--kernel", "mla", *ROW, "-o", "x"), "--head-dim is given with kernel mla, whose sizes are one"),
        (("--kernel", "mla", "--arch", "sm_80", "--family", "sm90", "-o", "x"), "family is 'sm90', which sm_80 does"),
        (("--kernel", "mla", "--arch", "sm_90a", "--dtype", "e4m3", "-o", "x"), "dtype is 'e4m3'; allowed: fp16, bf16"),
        (("--kernel", "mla", "--arch", "sm_80", "--e4m3-cache", "-o", "x"), "sm_80 does not convert e4m3"),
        (("--kernel", "mla", "--all", "--e4m3-cache", "-o", "x"), "--e4m3-cache is given with kernel mla"),
        (("--kernel", "mla", "--all", "--heads", "64", "-o", "x"), "--heads is given without kernel mla, or with"),
        ((*ROW, "--transposed-v"), "transposed_v is True; allowed with 'bf16': False"),
        (("--all", "--transposed-v", "-o", "x"), "--transposed-v is given with --all"),
        (
            (*ROW, "--lengths", "middling"),
            "lengths is 'middling'; allowed: decode, tiny, small, brief, short, moderate, medium, long",
        ),
        (
            (*ROW, "--lengths", "short,long"),
            "lengths is 'short,long'; allowed: one of decode, tiny, small, brief, short, moderate, medium, long",
        ),
        (("--all", "--lengths", "long", "-o", "x"), "--lengths is given with --all, which shows every row"),
        ((*ROW, "--family", "sm100"), "family is 'sm100'; allowed: sm80, sm90"),
        ((*ROW, "--family", "sm90"), "family is 'sm90', which sm_80 does not run; it runs: sm80"),
        ((*ROW, "--format", "pdf"), "format is 'pdf'; allowed: html, json, svg, png, ascii"),
        ((*ROW, "--format", "svg", "--color", "red", "-o", "x"), f"color is 'red'; allowed: {', '.join(COLORS)}"),
        ((*ROW, "--panel", "sK", "-o", "x"), "--panel is given with format html; it is for: svg, png, ascii"),
        ((*ROW, "--format", "json", "--stage", "0"), "--stage is given with format json"),
        ((*ROW, "--no-swizzle", "-o", "x"), "--no-swizzle is given with format html"),
        (ROW, "layouts needs -o, e.g. -o page.html"),
        ((*ROW, "--format", "png", "--panel", "sK"), "layouts needs -o, e.g. -o panel.png"),
        ((*ROW, "--format", "svg"), "layouts needs -o, e.g. -o pictures/"),
        (("--all",), "layouts needs -o, e.g. -o site/"),
        (("--all", "--format", "svg", "-o", "x"), "format is 'svg'; with --all allowed: html"),
        (("--all", "--causal", "-o", "x"), "--mask is given with --all, which shows every row"),
        (("--all", "--dtype", "bf16", "-o", "x"), "--dtype is given with --all"),
        (("--all", "--arch", "sm_75", "-o", "x"), "arch is 'sm_75'; allowed: sm_80"),
        (("--all", "--arch", "sm_80", "--family", "sm90", "-o", "x"), "no row of the shipped tables is left"),
        (("--all", "--head-dim", "72", "-o", "x"), "no row of the shipped tables is left"),
        ((*ROW, "-o", "folder"), "output folder is a directory; a file is needed"),
        ((*ROW, "-o", "file/page.html"), "is not a directory"),
        ((*ROW, "-o", "/dev/null"), "output /dev/null is not a regular file"),
        ((*ROW, "-o", "/proc/page.html"), "cannot be written"),
        ((*ROW, "-o", "x" * 300), "File name too long"),
        ((*ROW, "--format", "svg", "-o", "file"), "output file is not a directory; a directory is needed"),
        ((*ROW, "--format", "svg", "-o", "/proc/panels"), "cannot be written"),
        (("--all", "-o", "file"), "output file is not a directory; a directory is needed"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_bad_input_is_said_before_the_work_with_exit_2(
    here: pathlib.Path, no_work: None, arguments: tuple[str, ...], complaint: str
) -> None:
    (here / "file").write_text("mine")
    (here / "folder").mkdir()
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert names_in(here) == {"file", "folder"}
    assert (here / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("ascii",), "panel is not given; sm_80-sm80-64-full-bf16 has: gQ, gK"),
        (("ascii", "--panel", "sX"), "panel is 'sX'; sm_80-sm80-64-full-bf16 has: gQ, gK"),
        (("svg", "--panel", "acc_S", "--color", "bank", "-o", "x"), "color is 'bank'; panel acc_S has: owner, value"),
        (("svg", "--panel", "sK", "--stage", "7", "-o", "x"), "stage is 7; panel sK has: 0, 1"),
        (("svg", "--color", "core", "-o", "x"), "color is 'core'; the panels of sm_80-sm80-64-full-bf16 have: owner"),
        (("svg", "--stage", "7", "-o", "x"), "stage is 7; the panels of sm_80-sm80-64-full-bf16 have at most: 0, 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_the_row_has_not_is_listed(here: pathlib.Path, arguments: tuple[str, ...], complaint: str) -> None:
    result = call(*ROW, "--format", *arguments)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr
    assert names_in(here) == set()


def test_a_row_that_does_not_fit_says_why(here: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in tables_of("fwd")["fwd", "sm_80", "sm80"] if row.traits.head_dim == 256)
    monkeypatch.setattr("cuteflash.dispatch.TABLES", {("fwd", "sm_86", "sm80"): rows})
    choose.cache_clear()
    try:
        result = call("--arch", "sm_86", "--head-dim", "256", "-o", "x.html")
    finally:
        choose.cache_clear()
    assert result.exit_code == 2
    assert "bytes of shared memory, sm_86 has 101376" in result.stderr


def test_a_gpu_is_needed_only_where_no_arch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("--head-dim", "64", "--format", "json")
    assert result.exit_code == 2
    assert "arch is not given and torch finds no GPU; allowed: sm_80" in result.stderr


def test_the_commands_names_are_the_packages() -> None:
    assert command_line.COLORS == COLORS
    assert set(command_line.PICTURES) == set(command.SUFFIXES)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = here / "page.html"
    target.write_text("before")

    def full(self: pathlib.Path, content: bytes) -> int:
        with open(self, "wb") as handle:
            handle.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        output.write_file(target, "after")
    assert names_in(here) == {"page.html"}
    assert target.read_text() == "before"


def test_a_written_file_has_the_usual_permissions_and_a_link_stays_one(here: pathlib.Path) -> None:
    (here / "real.html").write_text("before")
    (here / "link.html").symlink_to("real.html")
    output.check_file(here / "link.html")
    output.write_file(here / "link.html", "after")
    assert (here / "link.html").is_symlink()
    assert (here / "real.html").read_text() == "after"
    (here / "plain").touch()
    assert os.stat(here / "real.html").st_mode == os.stat(here / "plain").st_mode


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_command_line_starts_without_the_explorers_packages() -> None:
    """numpy is torch's to import."""
    code = "import sys, cuteflash.cli.app; print({'PIL', 'cutlass', 'layouts'} & sys.modules.keys())"
    assert run_python(code).stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "package", "form"), [("numpy", "numpy", "json"), ("PIL", "pillow", "png")], ids=["numpy", "pillow"]
)
def test_a_missing_package_is_named_with_the_extra(here: pathlib.Path, module: str, package: str, form: str) -> None:
    arguments = ["layouts", *ROW, "--format", form, "-o", str(here / "x"), "--panel", "sK"]
    if form == "json":
        arguments = arguments[:-2]
    missing = f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = {arguments!r}"
    done = run_python(f"{missing}; from cuteflash.cli import main; main()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"cuteflash: layouts needs {package}; {how_to_install('layouts')}"
