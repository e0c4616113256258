"""Rows that were left out: how many, why, and where the first few are.

A bad row never ends a run and is never silent. Reasons are short and few, so that counts by
reason stay readable; the details of a row are shown with its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST_PLACES = 3


class BadRow(Exception):
    """A row that cannot be used: `reason` is counted, `detail` is shown for the first few."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True, kw_only=True)
class SkippedRows:
    """Counts of rows left out, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    """For each reason the first few places: `train.jsonl:17`, with a detail if there is one."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, place: str, bad: BadRow) -> None:
        self.counts[bad.reason] = self.counts.get(bad.reason, 0) + 1
        self._note(bad.reason, f"{place} ({bad.detail})" if bad.detail else place)

    def merge(self, later: SkippedRows) -> None:
        """Add the rows that were skipped in a later part of the same data."""
        for reason, count in later.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            for place in later.places[reason]:
                self._note(reason, place)

    def _note(self, reason: str, place: str) -> None:
        places = self.places.setdefault(reason, [])
        if len(places) < _MOST_PLACES:
            places.append(place)

    def __str__(self) -> str:
        lines = []
        for reason, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            places = self.places[reason]
            more = ", ..." if count > len(places) else ""
            lines.append(f"  {count} x {reason}: {', '.join(places)}{more}")
        return "\n".join(lines)
