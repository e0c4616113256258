"""HTML from parts, where only `Html` is inserted unchanged and every other string is escaped.

A report quotes untrusted text: samples of a model, names of folders, a config. Such text becomes a
part of the page through `tag` or `join_html`, which escape it. `Html` is made here, and elsewhere
only from our own text.

Invariants (tests/report/test_markup.py)
    1. No plain string opens a tag or ends an attribute.
    2. No control character, half a surrogate pair or mark that turns the reading direction reaches
       the page; each is spelled out. Newlines and tabs stay.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from megatrain.text import printable

_EMPTY = frozenset({"meta", "rect", "path"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def shortened(text: str, most: int) -> str:
    """Return `text`, or its start and how much is missing."""
    if len(text) <= most:
        return text
    return f"{text[:most]} ... ({len(text) - most:,} more characters)"


def escaped(text: str) -> Html:
    """Return `text` as HTML that shows it; `Html` comes back as it is."""
    return text if isinstance(text, Html) else Html(html.escape(printable(text)))


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
        return Html(f"<{name}{shown}>" if name == "meta" else f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{join_html(children)}</{name}>")
