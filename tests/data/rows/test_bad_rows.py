"""Bad rows in every kind of file: file and line are named, and the others stay as they were.

What the shapes of rows can hold is in test_rows.py for four kinds of file; this is what the files
themselves can hold.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.data.rows import cells, reading
from megatrain.data.rows.skipped import BadRow, SkippedRows
from megatrain.data.rows.source import open_source
from megatrain.errors import DataError
from tests.data.rows.bad_rows import (
    CSV_LINES,
    JSON_BREAKS,
    JSON_ELEMENTS,
    TXT_LINES,
)

GOOD = ["first", "second", "third"]


def _read(path: Path) -> tuple[list[str], SkippedRows]:
    skipped = SkippedRows()
    return [row.text for _, row in open_source(path).rows(skipped)], skipped


def _expect(path: Path, reason: str, number: int) -> None:
    texts, skipped = _read(path)
    assert texts == GOOD
    assert skipped.counts == {reason: 1}
    assert skipped.places[reason][0].partition(" ")[0] == f"{path.name}:{number}"


@pytest.fixture
def _short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 4096)


@pytest.mark.usefixtures("_short_lines")
@pytest.mark.parametrize("case", TXT_LINES)
def test_txt(tmp_path: Path, case: str) -> None:
    line, reason = TXT_LINES[case]
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\n\n" + line + b"second\nthird\n")
    if case == "UTF-16":  # its line feed has a zero byte after it, which begins the next line
        path.write_bytes(b"first\n\n" + line[:-1] + b"\nsecond\nthird\n")
    _expect(path, reason, 3)


@pytest.mark.usefixtures("_short_lines")
@pytest.mark.parametrize("case", CSV_LINES)
def test_csv(tmp_path: Path, case: str) -> None:
    line, reason = CSV_LINES[case]
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\n"first",1\n\n' + line + b"second,2\nthird,3\n")
    _expect(path, reason, 4)


@pytest.mark.parametrize("case", JSON_ELEMENTS)
def test_json(tmp_path: Path, case: str) -> None:
    element, reason = JSON_ELEMENTS[case]
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"text": "first"},\n' + element + b', {"text": "second"},{"text": "third"}\n]'
    )
    _expect(path, reason, 2)


@pytest.mark.parametrize("case", JSON_BREAKS)
def test_json_that_breaks(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "first"},\n' + JSON_BREAKS[case] + b', {"text": "second"}]')
    with pytest.raises(DataError, match=r"a\.json: row [23]: broken JSON"):
        _read(path)


def _texts(*values: bytes | None) -> pa.Array:
    """A column of text, as some writers make it: nobody looked whether it is UTF-8."""
    return pa.array(values, pa.binary()).cast(pa.binary()).view(pa.string())


PARQUET: dict[str, tuple[pa.Array, str]] = {
    "null": (_texts(b"first", None, b"second", b"third"), cells.IS_NULL),
    "empty": (_texts(b"first", b"", b"second", b"third"), cells.EMPTY),
    "blank": (_texts(b"first", b" \n", b"second", b"third"), cells.EMPTY),
    "not UTF-8": (_texts(b"first", b"\xff\xfe", b"second", b"third"), "not UTF-8"),
    "latin-1": (_texts(b"first", b"caf\xe9", b"second", b"third"), "not UTF-8"),
    "a surrogate in bytes": (_texts(b"first", b"\xed\xa0\x80", b"second", b"third"), "not UTF-8"),
    "null in a dictionary": (
        _texts(b"first", None, b"second", b"third").dictionary_encode(),
        cells.IS_NULL,
    ),
}


@pytest.mark.parametrize("case", PARQUET)
def test_parquet(tmp_path: Path, case: str) -> None:
    column, reason = PARQUET[case]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    _expect(path, reason, 2)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2, 3]),
        pa.array([0.5, float("nan"), 1.0]),
        pa.array([True, False, None]),
        pa.array([b"a", b"\xff", b"c"]),
        pa.array([["a"], [], None], pa.list_(pa.string())),
        pa.array([{"a": "b"}, None, {"a": None}]),
        pa.array([1, 2, 3], pa.timestamp("us")),
        pa.array([1, 2, 3], pa.date32()),
        pa.array([None, None, None], pa.null()),
    ],
    ids=str,
)
def test_a_parquet_column_of_another_type_costs_every_row(tmp_path: Path, column: pa.Array) -> None:
    good = pa.table({"text": ["first", "second", "third"]})
    (tmp_path / "data").mkdir()
    for name, table in (("a", good), ("b", pa.table({"text": column}))):
        pq.write_table(table, tmp_path / "data" / f"{name}.parquet")
    texts, skipped = _read(tmp_path / "data")
    assert texts == GOOD
    assert skipped.total == 3
    places = [place for places in skipped.places.values() for place in places]
    assert sorted(place.partition(" ")[0] for place in places) == [
        f"b.parquet:{number}" for number in (1, 2, 3)
    ]


def test_a_time_that_python_has_not_costs_its_row() -> None:
    times = pa.array([0, 2**62, 0, 0], pa.timestamp("s"))
    texts = ["first", "x", "second", "third"]
    batch = pa.record_batch({"text": pa.array(texts), "at": times})
    found = list(reading._batch_rows(batch))
    assert isinstance(found[1], BadRow)
    assert found[1].reason == "unreadable value"
    assert [row["text"] for row in found if isinstance(row, dict)] == GOOD


def test_a_parquet_column_whose_name_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "xyzzy": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"xyzzy", b"xyz\xf2y"))
    with pytest.raises(DataError, match=r"a\.parquet: broken Parquet after row 0"):
        _read(path)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, at: float) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(5000)]}), path)
    data = bytearray(path.read_bytes())
    begin = int(at * len(data))
    data[begin : begin + 64] = b"\xff" * 64
    path.write_bytes(data)
    try:
        texts, skipped = _read(path)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017, either is right
    else:
        assert len(texts) + skipped.total == 5000
