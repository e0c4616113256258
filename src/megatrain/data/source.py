"""A data set as the user names it: a file, a folder of files, or a name on the Hub.

with its format:   source = open_source("train.jsonl");  print(source.format)
its rows:          for place, row in source.rows(skipped): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.data.formats import Format, FormatName, detect
from megatrain.data.hub_rows import HubRows, Where, located
from megatrain.data.reading import data_files, parsed, read_unparsed
from megatrain.data.rows import Row, canonical
from megatrain.data.skipped import BadRow, Skipped
from megatrain.progress import Advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from and what shape they have."""

    name: str
    files: tuple[Path, ...]
    hub: HubRows | None
    """None: the rows are in files."""
    format: Format

    def values(self, advance: Advance = lambda _: None) -> Iterator[tuple[str, object]]:
        """Yield each raw row with its place, `train.jsonl:17`; tell `advance` of bytes read.

        Lines of JSON come unparsed: see `parsed` in reading.py.
        """
        return _values(self.files, self.hub, advance)

    def rows(self, skipped: Skipped) -> Iterator[tuple[str, Row]]:
        """Yield each usable row with its place; count the others in `skipped`."""
        for place, value in self.values():
            try:
                yield place, canonical(parsed(value), self.format)
            except BadRow as bad:
                skipped.add(place, bad)


def open_source(where: Where, wanted: FormatName = "auto") -> Source:
    """Return the source of this name, its format detected from its first rows unless told.

    Raises DataError if it is neither a file, a folder nor a dataset, or not of that format.
    """
    where = where if isinstance(where, HubRows) else located(where)
    hub = where if isinstance(where, HubRows) else None
    files = () if isinstance(where, HubRows) else tuple(data_files(where))
    first = (parsed(value) for _, value in _values(files, hub))
    shape = detect(first, where=str(where), wanted=wanted)
    return Source(name=str(where), files=files, hub=hub, format=shape)


def _values(
    files: tuple[Path, ...], hub: HubRows | None, advance: Advance = lambda _: None
) -> Iterator[tuple[str, object]]:
    if hub is not None:
        for number, value in hub.values():
            yield f"{hub}:{number}", value
    for path in files:
        for number, value in read_unparsed(path, advance):
            yield f"{path.name}:{number}", value
