"""A source: what cannot be read at all is said in words that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.data.rows.source import open_source
from megatrain.errors import DataError

ROW = '{"prompt": "caf\u00e9", "completion": "yes"}\n'


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_called_empty(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is empty: it has no rows"):
        open_source(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf_16_is_said(tmp_path: Path, encoding: str) -> None:
    mark = "" if encoding == "utf-16" else "\ufeff"
    (tmp_path / "a.jsonl").write_bytes((mark + ROW * 5).encode(encoding))
    with pytest.raises(DataError, match=r"is UTF-16\. Save it as UTF-8"):
        open_source(tmp_path / "a.jsonl")


def test_latin_1_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes((ROW * 5).encode("latin-1"))
    with pytest.raises(
        DataError, match=r"(?s)none of the first 5 rows can be read:.*5 x not UTF-8: a\.jsonl:1"
    ):
        open_source(tmp_path / "a.jsonl")


def test_one_row_that_can_be_read_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes((ROW * 5).encode("latin-1") + ROW.encode())
    assert open_source(tmp_path / "a.jsonl").format.kind == "pair"
