"""The formats that rows can have: how each is recognised, and how it becomes turns.

Everything about a format is one entry of FORMATS; its name is also in config/data_settings.py.
The format of a file is detected from the columns of the first rows, by majority, and always
printed. Rows of another format are counted later. A user who names the format gets only rows of
that format, and there must be some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from megatrain.config.data_settings import FormatName
from megatrain.data.rows.cells import (
    EMPTY,
    WRONG_TYPE,
    decoded,
    optional_text,
    read_cell,
    read_list,
    read_text,
)
from megatrain.data.rows.messages import Turn, read_turn
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError, listing

FIRST_ROWS = 100
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "answer"),
)
_TURN_KEYS = (("role", "content"), ("from", "value"), ("role", "value"), ("from", "content"))
_MESSAGES = ("messages", "conversations", "conversation")
_ALPACA = ("instruction", "input", "output", "system", "history")
_KNOWN = (
    "messages or conversations (role, content | from, value); instruction, input, output; "
    "prompt, completion; query, response; question, answer; text"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The format of a row, with the columns that were found. `str()` is what the user is shown."""

    kind: str
    """A key of FORMATS."""
    columns: tuple[str, ...]
    turn_keys: tuple[str, str] = ("role", "content")
    """Keys of role and content in a turn, for `messages`."""
    is_given: bool = field(default=False, repr=False, compare=False)
    """Whether the user named it. It is not part of the rows' fingerprint."""

    def __str__(self) -> str:
        how = "given" if self.is_given else "detected"
        return f"{how}: {FORMATS[self.kind].describe(self)}"

    @property
    def is_text(self) -> bool:
        """Whether a row is one column of text, and not a conversation."""
        return FORMATS[self.kind].turns is None

    def turns(self, value: Mapping[str, Any]) -> tuple[int, list[Turn]]:
        """Return the number of turns that are a prompt, and all turns. Raises BadRow."""
        read = FORMATS[self.kind].turns
        assert read is not None, "text has no turns"
        return read(value, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """Everything about one format."""

    name: FormatName
    """The user's name for it."""
    columns: str
    """The columns that it needs, in words."""
    find: Callable[[Mapping[str, Any], set[str]], Iterator[Format]]
    """Yields the forms of it that a row has, given the columns that are not null."""
    describe: Callable[[Format], str]
    turns: Callable[[Mapping[str, Any], Format], tuple[int, list[Turn]]] | None
    """Returns the number of turns that are a prompt, and all turns. None: the row is text."""


def detect_format(
    values: Iterable[object], where: str = "the data", wanted: FormatName = "auto"
) -> Format:
    """Return the format that most of the first rows have, of those that `wanted` names.

    Raises DataError if none of them has it; it names the columns seen, and the format they have.
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
    shapes = Counter(shape for value in first for shape in formats_of(value))
    for shape, _ in shapes.most_common():
        if FORMATS[shape.kind].name == wanted:
            return replace(shape, is_given=True)
    needed = next(spec.columns for spec in FORMATS.values() if spec.name == wanted)
    fitting = listing({FORMATS[shape.kind].name for shape in shapes})
    raise DataError(
        f"{where}: format {wanted} needs the columns {needed}; those of the first "
        f"{len(first)} rows are {_columns(first)}. "
        + (f"Formats that fit: {fitting}." if fitting else f"Known formats: {_KNOWN}.")
    )


def _columns(first: Iterable[object]) -> str:
    columns = {str(key) for value in first if isinstance(value, Mapping) for key in value}
    return listing(columns) or "(none)"


def format_of(value: object) -> Format | None:
    """Return the format of one row, or None if it has no known format."""
    return next(formats_of(value), None)


def formats_of(value: object) -> Iterator[Format]:
    """Yield every format that one row has, the likeliest first."""
    if isinstance(value, Mapping):
        columns = {key for key, cell in value.items() if cell is not None}
        for spec in FORMATS.values():
            yield from spec.find(value, columns)


# Messages.


def _find_messages(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    for name in _MESSAGES:
        if name in columns:
            yield Format(kind="messages", columns=(name,), turn_keys=_turn_keys(value[name]))


def _turn_keys(turns: object) -> tuple[str, str]:
    turns = decoded(turns)
    first = turns[0] if isinstance(turns, list) and turns else None
    for keys in _TURN_KEYS:
        if isinstance(first, Mapping) and all(first.get(key) is not None for key in keys):
            return keys
    return _TURN_KEYS[0]


def _message_turns(value: Mapping[str, Any], shape: Format) -> tuple[int, list[Turn]]:
    return 0, _with_system(value, _turns(read_cell(value, shape.columns[0]), shape))


def _turns(value: object, shape: Format) -> list[Turn]:
    turns = read_list(value, shape.columns[0])
    if not turns:
        raise BadRow(EMPTY, f"{shape.columns[0]} has no turns")
    return [read_turn(turn, number, shape.turn_keys) for number, turn in enumerate(turns)]


def _with_system(value: Mapping[str, Any], turns: list[Turn]) -> list[Turn]:
    """Prepend the system prompt that some tools keep in its own column."""
    system = optional_text(value, "system") if turns[0].message["role"] != "system" else ""
    return [_turn("system", system), *turns] if system.strip() else turns


def _turn(role: str, content: str) -> Turn:
    return Turn(message={"role": role, "content": content})


# Alpaca.


def _find_alpaca(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    if {"instruction", "output"} <= columns:
        # Optional columns may be null in some rows; the name must not change with them.
        yield Format(kind="alpaca", columns=tuple(name for name in _ALPACA if name in value))


def _alpaca_turns(value: Mapping[str, Any], shape: Format) -> tuple[int, list[Turn]]:
    turns = []
    if system := optional_text(value, "system"):
        turns.append(_turn("system", system))
    for number, pair in enumerate(_history(value.get("history"))):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRow(WRONG_TYPE, f"history {number} is not a pair")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append(_turn(role, read_text(text, f"history {number}")))
    instruction = read_text(read_cell(value, "instruction"), "instruction")
    extra = optional_text(value, "input")
    turns.append(_turn("user", f"{instruction}\n{extra}" if extra else instruction))
    turns.append(_turn("assistant", read_text(read_cell(value, "output"), "output")))
    return 0, turns


def _history(value: object) -> Sequence[Any]:
    return () if value is None or value == "" else read_list(value, "history")


# Prompt and completion.


def _find_pair(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    for pair in _PAIRS:
        if columns.issuperset(pair):
            yield Format(kind="pair", columns=pair)


def _pair_turns(value: Mapping[str, Any], shape: Format) -> tuple[int, list[Turn]]:
    prompt, answer = (read_cell(value, name) for name in shape.columns)
    if isinstance(prompt, list) and isinstance(answer, list):
        before, after = _turns(prompt, shape), _turns(answer, shape)
    else:
        asked, given = shape.columns
        before = [_turn("user", read_text(prompt, asked))]
        after = [_turn("assistant", read_text(answer, given))]
    before = _with_system(value, before)
    return len(before), [*before, *after]


# Text.


def _find_text(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    if "text" in columns:
        yield Format(kind="text", columns=("text",))


FORMATS: Mapping[str, FormatSpec] = {
    "messages": FormatSpec(
        name="messages",
        columns=" or ".join(_MESSAGES),
        find=_find_messages,
        describe=lambda shape: f"{shape.columns[0]} ({', '.join(shape.turn_keys)})",
        turns=_message_turns,
    ),
    "alpaca": FormatSpec(
        name="alpaca",
        columns="instruction and output",
        find=_find_alpaca,
        describe=lambda shape: f"alpaca ({', '.join(shape.columns)})",
        turns=_alpaca_turns,
    ),
    "pair": FormatSpec(
        name="prompt_completion",
        columns=", or ".join(" and ".join(pair) for pair in _PAIRS),
        find=_find_pair,
        describe=lambda shape: " / ".join(shape.columns),
        turns=_pair_turns,
    ),
    "text": FormatSpec(
        name="text",
        columns="text",
        find=_find_text,
        describe=lambda shape: f"text ({shape.columns[0]})",
        turns=None,
    ),
}
