"""Detection of the format that the rows of a file have.

Detected from the columns of the first rows, by majority, and always printed. Rows of another shape
are counted later. A user who names the shape gets only rows of that shape, and there must be some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from megatrain.data.rows.cells import decoded
from megatrain.errors import DataError, listing

ShapeKind = Literal["messages", "alpaca", "pair", "text"]
FormatName = Literal["auto", "messages", "alpaca", "prompt_completion", "text"]
"""The user's name for a shape."""

FIRST_ROWS = 100
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "answer"),
)
_TURN_KEYS = (("role", "content"), ("from", "value"), ("role", "value"), ("from", "content"))
_MESSAGES = ("messages", "conversations", "conversation")
_KINDS: dict[str, ShapeKind] = {
    "messages": "messages", "alpaca": "alpaca", "prompt_completion": "pair", "text": "text",
}  # fmt: skip
_COLUMNS: dict[ShapeKind, str] = {
    "messages": " or ".join(_MESSAGES),
    "alpaca": "instruction and output",
    "pair": ", or ".join(" and ".join(pair) for pair in _PAIRS),
    "text": "text",
}
_KNOWN = (
    "messages or conversations (role, content | from, value); instruction, input, output; "
    "prompt, completion; query, response; question, answer; text"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The shape of a row. `str()` is what the user is shown."""

    kind: ShapeKind
    columns: tuple[str, ...]
    """messages: the one column. pair: prompt and answer. text: the one column."""
    turn_keys: tuple[str, str] = ("role", "content")
    """Keys of role and content in a turn, for `messages`."""
    is_told: bool = field(default=False, repr=False, compare=False)
    """Whether the user named it. It is not part of the rows' fingerprint."""

    def __str__(self) -> str:
        how = "told" if self.is_told else "detected"
        if self.kind == "messages":
            return f"{how}: {self.columns[0]} ({', '.join(self.turn_keys)})"
        if self.kind == "pair":
            return f"{how}: {' / '.join(self.columns)}"
        if self.kind == "alpaca":
            return f"{how}: alpaca ({', '.join(self.columns)})"
        return f"{how}: text ({self.columns[0]})"


def detect_format(
    values: Iterable[object], where: str = "the data", wanted: FormatName = "auto"
) -> Format:
    """Return the shape that most of the first rows have, of those that `wanted` names.

    Raises DataError if none of them has it; it names the columns seen, and the shape they have.
    """
    first = list(islice(values, FIRST_ROWS))
    if wanted != "auto":
        return _told(first, where, wanted)
    shapes = Counter(shape for value in first if (shape := format_of(value)) is not None)
    if not shapes:
        raise DataError(
            f"{where}: no known format in the first {len(first)} rows; their columns are "
            f"{_columns(first)}. Known formats: {_KNOWN}."
        )
    return shapes.most_common(1)[0][0]


def _told(first: list[object], where: str, wanted: str) -> Format:
    kind = _KINDS[wanted]
    shapes = Counter(shape for value in first for shape in formats_of(value))
    for shape, _ in shapes.most_common():
        if shape.kind == kind:
            return replace(shape, is_told=True)
    names = {kind: name for name, kind in _KINDS.items()}
    fitting = listing({names[shape.kind] for shape in shapes})
    raise DataError(
        f"{where}: format {wanted} needs the columns {_COLUMNS[kind]}; those of the first "
        f"{len(first)} rows are {_columns(first)}. "
        + (f"Formats that fit: {fitting}." if fitting else f"Known formats: {_KNOWN}.")
    )


def _columns(first: Iterable[object]) -> str:
    columns = {str(key) for value in first if isinstance(value, Mapping) for key in value}
    return listing(columns) or "(none)"


def format_of(value: object) -> Format | None:
    """Return the shape of one row, or None if it has no known shape."""
    return next(formats_of(value), None)


def formats_of(value: object) -> Iterator[Format]:
    """Yield every shape that one row has, the likeliest first."""
    if not isinstance(value, Mapping):
        return
    columns = {key for key, cell in value.items() if cell is not None}
    for name in _MESSAGES:
        if name in columns:
            yield Format(kind="messages", columns=(name,), turn_keys=_turn_keys(value[name]))
    if {"instruction", "output"} <= columns:
        known = ("instruction", "input", "output", "system", "history")
        # Optional columns may be null in some rows; the name must not change with them.
        yield Format(kind="alpaca", columns=tuple(name for name in known if name in value))
    for pair in _PAIRS:
        if columns.issuperset(pair):
            yield Format(kind="pair", columns=pair)
    if "text" in columns:
        yield Format(kind="text", columns=("text",))


def _turn_keys(turns: object) -> tuple[str, str]:
    turns = decoded(turns)
    first = turns[0] if isinstance(turns, list) and turns else None
    for keys in _TURN_KEYS:
        if isinstance(first, Mapping) and all(first.get(key) is not None for key in keys):
            return keys
    return _TURN_KEYS[0]
