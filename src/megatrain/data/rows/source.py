"""A dataset of the user: a file, a folder of files, a Hub id, or rows that a program gives.

with its format:   source = open_source("train.jsonl");  print(source.format)
its rows:          for place, row in source.rows(skipped): ...
"""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatrain.choices import RowFormat
from megatrain.data.rows.formats import FIRST_ROWS, Format, detect_format
from megatrain.data.rows.hub_rows import HubRows, Where, located
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.reading import data_files, parsed, read_unparsed
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow, SkippedRows
from megatrain.errors import DataError
from megatrain.progress import Advance


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """The origin of rows, and their format."""

    name: str
    files: tuple[Path, ...]
    hub: HubRows | None
    """None: the rows are in files, or given."""
    given: GivenRows | None
    format: Format

    def values(self, advance: Advance = lambda _: None) -> Iterator[tuple[str, object]]:
        """Yield each raw row with its place, `train.jsonl:17`; report bytes read to `advance`.

        Lines of JSON come unparsed: see `parsed` in reading.py.
        """
        return _values(self.files, self.hub or self.given, advance)

    def rows(self, skipped: SkippedRows) -> Iterator[tuple[str, Row]]:
        """Yield each usable row with its place; count the others in `skipped`."""
        for place, value in self.values():
            try:
                yield place, canonical(parsed(value), self.format)
            except BadRow as bad:
                skipped.add(place, bad)


def open_source(where: Where, wanted: RowFormat = "auto") -> RowSource:
    """Return the source of this name, its format detected from its first rows unless given.

    Raises DataError if it is neither a file, a folder nor a dataset, or not of that format.
    """
    where = where if isinstance(where, HubRows | GivenRows) else located(where)
    whole = where if isinstance(where, HubRows | GivenRows) else None
    files = () if isinstance(where, HubRows | GivenRows) else tuple(data_files(where))
    for path in files:
        _check_encoding(path)
    first = [(place, parsed(value)) for place, value in islice(_values(files, whole), FIRST_ROWS)]
    _check_first(first, str(where))
    shape = detect_format((value for _, value in first), where=str(where), wanted=wanted)
    return RowSource(
        name=str(where),
        files=files,
        hub=where if isinstance(where, HubRows) else None,
        given=where if isinstance(where, GivenRows) else None,
        format=shape,
    )


def _check_encoding(path: Path) -> None:
    """Raise DataError for a text file in UTF-16: its lines would only look broken."""
    try:
        with path.open("rb") as file:
            begin = file.read(2)
    except OSError:
        return  # reading it reports the reason
    if begin in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise DataError(f"{path} is UTF-16. Save it as UTF-8.")


def _check_first(first: list[tuple[str, object]], where: str) -> None:
    """Raise DataError if there are no rows, or none of the first ones can be read."""
    if not first:
        raise DataError(f"{where} is empty: it has no rows")
    bad = SkippedRows()
    for place, value in first:
        if isinstance(value, BadRow):
            bad.add(place, value)
    if bad.total == len(first):
        raise DataError(f"{where}: none of the first {len(first)} rows can be read:\n{bad}")


def _values(
    files: tuple[Path, ...], whole: HubRows | GivenRows | None, advance: Advance = lambda _: None
) -> Iterator[tuple[str, object]]:
    if whole is not None:
        for number, value in whole.values():
            yield f"{whole}:{number}", value
    for path in files:
        for number, value in read_unparsed(path, advance):
            yield f"{path.name}:{number}", value
