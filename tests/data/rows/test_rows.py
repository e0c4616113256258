"""Rows: every shape means one row; what else a file holds is counted, and costs itself alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.choices import RowFormat
from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.formats import FORMATS, format_of
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow, SkippedRows
from megatrain.data.rows.source import open_source
from megatrain.errors import DataError
from testkit.row_shapes import SHAPES
from testkit.written import write
from tests.data.rows.bad_rows import CELLS, GOOD_CELLS, GOOD_LINE, LINES, MESSAGES

GOOD = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
    for i in range(3)
]


def _said(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in row.messages)


def _read(path: Path) -> tuple[list[Row], SkippedRows]:
    skipped = SkippedRows()
    return [row for _, row in open_source(path).rows(skipped)], skipped


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_is_the_same_in_every_shape(tmp_path: Path, shape: str, suffix: str) -> None:
    value, said, printed = SHAPES[shape]
    path = write(tmp_path / f"a.{suffix}", [value, value])
    assert str(open_source(path).format) == printed
    rows, skipped = _read(path)
    assert [_said(row) for row in rows] == [said, said]
    assert skipped.total == 0


def test_text_is_text(tmp_path: Path) -> None:
    rows, _ = _read(write(tmp_path / "a.txt", [{"text": " a b "}]))
    assert rows == [Row(text=" a b ")]


def _expect_middle_bad(path: Path, rows: list[Row], skipped: SkippedRows, reason: str) -> None:
    assert len(rows) == 2
    assert skipped.counts == {reason: 1}
    number = 3 if path.suffix == ".csv" else 2
    assert skipped.places[reason][0].startswith(f"{path.name}:{number}")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("case", MESSAGES)
def test_a_bad_conversation_costs_itself_alone(tmp_path: Path, case: str, suffix: str) -> None:
    value, reason = MESSAGES[case]
    path = write(tmp_path / f"a.{suffix}", [GOOD[0], {"messages": value}, GOOD[1], GOOD[2]])
    rows, skipped = _read(path)
    if suffix == "parquet" and reason == "other shape" and not skipped.counts.get(reason):
        reason = "null"  # a column has one type: keys that are missing are there, and null
    assert [_said(row)[0][1] for row in rows] == ["q0", "q1", "q2"]
    _expect_middle_bad(path, rows[:2], skipped, reason)


_LAST = {"text": "text", "pair": "completion", "alpaca": "output"}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("case", CELLS)
def test_a_bad_cell_costs_its_row_alone(tmp_path: Path, case: str, suffix: str) -> None:
    kind, value, reason = CELLS[case]
    if suffix == "csv":
        if reason == "wrong type" and "history" not in case:
            pytest.skip("csv has no types: any cell is text")
        reason = {"null": "empty", "other shape": "empty"}.get(reason, reason)
        reason = "null" if case == "history with null" else reason
        reason = "not UTF-8" if reason == "lone surrogate" else reason  # a byte of another encoding
    first, second = ({**GOOD_CELLS[kind], _LAST[kind]: text} for text in ("one", "two"))
    path = write(tmp_path / f"a.{suffix}", [first, value, second])
    if suffix == "parquet":
        if reason == "wrong type" and "history" not in case:
            pytest.skip("a column has one type: here the whole column would be JSON text")
        reason = {"other shape": "null"}.get(reason, reason)
        if "surrogate" in case:
            pytest.skip("Arrow has no lone surrogates")
    rows, skipped = _read(path)
    assert [row.text or row.messages[-1]["content"] for row in rows] == ["one", "two"]
    _expect_middle_bad(path, rows, skipped, reason)


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_costs_itself_alone(tmp_path: Path, case: str) -> None:
    line, reason = LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD_LINE + line + GOOD_LINE.replace(b"fine", b"good"))
    rows, skipped = _read(path)
    assert skipped.counts[reason] >= 1
    assert [row.text for row in rows] == ["fine", "good"]
    assert skipped.places[reason][0].startswith("a.jsonl:2")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "text", "history", "output"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(value=_json)
def test_whatever_a_row_is_the_answer_is_a_row_or_a_reason(value: Any) -> None:
    for shaped in (GOOD[0], *GOOD_CELLS.values()):
        shape = format_of(shaped)
        assert shape
        for candidate in (
            value,
            {"messages": value},
            {"text": value},
            {**shaped, "history": value},
        ):
            with suppress(BadRow):  # and nothing else
                row = canonical(candidate, shape)
                assert bool(row.text) != bool(row.messages)


def test_the_majority_of_the_first_rows_decides() -> None:
    odd: list[Any] = [{"text": "a"}, None, 3, {}]
    assert str(detect_format([*odd, *GOOD])) == "detected: messages (role, content)"


BOTH: dict[str, Any] = {**GOOD[0], "text": "a", "prompt": "p", "completion": "c"}


@pytest.mark.parametrize(
    ("wanted", "printed", "row"),
    [
        ("auto", "detected: messages (role, content)", canonical(GOOD[0], detect_format(GOOD))),
        ("messages", "messages (role, content)", canonical(GOOD[0], detect_format(GOOD))),
        ("text", "text (text)", Row(text="a")),
        (
            "prompt_completion",
            "prompt / completion",
            canonical(
                {"prompt": "p", "completion": "c"}, detect_format([{"prompt": 1, "completion": 2}])
            ),
        ),
    ],
)
def test_the_told_format_is_used(tmp_path: Path, wanted: Any, printed: str, row: Row) -> None:
    source = open_source(write(tmp_path / "a.jsonl", [BOTH, BOTH]), wanted)
    assert str(source.format) == printed
    read = [replace(found, unused=()) for _, found in source.rows(SkippedRows())]
    assert read == [row, row]


def test_a_told_format_counts_rows_of_another_as_such(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*GOOD, {"text": "a"}, *GOOD])
    skipped = SkippedRows()
    rows = list(open_source(path, "text").rows(skipped))
    assert [row.text for _, row in rows] == ["a"]
    assert skipped.counts == {"other shape": 6}
    assert "(no text, but messages)" in str(skipped)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            "alpaca",
            r"a\.jsonl: format alpaca needs the columns instruction and output; those of the first "
            r"3 rows are messages\. Formats that fit: messages\.",
        ),
        (
            "prompt_completion",
            r"needs the columns prompt and completion, or prompt and response, or .* and answer; "
            r"those",
        ),
        ("text", r"needs the columns text; .* Formats that fit: messages\."),
    ],
)
def test_a_told_format_that_no_row_has_is_refused(tmp_path: Path, wanted: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        open_source(write(tmp_path / "a.jsonl", GOOD), wanted)


def test_a_told_format_where_none_would_fit_names_those_that_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": "b"}])
    with pytest.raises(
        DataError, match=r"rows are a\.\n(?s:.*)  Known formats: messages or conversations"
    ):
        open_source(path, "messages")


def test_no_known_format_names_columns_and_formats() -> None:
    with pytest.raises(
        DataError, match=r"x\.jsonl: no known format .* columns are a, b\.\n(?s:.*)  Known formats"
    ):
        detect_format([{"a": 1}, {"b": 2}], where="x.jsonl")


def test_counts_of_parts_add_up() -> None:
    first, second = SkippedRows(), SkippedRows()
    first.add("a:1", BadRow("empty"))
    second.add("a:9", BadRow("empty"))
    second.add("a:10", BadRow("null"))
    first.merge(second)
    assert first.counts == {"empty": 2, "null": 1}
    assert first.places["empty"] == ["a:1", "a:9"]


def test_a_function_alone_is_a_tool() -> None:
    function, tool = {"name": "add"}, {"type": "function", "function": {"name": "add"}}
    for column in ({"tools": [function]}, {"tools": [tool]}, {"functions": [function]},
                   {"tools": '[{"name": "add"}]'}):  # fmt: skip
        row = canonical({**GOOD[0], **column}, detect_format(GOOD))
        assert row.tools == (tool,)
        assert row.unused == ()
    other = {"type": "web_search", "name": "search"}
    assert canonical({**GOOD[0], "tools": [other]}, detect_format(GOOD)).tools == (other,)


def test_a_format_is_described_in_one_place_and_named_in_the_config() -> None:
    assert ["auto", *(spec.name for spec in FORMATS.values())] == list(get_args(RowFormat))
    for kind, spec in FORMATS.items():
        for row in ROWS_OF_FORMATS[kind]:
            (found, *_) = spec.find(row, set(row))
            has_turns = spec.turns is not None or spec.preference is not None
            assert (found.kind, found.is_conversation) == (kind, has_turns)


ROWS_OF_FORMATS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": [{"role": "user", "content": "a"}]}],
    "alpaca": [{"instruction": "a", "output": "b"}],
    "pair": [{"prompt": "a", "completion": "b"}, {"question": "a", "answer": "b"}],
    "text": [{"text": "a"}],
    "pairs": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "kto": [{"prompt": "a", "completion": "b", "label": True}],
    "tokens": [{"input_ids": [1, 2]}],
}
