"""A dataset of the user: a file, a folder of files, a Hub id, or rows that a program gives.

with its format:   source = open_source("train.jsonl");  print(source.format)
its rows:          for place, row in source.rows(skipped): ...
"""

from __future__ import annotations

import json
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from megatrain.choices import COLUMNS, RowFormat
from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.formats import Format
from megatrain.data.rows.hub_rows import FileRows, HubRows, Where, located
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.reading import (
    FIRST_ROWS,
    LONGEST_LINE_BYTES,
    data_files,
    parsed,
    read_unparsed,
)
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow, SkippedRows
from megatrain.data.rows.token_files import TokenFiles
from megatrain.data.rows.turns import TALKS
from megatrain.errors import DataError
from megatrain.progress import Advance
from megatrain.text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """The origin of rows, and their format."""

    name: str
    files: tuple[Path, ...]
    hub: HubRows | None
    """None: the rows are in files, or given."""
    given: GivenRows | None
    tokens: TokenFiles | None
    """How files of token ids are read; None: the files have rows."""
    format: Format
    bounds: tuple[int, int | None] = (0, None)
    """The first row that is read, and the row after the last; None is the end."""

    @property
    def folder(self) -> Path | None:
        """The folder of the files, which are all in one; None: the rows are not in files."""
        return self.files[0].parent if self.files else None

    def values(self, advance: Advance = lambda _: None) -> Iterator[tuple[str, object]]:
        """Yield each raw row with its place, `train.jsonl:17`; report bytes read to `advance`.

        Lines of JSON come unparsed: see `parsed` in reading.py.
        """
        whole = self.hub or self.given or self.tokens
        return islice(_values(self.files, whole, advance), *self.bounds)

    def rows(self, skipped: SkippedRows) -> Iterator[tuple[str, Row]]:
        """Yield each usable row with its place; count the others in `skipped`."""
        for place, value in self.values():
            try:
                yield place, canonical(parsed(value), self.format)
            except BadRow as bad:
                skipped.add(place, bad)


def open_source(
    where: Where,
    wanted: RowFormat = "auto",
    *,
    columns: Mapping[str, str] = MappingProxyType({}),
    roles: Mapping[str, Sequence[str]] = MappingProxyType({}),
    max_rows: int | None = None,
) -> RowSource:
    """Return the source of this name, its format detected from its first rows unless given.

    `columns` and `roles` are the file's names for ours, and no more than `max_rows` are read.
    Raises DataError if it is neither a file, a folder nor a dataset, or not of that format.
    """
    where = where if isinstance(where, _Opened) else located(where)
    files, bounds, first = _begun(where, max_rows)
    values = (value for _, value in first)
    return RowSource(
        name=_name(where, max_rows),
        files=files,
        hub=where if isinstance(where, HubRows) else None,
        given=where if isinstance(where, GivenRows) else None,
        tokens=where if isinstance(where, TokenFiles) else None,
        format=detect_format(values, where, wanted, columns, roles),
        bounds=bounds,
    )


def raw_rows(where: Where, max_rows: int | None = None) -> tuple[str, Iterator[tuple[str, object]]]:
    """Return the name of a source, and its rows as they are, each with its place.

    A row that cannot be read is a BadRow. Raises DataError if it has none, or none can be read.
    """
    where = where if isinstance(where, _Opened) else located(where)
    files, bounds, _ = _begun(where, max_rows)
    whole = where if isinstance(where, _WHOLE) else None
    rows = ((place, parsed(value)) for place, value in islice(_values(files, whole), *bounds))
    return _name(where, max_rows), rows


def _name(where: Where, max_rows: int | None) -> str:
    return str(where) if max_rows is None else f"{where}[:{max_rows}]"


def _begun(
    where: Where, max_rows: int | None
) -> tuple[tuple[Path, ...], tuple[int, int | None], list[tuple[str, object]]]:
    """Return the files of a source, which of its rows are read, and the first of them, checked."""
    files = _files(where)
    if not isinstance(where, TokenFiles):
        for path in files:
            _check_encoding(path)
    begin, end = _bounds(where, files)
    if max_rows is not None:
        end = begin + max_rows if end is None else min(end, begin + max_rows)
    whole = where if isinstance(where, _WHOLE) else None
    raw = islice(_values(files, whole), begin, end)
    first = [(place, parsed(value)) for place, value in islice(raw, FIRST_ROWS)]
    _check_first(first, str(where), files)
    return files, (begin, end), first


_WHOLE = HubRows | TokenFiles | GivenRows
"""Sources that yield their rows themselves."""
_Opened = _WHOLE | FileRows


def _files(where: Where) -> tuple[Path, ...]:
    if isinstance(where, FileRows):
        return tuple(data_files(where.path, where.name))
    if isinstance(where, TokenFiles):
        return where.files
    return () if isinstance(where, HubRows | GivenRows) else tuple(data_files(where))


def _bounds(where: Where, files: tuple[Path, ...]) -> tuple[int, int | None]:
    if not isinstance(where, FileRows):
        return 0, None
    return where.bounds(lambda: sum(1 for _ in _values(files, None)))


def _check_encoding(path: Path) -> None:
    """Raise DataError for a text file in UTF-16: its lines would only look broken."""
    try:
        with path.open("rb") as file:
            begin = file.read(2)
    except OSError:
        return  # reading it reports the reason
    if begin in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise DataError(
            f"{path} is UTF-16. Save it as UTF-8: iconv -f UTF-16 -t UTF-8 "
            f"{shlex.quote(str(path))} > {shlex.quote(f'utf8_{path.name}')}"
        )


def _check_first(first: list[tuple[str, object]], where: str, files: tuple[Path, ...]) -> None:
    """Raise DataError if there are no rows, or none of the first ones can be read."""
    if not first:
        raise DataError(f"{where} is empty: it has no rows")
    bad = SkippedRows()
    for place, value in first:
        if isinstance(value, BadRow):
            bad.add(place, value)
    if bad.total == len(first):
        raise DataError(
            f"{where}: none of the first {len(first)} rows can be read:\n{bad}{_inside(files)}"
        )
    if len(first) == 1 and (advice := _inside(files)):
        raise DataError(f"{where} has one row.{advice}")


def _inside(files: tuple[Path, ...]) -> str:
    """Return how to get at the rows of a .json file that has them in a list inside of an object."""
    path = files[0] if files else Path()
    if path.suffix != ".json" or len(files) > 1 or path.stat().st_size > LONGEST_LINE_BYTES:
        return ""
    try:
        whole = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    lists = whole.items() if isinstance(whole, dict) else ()
    keys = [
        key
        for key, rows in lists
        if key not in (*COLUMNS, *TALKS)
        and isinstance(rows, list)
        and rows
        and all(isinstance(row, dict) for row in rows)
    ]
    if not keys:
        return ""
    where, key = json.dumps(str(path)), json.dumps(keys[0])
    code = f"import json; [print(json.dumps(row)) for row in json.load(open({where}))[{key}]]"
    return (
        f"\n  The file is one object, with rows in {printable(', '.join(keys))}. This writes them "
        f"one a line, then train on rows.jsonl:\n    python3 -c {shlex.quote(code)} > rows.jsonl"
    )


def _values(
    files: tuple[Path, ...],
    whole: HubRows | TokenFiles | GivenRows | None,
    advance: Advance = lambda _: None,
) -> Iterator[tuple[str, object]]:
    if isinstance(whole, TokenFiles):
        yield from whole.values(advance)
        return
    if whole is not None:
        for number, value in whole.values():
            yield f"{whole}:{number}", value
    for path in files:
        for number, value in read_unparsed(path, advance):
            yield f"{path.name}:{number}", value
