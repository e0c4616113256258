"""Rows written as files of each kind, for tests."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt", "jsonl.zst", "csv.zst")


def write(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as the kind of file its suffix says."""
    kind = path.suffix[1:]
    if kind == "zst":
        plain = write(path.with_suffix(""), rows)
        path.write_bytes(pa.compress(plain.read_bytes(), codec="zstd", asbytes=True))
        plain.unlink()
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    elif kind in ("csv", "tsv"):
        _write_csv(path, rows, "," if kind == "csv" else "\t")
    elif kind == "arrow":
        table = _table(rows)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(_table(rows), path)
    return path


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]], separator: str) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", errors="surrogatepass") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_cell(row.get(name)) for name in columns])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the rows as a table; columns that Arrow cannot type are JSON text, as in csv."""
    columns = dict.fromkeys(key for row in rows for key in row)
    table = {}
    for name in columns:
        cells = [row.get(name) for row in rows]
        try:
            table[name] = pa.array(cells)
        except (pa.ArrowException, UnicodeEncodeError):
            table[name] = pa.array([None if cell is None else json.dumps(cell) for cell in cells])
    return pa.table(table)
