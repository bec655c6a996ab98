"""Files that belong together are copied as they were at one moment."""

from __future__ import annotations

import pathlib

import pytest

from cuteflash.files import copy_together


def test_files_are_copied_and_a_missing_one_is_not(tmp_path: pathlib.Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "a").write_text("one")
    (tmp_path / "here" / "b").write_text("of an earlier attempt")
    first, second = copy_together([tmp_path / "a", tmp_path / "b"], tmp_path / "here")
    assert first.read_text() == "one" and not second.exists()


def test_what_changes_while_it_is_copied_is_copied_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "a").write_text("")
    writers = [True, True, False]
    read = pathlib.Path.read_bytes

    def read_bytes(path: pathlib.Path) -> bytes:
        content = read(path)
        if writers.pop(0):
            path.write_bytes(content + b"more")
        return content

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
    (copy,) = copy_together([tmp_path / "a"], tmp_path / "here")
    assert read(copy) == b"moremore" and not writers
    writers[:] = [True] * 9
    with pytest.raises(OSError, match="changes whenever it is copied"):
        copy_together([tmp_path / "a"], tmp_path / "here")
