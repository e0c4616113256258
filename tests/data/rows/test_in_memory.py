"""Rows that a program gives: the same documents as from a file, known by their contents."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.reading import FIRST_ROWS
from megatrain.data.tokens import prepare as prepare_module
from megatrain.data.tokens.prepare import Enough, prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import ConfigError, DataError
from testkit.tokenizers_of_kinds import tokenizer_of
from testkit.written import write

ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "word " * (1 + number % 9)},
        ],
        "source": "s" if number % 2 else None,
    }
    for number in range(700)
]


def _prepared(where: Any, folder: Path, **changes: Any) -> PreparedData:
    settings: dict[str, Any] = {"cache_dir": folder, "max_length": 64, **changes}
    return prepare(where, tokenizer_of("chatml"), **settings)


def _given(rows: Any) -> GivenRows:
    return GivenRows("train_dataset", rows)


class _Stream:
    """Rows without a length, which can be read again; counts what is read."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.num_read = rows, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            self.num_read += 1
            yield row


def test_the_same_rows_are_the_same_documents_in_any_form(tmp_path: Path) -> None:
    expected = _prepared(write(tmp_path / "rows.jsonl", ROWS), tmp_path / "of_file")
    table = datasets.Dataset.from_list(ROWS)
    forms = {
        "list": ROWS,
        "tuple": tuple(ROWS),
        "dataset": table,
        "shuffled back": table.select(range(699, -1, -1)).select(range(699, -1, -1)),
        "generator": (row for row in ROWS),
        "iterable": _Stream(ROWS),
        "iterable dataset": table.to_iterable_dataset(),
    }
    for name, rows in forms.items():
        card = _prepared(_given(rows), tmp_path / name).card
        assert card["digest"] == expected.card["digest"], name
        assert card["source"] == "train_dataset"
        assert card["unused_columns"] == expected.card["unused_columns"]


def test_what_was_prepared_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _prepared(_given(datasets.Dataset.from_list(ROWS)), tmp_path).folder
    monkeypatch.delattr(prepare_module, "PreparedWriter")
    assert _prepared(_given(datasets.Dataset.from_list(ROWS)), tmp_path).folder == folder


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list], ids=["list", "dataset"])
def test_the_mark_changes_with_any_cell(make: Any) -> None:
    few = copy.deepcopy(ROWS[:300])
    mark = _given(make(few)).mark()
    assert _given(make(copy.deepcopy(few))).mark() == mark
    changes: list[Callable[[Any], Any]] = [
        lambda rows: rows[299]["messages"][1].update(content="x"),
        lambda rows: rows[0].update(source="t"),
        lambda rows: rows.pop(),
        lambda rows: rows.reverse(),
    ]
    for change in changes:
        changed = copy.deepcopy(few)
        change(changed)
        assert _given(make(changed)).mark() != mark


def test_a_stream_is_read_as_far_as_needed_and_once(tmp_path: Path) -> None:
    stream = _Stream(ROWS)
    given = _given(stream)
    few = _prepared(given, tmp_path, enough=Enough(rows=250))
    assert (few.card["rows"], stream.num_read) == (256, 256)
    again = _prepared(_given(_Stream(ROWS)), tmp_path, enough=Enough(tokens=few.card["tokens"]))
    assert again.folder == few.folder
    with pytest.raises(DataError, match="this stream has already been consumed"):
        next(given.values())


def test_the_first_rows_of_a_stream_can_be_looked_at() -> None:
    given = _given(iter(ROWS))
    for _ in range(2):
        first = [row for _, row in zip(range(FIRST_ROWS), given.values(), strict=False)]
        assert [row for _, row in first] == ROWS[:FIRST_ROWS]
    assert [row for _, row in given.values()] == ROWS


def test_a_stream_of_datasets_goes_on_where_a_run_ended(tmp_path: Path) -> None:
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    card = _prepared(_given(stream), tmp_path, enough=Enough(rows=250)).card
    rest = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    rest.load_state_dict(json.loads(json.dumps(card["stream_state"])))
    assert next(iter(rest))["messages"] == ROWS[256]["messages"]


def test_a_column_that_is_not_used_may_be_an_array(tmp_path: Path) -> None:
    rows = [{**row, "embedding": np.arange(3.0)} for row in ROWS[:4]]
    card = _prepared(_given(rows), tmp_path).card
    assert (card["kept"], card["unused_columns"]["embedding"]) == (4, 4)


def test_tokens_may_be_tensors(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7 + n], "labels": [-100, 6, 7 + n]} for n in range(20)]
    tensors = [{name: torch.tensor(cell) for name, cell in row.items()} for row in rows]
    expected = _prepared(_given(rows), tmp_path / "lists")
    assert (
        _prepared(_given(tensors), tmp_path / "tensors").card["digest"] == expected.card["digest"]
    )
    assert expected.card["trained_tokens"] == 40


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("rows.jsonl", r'a name of a file or dataset goes to data=\{"train": \'rows.jsonl\'\}'),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:2])}), "parts .train.;"),
        (7, "give a datasets.Dataset, a list of dicts"),
        ({1, 2}, "no order"),
    ],
)
def test_what_is_not_rows_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _given(rows)


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train_dataset is empty"):
        _prepared(_given(iter(())), tmp_path)
