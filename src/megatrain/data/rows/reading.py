"""Files as raw rows, one after another, in bounded memory.

Each reader yields (number, value): the first line of the row for jsonl, txt, csv and tsv, the
row's number from 1 for json, parquet and arrow. A row that cannot even be parsed is
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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from megatrain.choices import COLUMNS
from megatrain.data.rows.cells import TOOL_COLUMNS
from megatrain.data.rows.skipped import BadRow
from megatrain.data.rows.token_files import TOKEN_FILES
from megatrain.errors import ConfigError, DataError, listing
from megatrain.hub import is_id
from megatrain.progress import Advance

Raw = tuple[int, object]
"""Line or row number, and the value: the parsed contents, or a BadRow."""

FIRST_ROWS = 100
"""Rows that decide the format of a source."""
LONGEST_LINE_BYTES = 64 * 2**20
_CHUNK_CHARS = 2**20
_TABLE_ROWS = 256
_ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file; an Arrow stream has others."""
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files of `Dataset.save_to_disk`, and of `DatasetDict.save_to_disk`."""
_MAX_STATE_BYTES = 8 << 20
DUPLICATE_KEY = "duplicate key"
_SPACE = re.compile(r"[ \t\r\n]*")
_NAMED_SEPARATOR = re.compile(r"sep=(.)\r?\n?", re.IGNORECASE)
_ROW_KEYS = {*COLUMNS, "conversations", "conversation", "turns", "dialogue", "dialog"}
"""Keys of a row that may hold a list of objects: one row of its own, not a file of rows."""
_ESCAPED = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, as `_open_text` shows it."""
_CONVERT = "convert with `iconv -f latin1 -t utf8`"
_QUOTED = re.compile(r'"[^"]*"')


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
        known = f"known types are {listing(_READERS, most=20)}, and text with .gz or .zst"
        if path.suffix.lower() in _SPREADSHEETS:
            known = "save the sheet as CSV (UTF-8) in the program that made it, and give that file"
        raise DataError(f"{path}: unknown file type {path.suffix or '(no suffix)'}; {known}")
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
    as null, in every other. A column and the keys of a turn stay: there null is a bad row. Of a
    tool no key does.
    """
    return {name: _pruned(cell, depth=int(name in TOOL_COLUMNS)) for name, cell in row.items()}


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


def data_files(path: str | Path, split: str | None = None) -> list[Path]:
    """Return the file, or the files of known kinds in a folder by name; none for a Hub name.

    `split` names a part of a folder that `DatasetDict.save_to_disk` has written; None is train.
    """
    name, path = str(path), Path(path)
    if path.is_dir():
        if (path / _SAVED_SPLITS).is_file():
            path = _saved_split(path, split or "train")
        elif split not in (None, "train"):
            raise _no_splits(path, split)
        return _saved_files(path) if (path / _SAVED).is_file() else _files_in(path)
    if path.exists():
        if split not in (None, "train"):
            raise _no_splits(path, split)
        return [path]
    if name.startswith("<"):
        raise DataError(
            f"{name}: these rows were given by a program, as an argument of mt.Trainer. Run that "
            "program again, or give a file with the rows."
        )
    if _kind(path) in (*_READERS, *TOKEN_FILES) or not is_id(name):
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
    found = [path for path in seen if _kind(path) in _READERS and path.is_file()]
    below = [path.name for path in seen if path.is_dir() and _holds_data(path)]
    if below:
        raise DataError(
            f"{folder} also has data files in subfolders: {listing(below)}. A folder is read "
            "without its subfolders: list each folder in data.train."
        )
    if not found:
        raise DataError(f"{folder}: the folder has no {listing(_READERS, most=20)} file")
    return found


def _no_splits(path: Path, split: str) -> ConfigError:
    return ConfigError(
        f"{path} is local and has one split, train, not {split}. Give the path of other rows, or "
        "a part of these, like `split: train[:1000]`."
    )


def _saved_split(folder: Path, split: str) -> Path:
    """Return the folder of one split that `DatasetDict.save_to_disk` has written."""
    splits = _saved_json(folder / _SAVED_SPLITS).get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    if split not in names or not _is_file_name(split):
        raise DataError(
            f"{folder} was written by DatasetDict.save_to_disk and has no split {split}. Set split "
            f"of this source to one of: {listing(names) or '(none)'}."
        )
    return folder / split


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files that `Dataset.save_to_disk` has written, in the order of the rows."""
    listed = _saved_json(folder / _SAVED).get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    found = [folder / name for name in names if isinstance(name, str) and _is_file_name(name)]
    if not found or len(found) != len(entries):
        raise DataError(f"{folder / _SAVED} does not name the Arrow files of the dataset")
    return found


def _saved_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_STATE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read it: {str(error)[:100]}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not an object of JSON")
    return found


def _is_file_name(name: str) -> bool:
    """Return whether a name stays in its folder."""
    return name == Path(name).name and name not in ("", ".", "..")


def _holds_data(folder: Path) -> bool:
    return any(_kind(path) in _READERS for path in folder.rglob("[!.]*"))


def _kind(path: Path) -> str:
    """Return the suffix that selects the reader; .jsonl for rows.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in _PACKED and suffixes[0] in _TEXTS:
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


class _ZstdFile(io.RawIOBase):
    """A zstd file, decompressed by Arrow: Python has no reader for it before 3.14."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        import pyarrow as pa

        super().__init__()
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._stream.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        super().close()
        self._file.close()


def _open(path: Path, advance: Advance) -> io.BufferedReader[Any] | _PackedFile:
    file = io.BufferedReader(_CountedFile(path, advance), _CHUNK_CHARS)
    if path.suffix.lower() == ".gz":
        return _PackedFile(file)
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdFile(file), _CHUNK_CHARS)
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
                yield number, not_utf8(line[error.start], number)
                continue
            if text.strip():
                yield number, text.rstrip("\r\n")


def _read_txt(path: Path, advance: Advance) -> Iterator[Raw]:
    for number, line in _text_lines(path, advance):
        yield number, line if isinstance(line, BadRow) else {"text": line}


def _read_jsonl(path: Path, advance: Advance) -> Iterator[Raw]:
    for number, line in _text_lines(path, advance):
        yield number, line if isinstance(line, BadRow) else JsonLine(line)


def not_utf8(byte: int, number: int) -> BadRow:
    """Return the refusal of a line that has a byte of another encoding."""
    return BadRow("not UTF-8", f"byte 0x{byte:02X} in line {number}; {_CONVERT}")


def _parsed(line: str) -> object:
    try:
        return _DECODER.all_of(line)
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return BadRow("broken JSON", str(error)[:80])


def _read_json(path: Path, advance: Advance) -> Iterator[Raw]:
    """Read an array of rows, which may be all that is in an object, like {"data": [...]}.

    Another file that starts with an object is read line by line.
    """
    with _open_text(path, advance) as file:
        buffer = file.read(_CHUNK_CHARS).lstrip()
        if buffer.startswith("["):
            yield from _elements(path, file, buffer[1:])
            return
        if (rows := _nested(buffer, file)) is not None:
            yield from enumerate(rows, 1)
            return
    yield from _read_jsonl(path, advance)


def _nested(buffer: str, file: IO[str]) -> list[Any] | None:
    """Return the rows of an object with one key that is no column of ours; None: it is no such."""
    text = buffer + file.read(LONGEST_LINE_BYTES)
    try:
        value = None if file.read(1) else _DECODER.all_of(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((key, rows),) = value.items()
    if key in _ROW_KEYS or not isinstance(rows, list) or not rows:
        return None
    return rows if all(isinstance(row, dict) for row in rows) else None


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


def _read_csv(path: Path, advance: Advance, separators: str = ",;\t") -> Iterator[Raw]:
    csv.field_size_limit(LONGEST_LINE_BYTES)
    with _open_text(path, advance) as file:
        begin, separator, num_skipped = _begin_of_table(file, separators)
        reader = csv.reader(chain([begin], file), strict=True, delimiter=separator)
        header: list[str] | None = None
        while True:
            number = reader.line_num + num_skipped + 1
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
            if not any(cells) and len(cells) != 1:
                continue  # a blank line, or the empty end of a sheet
            if odd := _ESCAPED.search("".join(cell for cell in cells if not cell.isascii())):
                row = not_utf8(ord(odd[0]) - 0xDC00, number)
                if header is None:
                    raise DataError(f"{path} is {row.reason} ({row.detail})")
                yield number, row
                continue
            if header is None:
                header = _header(cells, f"{path}:{number}")
            elif len(cells) != len(header):
                detail = f"{len(cells)} fields, the header has {len(header)}"
                yield number, BadRow("broken CSV", detail)
            else:
                yield number, dict(zip(header, cells, strict=True))


def _begin_of_table(file: IO[str], separators: str) -> tuple[str, str, int]:
    """Return the line of the header, the separator of its cells, and the lines before it.

    It is the separator that the header has most often outside of quotes, the first of several; or
    the one in a line `sep=;`, which spreadsheets write before the header.
    """
    begin = file.readline()
    if named := _NAMED_SEPARATOR.fullmatch(begin):
        return file.readline(), named[1], 1
    bare = _QUOTED.sub("", begin)
    return begin, max(separators, key=bare.count), 0


def _header(cells: list[str], place: str) -> list[str]:
    """Return the names of the columns, without the spaces around them.

    A column without a name, as spreadsheets leave them at the end, is named by its number.
    """
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, 1)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DataError(
            f"{place}: the header has {listing(twice)} more than once, and a "
            "row can have one value for a name. Rename or remove a column."
        )
    return names


def _read_parquet(path: Path, advance: Advance) -> Iterator[Raw]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            _require_columns_once(file.schema_arrow.names, path)
            row_bytes = path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_TABLE_ROWS):
                advance(int(row_bytes * batch.num_rows))
                for value in _batch_rows(batch):
                    number += 1
                    yield number, value
    except (ArrowException, ValueError, OverflowError) as error:  # names may not be text either
        raise DataError(f"{path}: broken Parquet after row {number}: {error}") from error


def _read_arrow(path: Path, advance: Advance) -> Iterator[Raw]:
    """Read an Arrow file or stream, as `datasets` writes it."""
    import pyarrow as pa

    number = 0
    try:
        with pa.memory_map(str(path)) as file:
            for batch in _arrow_batches(file, path):
                batch.validate(full=True)  # a file may have any bytes where it has offsets
                for start in range(0, batch.num_rows, _TABLE_ROWS):
                    for value in _batch_rows(batch.slice(start, _TABLE_ROWS)):
                        number += 1
                        yield number, value
                advance(batch.nbytes)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{path}: broken Arrow after row {number}: {error}") from error


def _arrow_batches(file: Any, path: Path) -> Iterator[Any]:
    from pyarrow import ipc

    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    _require_columns_once(reader.schema.names, path)
    if is_file:
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _require_columns_once(names: list[str], path: Path) -> None:
    if len(set(names)) < len(names):
        twice = {name for name in names if names.count(name) > 1}
        raise DataError(
            f"{path} has the column {listing(twice)} more than once, and a row can have one value "
            "for a name. Rename or remove one."
        )


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


_TEXTS: dict[str, Callable[[Path, Advance], Iterator[Raw]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, separators="\t"),
    ".txt": _read_txt,
}
_PACKED = (".gz", ".zst")
_READERS = _TEXTS | {".parquet": _read_parquet, ".arrow": _read_arrow}
_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
"""Files that people have, and that a program has to export."""
