"""Planned and measured memory, as bars on one scale for each place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.memory.ledger import plain_purpose
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.run import LedgerLine, Run
from megatrain.report.tables import bar_row, table
from megatrain.text import percent, size

_PLACES = {"Host memory": ("host", "pinned"), "Device memory": ("device",)}
"""Pinned memory is host memory: the measured peak includes both."""
_MEASURED = {"Host memory": "host_peak_bytes", "Device memory": "device_peak_bytes"}
_MOST_LINES = 30


def memory_section(runs: Sequence[Run]) -> Html:
    """Return bars for every run and place that has a ledger or a measured peak."""
    return join_html(_run(run, len(runs)) for run in runs if run.ledger or run.measured)


def _run(run: Run, num_runs: int) -> Html:
    places = dict(_PLACES)
    for line in run.ledger:
        if not any(line.place in names for names in places.values()):
            places[line.place.capitalize()] = (line.place,)
    name = (tag("h3", run.name),) if num_runs > 1 else ()
    parts = (_place(run, title, names) for title, names in places.items())
    return join_html([*name, tag("div", *parts, class_="charts")])


def _place(run: Run, title: str, names: Sequence[str]) -> Html:
    lines = sorted((line for line in run.ledger if line.place in names), key=lambda x: -x.num_bytes)
    planned = sum(line.num_bytes for line in lines)
    measured = run.measured.get(_MEASURED.get(title, ""), 0.0)
    if not planned and not 0 < measured < float("inf"):
        return Html()
    scale = max(planned, measured)
    rows = [_row(_purpose(line), line.num_bytes, scale, "part") for line in _folded(lines)]
    if planned:
        rows.append(_row("planned", planned, scale, "planned"))
    if measured:
        rows.append(_row("measured peak", measured, scale, "measured"))
    return tag("figure", tag("figcaption", title, _verdict(planned, measured)),
               table([], rows, f"{title}: planned and measured"))  # fmt: skip


def _folded(lines: list[LedgerLine]) -> Iterator[LedgerLine]:
    yield from lines[:_MOST_LINES]
    if rest := lines[_MOST_LINES:]:
        yield LedgerLine("", f"{len(rest)} smaller ones", sum(line.num_bytes for line in rest))


def _purpose(line: LedgerLine) -> str:
    purpose = plain_purpose(line.purpose)
    return f"{purpose} (pinned)" if line.place == "pinned" else purpose


def _row(name: str, num_bytes: float, scale: float, look: str) -> Html:
    return bar_row(name, num_bytes / scale, size(num_bytes), look)


def _verdict(planned: float, measured: float) -> Html:
    if not planned or not measured:
        return Html()
    text = f" measured {percent(measured / planned)} of the plan"
    return tag("span", text, class_="unit")
