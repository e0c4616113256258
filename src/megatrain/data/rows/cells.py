"""The cells of a row, checked: text, lists, JSON. An unusable value is a BadRow.

The reasons are few and short, so that counts by reason stay readable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.data.rows.skipped import BadRow
from megatrain.errors import listing

OTHER_SHAPE = "other shape"
IS_NULL = "null"
WRONG_TYPE = "wrong type"
EMPTY = "empty"
NO_ANSWER = "no assistant turn"
UNKNOWN_ROLE = "unknown role"
NOT_TEXT = "lone surrogate"
MEDIA = "image, audio or video"
BAD_WEIGHT = "weight other than 0 or 1"
NOT_AN_ANSWER = "train on a turn that is not the assistant's"

TOOL_COLUMNS = ("tools", "functions")
"""Columns with the tools that a conversation may call."""

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}


def kind_of(value: object) -> str:
    """Return the name of a value's type for messages."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else "another type")


def decoded(value: object) -> object:
    """Return a cell's value, which csv can only hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_text(value: object, name: str, *, allow_empty: bool = False) -> str:
    """Return text that can be encoded."""
    if value is None:
        raise BadRow(IS_NULL, name)
    if not isinstance(value, str):
        raise BadRow(WRONG_TYPE, f"{name} is {kind_of(value)}, not text")
    if not allow_empty and not value.strip():
        raise BadRow(EMPTY, name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(NOT_TEXT, f"{name}, character {error.start}") from None
    return value


def read_cell(value: Mapping[str, Any], name: str) -> object:
    """Return a cell that must be there and not be null."""
    if name not in value:
        columns = listing([str(key)[:40] for key in value], most=3)
        raise BadRow(OTHER_SHAPE, f"no {name}, but {columns or 'nothing'}")
    if value[name] is None:
        raise BadRow(IS_NULL, name)
    return value[name]


def optional_text(value: Mapping[str, Any], name: str) -> str:
    """Return a cell's text; an empty one where it is missing or null."""
    cell = value.get(name)
    return "" if cell is None else read_text(cell, name, allow_empty=True)


def read_list(value: object, name: str) -> Sequence[Any]:
    """Return a list, also from JSON text."""
    value = decoded(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRow(WRONG_TYPE, f"{name} is {kind_of(value)}, not a list")
    return value


def read_mapping(value: object, name: str) -> Mapping[str, Any]:
    """Return an object, also from JSON text."""
    value = decoded(value)
    if not isinstance(value, Mapping):
        raise BadRow(WRONG_TYPE, f"{name} is {kind_of(value)}, not an object")
    return value


def read_flag(value: object, name: str) -> bool:
    """Return a truth value, also from 0, 1 or text."""
    value = decoded(value.lower() if isinstance(value, str) else value)
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow(WRONG_TYPE, f"{name} is {kind_of(value)}, not true or false")
    return bool(value)


def check_encodable(value: object, name: str) -> None:
    """Raise BadRow if a text somewhere inside `value` cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRow(NOT_TEXT, name) from None
    except (ValueError, RecursionError, TypeError) as error:
        raise BadRow(WRONG_TYPE, f"{name}: {error}"[:120]) from None
