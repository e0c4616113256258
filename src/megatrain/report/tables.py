"""Facts as tables: one column for each run, one row for each fact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatrain.report.drawing.markup import Html, join_html, shortened, tag
from megatrain.report.run import Run, number
from megatrain.text import count, duration, figure, size

_MOST_CHARACTERS = 300
_MOST_ROWS = 200
Facts = Mapping[str, str]


def facts_table(runs: Sequence[Run], columns: Sequence[Facts], caption: str) -> Html:
    """Return a table of facts, in the order they are first met; nothing if there are none."""
    keys = list(dict.fromkeys(key for facts in columns for key in facts))
    if not keys:
        return Html()
    left = [f"and {len(keys) - _MOST_ROWS:,} more"] if len(keys) > _MOST_ROWS else []
    rows = [
        tag(
            "tr", tag("th", key, scope="row"), *(tag("td", facts.get(key, "")) for facts in columns)
        )
        for key in keys[:_MOST_ROWS]
    ]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    notes = (tag("p", text, class_="note") for text in left)
    return join_html([table(head, rows, caption), *notes])


def table(head: Sequence[str], rows: Iterable[Html], caption: str) -> Html:
    """Return a table that scrolls inside a narrow page, also by keyboard."""
    heads = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head)))
    body = tag("table", heads if head else Html(), tag("tbody", *rows))
    return tag("div", body, class_="wide", role="region", aria_label=caption, tabindex="0")


def bar_row(name: str, share: float, text: str, look: str) -> Html:
    """Return a row with a bar of so long a share of its cell."""
    bar = tag("svg", tag("rect", width=f"{share:.2%}", height="100%", class_=look),
              class_="bar", aria_hidden="true")  # fmt: skip
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", bar, class_="bars"),
        tag("td", text, class_="number"),
        class_=look,
    )


def flattened(facts: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested facts as lines for people: `length, p95`."""
    lines: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{before}{_name(str(key))}"
        if isinstance(value, dict) and before.count(", ") < 3:
            lines.update(flattened(value, f"{name}, "))
        else:
            lines[name] = shown_cell(str(key), value)
    return lines


def shown_cell(key: str, value: object) -> str:
    """Return a value in the unit that its name implies."""
    real = number(value)
    if real is None:
        if isinstance(value, list):
            return shortened(", ".join(shown_cell(key, item) for item in value), _MOST_CHARACTERS)
        words = {True: "yes", False: "no", None: "none"}
        known = words.get(value) if isinstance(value, bool | None) else None
        return known or shortened(str(value), _MOST_CHARACTERS)
    if key.endswith("bytes_per_s"):
        return f"{size(real)}/s"
    if key.endswith("bytes"):
        return size(real)
    if key.endswith(("_s", "seconds")) and not key.endswith("per_s"):
        return duration(real)
    return count(real) if isinstance(value, int) else figure(real)


def _name(key: str) -> str:
    return key.replace("_", " ")
