"""A page taken apart, without a browser."""

from __future__ import annotations

import html.parser


class Parts(html.parser.HTMLParser):
    """The elements of a page: (tag, attributes, text inside), and its comments."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.comments: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.elements:
            tag, attributes, text = self.elements[-1]
            self.elements[-1] = (tag, attributes, text + data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        """(attributes, text inside) of each element of a kind."""
        return [(attributes, text) for name, attributes, text in self.elements if name == tag]
