"""Rows that the caller of `mt.Trainer` gives: a datasets.Dataset, a list, or a stream of rows.

Rows that have a length can be read again: they are known by a hash of all their contents, and what
was prepared from them is found again. A Dataset is read in batches from its Arrow files. A stream,
which has no length (an iterable, a generator, an IterableDataset), is read once, in order, as far
as a run needs it, and known by what was read. It costs memory for a few rows at a time.

Laws (tests/data/rows/test_in_memory.py)
    1. The same rows give the same documents as a Dataset, as a list, as a stream and in a file.
    2. The mark changes with any cell of any row, and with nothing else.
    3. A stream is read once, each row once, and no further than asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from megatrain.data.rows.reading import FIRST_ROWS, Raw, without_filling
from megatrain.errors import ConfigError, DataError

_BATCH_ROWS = 256


class GivenRows:
    """Rows in the hands of the caller, by the name of the argument that they were given as."""

    def __init__(self, name: str, rows: Any) -> None:
        """Raise ConfigError for an object that is not rows."""
        _require_rows(name, rows)
        self.name, self._rows = name, rows
        self.is_stream = not hasattr(rows, "__len__")
        self._is_filled = _is_dataset(rows)
        """Whether rows come from Arrow, which fills objects with nulls."""
        self._is_table = not self.is_stream and self._is_filled
        self._content = xxhash.xxh3_128()
        self._first: list[Any] = []
        """The first rows that were read from a stream, which are given again."""
        self._rest: Iterator[Any] | None = None
        self._num_taken = 0

    def __str__(self) -> str:
        return self.name

    @property
    def num_rows(self) -> int | None:
        """How many rows there are; None: a stream does not know."""
        return None if self.is_stream else len(self._rows)

    def values(self) -> Iterator[Raw]:
        """Yield the rows with their numbers, from 1.

        A stream gives its first rows as often as they are asked for, all others once.
        """
        if self.is_stream:
            rows: Iterable[Any] = self._streamed()
        elif self._is_table:
            rows = (row for table in self._tables() for row in table.to_pylist())
        else:
            rows = self._listed()
        for number, row in enumerate(rows, 1):
            is_filled = self._is_filled and isinstance(row, dict)
            yield number, without_filling(row) if is_filled else row

    def mark(self) -> str:
        """Return a hash of all rows; of a stream, of those that were read."""
        if self.is_stream:
            return self._content.hexdigest()
        content = xxhash.xxh3_128()
        if self._is_table:
            for table in self._tables():
                content.update(str(table.schema.remove_metadata()).encode())
                for batch in table.to_batches():
                    content.update(batch.replace_schema_metadata().serialize())
        else:
            for row in self._listed():
                content.update(_as_bytes(row))
        return content.hexdigest()

    def state(self) -> Any:
        """Return the state of a `datasets` stream after the rows that were taken, or None."""
        ask = getattr(self._rows, "state_dict", None)
        if not self.is_stream or ask is None or self._num_taken < len(self._first):
            return None
        try:
            return json.loads(json.dumps(ask()))
        except (TypeError, ValueError):
            return None

    def _streamed(self) -> Iterator[Any]:
        if self._rest is None:
            self._rest = iter(self._rows)
        elif self._num_taken > FIRST_ROWS:
            raise DataError(f"{self.name}: this stream has already been consumed")
        self._num_taken = 0
        while True:
            if self._num_taken == len(self._first) or self._num_taken >= FIRST_ROWS:
                try:
                    row = next(self._rest)
                except StopIteration:
                    return
                self._content.update(_as_bytes(row))
                if len(self._first) < FIRST_ROWS:
                    self._first.append(row)
            else:
                row = self._first[self._num_taken]
            self._num_taken += 1
            yield row

    def _tables(self) -> Iterator[Any]:
        yield from self._rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)

    def _listed(self) -> Iterator[Any]:
        return (self._rows[number] for number in range(len(self._rows)))


def _require_rows(name: str, rows: Any) -> None:
    repair = None
    if isinstance(rows, str):
        repair = f'a name of a file or dataset goes to data={{"{_key(name)}": {rows[:80]!r}}}'
    elif isinstance(rows, Mapping):
        splits = ", ".join(str(key)[:40] for key in list(rows)[:4])
        repair = f"it has parts ({splits}); give one of them"
    elif type(rows).__module__.partition(".")[0] in ("pandas", "polars"):
        repair = "make a dataset of the table first: datasets.Dataset.from_pandas(table)"
    elif not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        repair = "give a datasets.Dataset, a list of dicts, or an iterable of dicts"
    elif hasattr(rows, "__len__") and not hasattr(rows, "__getitem__"):
        repair = "its rows have no order; give list(rows)"
    if repair is not None:
        raise ConfigError(f"{name} is a {type(rows).__name__}: {repair}.")


def _key(name: str) -> str:
    return "eval" if name.startswith("eval") else "train"


def _is_dataset(rows: Any) -> bool:
    """Return whether these are rows in Arrow files, or in memory in the same form."""
    return type(rows).__module__.startswith("datasets.") and hasattr(rows, "with_format")


def _as_bytes(row: object) -> bytes:
    """Return a row as bytes that tell it from any other, and where it ends."""
    try:
        text = json.dumps(row, default=_as_list)
    except (TypeError, ValueError, RecursionError):
        text = repr(row)
    return f"{len(text)}:{text}".encode("utf-8", "surrogatepass")


def _as_list(value: Any) -> object:
    """Return an array or tensor as a list, for JSON; of an image its pixels."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return xxhash.xxh3_128_hexdigest(value)
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{value.mode} {value.size} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    return repr(value)
