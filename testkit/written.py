"""Rows written as files of each kind, for tests."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = ("jsonl", "json", "csv", "parquet", "txt")


def write(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as the kind of file its suffix says."""
    kind = path.suffix[1:]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    elif kind == "csv":
        _write_csv(path, rows)
    else:
        _write_parquet(path, rows)
    return path


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", errors="surrogatepass") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_cell(row.get(name)) for name in columns])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Columns that Arrow cannot type are written as JSON text, as in csv."""
    columns = dict.fromkeys(key for row in rows for key in row)
    table = {}
    for name in columns:
        cells = [row.get(name) for row in rows]
        try:
            table[name] = pa.array(cells)
        except (pa.ArrowException, UnicodeEncodeError):
            table[name] = pa.array([None if cell is None else json.dumps(cell) for cell in cells])
    pq.write_table(pa.table(table), path)
