"""Which of the known shapes the rows of a file have.

Detected from the columns of the first rows, by majority, and printed: what was guessed is never
silent. Rows of another shape are counted as such later on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from megatrain.errors import DataError, listing

Kind = Literal["messages", "alpaca", "pair", "text"]

FIRST_ROWS = 100
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "answer"),
)
_TURN_KEYS = (("role", "content"), ("from", "value"), ("role", "value"), ("from", "content"))
_KNOWN = (
    "messages or conversations (role, content | from, value); instruction, input, output; "
    "prompt, completion; query, response; question, answer; text"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The shape of a row. `str()` is what the user is shown."""

    kind: Kind
    columns: tuple[str, ...]
    """messages: the one column. pair: prompt and answer. text: the one column."""
    turn_keys: tuple[str, str] = ("role", "content")
    """Keys of role and content in a turn, for `messages`."""

    def __str__(self) -> str:
        if self.kind == "messages":
            return f"detected: {self.columns[0]} ({', '.join(self.turn_keys)})"
        if self.kind == "pair":
            return f"detected: {' / '.join(self.columns)}"
        if self.kind == "alpaca":
            return f"detected: alpaca ({', '.join(self.columns)})"
        return f"detected: text ({self.columns[0]})"


def detect(values: Iterable[object], where: str = "the data") -> Format:
    """Return the shape that most of the first rows have.

    Raises DataError if none of them has a shape we know; it names the columns seen.
    """
    first = list(islice(values, FIRST_ROWS))
    shapes = Counter(shape for value in first if (shape := format_of(value)) is not None)
    if not shapes:
        columns = {str(key) for value in first if isinstance(value, Mapping) for key in value}
        raise DataError(
            f"{where}: no known format in the first {len(first)} rows; their columns are "
            f"{listing(columns) or '(none)'}. Known are: {_KNOWN}."
        )
    return shapes.most_common(1)[0][0]


def format_of(value: object) -> Format | None:
    """Return the shape of one row, or None if it is none of ours."""
    if not isinstance(value, Mapping):
        return None
    columns = {key for key, cell in value.items() if cell is not None}
    for name in ("messages", "conversations", "conversation"):
        if name in columns:
            return Format(kind="messages", columns=(name,), turn_keys=_turn_keys(value[name]))
    if {"instruction", "output"} <= columns:
        known = ("instruction", "input", "output", "system", "history")
        # Optional columns may be null in some rows; the name must not change with them.
        return Format(kind="alpaca", columns=tuple(name for name in known if name in value))
    for pair in _PAIRS:
        if columns.issuperset(pair):
            return Format(kind="pair", columns=pair)
    if "text" in columns:
        return Format(kind="text", columns=("text",))
    return None


def decoded_turns(value: object) -> object:
    """Return the turns of a cell, which csv can only hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _turn_keys(turns: object) -> tuple[str, str]:
    turns = decoded_turns(turns)
    first = turns[0] if isinstance(turns, list) and turns else None
    for keys in _TURN_KEYS:
        if isinstance(first, Mapping) and all(first.get(key) is not None for key in keys):
            return keys
    return _TURN_KEYS[0]
