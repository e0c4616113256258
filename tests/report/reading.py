"""A page as a browser would take it apart: elements, attributes, text; each element closed."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br"}


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def read(html: str) -> Page:
    """Return the page taken apart; fails if an element is not closed where it should be."""
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page
