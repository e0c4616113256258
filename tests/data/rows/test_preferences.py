"""Preferences: the same prompt and answers in any shape, and the prompt that TRL would find."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.choices import PreferenceFormat, RowFormat
from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.formats import FORMATS, format_of
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError

ASKED, GOOD, WRONG = "How far?", "Two miles.", "Who knows."
USER = {"role": "user", "content": ASKED}
YES, NO = ({"role": "assistant", "content": text} for text in (GOOD, WRONG))
FROM = [{"from": "human", "value": ASKED}]
LF_YES, LF_NO = ({"from": "gpt", "value": text} for text in (GOOD, WRONG))

PAIRS: dict[str, dict[str, Any]] = {
    "text": {"prompt": ASKED, "chosen": GOOD, "rejected": WRONG},
    "question": {"question": ASKED, "chosen": GOOD, "rejected": WRONG},
    "messages": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "messages and text": {"prompt": [USER], "chosen": GOOD, "rejected": WRONG},
    "text and messages": {"prompt": ASKED, "chosen": [YES], "rejected": [NO]},
    "implicit": {"chosen": [USER, YES], "rejected": [USER, NO]},
    "implicit beside its question": {
        "prompt": ASKED, "chosen": [USER, YES], "rejected": [USER, NO],
    },
    "repeated": {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
    "LLaMA-Factory": {"conversations": FROM, "chosen": LF_YES, "rejected": LF_NO},
    "LLaMA-Factory, alpaca": {
        "instruction": ASKED, "input": "", "chosen": GOOD, "rejected": WRONG,
    },
}  # fmt: skip
MARKED: dict[str, dict[str, Any]] = {
    "text": {"prompt": ASKED, "completion": GOOD, "label": True},
    "numbers": {"prompt": ASKED, "completion": GOOD, "label": 1},
    "words": {"prompt": ASKED, "completion": GOOD, "label": "True"},
    "messages": {"prompt": [USER], "completion": [YES], "label": True},
    "LLaMA-Factory": {"conversations": [*FROM, LF_YES], "kto_tag": True},
    "LLaMA-Factory, alpaca": {"instruction": ASKED, "output": GOOD, "kto_tag": True},
}


def _read(value: dict[str, Any], wanted: PreferenceFormat) -> Row:
    return canonical(value, detect_format([value], wanted=wanted))


def _said(row: Row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages]


@pytest.mark.parametrize("shape", PAIRS)
def test_pairs_of_any_shape_are_the_same_two_conversations(shape: str) -> None:
    row = _read(PAIRS[shape], "pairs")
    assert row.rejected is not None
    assert _said(row) == [("user", ASKED), ("assistant", GOOD)]
    assert _said(row.rejected) == [("user", ASKED), ("assistant", WRONG)]
    assert row.num_prompt == row.rejected.num_prompt == 1
    assert row.unused == ()
    assert row.plain == (shape in ("text", "question"))
    assert not row.joined
    assert format_of(PAIRS[shape]) is not None  # found without being named


@pytest.mark.parametrize("shape", ["messages", "text and messages", "implicit", "repeated"])
def test_turns_that_a_table_keeps_as_text_are_turns(shape: str) -> None:
    kept = {
        name: cell if isinstance(cell, str) else json.dumps(cell)
        for name, cell in PAIRS[shape].items()
    }
    assert _read(kept, "pairs") == _read(PAIRS[shape], "pairs")


def test_turns_of_a_marked_completion_may_be_text() -> None:
    value = {**MARKED["messages"], **{name: json.dumps(MARKED["messages"][name])
                                      for name in ("prompt", "completion")}}  # fmt: skip
    assert _read(value, "kto") == _read(MARKED["messages"], "kto")


def test_an_answer_in_json_after_a_question_in_words_is_text() -> None:
    """Who asks for JSON gets it, a list of messages too."""
    value = {"prompt": "As JSON, please.", "completion": json.dumps([YES])}
    shape = format_of(value)
    assert shape is not None
    assert _said(canonical(value, shape))[1] == ("assistant", value["completion"])


@pytest.mark.parametrize("shape", MARKED)
def test_marked_completions_of_any_shape_are_the_same(shape: str) -> None:
    row = _read(MARKED[shape], "kto")
    assert _said(row) == [("user", ASKED), ("assistant", GOOD)]
    assert (row.num_prompt, row.rejected, row.desirable, row.unused) == (1, None, True, ())


def test_a_row_of_another_format_stays_one_although_it_has_such_columns() -> None:
    """Columns that nobody asked for change nothing for those who do not prefer."""
    for value in (MARKED["numbers"], {"messages": [USER, YES], **PAIRS["text"]}):
        found = format_of(value)
        assert found is not None
        assert found.preferences is None
    assert detect_format([PAIRS["implicit"]]).preferences == "pairs"
    assert set(get_args(PreferenceFormat)) < set(get_args(RowFormat))
    assert {FORMATS[name].name for name in get_args(PreferenceFormat)} == set(
        get_args(PreferenceFormat)
    )


def test_a_prompt_of_several_turns_and_its_system_prompt() -> None:
    turns = [USER, YES, {"role": "user", "content": "Sure?"}]
    row = _read({"system": "Be brief.", "chosen": [*turns, YES], "rejected": [*turns, NO]}, "pairs")
    assert [role for role, _ in _said(row)] == ["system", "user", "assistant", "user", "assistant"]
    assert row.num_prompt == 4


def test_a_system_prompt_of_the_answers_alone_repeats_no_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    value = {"prompt": [USER], "chosen": [system, USER, YES], "rejected": [system, USER, NO]}
    row = _read(value, "pairs")
    assert row.rejected is not None
    assert [role for role, _ in _said(row)] == ["system", "user", "assistant"]
    assert (row.num_prompt, row.rejected.num_prompt) == (2, 2)


def test_a_question_in_other_words_than_in_the_answers_is_named_as_unused() -> None:
    row = _read({"prompt": "Q: How far?", "chosen": [USER, YES], "rejected": [USER, NO]}, "pairs")
    assert (_said(row)[0], row.unused) == (("user", ASKED), ("prompt",))


def _cut(chosen: str, rejected: str) -> tuple[str, str, str]:
    """What TRL's `extract_prompt` makes of two texts; proofs/preferences asks TRL itself."""
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    at = same.index(False) if False in same else len(same) - 1
    if False in same and chosen[:at].endswith(" "):
        at -= 1
    return chosen[:at], chosen[at:], rejected[at:]


@given(
    prompt=st.text("ab ", min_size=1, max_size=6).filter(lambda text: text.strip()),
    answers=st.tuples(
        st.text("ab ", min_size=1, max_size=4), st.text("ab ", min_size=1, max_size=4)
    ),
)
def test_the_prompt_of_texts_is_what_trl_finds(prompt: str, answers: tuple[str, str]) -> None:
    chosen, rejected = (prompt + answer for answer in answers)
    asked, good, wrong = _cut(chosen, rejected)
    value = {"chosen": chosen, "rejected": rejected}
    if not asked.strip():
        with pytest.raises(BadRow, match="no shared prompt"):
            _read(value, "pairs")
        return
    row = _read(value, "pairs")
    assert row.rejected is not None
    assert _said(row) == [("user", asked), ("assistant", good)]
    assert _said(row.rejected) == [("user", asked), ("assistant", wrong)]
    assert row.joined
    assert row.plain


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"chosen": [YES], "rejected": [NO]}, "no shared prompt"),
        ({"chosen": "Yes.", "rejected": "No."}, "no shared prompt"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": [NO]}, "wrong type"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": ""}, "empty"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": 7}, "wrong type"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [USER]}, "no assistant turn"),
        ({"prompt": [], "chosen": [YES], "rejected": [NO]}, "empty"),
        ({"images": [None], **PAIRS["text"]}, "null"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_bad(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as raised:
        _read(value, "pairs")
    assert raised.value.reason == reason


@pytest.mark.parametrize("label", [2, "good", [True], -1, 0.5])
def test_a_mark_is_true_or_false(label: Any) -> None:
    with pytest.raises(BadRow, match="wrong type"):
        _read({**MARKED["text"], "label": label}, "kto")


def test_columns_that_are_missing_are_named() -> None:
    with pytest.raises(
        DataError,
        match=r"format pairs needs the columns chosen and rejected; .*"
        r"Formats that fit: .*prompt_completion",
    ):
        detect_format([MARKED["text"]], wanted="pairs")
    with pytest.raises(
        DataError, match="format kto needs the columns prompt, completion and label"
    ):
        detect_format([PAIRS["text"]], wanted="kto")
