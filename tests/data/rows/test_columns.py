"""Columns of other names: the plain ones are found, and a config names the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.sections import DataSource
from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.source import open_source
from megatrain.data.tokens import fingerprint as fingerprint_module
from megatrain.data.tokens.fingerprint import fingerprint
from megatrain.data.tokens.prepare import prepare
from megatrain.errors import DataError
from testkit.row_shapes import SHAPES
from testkit.tokenizers_of_kinds import tokenizer_of
from testkit.written import write

ROWS = [{"Q": f"question {n}", "A": f"answer {n}", "topic": "x"} for n in range(6)]


def _row(value: dict[str, Any], **names: Any) -> Row:
    return canonical(value, detect_format([value], **names))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_in_capitals_and_under_any_names_that_a_config_gives(shape: str) -> None:
    value, _, _ = SHAPES[shape]
    expected = _row(value)
    loud = _row({f" {name.upper()} ": cell for name, cell in value.items()})
    assert loud.messages == expected.messages
    ours = {"conversations": "messages", "query": "prompt", "question": "prompt",
            "response": "completion", "answer": "completion"}  # fmt: skip
    columns = {ours.get(name, name): f"field {n}" for n, name in enumerate(value) if name != "id"}
    named = {f"field {n}": cell for n, cell in enumerate(value.values())}
    assert _row(named, columns=columns).messages == expected.messages


def test_names_are_used_before_any_other() -> None:
    value = {"prompt": "no", "question": "yes", "completion": "c", "text": "t"}
    row = _row(value, columns={"prompt": "QUESTION"})
    assert row.messages[0]["content"] == "yes"
    assert row.unused == ("text", "prompt (of the file)")
    assert _row(value).messages[0]["content"] == "no"


def test_one_column_may_have_two_spellings_but_not_in_one_row() -> None:
    rows = [{"Q": "a", "Answer": "b"}, {"q": "c", "answer": "d"}]
    shape = detect_format(rows)
    assert [canonical(row, shape).messages[0]["content"] for row in rows] == ["a", "c"]
    with pytest.raises(DataError, match=r"Q, q could each be the prompt of a row"):
        detect_format([{"Q": "a", "q": "b", "Answer": "c"}])


def test_a_path_leads_into_objects_and_lists() -> None:
    value = {"in": {"ask": "q"}, "out": {"choices": [{"message": {"content": "a"}}]}}
    columns = {"prompt": "in.ask", "completion": "out.choices.0.message.content"}
    assert [turn["content"] for turn in _row(value, columns=columns).messages] == ["q", "a"]


def test_tools_beside_inner_messages_are_not_lost() -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = _row({"body": {"messages": talk, "tools": [{"name": "f"}]}, "custom_id": "1"})
    assert row.tools[0]["function"] == {"name": "f"}


def test_roles_of_a_file_are_ours() -> None:
    value = {"messages": [{"role": "Kunde", "content": "q"}, {"role": "Bot 7", "content": "a"}]}
    row = _row(value, roles={"user": ["KUNDE"], "assistant": ["bot 7"]})
    assert [turn["role"] for turn in row.messages] == ["user", "assistant"]
    with pytest.raises(DataError, match=r"roles: \{user: Kunde, assistant: \"Bot 7\"\}"):
        _row(value)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"prompt": "Quest"}, r"columns has prompt: Quest, .* no such column; theirs are A, Q, t"),
        ({"prompt": "Q", "text": "A"}, r"columns names prompt, text, and no format has all of"),
        ({"prompt": "topics", "completion": "A"}, r"Did you mean topic\?"),
    ],
)
def test_names_that_do_not_fit_are_refused(columns: dict[str, str], text: str) -> None:
    with pytest.raises(DataError, match=text):
        detect_format(ROWS, columns=columns)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"columns": {"Question": "prompt"}}, r"our name comes first: prompt: Question"),
        ({"columns": {"promt": "Q"}}, r"promt is not a column of ours; the names here are mess"),
        ({"columns": {"prompt": "Q", "completion": "Q"}}, r"Q cannot be two columns"),
        ({"columns": {"prompt": 3}}, r"prompt needs the name of a column of the file"),
        ({"columns": ["prompt"]}, r"give a mapping, like \{prompt: Question"),
        ({"roles": {"boss": "x"}}, r"boss is not a role; the roles are system, user"),
        ({"roles": {"user": "x", "assistant": ["X"]}}, r"one is there twice"),
        ({"rows": 0}, r"greater than or equal to 1"),
    ],
)
def test_a_config_with_other_names_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DataSource(path="a.jsonl", **keys)


def test_control_characters_of_names_are_not_printed() -> None:
    with pytest.raises(DataError) as refused:
        detect_format([{"a\x1b[31m": "one", "b\u202e": "two words"}])
    assert "\x1b" not in str(refused.value)
    assert "\u202e" not in str(refused.value)


def test_rows_of_a_program_are_renamed_there() -> None:
    with pytest.raises(DataError, match=r"rename_columns\(\{'first': 'prompt', 'then': 'compl"):
        open_source(GivenRows("train_dataset", [{"first": "a", "then": "b"}]))


def test_columns_and_rows_are_part_of_what_prepared_data_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = write(tmp_path / "a.jsonl", ROWS), tokenizer_of("chatml")
    found = {
        fingerprint(open_source(path, **how), tokenizer, {})
        for how in (
            {},
            {"max_rows": 3},
            {"max_rows": 4},
            {"columns": {"prompt": "topic"}},
            {"columns": {"prompt": "Q", "system": "topic"}},
            {"roles": {"user": ["x"]}},
        )
    }
    assert len(found) == 6
    same = [fingerprint(open_source(path, columns=c), tokenizer, {})
            for c in ({}, {"prompt": "q", "completion": "a"})]  # fmt: skip
    assert same[0] == same[1]
    made = [
        prepare(path, tokenizer, cache_dir=tmp_path / "cache", max_length=64, **how)
        for how in ({"max_rows": 3}, {}, {"columns": {"prompt": "topic", "completion": "A"}})
    ]
    assert [one.card["rows"] for one in made] == [3, 6, 6]
    assert len({one.card["digest"] for one in made}) == 3
    assert made[0].card["source"] == f"{path}[:3]"


def test_other_code_that_reads_rows_prepares_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, tokenizer = open_source(write(tmp_path / "a.jsonl", ROWS)), tokenizer_of("chatml")
    copy = shutil.copytree(fingerprint_module._CODE, tmp_path / "data")
    before = fingerprint(source, tokenizer, {})
    monkeypatch.setattr(fingerprint_module, "_CODE", copy)
    assert fingerprint(source, tokenizer, {}) == before
    (copy / "rows" / "messages.py").write_text("ROLES = {}")
    assert fingerprint(source, tokenizer, {}) != before


def test_a_refused_line_is_a_line_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "with space, and comma.csv"
    path.write_text('"what: they {asked}","yes"\na,b\n')
    with pytest.raises(DataError) as refused:
        open_source(path)
    line = next(line for line in str(refused.value).splitlines() if "data: {" in line)
    assert json.dumps(str(path)) in line
    assert '{prompt: "what: they {asked}", completion: "yes"}' in line
