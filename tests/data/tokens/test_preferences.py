"""Preferences as documents: both answers or none, one prompt, only answers trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.chat.masks import Tokens
from megatrain.data.preview import card_lines, show_prepared
from megatrain.data.tokens.encoding import NO_TARGET, TOO_LONG, with_one_prompt
from megatrain.data.tokens.mismatched import MismatchedDocuments, others_of
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import ConfigError, DataError
from testkit.tokenizers_of_kinds import tokenizer_of
from testkit.written import write


def _prepare(path: Path, kind: str = "chatml", **changes: Any) -> PreparedData:
    settings: dict[str, Any] = {"cache_dir": path.parent / "cache", "max_length": 64, **changes}
    return prepare(path, tokenizer_of(kind), **settings)


def _pair(number: int, chosen: int = 3, rejected: int = 2) -> dict[str, Any]:
    return {
        "prompt": f"question {number}",
        "chosen": "yes " * chosen + str(number),
        "rejected": "no " * rejected + str(number),
    }


def _texts(prepared: PreparedData, document: int, kind: str = "chatml") -> tuple[str, str]:
    """What is read, and what is trained."""
    ids, trained = prepared.tokens(document)
    tokenizer = tokenizer_of(kind)
    return tokenizer.decode(ids[~trained]), tokenizer.decode(ids[trained])


ROWS = [_pair(number, 1 + number % 5, 1 + number % 3) for number in range(300)]


def test_a_row_is_its_chosen_and_its_rejected_answer(tmp_path: Path) -> None:
    prepared = _prepare(write(tmp_path / "a.jsonl", ROWS))
    assert prepared.preferences == "pairs"
    assert prepared.row_starts.tolist() == list(range(0, 601, 2))
    assert prepared.card["format"] == "detected: pairs (prompt, chosen, rejected)"
    for row in (0, 7, 299):
        (asked, chosen), (same, rejected) = (_texts(prepared, 2 * row + n) for n in (0, 1))
        assert asked == same
        assert f"question {row}" in asked
        assert chosen.startswith(ROWS[row]["chosen"])
        assert rejected.startswith(ROWS[row]["rejected"])
        assert chosen.endswith("<|im_end|>")


def test_prompt_and_answers_are_joined_without_a_template(tmp_path: Path) -> None:
    rows = [{"chosen": "Q: far? A: two miles", "rejected": "Q: far? A: who knows"}]
    prepared = _prepare(write(tmp_path / "a.jsonl", rows))
    asked, chosen = _texts(prepared, 0)
    assert (asked, chosen) == ("Q: far? A:", " two miles<|im_end|>")
    assert _texts(prepared, 1) == ("Q: far? A:", " who knows<|im_end|>")
    assert any("joined without a chat template" in line for line in card_lines(prepared.card))


def test_answers_are_compared_after_the_same_tokens() -> None:
    """One of them shares its first token with the prompt: `th` and `ink`, `th` and `|under`."""
    merged = Tokens(input_ids=[5, 6, 7], runs=((1, 3),))
    apart = Tokens(input_ids=[5, 8, 9, 7], runs=((2, 3), (3, 4)))
    assert [answer.runs for answer in with_one_prompt([merged, apart])] == [((1, 3),), ((1, 4),)]
    assert with_one_prompt([apart, apart])[0].runs == ((2, 4),)
    untrained = Tokens(input_ids=[5, 6], runs=())
    assert with_one_prompt([untrained, apart])[0] == untrained


SURE, CALL, FOUND, YES, NO = (
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "let me see"},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "yes"},
    {"role": "assistant", "content": "no"},
)


@pytest.mark.parametrize(
    ("changes", "chosen", "rejected", "trained"),
    [
        ({}, [YES], [NO], ["yes", "no"]),
        ({}, [CALL, FOUND, YES], [NO], ["let me see yes", "no"]),
        ({}, [FOUND, YES], [NO], ["yes", "no"]),
        ({}, [{**CALL, "weight": 0}, SURE, YES], [NO], ["yes", "no"]),
        ({}, [CALL, FOUND, YES], [{**CALL, "train": False}, SURE, NO], ["let me see yes", "no"]),
        ({"train_on": "last"}, [CALL, FOUND, YES], [NO], ["yes", "no"]),
    ],
    ids=["answers", "calls", "a result first", "left out", "left out of one", "last"],
)
def test_nothing_but_answers_is_trained_of_a_pair(
    tmp_path: Path, changes: Any, chosen: Any, rejected: Any, trained: list[str]
) -> None:
    row = {"prompt": [SURE], "chosen": chosen, "rejected": rejected}
    prepared = _prepare(write(tmp_path / "a.jsonl", [row]), **changes)
    found = [_texts(prepared, document)[1] for document in (0, 1)]
    assert [" ".join(text.split("<|im_end|>")).strip() for text in found] == trained


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_no_answer_of_a_row_is_left_alone(tmp_path: Path, overlong: str) -> None:
    long = {"prompt": "word " * 80, "chosen": "yes", "rejected": "no"}
    rows = [_pair(0), _pair(1, chosen=90), _pair(2, rejected=90), long, _pair(4)]
    prepared = _prepare(
        write(tmp_path / "a.jsonl", rows), max_length=48, overlong=overlong, max_dropped=1.0
    )
    kept = [0, 1, 2, 4] if overlong == "truncate" else [0, 4]
    assert prepared.rows[::2].tolist() == prepared.rows[1::2].tolist() == kept
    assert prepared.lengths.max() <= 48
    reasons = {NO_TARGET: 1} if overlong == "truncate" else {TOO_LONG: 3}
    assert prepared.card["dropped"] == reasons
    assert prepared.card["truncated"] == (3 if overlong == "truncate" else 0)
    assert all(_texts(prepared, document)[1] for document in range(2 * len(kept)))


def test_the_same_answer_twice_is_remarked(tmp_path: Path) -> None:
    rows = [_pair(0), {"prompt": "a", "chosen": "b", "rejected": "b"}]
    lines = card_lines(_prepare(write(tmp_path / "a.jsonl", rows)).card)
    assert any("1 rows have the same answer" in line for line in lines)


def test_a_prompt_is_no_target(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"data.train_on is all.*only answers are compared"):
        _prepare(path, train_on="all")


def test_an_answer_that_needs_several_texts_is_bad(tmp_path: Path) -> None:
    """A template that removes earlier thoughts shows no answer of two turns as it was written."""
    thought = {"role": "assistant", "content": "<think>hm</think>yes"}
    asked = {"role": "user", "content": "sure?"}
    row = {"prompt": [asked], "chosen": [thought, asked, thought], "rejected": [thought]}
    path = write(tmp_path / "a.jsonl", [row, {**row, "chosen": [thought]}])
    prepared = _prepare(path, "qwen3", max_bad=1.0)
    assert prepared.card["bad"] == {"chat template rewrites earlier turns of the answer": 1}
    assert _prepare(path, "qwen3", train_on="last").card["kept"] == 2


def _marked(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {n}", "completion": "yes " * (1 + n % 4), "label": n % 3 == 0}
        for n in range(count)
    ]


def test_marks_stay_with_their_completions(tmp_path: Path) -> None:
    rows = [*_marked(5), {"prompt": "", "completion": "x", "label": True}, *_marked(3)]
    prepared = _prepare(write(tmp_path / "a.jsonl", rows), wanted="kto", max_bad=1.0)
    assert prepared.preferences == "kto"
    assert prepared.desirable.tolist() == [n % 3 == 0 for n in (0, 1, 2, 3, 4, 0, 1, 2)]
    assert prepared.card["desirable"] == 3
    assert any("3 of them desirable" in line for line in card_lines(prepared.card))
    other = _prepare(write(tmp_path / "b.jsonl", [{**row, "label": True} for row in rows]),
                     wanted="kto", max_bad=1.0)  # fmt: skip
    assert other.card["digest"] != prepared.card["digest"]  # a run does not go on with other marks


@pytest.mark.parametrize(("count", "group"), [(7, None), (7, 3), (8, 4), (6, 10), (2, None)])
def test_the_second_document_has_the_completion_of_another_row(
    tmp_path: Path, count: int, group: int | None
) -> None:
    prepared = _prepare(write(tmp_path / "a.jsonl", _marked(count)), wanted="kto")
    documents = MismatchedDocuments(prepared, 64, group)
    assert documents.row_starts.tolist() == list(range(0, 2 * count + 1, 2))
    for row, other in enumerate(others_of(count, group or count).tolist()):
        own, (ids, trained) = documents.tokens(2 * row), documents.tokens(2 * row + 1)
        assert [part.tolist() for part in own] == [part.tolist() for part in prepared.tokens(row)]
        other_ids, other_trained = prepared.tokens(other)
        assert ids[trained].tolist() == other_ids[other_trained].tolist()
        assert ids[~trained].tolist() == own[0][~own[1]].tolist()
        assert len(ids) == documents.lengths[2 * row + 1]
        assert other != row


def test_completions_change_places_within_their_group() -> None:
    assert others_of(6, 3).tolist() == [2, 0, 1, 5, 3, 4]
    assert others_of(4, 9).tolist() == [3, 0, 1, 2]
    assert others_of(4, 3).tolist() == [2, 0, 1, 2]  # the last is alone in its group
    for size in range(2, 40):
        for group in range(2, size + 1):
            others, rows = others_of(size, group), np.arange(size)
            alone = size % group == 1
            assert (others != rows).all()
            assert (others // group == rows // group)[: size - alone].all()
            assert len(set(others[: size - alone].tolist())) == size - alone


def test_a_second_document_is_cut_where_it_is_too_long(tmp_path: Path) -> None:
    rows = [
        {"prompt": "word " * 20, "completion": "a", "label": True},
        {"prompt": "b", "completion": "word " * 20, "label": True},
    ]
    prepared = _prepare(write(tmp_path / "a.jsonl", rows), wanted="kto", max_length=80)
    documents = MismatchedDocuments(prepared, 80)
    ids, trained = documents.tokens(1)
    assert len(ids) == documents.lengths[1] == 80
    assert trained.any()


def test_one_row_has_no_other(tmp_path: Path) -> None:
    prepared = _prepare(write(tmp_path / "a.jsonl", _marked(1)), wanted="kto")
    with pytest.raises(DataError, match="needs at least two"):
        MismatchedDocuments(prepared, 64)
    with pytest.raises(ConfigError, match=r"train.batch_rows is 1.*Set it to 2 or more"):
        MismatchedDocuments(prepared, 64, 1)


def test_answers_are_shown_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_of("chatml")
    show_prepared(_prepare(write(tmp_path / "a.jsonl", ROWS[:3])), tokenizer, 1)
    shown = capsys.readouterr().out
    assert "--- row 0, chosen:" in shown
    assert "--- row 0, rejected:" in shown
    assert "row 1" not in shown
    show_prepared(_prepare(write(tmp_path / "b.jsonl", _marked(3)), wanted="kto"), tokenizer, 2)
    shown = capsys.readouterr().out
    assert "--- row 0, desirable:" in shown
    assert "--- row 1, undesirable:" in shown
