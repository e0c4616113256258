"""One canonical row, whatever the file's shape: a list of messages, or plain text.

Laws (tests/data/test_rows.py)
    1. The same conversation in any shape gives the same row.
    2. Whatever a file holds, the answer is a Row or a BadRow with one of the reasons below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.data.formats import Format, decoded_turns
from megatrain.data.skipped import BadRow

Message = dict[str, str]
"""`role` (system, user, assistant or tool) and `content`."""

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip

OTHER_SHAPE = "other shape"
IS_NULL = "null"
WRONG_TYPE = "wrong type"
EMPTY = "empty"
NO_ANSWER = "no assistant turn"
UNKNOWN_ROLE = "unknown role"
NOT_TEXT = "lone surrogate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Either a conversation or a text."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    plain: bool = False
    """True: a prompt and its answer, which need no chat template to be joined."""


def canonical(value: object, shape: Format) -> Row:
    """Return the row that `value` means. Raises BadRow, and nothing else, for what means none."""
    if isinstance(value, BadRow):
        raise value
    if value is None:
        raise BadRow(IS_NULL, "the row")
    if not isinstance(value, Mapping):
        raise BadRow(WRONG_TYPE, f"the row is {_kind(value)}")
    if shape.kind == "text":
        return Row(text=_string(_cell(value, shape.columns[0]), shape.columns[0]))
    if shape.kind == "messages":
        turns = _with_system(value, _turns(_cell(value, shape.columns[0]), shape))
    elif shape.kind == "pair":
        turns = _pair(value, shape)
    else:
        turns = _alpaca(value)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise BadRow(NO_ANSWER)
    plain = shape.kind == "pair" and isinstance(value[shape.columns[0]], str)
    return Row(messages=tuple(turns), plain=plain)


def _with_system(value: Mapping[str, Any], turns: list[Message]) -> list[Message]:
    """Put the system prompt that some tools keep in a column of its own in front."""
    system = _optional(value, "system") if turns[0]["role"] != "system" else ""
    return [_message("system", system), *turns] if system.strip() else turns


def _pair(value: Mapping[str, Any], shape: Format) -> list[Message]:
    prompt, answer = (_cell(value, name) for name in shape.columns)
    if isinstance(prompt, list) and isinstance(answer, list):
        return [*_turns(prompt, shape), *_turns(answer, shape)]
    texts = (
        _string(cell, name) for cell, name in zip((prompt, answer), shape.columns, strict=True)
    )
    return [_message(role, text) for role, text in zip(("user", "assistant"), texts, strict=True)]


def _turns(value: object, shape: Format) -> list[Message]:
    turns = decoded_turns(value)
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadRow(WRONG_TYPE, f"{shape.columns[0]} is {_kind(turns)}, not a list")
    if not turns:
        raise BadRow(EMPTY, f"{shape.columns[0]} has no turns")
    return [_turn(turn, number, shape.turn_keys) for number, turn in enumerate(turns)]


def _turn(turn: object, number: int, keys: tuple[str, str]) -> Message:
    if not isinstance(turn, Mapping):
        reason = IS_NULL if turn is None else WRONG_TYPE
        raise BadRow(reason, f"turn {number} is {_kind(turn)}")
    role_key, content_key = keys
    for key in keys:
        if key not in turn:
            raise BadRow(OTHER_SHAPE, f"turn {number} has no {key}")
    role = _string(turn[role_key], f"{role_key} of turn {number}")
    if role.strip().lower() not in ROLES:
        raise BadRow(UNKNOWN_ROLE, f"turn {number}: {role[:40]}")
    name = ROLES[role.strip().lower()]
    content = turn[content_key]
    # An empty system prompt, or a tool that returned nothing, is no fault of the row.
    allow_empty = name in ("system", "tool")
    return _message(name, _string(content, f"{content_key} of turn {number}", allow_empty))


def _alpaca(value: Mapping[str, Any]) -> list[Message]:
    turns = []
    if system := _optional(value, "system"):
        turns.append(_message("system", system))
    for number, pair in enumerate(_history(value.get("history"))):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRow(WRONG_TYPE, f"history {number} is not a pair")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append(_message(role, _string(text, f"history {number}")))
    instruction = _string(_cell(value, "instruction"), "instruction")
    extra = _optional(value, "input")
    turns.append(_message("user", f"{instruction}\n\n{extra}" if extra else instruction))
    turns.append(_message("assistant", _string(_cell(value, "output"), "output")))
    return turns


def _history(value: object) -> Sequence[Any]:
    value = decoded_turns(value)
    if value is None or value == "":
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(WRONG_TYPE, f"history is {_kind(value)}, not a list")
    return value


def _cell(value: Mapping[str, Any], name: str) -> object:
    if name not in value:
        raise BadRow(OTHER_SHAPE, f"no {name}")
    if value[name] is None:
        raise BadRow(IS_NULL, name)
    return value[name]


def _optional(value: Mapping[str, Any], name: str) -> str:
    cell = value.get(name)
    return "" if cell is None else _string(cell, name, allow_empty=True)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _string(value: object, name: str, allow_empty: bool = False) -> str:
    if value is None:
        raise BadRow(IS_NULL, name)
    if not isinstance(value, str):
        raise BadRow(WRONG_TYPE, f"{name} is {_kind(value)}, not text")
    if not allow_empty and not value.strip():
        raise BadRow(EMPTY, name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(NOT_TEXT, f"{name}, character {error.start}") from None
    return value


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a truth value",
        type(None): "null",
    }
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no text")
