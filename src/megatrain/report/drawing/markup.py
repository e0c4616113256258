"""HTML from parts, where only `Html` is inserted unchanged and every other string is escaped.

A report quotes untrusted text: samples of a model, names of folders, a config. A string therefore
becomes part of a page in one way, through `tag` or `join_html`, which escape it. `Html` is made
here, and elsewhere only from our own text.

Laws (tests/report/drawing/test_markup.py)
    1. No plain string opens a tag or ends an attribute.
    2. No control character, half a surrogate pair or mark that turns the reading direction reaches
       the page; each is spelled out. Newlines and tabs stay.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

# Controls but tab and newline, halves of surrogate pairs (a file cannot hold them), and the marks
# that make text read in another order than it is stored.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_EMPTY = frozenset({"meta", "rect", "path", "line", "br"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def visible(text: str) -> str:
    """Return `text` with what cannot be seen spelled out."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int) -> str:
    """Return `text`, or its start and how much is missing."""
    if len(text) <= most:
        return text
    return f"{text[:most]} ... ({len(text) - most:,} more characters)"


def escaped(text: str) -> Html:
    """Return `text` as HTML that shows it; `Html` comes back as it is."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text)))


def join_html(parts: Iterable[str]) -> Html:
    """Return the parts one after another."""
    return Html("".join(escaped(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | None) -> Html:
    """Return an element. `class_` gives class, `aria_label` aria-label, and None no attribute."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Html(f"<{name}{shown}>" if name in ("meta", "br") else f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{join_html(children)}</{name}>")
