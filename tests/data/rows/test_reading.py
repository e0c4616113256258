"""Files: the same rows whatever the kind of file; a broken line costs that line."""

from __future__ import annotations

import gzip
import json
import os
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from megatrain.data.rows import reading
from megatrain.data.rows.cells import TOOL_COLUMNS
from megatrain.data.rows.reading import Raw, data_files, parsed, read_unparsed
from megatrain.data.rows.skipped import BadRow
from megatrain.data.rows.source import open_source
from megatrain.errors import DataError
from testkit.effort import require_effort
from testkit.written import SUFFIXES, write

ROWS = [{"text": text} for text in ("one", "42", "NA", "null", "a, b", "caf\u00e9", 'say "x"')]


def read_rows(path: Path) -> list[Raw]:
    return [(number, parsed(value)) for number, value in read_unparsed(path)]


def _values(path: Path) -> list[Any]:
    return [value for _, value in read_rows(path)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert _values(write(tmp_path / f"a.{suffix}", ROWS)) == ROWS


def test_lines_are_numbered_as_editors_number_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n{oops\n{"text": "b"}')
    numbers = dict(read_rows(path))
    assert list(numbers) == [1, 3, 4]
    assert numbers[1] == {"text": "a"}
    assert isinstance(numbers[3], BadRow)
    assert numbers[3].reason == "broken JSON"


def test_a_csv_row_may_have_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,b\n"one\ntwo",x\nshort\nlast,y\n')
    (first, second, third) = read_rows(path)
    assert first == (2, {"text": "one\ntwo", "b": "x"})
    assert second[0] == 4
    assert isinstance(second[1], BadRow)
    assert second[1].detail == "1 fields, the header has 2"
    assert third == (5, {"text": "last", "b": "y"})


def test_a_quote_that_never_closes_is_no_single_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nfine\n"open\nx\ny\n')
    with pytest.raises(DataError, match=r"a\.csv:3: a quote starts here and never ends"):
        _values(path)


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert _values(path) == ROWS


def test_a_json_file_may_hold_rows_under_one_key(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": ROWS}, indent=1))
    assert _values(path) == ROWS
    for row in ({"data": ROWS, "version": 1}, {"messages": ROWS}, {"data": ["text"]}):
        path.write_text(json.dumps(row))
        assert _values(path) == [row], "this is a row"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_arrays_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(reading, "_CHUNK_CHARS", chunk)
    path = write(tmp_path / "a.json", [*ROWS, 12345678, None])
    assert _values(path) == [*ROWS, 12345678, None]


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text": ', '[{"text": "a"} oops]', "[1, 2"])
def test_a_broken_array_says_where(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.json: row [23]: broken JSON"):
        _values(path)


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 1000 + b"\nfine\n")
    (first, second) = read_rows(path)
    assert isinstance(first[1], BadRow)
    assert first[1].reason == "line too long"
    assert second == (2, {"text": "fine"})


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: broken Parquet after row 0"):
        _values(path)


def test_unknown_files_are_refused_with_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(
        DataError,
        match=r"unknown file type \.docx; known types are \.arrow, \.csv, "
        r"\.json, ",
    ):
        _values(tmp_path / "a.docx")


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[2:])
    write(tmp_path / "a.csv", ROWS[:2])
    (tmp_path / "notes.md").write_text("not data")
    assert [path.name for path in data_files(tmp_path)] == ["a.csv", "b.jsonl"]
    source = open_source(tmp_path)
    places = [place for place, _ in source.values()]
    assert places[:3] == ["a.csv:2", "a.csv:3", "b.jsonl:1"]
    assert [parsed(value) for _, value in source.values()] == ROWS


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "txt"])
def test_a_packed_file_gives_the_rows_of_the_plain_one(tmp_path: Path, suffix: str) -> None:
    plain = write(tmp_path / f"a.{suffix}", ROWS)
    packed = tmp_path / f"b.{suffix}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert _values(packed) == _values(plain) == ROWS
    assert data_files(packed) == [packed]


SHORTENED = gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-12]


@pytest.mark.parametrize("data", [b"no gzip", SHORTENED, b"\x1f"])
def test_a_broken_packed_file_says_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot read it: "):
        _values(path)


def test_hidden_files_are_not_data(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / ".a.jsonl", ROWS)
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "b.jsonl", ROWS)
    assert [path.name for path in data_files(tmp_path)] == ["a.jsonl"]


def test_a_subfolder_with_data_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "notes").mkdir()
    assert len(data_files(tmp_path)) == 1
    (tmp_path / "more" / "deep").mkdir(parents=True)
    write(tmp_path / "more" / "deep" / "b.jsonl", ROWS)
    with pytest.raises(DataError, match=r"data files in subfolders: more\. .* data\.train"):
        data_files(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: not a regular file"):
        _values(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["missing.jsonl", "/no/such/folder", "./data", "a/b/c"])
def test_what_must_be_a_file_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(name)


def test_a_misspelled_file_is_told_with_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train.jsonl", [{"text": "word"}])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as near:
        open_source("trian.jsonl")
    said = f"trian.jsonl: no such file or folder in {tmp_path}."
    assert str(near.value) == f"{said} Did you mean train.jsonl?"
    with pytest.raises(DataError, match=r"Did you mean .*/train\.jsonl\?$"):
        open_source(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"Give a data file, a folder of data files, or a dataset"):
        open_source("other.parquet")


def test_large_arrays_take_no_longer_per_row(tmp_path: Path) -> None:
    """2 MB of small rows: copying the rest for every row would take minutes."""
    path = write(tmp_path / "a.json", [{"text": "word"}] * 60_000)
    assert len(_values(path)) == 60_000
    require_effort(lambda: _values(path), at_most=50)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder has no"):
        data_files(tmp_path)


def test_an_unreadable_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        _values(tmp_path / "none.jsonl")


def test_keys_that_arrow_fills_in_are_left_out(tmp_path: Path) -> None:
    """Objects of a parquet column have the keys of all of them; a turn's own keys stay."""
    calls = [[{"arguments": {"city": "Oslo"}}], [{"arguments": {"a": 2, "b": None}}]]
    rows = [{"messages": [{"role": "assistant", "content": None, "calls": c}]} for c in calls]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = [value for _, value in read_rows(path)]
    arguments = [{"city": "Oslo"}, {"a": 2}]
    assert found == [
        {"messages": [{"role": "assistant", "content": None, "calls": [{"arguments": given}]}]}
        for given in arguments
    ]


@pytest.mark.parametrize("column", TOOL_COLUMNS)
def test_a_tool_has_only_keys_of_its_own(tmp_path: Path, column: str) -> None:
    """A template shows tools as they are, and no file of lines has such nulls."""
    tools = [
        {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
        {"name": "now", "strict": True, "parameters": {"properties": {"zone": {"type": "string"}}}},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{column: [tool], "text": None} for tool in tools]), path)
    found = [value for _, value in read_rows(path)]
    assert found == [{column: [tool], "text": None} for tool in tools]


def test_a_key_that_a_row_has_twice_costs_that_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "text": "b"}\n{"text": "c"}\n{"m": [{"role": 1, "role": 2}]}\n')
    first, second, third = _values(path)
    assert (first.reason, first.detail) == ("duplicate key", "text")
    assert second == {"text": "c"}
    assert third.detail == "role"


def test_a_key_twice_in_an_array_costs_that_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": "b", "text": "c"}, {"text": "d"}]')
    first, second, third = _values(path)
    assert (first, third) == ({"text": "a"}, {"text": "d"})
    assert (second.reason, second.detail) == ("duplicate key", "text")


def test_a_column_twice_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,prompt,completion\na,b,c\n")
    with pytest.raises(DataError, match=r"a\.csv:1: the header has prompt more than once"):
        _values(path)


def test_a_column_twice_in_a_table_is_an_error(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name} has the column text more than once"):
            _values(tmp_path / name)


def test_a_folder_of_save_to_disk_has_its_rows_in_order(tmp_path: Path) -> None:
    rows = [{"text": str(number)} for number in range(7)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    files = data_files(tmp_path / "saved")
    assert len(files) == 3
    assert [value for path in files for value in _values(path)] == rows


def test_a_split_of_save_to_disk_is_chosen(tmp_path: Path) -> None:
    parts = {"valid": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    (path,) = data_files(tmp_path / "saved", "valid")
    assert _values(path) == ROWS
    with pytest.raises(DataError, match=r"has no split train\. Set split .* one of: test, valid"):
        data_files(tmp_path / "saved")


def test_a_folder_of_save_to_disk_names_no_file_outside(tmp_path: Path) -> None:
    write(tmp_path / "secret.arrow", ROWS)
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    state = {"_data_files": [{"filename": "../secret.arrow"}]}
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"state\.json does not name the Arrow files"):
        data_files(tmp_path / "saved")


@pytest.mark.parametrize("suffix", ["jsonl.zst", "arrow"])
def test_a_file_that_ends_too_early_is_named(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", ROWS * 500)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=rf"a\.{suffix}: (cannot read it|broken Arrow)"):
        _values(path)


def test_arrow_that_points_outside_of_its_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", [{"text": "ab"}, {"text": "cd"}])
    assert len(_values(path)) == 2
    good, bad = (struct.pack("<3i", 0, middle, 4) for middle in (2, 1 << 20))
    assert good in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(good, bad))
    with pytest.raises(DataError, match=r"a\.arrow: broken Arrow after row 0"):
        _values(path)


def test_two_frames_of_zstd_are_one_file(tmp_path: Path) -> None:
    frames = (pa.compress(text, codec="zstd", asbytes=True) for text in (b"one\n", b"two\n"))
    (tmp_path / "a.txt.zst").write_bytes(b"".join(frames))
    assert _values(tmp_path / "a.txt.zst") == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a;b,c;d\n1;2;3\n", {"a": "1", "b,c": "2", "d": "3"}),
        ('"a;x;y",b\n1,2\n', {"a;x;y": "1", "b": "2"}),
        ("SEP=|\na|b;c\n1|2\n", {"a": "1", "b;c": "2"}),
        ("\n a , b,,\n\n1,2,,\n,,,\n", {"a": "1", "b": "2", "column 3": "", "column 4": ""}),
    ],
)
def test_a_table_has_the_separator_of_its_header(
    tmp_path: Path, text: str, expected: dict[str, str]
) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert _values(tmp_path / "a.csv") == [expected]


@pytest.mark.parametrize("kind", ["csv", "txt", "jsonl"])
def test_a_file_in_latin_1_says_which_byte_where_and_how_to_convert_it(
    kind: str, tmp_path: Path
) -> None:
    lines = {
        "csv": ("prompt,completion", "Café,black"),
        "txt": ("Tea", "Café"),
        "jsonl": ('{"text": "Tea"}', '{"text": "Café"}'),
    }
    path = tmp_path / f"rows.{kind}"
    path.write_bytes("\n".join(lines[kind]).encode("latin-1"))
    (bad,) = [row for _, row in read_rows(path) if isinstance(row, BadRow)]
    assert bad.reason == "not UTF-8"
    assert bad.detail == "byte 0xE9 in line 2; convert with `iconv -f latin1 -t utf8`"


def test_a_header_in_latin_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("réponse,question\na,b\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"rows.csv is not UTF-8 \(byte 0xE9 in line 1; convert"):
        list(read_rows(path))
