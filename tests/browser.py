"""Pages in headless Chromium, driven by Playwright. Importing this skips a test module where there is none."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Self

import pytest

from tests.patience import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api")

DESKTOP = {"width": 1440, "height": 1000}
PHONE = {"width": 360, "height": 740}


def launch() -> Iterator[Any]:
    """A browser, closed when the generator ends."""
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visit:
    """One page in a context of its own; leaving it without an error calls `check`.

    Attributes:
        said: every line of its console, and its errors.
        errors: the errors alone.
        requests: what it asked for.
    """

    viewport = DESKTOP

    def __init__(self, browser: Any, path: pathlib.Path, fragment: str = "", **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": self.viewport} | context)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self._hear(str(error), "error"))
        self.page.on("console", lambda line: self._hear(line.text, line.type))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.goto(path.as_uri() + fragment)
        self.settle()

    def _hear(self, text: str, kind: str) -> None:
        self.said.append(text)
        if kind == "error":
            self.errors.append(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()
        if error[0] is None:
            self.check()

    def drawn(self) -> None:
        """Wait until the page has drawn what it was asked for: one frame for observers, two for what they ask for."""
        self.page.evaluate(
            """async () => {
                for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
                await new Promise(setTimeout);
            }"""
        )

    def settle(self) -> None:
        """Wait until the page is there."""

    def check(self) -> None:
        """What holds of every visit."""
        assert self.errors == []
