"""Files of strangers: each trains as it is, or is refused with the line that makes it train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.config.sections import DataSource
from megatrain.config.yaml_reader import parse_document
from megatrain.data.preview import card_lines
from megatrain.data.rows.hub_rows import located
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import SkippedRows
from megatrain.data.rows.source import open_source
from megatrain.data.tokens.prepare import prepare
from megatrain.errors import DataError
from testkit.found_files import ASKED, FOUND_FILES, NUM_ROWS, PAIRS, SAID, WORSE, FoundFile
from testkit.tokenizers_of_kinds import tokenizer_of


def _said(row: Row | None) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in row.messages] if row else []


def _rows(source: DataSource, found: FoundFile) -> list[Row]:
    skipped = SkippedRows()
    where = located(source.path, split=source.split)
    wanted = found.wanted if source.format == "auto" else source.format
    opened = open_source(where, wanted, columns=source.columns, roles=source.roles)
    rows = [row for _, row in opened.rows(skipped)]
    assert skipped.total == 0
    return rows


def _expect(rows: list[Row], found: FoundFile) -> None:
    """Every file has the same questions and answers."""
    assert len(rows) == NUM_ROWS
    for number, row in enumerate(rows):
        if row.joined:  # one text, whose question ends where the answers differ
            texts = ["".join(text for _, text in _said(one)) for one in (row, row.rejected)]
            assert [text.split("\n\nAssistant: ") for text in texts] == [
                [f"\n\nHuman: {ASKED[number]}", answer] for answer in (SAID[number], WORSE[number])
            ]
            continue
        (_, asked), answer = PAIRS[number]
        assert _said(row) == [("user", asked + found.behind), answer]
        if found.wanted == "pairs":
            assert _said(row.rejected)[-1] == ("assistant", WORSE[number])
        if found.wanted == "kto":
            assert row.desirable is (number != 1)


def _settled(text: str, path: Path) -> DataSource:
    """Return the source that the advice of a refusal leads to; commands are run."""
    if line := re.search(r"^ *data: (\{.*\})$", text, re.MULTILINE):
        value = parse_document(line[1].encode(), "the line of the refusal").value["train"]
        assert value["path"] == str(path)
        return DataSource(**value)
    (command,) = re.findall(r"((?:python3 -c|iconv) .*)", text)
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, cwd=path.parent, env={"PATH": bin_folder})
    return DataSource(path=str(path.parent / command.rpartition(" > ")[2]))


@pytest.mark.parametrize("name", FOUND_FILES)
def test_a_file_trains_or_the_line_of_its_refusal_makes_it_train(tmp_path: Path, name: str) -> None:
    found = FOUND_FILES[name]
    path = found.write(tmp_path)
    if found.printed:
        assert found.printed in str(open_source(path, found.wanted).format)
        _expect(_rows(DataSource(path=str(path)), found), found)
        return
    with pytest.raises(DataError) as refused:
        open_source(path, found.wanted)
    _expect(_rows(_settled(str(refused.value), path), found), found)


def test_the_card_says_which_columns_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FOUND_FILES["dolly"].write(tmp_path)
    made = prepare(path, tokenizer_of("chatml"), cache_dir=tmp_path / "cache", max_length=512)
    lines = card_lines(made.card)
    assert lines[0] == (
        f"{path}: detected: alpaca (instruction, input, output), columns output = response, "
        "input = context"
    )
    assert any("category" in line for line in lines)
