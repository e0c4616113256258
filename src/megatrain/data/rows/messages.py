"""One turn of a conversation, normalized for the chat template.

Keys that a template reads keep their names; keys that files write in several ways become one:

    role          system, user, assistant or tool
    content       text; text parts are joined; null where an assistant turn only calls tools, as
                  some templates look for that; a list of parts in rows with media (media.py)
    tool_calls    OpenAI's form, arguments as a mapping: `{"function": {"name", "arguments"}}`
    reasoning     under `reasoning_content` and `thinking`, whichever of three names the file uses

A key that is null is absent: Arrow gives every turn the keys of all turns. Any other key reaches
the template as it is, and is counted. `weight` and `train` are ours: they control whether the
assistant turn is trained.

Laws (tests/data/rows/test_messages.py)
    1. The same turn in any form gives the same message.
    2. No key is lost: it is in the message, it is ours, or the turn is a BadRow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.data.rows.cells import (
    BAD_WEIGHT,
    IS_NULL,
    NOT_AN_ANSWER,
    OTHER_SHAPE,
    UNKNOWN_ROLE,
    WRONG_TYPE,
    check_encodable,
    decoded,
    kind_of,
    read_list,
    read_mapping,
    read_text,
)
from megatrain.data.rows.media import Medium, is_media, read_part
from megatrain.data.rows.skipped import BadRow

Message = Mapping[str, Any]
"""`role` and `content`, and other keys that the template may read."""

CALL = "function_call"
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant", "ai": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
    "tool_response": "tool",
    "function_call": CALL, "tool_call": CALL,
}  # fmt: skip
REASONING = ("reasoning_content", "thinking", "reasoning")
_READ = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", *REASONING}
_OURS = {"weight", "train", "train_detail"}
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message, and the flags from its keys."""

    message: Message
    is_trained: bool = True
    """False: the row asks not to train this answer."""
    others: tuple[str, ...] = ()
    """Keys that we do not know; they are in the message."""
    parts: tuple[str | Medium, ...] = ()
    """Words and media in their order; of a turn without media, none."""


def read_turn(turn: object, number: int, keys: tuple[str, str]) -> Turn:
    """Return the normalized turn; `keys` name its role and content. Raises BadRow."""
    if not isinstance(turn, Mapping):
        reason = IS_NULL if turn is None else WRONG_TYPE
        raise BadRow(reason, f"turn {number} is {kind_of(turn)}")
    role_key, content_key = keys
    if role_key not in turn:
        raise BadRow(OTHER_SHAPE, f"turn {number} has no {role_key}")
    role = read_text(turn[role_key], f"{role_key} of turn {number}")
    if role.strip().lower() not in ROLES:
        raise BadRow(UNKNOWN_ROLE, f"turn {number}: {role[:40]}")
    role = ROLES[role.strip().lower()]
    if role != CALL and len(turn) == 2 and content_key in turn:
        content, parts = _content(turn, content_key, role, number, may_be_null=False)
        return Turn(message={"role": role, "content": content}, parts=parts)
    given = {k: v for k, v in turn.items() if v is not None and k not in (*keys, *_OURS)}
    if role == CALL:
        role, given["tool_calls"] = "assistant", _call_turn(turn.get(content_key), number)
        turn = {**turn, content_key: None}
    if role == "assistant":
        _put_calls(given, number)
    content, parts = _content(
        turn, content_key, role, number, may_be_null=bool(given.get("tool_calls"))
    )
    _put_reasoning(given, number)
    check_encodable(given, f"turn {number}")
    _drop_doubles(given, role, content, number, keys)
    return Turn(
        message={"role": role, "content": content, **given},
        is_trained=_is_trained(turn, role, number),
        others=tuple(str(key) for key in given if key not in _READ),
        parts=parts,
    )


def _drop_doubles(
    given: dict[str, Any], role: str, content: str | None, number: int, keys: tuple[str, str]
) -> None:
    """Forget `role` and `content` beside keys of other names, if they say the same."""
    same_role = ROLES.get(str(given.pop("role", role)).strip().lower()) == role
    if not same_role or given.pop("content", content) != content:
        other = "content" if same_role else "role"
        raise BadRow(
            OTHER_SHAPE, f"turn {number} has {' and '.join(keys)}, and another {other} beside them"
        )


def _content(
    turn: Mapping[str, Any], key: str, role: str, number: int, *, may_be_null: bool
) -> tuple[str | None, tuple[str | Medium, ...]]:
    """Return the words of a turn, and its parts if there are media among them."""
    name = f"{key} of turn {number}"
    value = turn.get(key)
    if value is None and may_be_null:
        return None, ()
    if key not in turn:
        raise BadRow(OTHER_SHAPE, f"turn {number} has no {key}")
    parts: tuple[str | Medium, ...] = ()
    if isinstance(value, list):
        parts = tuple(_part(part, name) for part in value)
        value = "".join(part for part in parts if isinstance(part, str))
        if all(isinstance(part, str) for part in parts):
            parts = ()
    # An empty system prompt, or a tool that returned nothing, is allowed; so is a medium alone.
    may_be_empty = may_be_null or bool(parts) or role in ("system", "tool")
    text = read_text(value, name, allow_empty=may_be_empty)
    return text if text.strip() or not may_be_null else None, parts


def _part(part: object, name: str) -> str | Medium:
    """Return the words of one part, or its medium."""
    if not isinstance(part, Mapping):
        raise BadRow(WRONG_TYPE, f"a part of {name} is {kind_of(part)}")
    kind = str(part.get("type"))
    if kind in _TEXT_PARTS:
        return read_text(part.get("text"), f"a part of {name}", allow_empty=True)
    if is_media(part):
        return read_part(part, name)
    raise BadRow(WRONG_TYPE, f"a part of {name} has the type {kind[:40]}, not text")


def _put_calls(given: dict[str, Any], number: int) -> None:
    """Bring the calls of an assistant turn into one form, under `tool_calls`."""
    old = given.pop("function_call", None)  # OpenAI's form before tool_calls
    calls = read_list(given.pop("tool_calls", ()), f"tool_calls of turn {number}")
    if old is not None:
        calls = [*calls, old]
    if calls:
        given["tool_calls"] = [_call(call, number) for call in calls]


def _call_turn(value: object, number: int) -> Sequence[Any]:
    """Return the calls of a `function_call` turn, whose content is one call or a list of them."""
    value = decoded(value)
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list) or not value:
        raise BadRow(WRONG_TYPE, f"turn {number} is a function_call, but not the JSON of a call")
    return value


def _call(value: object, number: int) -> dict[str, Any]:
    name = f"a tool call of turn {number}"
    call = dict(read_mapping(value, name))
    if call.get("function") is None:
        call.pop("function", None)
        outer: dict[str, Any] = {key: call.pop(key) for key in ("id", "type") if key in call}
        call = {"type": "function", **outer, "function": call}
    function = dict(read_mapping(call["function"], name))
    read_text(function.get("name"), f"the name of {name}")
    return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(value: object) -> object:
    """Return arguments as a mapping for templates; text that is not a JSON object stays."""
    if value is None:
        return {}
    found = decoded(value)
    return found if isinstance(found, Mapping) else value


def _put_reasoning(given: dict[str, Any], number: int) -> None:
    """Give a thought the two names that templates read, whichever of three the file uses."""
    for key in REASONING:
        if key in given:
            given[key] = read_text(given[key], f"{key} of turn {number}", allow_empty=True)
    thoughts = [given[key] for key in REASONING if key in given]
    said = dict.fromkeys(thought for thought in thoughts if thought.strip())
    if len(said) > 1:
        names = " and ".join(key for key in REASONING if given.get(key, "").strip())
        raise BadRow(OTHER_SHAPE, f"turn {number} has other thoughts in {names}")
    if thoughts:
        found = next(iter(said), thoughts[0])
        given |= dict.fromkeys(("reasoning_content", "thinking"), found)


def _is_trained(turn: Mapping[str, Any], role: str, number: int) -> bool:
    weight, train = turn.get("weight"), turn.get("train")
    if turn.get("train_detail") is not None:
        raise BadRow(BAD_WEIGHT, f"turn {number} has train_detail, which is not supported")
    if weight is not None and not (isinstance(weight, int | float) and weight in (0, 1)):
        raise BadRow(BAD_WEIGHT, f"weight of turn {number}: {weight!r:.40}")
    if train is not None and not isinstance(train, bool):
        raise BadRow(WRONG_TYPE, f"train of turn {number} is {kind_of(train)}, not true or false")
    if train and role != "assistant":
        raise BadRow(NOT_AN_ANSWER, f"turn {number}: {role}")
    return train is not False and weight != 0
