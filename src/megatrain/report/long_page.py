"""The pages of `megatrain gpu-check --long`: index.html explains the archive that it is in.

Laws (tests/report/test_long_page.py)
    1. Every part is on it, with its question, its state as a word, and its tables.
    2. No text of a result becomes markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.report.drawing.document import document, signs
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.tables import facts_table, flattened, shown_cell, table
from megatrain.text import duration

_NAME = "MegaTrain gpu-check --long"
LONG_SIGNS = signs(_NAME)
_STATES = {"done": "ok", "left out": "left-out", "failed": "wrong", "unfinished": "slow"}
_MOST_ROWS = 60
FILES = {
    "*.json": "the results of a part, as the tables below show them, in plain numbers",
    "check.html": "the page of the short check: laws and rates",
    "lanes-trace.json": "one step by lane; open it with Perfetto (ui.perfetto.dev)",
    "kernels-trace.json.gz": "one step by kernel, from torch's profiler; Perfetto opens it",
    "kernels-lanes.json": "that step by lane",
    "*.log": "warnings and errors of a part",
}


def long_page(device: str, results: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> Html:
    """Return the index of results, each by the fields of a PartResult; `missing` did not run."""
    sections = {"What this is": _about(results, missing), "Files": _files()}
    for result in results:
        sections[f"{result['name'].replace('_', ' ').capitalize()}"] = _part(result)
    return document(device, _NAME, sections)


def _about(results: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> Html:
    text = (
        "MegaTrain trains language models whose weights live in host memory; the device computes "
        "one block at a time. Each part below asks one question about this machine. No path, user "
        "or host is named. Times are measured here, unless a column says planned or predicted."
    )
    rows = [
        tag(
            "tr",
            tag("td", _state(result["state"])),
            tag("th", result["name"].replace("_", " "), scope="row"),
            tag("td", str(result["found"].get("lead") or result["why"])),
            tag("td", duration(result["seconds"]), class_="number"),
        )
        for result in results
    ]
    rows += [
        tag(
            "tr",
            tag("td", _state("unfinished")),
            tag("th", name.replace("_", " "), scope="row"),
            tag("td", "it did not run, or not yet"),
            tag("td", ""),
        )
        for name in missing
    ]
    return join_html([tag("p", text), table([], rows, "Parts")])


def _files() -> Html:
    rows = [
        tag("tr", tag("th", tag("code", name), scope="row"), tag("td", text))
        for name, text in FILES.items()
    ]
    return table([], rows, "Files")


def _part(result: Mapping[str, Any]) -> Html:
    found = result["found"]
    why = f" {result['why']}" if result["why"] else ""
    parts = [
        tag("p", result["asks"], class_="lead"),
        tag("p", _state(result["state"]), f"{why} {found.get('lead', '')}"),
        tag("p", f"{result['when']}, {duration(result['seconds'])}", class_="note"),
    ]
    for title, rows in found.get("tables", {}).items():
        if rows:
            parts += [tag("h3", title), _rows(title, rows)]
    figures = facts_table([], [flattened(found.get("figures", {}))], "Figures")
    return join_html([*parts, *([tag("h3", "Figures"), figures] if figures else [])])


def _rows(title: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        tag("tr", *(tag("td", shown_cell(key, row[key]) if key in row else "") for key in columns))
        for row in rows[:_MOST_ROWS]
    ]
    return table([key.replace("_", " ") for key in columns], cells, title)


def _state(state: str) -> Html:
    return tag("span", state, class_=f"state {_STATES.get(state, 'slow')}")
