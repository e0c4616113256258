"""Files as raw rows, one after another, in bounded memory.

Each reader yields (number, value): the first line of the row for jsonl, txt and csv, the
row's number from 1 for json and parquet. A row that cannot even be parsed is
yielded as a BadRow in place of its value, so numbers and order of the others stay right.

We parse text files ourselves: table readers give up on the first broken line, turn an answer
`NA` into null and an answer `42` into a number, and copy the entire file first.

Laws (tests/data/rows/test_reading.py)
    1. Every format gives the same rows for the same content.
    2. A broken line costs that line.
    3. An error outside of one row (no such file, a quote that never closes) is a DataError
       with file and line.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError, listing
from megatrain.hub import is_id
from megatrain.progress import Advance

Raw = tuple[int, object]
"""Line or row number, and the value: the parsed contents, or a BadRow."""

LONGEST_LINE_BYTES = 64 * 2**20
_CHUNK_CHARS = 2**20
_PARQUET_ROWS = 256
DUPLICATE_KEY = "duplicate key"
_SPACE = re.compile(r"[ \t\r\n]*")


class _RowDecoder(threading.local):
    """Parses JSON and notes a key that an object has twice: one of its values would be lost."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            self._twice.append(next(name for name in names if names.count(name) > 1))
        return found

    def at(self, text: str, start: int) -> tuple[object, int]:
        """Return the value that begins at `start`, or a BadRow, and its end. Raises ValueError."""
        self._twice.clear()
        value, end = self._decoder.raw_decode(text, start)
        return (BadRow(DUPLICATE_KEY, self._twice[0]) if self._twice else value), end

    def all_of(self, text: str) -> object:
        """Return the value that is all of a text, or a BadRow. Raises ValueError."""
        self._twice.clear()
        value = self._decoder.decode(text)
        return BadRow(DUPLICATE_KEY, self._twice[0]) if self._twice else value


_DECODER = _RowDecoder()


class JsonLine(str):
    """A line of JSON, not parsed yet: the maker of the row parses it."""

    __slots__ = ()


def parsed(value: object) -> object:
    """Return the value of a line, or a BadRow; any other value unchanged."""
    return _parsed(value) if isinstance(value, JsonLine) else value


def read_unparsed(path: str | Path, advance: Advance = lambda _: None) -> Iterator[Raw]:
    """Yield the raw rows of a local file, by its suffix; report bytes to `advance`.

    A line of JSON is a `JsonLine`, which `parsed` reads.
    """
    path = Path(path)
    reader = _READERS.get(_kind(path))
    if reader is None:
        raise DataError(
            f"{path}: unknown file type {path.suffix or '(no suffix)'}; "
            f"known types are {listing(_READERS)}, and {listing(_PACKED)}"
        )
    if not path.is_file():  # reading a pipe might never return
        raise DataError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    try:
        yield from reader(path, advance)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}"
        ) from error


def without_filling(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that Arrow puts where another row has a key.

    Objects of a column all have the same keys there, so arguments of one tool call would appear,
    as null, in every other. A column and the keys of a turn stay: there null is a bad row.
    """
    return {name: _pruned(cell, depth=0) for name, cell in row.items()}


def _pruned(value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [_pruned(item, depth) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _pruned(item, depth + 1)
        for key, item in value.items()
        if depth == 0 or item is not None
    }


def data_files(path: str | Path) -> list[Path]:
    """Return the file, or the files of known kinds in a folder by name; none for a Hub name."""
    name, path = str(path), Path(path)
    if path.is_dir():
        return _files_in(path)
    if path.exists():
        return [path]
    if name.startswith("<"):
        raise DataError(
            f"{name}: these rows were given by a program, as an argument of mt.Trainer. Run that "
            "program again, or give a file with the rows."
        )
    if _kind(path) in _READERS or not is_id(name):
        raise no_such_data(path)
    return []


def no_such_data(path: Path) -> DataError:
    """Return the error for a path with nothing there: it names the file that was meant, if any."""
    here = path.parent.resolve()
    names: list[str] = []
    with suppress(OSError):  # no such folder either, or one that may not be read
        names = os.listdir(here)
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    hint = "Give a data file, a folder of data files, or a dataset on the Hub like owner/name."
    if near:
        hint = f"Did you mean {path.with_name(near[0])}?"
    return DataError(f"{path}: no such file or folder in {here}. {hint}")


def _files_in(folder: Path) -> list[Path]:
    """Return the data files of a folder by name; hidden ones are not data."""
    seen = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if {"state.json", "dataset_info.json"} <= {path.name for path in seen}:
        raise DataError(
            f"{folder} was written by Dataset.save_to_disk. In Python give its rows to mt.Trainer "
            f"(train_dataset=datasets.load_from_disk({str(folder)!r})), or write them to a file "
            "that is read here: .to_parquet('rows.parquet')."
        )
    found = [path for path in seen if _kind(path) in _READERS and path.is_file()]
    below = [path.name for path in seen if path.is_dir() and _holds_data(path)]
    if below:
        raise DataError(
            f"{folder} also has data files in subfolders: {listing(below)}. A folder is read "
            "without its subfolders: list each folder in data.train."
        )
    if not found:
        raise DataError(f"{folder}: the folder has no {listing(_READERS)} file")
    return found


def _holds_data(folder: Path) -> bool:
    return any(_kind(path) in _READERS for path in folder.rglob("[!.]*"))


def _kind(path: Path) -> str:
    """Return the suffix that selects the reader; .jsonl for rows.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if "".join(suffixes) in _PACKED:
        return suffixes[0]
    return path.suffix.lower()


class _CountedFile(io.FileIO):
    """A file that reports the number of bytes read."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._advance(count)
        return count


class _PackedFile(gzip.GzipFile):
    """A gzip file that closes the file it reads from."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(fileobj=file)
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def _open(path: Path, advance: Advance) -> io.BufferedReader[_CountedFile] | _PackedFile:
    file = io.BufferedReader(_CountedFile(path, advance), _CHUNK_CHARS)
    if path.suffix.lower() == ".gz":
        return _PackedFile(file)
    return file


def _open_text(path: Path, advance: Advance) -> io.TextIOWrapper:
    """Open as text; invalid bytes become lone surrogates, which no row may have."""
    return io.TextIOWrapper(
        _open(path, advance), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )


def _lines(file: io.BufferedIOBase) -> Iterator[tuple[int, bytes | BadRow]]:
    """Yield numbered lines; a line that is too long is a BadRow."""
    number = 0
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        number += 1
        if len(line) <= LONGEST_LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE_BYTES)
        yield number, BadRow("line too long", f"over {LONGEST_LINE_BYTES >> 20} MiB")


def _text_lines(path: Path, advance: Advance) -> Iterator[tuple[int, str | BadRow]]:
    with _open(path, advance) as file:
        for number, line in _lines(file):
            if isinstance(line, BadRow):
                yield number, line
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, BadRow("not UTF-8", f"byte {error.start}")
                continue
            if text.strip():
                yield number, text.rstrip("\r\n")


def _read_txt(path: Path, advance: Advance) -> Iterator[Raw]:
    for number, line in _text_lines(path, advance):
        yield number, line if isinstance(line, BadRow) else {"text": line}


def _read_jsonl(path: Path, advance: Advance) -> Iterator[Raw]:
    for number, line in _text_lines(path, advance):
        yield number, line if isinstance(line, BadRow) else JsonLine(line)


def _parsed(line: str) -> object:
    try:
        return _DECODER.all_of(line)
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return BadRow("broken JSON", str(error)[:80])


def _read_json(path: Path, advance: Advance) -> Iterator[Raw]:
    """Read an array of rows; a file that starts with an object is read line by line."""
    with _open_text(path, advance) as file:
        buffer = file.read(_CHUNK_CHARS).lstrip()
        if buffer.startswith("["):
            yield from _elements(path, file, buffer[1:])
            return
    yield from _read_jsonl(path, advance)


def _elements(path: Path, file: IO[str], buffer: str) -> Iterator[Raw]:
    """Yield the array's elements; `buffer` is what follows the opening bracket."""
    number, at = 0, 0
    while True:
        at = _skip_space(buffer, at)
        if number and buffer.startswith(",", at):
            at = _skip_space(buffer, at + 1)
        if buffer.startswith("]", at):
            return
        value, end, why = _decoded(buffer, at)
        # A number at the end of the buffer may continue in the next chunk.
        if not why and end < len(buffer):
            number, at = number + 1, end
            yield number, value
            continue
        # Doubling keeps a long element from being parsed again for every chunk.
        more = file.read(max(_CHUNK_CHARS, len(buffer) - at))
        if not more or len(buffer) - at > LONGEST_LINE_BYTES:
            raise DataError(
                f"{path}: row {number + 1}: broken JSON ({why or 'the array does not end'}); the "
                "rows after it cannot be found in an array. With one row per line (.jsonl) only "
                "that line would be lost."
            )
        buffer, at = buffer[at:] + more, 0


def _skip_space(buffer: str, at: int) -> int:
    match = _SPACE.match(buffer, at)
    return match.end() if match else at


def _decoded(buffer: str, at: int) -> tuple[object, int, str]:
    """Return the value at `at` and its end, or the reason for an error."""
    try:
        value, end = _DECODER.at(buffer, at)
    except (ValueError, RecursionError) as error:
        return None, at, str(error)[:80]
    return value, end, ""


def _read_csv(path: Path, advance: Advance) -> Iterator[Raw]:
    csv.field_size_limit(LONGEST_LINE_BYTES)
    with _open_text(path, advance) as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        f"{path}:{number}: a quote starts here and never ends"
                    ) from error
                yield number, BadRow("broken CSV", str(error))
                continue
            if header is None:
                header = cells
                if twice := {name for name in cells if cells.count(name) > 1}:
                    raise DataError(
                        f"{path}:{number}: the header has {listing(twice)} more than once, and a "
                        "row can have one value for a name. Rename or remove a column."
                    )
            elif cells and len(cells) != len(header):
                detail = f"{len(cells)} fields, the header has {len(header)}"
                yield number, BadRow("broken CSV", detail)
            elif cells:
                yield number, dict(zip(header, cells, strict=True))


def _read_parquet(path: Path, advance: Advance) -> Iterator[Raw]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            row_bytes = path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                advance(int(row_bytes * batch.num_rows))
                for value in _batch_rows(batch):
                    number += 1
                    yield number, value
    except (ArrowException, ValueError, OverflowError) as error:  # names may not be text either
        raise DataError(f"{path}: broken Parquet after row {number}: {error}") from error


def _batch_rows(batch: Any) -> Iterator[object]:
    """Yield a batch's rows; row by row where one of them has no value in Python."""
    try:
        yield from map(without_filling, batch.to_pylist())
        return
    except (ValueError, OverflowError):  # before the first row: the list is built in one go
        pass
    for number in range(batch.num_rows):
        try:
            yield without_filling(batch.slice(number, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            yield BadRow("not UTF-8", f"byte {error.start}")
        except (ValueError, OverflowError) as error:
            yield BadRow("unreadable value", str(error)[:80])


_READERS: dict[str, Callable[[Path, Advance], Iterator[Raw]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
}
_PACKED = (".jsonl.gz", ".json.gz", ".csv.gz", ".txt.gz")
