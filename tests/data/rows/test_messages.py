"""Turns: every key of a turn reaches the chat template, in one form, or the turn says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.data.rows import cells
from megatrain.data.rows.messages import read_turn
from megatrain.data.rows.skipped import BadRow

KEYS = ("role", "content")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1]}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
_TEXT = json.dumps(CALL["function"]["arguments"])  # type: ignore[index]


def _message(turn: Any, keys: tuple[str, str] = KEYS) -> Any:
    return read_turn(turn, 0, keys).message


@pytest.mark.parametrize(
    "turn",
    [
        CALLING,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": None, "tool_calls": [json.dumps(CALL)]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": _TEXT},
                                              "type": "function"}]},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": _TEXT}]},
        {"role": "assistant", "function_call": {"name": "add", "arguments": _TEXT}},
        {"role": "function_call", "content": json.dumps({"name": "add", "arguments": _TEXT})},
        {"role": "tool_call", "content": json.dumps([CALL])},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None, "weight": None},
    ],
    ids=["whole", "no content", "JSON text", "JSON calls", "arguments as text", "flat",
         "before tool_calls", "function_call turn", "tool_call turn", "nulls"],
)  # fmt: skip
def test_a_tool_call_is_the_same_in_every_form(turn: Any) -> None:
    assert _message(turn) == CALLING


def test_a_second_role_or_content_says_the_same_or_the_turn_is_bad() -> None:
    keys = ("from", "value")
    turn = {"from": "human", "value": "hello"}
    for beside in ({"role": "user"}, {"content": "hello"}, {"content": None}):
        assert _message({**turn, **beside}, keys) == _message(turn, keys)
    for beside in ({"role": "assistant"}, {"content": "goodbye"}):
        with pytest.raises(BadRow, match=f"another {next(iter(beside))} beside them"):
            _message({**turn, **beside}, keys)


def test_parallel_calls_keep_their_order_and_ids() -> None:
    calls = [{"id": str(n), **CALL} for n in range(3)]
    assert _message({**CALLING, "tool_calls": calls})["tool_calls"] == calls
    flat = [{"id": str(n), "name": "add", "arguments": {}} for n in range(3)]
    found = _message({**CALLING, "tool_calls": flat})["tool_calls"]
    assert [call["id"] for call in found] == ["0", "1", "2"]
    assert found[0]["function"] == {"name": "add", "arguments": {}}


@pytest.mark.parametrize("arguments", ["", "2 and 2", "[1, 2]", "3", '{"a": '])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"name": "add", "arguments": arguments}
    (found,) = _message({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert found["function"]["arguments"] == arguments


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_the_names_that_templates_read(key: str) -> None:
    message = _message({"role": "assistant", "content": "4", key: "2 + 2"})
    assert message["reasoning_content"] == message["thinking"] == message[key] == "2 + 2"


def test_an_empty_thought_hides_no_other() -> None:
    turn = {"role": "assistant", "content": "4", "reasoning_content": "", "thinking": "2 + 2"}
    message = _message(turn)
    assert message["reasoning_content"] == message["thinking"] == "2 + 2"


def test_two_thoughts_of_a_turn_are_refused() -> None:
    turn = {"role": "assistant", "content": "4", "reasoning_content": "a", "thinking": "b"}
    with pytest.raises(BadRow, match="other thoughts in reasoning_content and thinking"):
        _message(turn)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b", "image_url": None}]
    assert _message({"role": "user", "content": parts}) == {"role": "user", "content": "a b"}


def test_what_is_neither_text_nor_a_medium_is_refused_by_name() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "file", "file": "x"}]
    with pytest.raises(BadRow) as refused:
        _message({"role": "user", "content": parts})
    assert refused.value.reason == cells.WRONG_TYPE
    assert refused.value.detail == "a part of content of turn 0 has the type file, not text"


def test_other_keys_reach_the_template_and_are_named() -> None:
    turn = read_turn(
        {"from": "tool", "value": "4", "name": "add", "tool_call_id": "7", "speaker": "x"},
        0,
        ("from", "value"),
    )
    assert turn.message == {
        "role": "tool", "content": "4", "name": "add", "tool_call_id": "7", "speaker": "x",
    }  # fmt: skip
    assert turn.others == ("speaker",)


@pytest.mark.parametrize(
    ("given", "is_trained"),
    [({}, True), ({"weight": 1}, True), ({"weight": 0}, False), ({"weight": 0.0}, False),
     ({"train": True}, True), ({"train": False}, False), ({"weight": 1, "train": False}, False)],
)  # fmt: skip
def test_a_turn_says_whether_it_is_trained(given: Any, is_trained: bool) -> None:
    turn = read_turn({"role": "assistant", "content": "4", **given}, 0, KEYS)
    assert turn.is_trained is is_trained
    assert turn.message == {"role": "assistant", "content": "4"}
    assert turn.others == ()


def test_deep_values_are_a_bad_row() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRow):
        read_turn({"role": "user", "content": "x", "deep": deep}, 0, KEYS)
