"""One HTML file that needs nothing else: no network, no script.

It carries a policy that forbids loading or running anything, should untrusted text ever slip
through; it is complete without scripts, and has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def signs(name: str) -> tuple[bytes, ...]:
    """Return what the file of a document of this name has near its start."""
    return (b"<!DOCTYPE html>", f"{name}</title>".encode())


def document(title: str, name: str, sections: Mapping[str, Html]) -> Html:
    """Return the page of the sections that are not empty, with links to them."""
    parts = {heading: part for heading, part in sections.items() if part}
    links = (tag("li", tag("a", heading, href=f"#{_anchor(heading)}")) for heading in parts)
    drawn = (
        tag("section", tag("h2", heading, id=f"{_anchor(heading)}-title"), part,
            id=_anchor(heading), aria_labelledby=f"{_anchor(heading)}-title")
        for heading, part in parts.items()
    )  # fmt: skip
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - {name}"),
        tag("style", Html(STYLE)),
    )
    body = (
        tag("header", tag("h1", title)),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *drawn),
        tag("footer", tag("p", "Written by MegaTrain.")),
    )
    page = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return join_html([Html("<!DOCTYPE html>\n"), page, "\n"])


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")
