"""The README is run: its Python here, on a CPU; and what the package's page on an index keeps of it."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)]*)\)")


def run(snippet: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names: dict[str, Any] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    return names


def test_the_first_snippet_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(SNIPPETS[0], monkeypatch)
    assert names["out"].shape == names["q"].shape and names["out"].device.type == "cpu"
    assert names["lse"].shape == (2, 8, 512) and names["lse"].dtype == torch.float32


@pytest.mark.parametrize("snippet", SNIPPETS[1:], ids=lambda text: re.search(r"cuteflash[. ]\S+", text)[0])
def test_the_other_snippets_run(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in snippet:
        pytest.importorskip("transformers")
    run(snippet, monkeypatch)


def headings(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))])
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in LINK.findall((ROOT / page).read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


def test_words_are_explained_before_they_are_used() -> None:
    glossary = README.index("- **family**")
    for word in ("famil", "target", "problem", "traits", r"\brows?\b", r"\bcells?\b"):
        first = re.search(word, README)
        assert first is not None and first.start() >= glossary, word


def test_the_long_description_links_to_nothing_that_only_a_checkout_has(setup_arguments: dict[str, Any]) -> None:
    text = setup_arguments["long_description"]
    assert all(target.startswith("https://") for target in LINK.findall(text))
    assert "![" not in text
    assert "(docs/performance.md)" in text and "| backward, 36 cells |" in text
