"""Rows of preferences: held out and mixed by row, with their marks, and planned with their room."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.data.steps.answers import tokens_together
from megatrain.data.tokens.documents import num_rows
from megatrain.data.training_rows import (
    TrainingRows,
    gather,
    num_of_each,
    with_longest_step,
    with_room,
)
from megatrain.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # no other processes


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _pairs(path: Path, count: int) -> str:
    """Row n has answers of n letters and of three."""
    rows = [{"prompt": f"{n}?", "chosen": "y" * n, "rejected": "no!"} for n in range(1, count + 1)]
    return _write(path, rows)


def _marked(path: Path, count: int) -> str:
    """Every third row is desirable, and its answer begins with y."""
    rows = [
        {"prompt": f"{n}?", "completion": "yn"[bool(n % 3)] * 9, "label": n % 3 == 0}
        for n in range(count)
    ]
    return _write(path, rows)


def _config(
    train: Any, *, more: dict[str, Any] | None = None, loss: str = "next_token", **data: Any
) -> Config:
    values = {"train": train, "max_length": 64, **data}
    given = {"model": "m", "data": values, "train": more or {}, "loss": {"name": loss}}
    return Config.model_validate(given)


def _rows(*given: Any, **named: Any) -> TrainingRows:
    return gather(_config(*given, **named), byte_tokenizer())


@pytest.mark.parametrize("held", [None, 0.25])
def test_marks_follow_their_rows(tmp_path: Path, held: float | None) -> None:
    files = [_marked(tmp_path / "a.jsonl", 30), _marked(tmp_path / "b.jsonl", 10)]
    rows = _rows([{"path": file, "format": "kto"} for file in files], eval=held)
    assert rows.preferences == "kto"
    assert rows.answers is not None
    assert len(rows.held) == len(rows.held_answers) == (2 if held else 0)
    parts = zip((rows.train, *rows.held), (rows.answers, *rows.held_answers), strict=True)
    for documents, answers in parts:
        assert answers.desirable is not None
        assert len(answers.desirable) == num_rows(documents) == len(documents.lengths) // 2
        firsts = [documents.tokens(2 * row) for row in range(num_rows(documents))]
        begins = [byte_tokenizer().decode(ids[trained][:1]) for ids, trained in firsts]
        assert [begin == "y" for begin in begins] == answers.desirable.tolist()


def test_completions_change_places_among_the_rows_of_a_step(tmp_path: Path) -> None:
    source = [{"path": _marked(tmp_path / "a.jsonl", 12), "format": "kto"}]
    by_rows, by_tokens = (_rows(source, more=more) for more in ({"batch_rows": 4}, {}))
    assert by_rows.digest == by_tokens.digest  # the same prepared rows
    second = [[rows.train.tokens(2 * n + 1)[0].tolist() for n in (1, 4)]
              for rows in (by_rows, by_tokens)]  # fmt: skip
    assert second[0][0] == second[1][0]  # the completion of row 0
    assert second[0][1] != second[1][1]  # the first of a step has that of its last


def test_pairs_bring_no_marks(tmp_path: Path) -> None:
    rows = _rows(_pairs(tmp_path / "a.jsonl", 9), eval=[_pairs(tmp_path / "b.jsonl", 3)])
    assert rows.preferences == "pairs"
    assert rows.answers is not None
    assert rows.answers.desirable is None
    assert [num_rows(part) for part in (rows.train, *rows.held)] == [9, 3]
    assert [source.card["kept"] for source in rows.prepared] == [9, 3]


@pytest.mark.parametrize(
    ("loss", "found"), [("next_token", None), ("dpo", "pairs"), ("orpo", "pairs"), ("kto", "kto")]
)
def test_the_loss_decides_what_rows_are_read_as(
    tmp_path: Path, loss: str, found: str | None
) -> None:
    """Files often have columns of several formats."""
    row = {"prompt": "a", "completion": "b", "label": True, "chosen": "c", "rejected": "d"}
    path = _write(tmp_path / "a.jsonl", [row] * 3)
    assert _rows(path, loss=loss).preferences == found
    assert _rows([{"path": path, "format": "pairs"}], loss=loss).preferences == "pairs"


def test_rows_that_the_loss_cannot_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="format kto needs the columns prompt, completion and"):
        _rows(_pairs(tmp_path / "a.jsonl", 3), loss="kto")


def test_rows_with_and_without_preferences_do_not_mix(tmp_path: Path) -> None:
    plain = _write(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    pairs = _pairs(tmp_path / "a.jsonl", 9)
    with pytest.raises(DataError, match=r"a.jsonl is detected: pairs.*b.jsonl is detected: prompt"):
        _rows([pairs, plain])
    with pytest.raises(DataError, match="trained with one loss"):
        _rows(pairs, eval=[plain])


@pytest.mark.parametrize("packing", [True, False])
def test_the_plan_leaves_room_for_both_answers(tmp_path: Path, packing: bool) -> None:
    config = _config(_pairs(tmp_path / "a.jsonl", 50), packing=packing, max_length=64)
    rows = gather(config, byte_tokenizer())
    needed = tokens_together(rows.train, one_row=packing)
    assert needed > 64
    planned = with_room(config, rows)
    assert planned.data.max_length == needed
    assert config.data.max_length == 64  # of a document
    for key, others in (("micro_batch_tokens", {"batch_tokens": 512}), ("batch_tokens", {})):
        given = _config(rows.sources[0].card["source"], packing=packing, more={**others, key: 64})
        with pytest.raises(ConfigError, match=rf"train.{key} is 64.*need up to {needed} tokens"):
            with_room(given, rows)
    by_rows = with_room(with_longest_step(_by_rows(config), rows), rows)
    assert isinstance(by_rows.train.batch_tokens, int)
    assert by_rows.train.batch_tokens >= max(needed, rows.largest_step(4, 1))


def _by_rows(config: Config) -> Config:
    train = config.train.model_copy(update={"batch_rows": 4, "batch_tokens": None, "epochs": 1.0})
    return config.model_copy(update={"train": train})


def test_room_is_asked_for_preferences_only(tmp_path: Path) -> None:
    config = _config(_write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 3))
    rows = gather(config, byte_tokenizer())
    assert rows.answers is None
    assert with_room(config, rows) is config
    assert np.diff(rows.train.row_starts).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "most", "counts"),
    [
        ([30], 4, [4]),
        ([30, 10], None, [30, 10]),
        ([30, 10], 40, [30, 10]),
        ([30, 10], 8, [6, 2]),
        ([100, 1, 1], 10, [8, 1, 1]),  # small sources keep their row
        ([100, 100, 100], 10, [3, 3, 3]),
        ([50, 1, 1], 2, [1, 1, 1]),  # so that each has its loss
        ([50, 0, 50], 10, [5, 0, 5]),
    ],
)
def test_an_evaluation_takes_a_part_of_each_source(
    sizes: list[int], most: int | None, counts: list[int]
) -> None:
    assert num_of_each(sizes, most) == counts


def test_a_source_that_is_called_like_a_sum_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "a", "completion": "b"}
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    _write(Path("rows/some.jsonl"), [row] * 3)
    card = _rows(["rows", _write(Path("other.jsonl"), [row] * 3)]).card()
    assert card["rows"] == 6
    assert card["other.jsonl"]["rows"] == 3


def test_losses_have_the_names_of_the_sources_that_hold_rows_out(tmp_path: Path) -> None:
    """Of a small one none is held out."""
    counts = {"first": 3, "second": 100, "third": 100}
    train = [
        _write(tmp_path / f"{name}.jsonl", [{"prompt": "a", "completion": "b"}] * count)
        for name, count in counts.items()
    ]
    rows = _rows(train, eval=0.1)
    assert rows.held_names == ("second", "third")
    assert [len(part.row_starts) - 1 for part in rows.held] == [10, 10]
    assert _rows(train, eval=train[:2]).held_names == ("first", "second")
    assert _rows(train).held_names == ()


@pytest.mark.parametrize(
    ("count", "fraction", "num_held"), [(3, 0.02, 0), (3, 0.5, 2), (25, 0.02, 1)]
)
def test_a_fraction_below_half_a_row_holds_nothing_out(
    tmp_path: Path, count: int, fraction: float, num_held: int
) -> None:
    rows = _rows(_pairs(tmp_path / "a.jsonl", count), eval=fraction)
    assert rows.order.size == count - num_held
    assert sum(len(part.row_starts) - 1 for part in rows.held) == num_held
    assert len(rows.held) == len(rows.held_answers) == (num_held > 0)


def test_shares_divide_the_tokens_of_an_epoch(tmp_path: Path) -> None:
    """Rows of one source are ten times as long as those of the other."""
    shares = {"a": (3, 4), "b": (1, 40)}
    sources = [
        {"path": _write(tmp_path / f"{name}.jsonl", [{"input_ids": [40] * count}] * 400),
         "share": share}
        for name, (share, count) in shares.items()
    ]  # fmt: skip
    rows = gather(_config(sources), byte_tokenizer())
    lengths = rows.train.lengths[rows.order.rows(0, 0, rows.order.size)]
    first, second = int(lengths[lengths == 4].sum()), int(lengths[lengths == 40].sum())
    assert first / second == pytest.approx(3, rel=0.02)
    assert first + second == pytest.approx(400 * 44, rel=0.02)  # as many as there are
    with pytest.raises(ConfigError, match="has no share, and other sources have one"):
        _config([sources[0], {"path": sources[1]["path"]}])
    with pytest.raises(ConfigError, match="has share 3 and weight 2"):
        _config([{**sources[0], "weight": 2}, sources[1]])
