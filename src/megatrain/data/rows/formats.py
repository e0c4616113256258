"""The formats that rows can have: how each is recognized, and how it becomes turns.

Everything about a format is one entry of FORMATS; its name is also in choices.py.
The format of a file is detected from the columns of the first rows, by majority, and always
printed. Rows of another format are counted later. A user who names the format gets only rows of
that format, and there must be some. Columns with other names than ours are found by columns.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatrain.choices import PreferenceFormat, RowFormat
from megatrain.data.rows.cells import OTHER_SHAPE, UNKNOWN_ROLE, read_cell, read_text
from megatrain.data.rows.messages import Turn
from megatrain.data.rows.preferences import (
    Preference,
    find_marked,
    find_pairs,
    read_marked,
    read_pair,
)
from megatrain.data.rows.skipped import BadRow
from megatrain.data.rows.turns import (
    ALPACA,
    TALKS,
    Names,
    alpaca_prompt,
    plain_turn,
    read_turns,
    turn_keys,
    with_system,
)

_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "answer"),
)
_PREFERENCES: Mapping[str, PreferenceFormat] = {"pairs": "pairs", "kto": "kto"}
KNOWN = (
    "messages or conversations (role, content | from, value); instruction, input, output; "
    "prompt, completion; query, response; question, answer; text; prompt, chosen, rejected; "
    "input_ids"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The format of a row, with the columns that were found. `str()` is what the user is shown."""

    kind: str
    """A key of FORMATS."""
    columns: tuple[str, ...]
    turn_keys: tuple[str, str] = ("role", "content")
    """Keys of role and content in a turn, for `messages`."""
    names: Names | None = None
    """The file's names for columns and roles; None: they are ours."""
    is_given: bool = field(default=False, repr=False, compare=False)
    """Whether the config named it, or its loss. It is not part of the rows' fingerprint."""

    def __str__(self) -> str:
        described = FORMATS[self.kind].describe(self)
        if self.names is not None and self.names.columns:
            read = (f"{name} = {'.'.join(path)}" for path, name in self.names.columns)
            described += f", columns {', '.join(read)}"
        return described if self.is_given else f"detected: {described}"

    @property
    def is_conversation(self) -> bool:
        """Whether a row has turns, and is not one text or tokens."""
        spec = FORMATS[self.kind]
        return spec.turns is not None or spec.preference is not None

    @property
    def preferences(self) -> PreferenceFormat | None:
        """Which preferences the rows have; None: they have none."""
        return _PREFERENCES.get(self.kind)

    def preference(self, value: Mapping[str, Any]) -> Preference:
        """Return a row's prompt and answers. Raises BadRow."""
        read = FORMATS[self.kind].preference
        assert read is not None, "the row prefers nothing"
        return read(value, self.columns, self.turn_keys)

    def turns(self, value: Mapping[str, Any]) -> tuple[int, list[Turn]]:
        """Return the number of turns that are a prompt, and all turns. Raises BadRow."""
        read = FORMATS[self.kind].turns
        assert read is not None, "it has no turns"
        return read(value, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """Everything about one format."""

    name: RowFormat
    """The user's name for it."""
    columns: str
    """The columns that it needs, in words."""
    find: Callable[[Mapping[str, Any], set[str]], Iterator[Format]]
    """Yields the forms of it that a row has, given the columns that are not null."""
    describe: Callable[[Format], str]
    turns: Callable[[Mapping[str, Any], Format], tuple[int, list[Turn]]] | None
    """Returns the number of turns that are a prompt, and all turns. None: there are no such."""
    preference: Callable[[Mapping[str, Any], Sequence[str], tuple[str, str]], Preference] | None = (
        None
    )
    """Returns a prompt and its answers, given the columns and the keys of a turn."""


def usual_format(first: Sequence[object], wanted: RowFormat = "auto") -> Format | None:
    """Return the format that most rows have by the usual names of columns, or None."""
    if wanted == "auto":
        shapes = Counter(shape for value in first if (shape := format_of(value)) is not None)
        return shapes.most_common(1)[0][0] if shapes else None
    shapes = Counter(shape for value in first for shape in formats_of(value))
    for shape, _ in shapes.most_common():
        if FORMATS[shape.kind].name == wanted:
            return replace(shape, is_given=True)
    return None


def format_of(value: object) -> Format | None:
    """Return the format of one row, or None if it has no known format."""
    return next(formats_of(value), None)


def formats_of(value: object) -> Iterator[Format]:
    """Yield every format that one row has, the likeliest first."""
    if isinstance(value, Mapping):
        columns = {key for key, cell in value.items() if cell is not None}
        for spec in FORMATS.values():
            yield from spec.find(value, columns)


def has_turns(first: Sequence[object], shape: Format) -> bool:
    """Return whether not all of the rows fail because of the keys or the roles of their turns."""
    if not shape.is_conversation:
        return True
    for value in first:
        try:
            if isinstance(value, Mapping):
                shape.preference(value) if shape.preferences else shape.turns(value)
        except BadRow as bad:
            if bad.reason in (OTHER_SHAPE, UNKNOWN_ROLE) and bad.detail.startswith("turn "):
                continue
        return True
    return False


# Messages.


def _find_messages(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    for name in TALKS:
        if name in columns:
            yield Format(kind="messages", columns=(name,), turn_keys=turn_keys(value[name]))


def _message_turns(value: Mapping[str, Any], shape: Format) -> tuple[int, list[Turn]]:
    return 0, with_system(value, _turns(read_cell(value, shape.columns[0]), shape))


def _turns(value: object, shape: Format) -> list[Turn]:
    return read_turns(value, shape.columns[0], shape.turn_keys)


# Alpaca.


def _find_alpaca(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    if {"instruction", "output"} <= columns:
        # Optional columns may be null in some rows; the name must not change with them.
        yield Format(kind="alpaca", columns=tuple(name for name in ALPACA if name in value))


def _alpaca_turns(value: Mapping[str, Any], shape: Format) -> tuple[int, list[Turn]]:
    answer = read_text(read_cell(value, "output"), "output")
    return 0, [*alpaca_prompt(value), plain_turn("assistant", answer)]


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
        before = [plain_turn("user", read_text(prompt, asked))]
        after = [plain_turn("assistant", read_text(answer, given))]
    before = with_system(value, before)
    return len(before), [*before, *after]


# Text.


def _find_text(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    if "text" in columns:
        yield Format(kind="text", columns=("text",))


# Preferences.


def _find_preferences(
    kind: PreferenceFormat,
    find: Callable[..., Iterator[Any]],
    value: Mapping[str, Any],
    columns: set[str],
) -> Iterator[Format]:
    for found, keys in find(value, columns):
        yield Format(kind=kind, columns=found, turn_keys=keys)


# Tokens.


def _find_tokens(value: Mapping[str, Any], columns: set[str]) -> Iterator[Format]:
    if "input_ids" in columns:
        yield Format(kind="tokens", columns=("input_ids",))


FORMATS: Mapping[str, FormatSpec] = {
    "tokens": FormatSpec(
        name="tokens",
        columns="input_ids",
        find=_find_tokens,
        describe=lambda shape: f"tokens ({shape.columns[0]})",
        turns=None,
    ),
    "messages": FormatSpec(
        name="messages",
        columns=" or ".join(TALKS),
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
    # Last: rows of another format may have these columns beside those that they are read by.
    "pairs": FormatSpec(
        name="pairs",
        columns="chosen and rejected",
        find=partial(_find_preferences, "pairs", find_pairs),
        describe=lambda shape: f"pairs ({', '.join(shape.columns)})",
        turns=None,
        preference=read_pair,
    ),
    "kto": FormatSpec(
        name="kto",
        columns="prompt, completion and label",
        find=partial(_find_preferences, "kto", find_marked),
        describe=lambda shape: f"kto ({', '.join(shape.columns)})",
        turns=None,
        preference=read_marked,
    ),
}
