"""One canonical row, whatever the file's shape: a list of messages, plain text, or tokens.

Laws (tests/data/rows/test_rows.py)
    1. The same conversation in any shape gives the same row.
    2. Any contents give a Row, or a BadRow with one of the reasons of cells.py.
    3. Every column of a row is used, or named as unused.
    4. A row of pairs is two conversations with one prompt (tests/data/rows/test_preferences.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.data.rows.cells import (
    IS_NULL,
    NO_ANSWER,
    TOOL_COLUMNS,
    WRONG_TYPE,
    check_encodable,
    decoded,
    kind_of,
    read_cell,
    read_list,
    read_mapping,
    read_text,
)
from megatrain.data.rows.formats import Format
from megatrain.data.rows.media import COLUMNS, Medium, as_content, put_in_place, read_columns
from megatrain.data.rows.messages import Message, Turn
from megatrain.data.rows.skipped import BadRow
from megatrain.data.rows.tokens import TOKEN_COLUMNS, read_token_row
from megatrain.data.rows.turns import turns_in_text

RESERVED = (
    "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
"""Variables that the renderer passes to a chat template; no argument of a row replaces them."""

_KWARGS = "chat_template_kwargs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A conversation, a text, or tokens that somebody else has made."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    token_ids: Sequence[int] = ()
    trained_runs: tuple[tuple[int, int], ...] = ()
    """Begin and end of each run of trained tokens, of a row that is tokens."""
    plain: bool = False
    """Whether it is a prompt and its answer, which can be joined without a chat template."""
    num_prompt: int = 0
    """Number of first messages that are a prompt, whose answers are not trained."""
    untrained: frozenset[int] = frozenset()
    """Messages that the row marks as not trained."""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    """Keys of messages that we do not know; the template gets them."""
    unused: tuple[str, ...] = ()
    """Columns that nothing reads."""
    joined: bool = False
    """Whether a prompt and its answer are one text, which a chat template would tear apart."""
    rejected: Row | None = None
    """The same prompt with the answer that is rejected; this row has the chosen one."""
    desirable: bool | None = None
    """The mark of a completion; None: it has none."""
    media: tuple[Medium, ...] = ()
    """Images and sounds, in the order of their places in the messages."""

    @property
    def may_split(self) -> bool:
        """Whether each part of it is a row as good as it."""
        return bool(self.text) or len(self.token_ids) > 0


def columns_of(value: object) -> Mapping[str, Any]:
    """Return a raw row, which has columns. Raises BadRow."""
    if isinstance(value, BadRow):
        raise value
    if value is None:
        raise BadRow(IS_NULL, "the row")
    if not isinstance(value, Mapping):
        raise BadRow(WRONG_TYPE, f"the row is {kind_of(value)}")
    return value


def canonical(value: object, shape: Format) -> Row:
    """Return the row of a raw value. Raises BadRow, and nothing else."""
    value = columns_of(value)
    if shape.names is not None:
        value = shape.names.read(value)
    if shape.is_conversation:
        value = _with_turns(value, shape)
        return _conversation(value, shape) if shape.preferences is None else _row(value, shape)
    if shape.kind == "tokens":
        ids, runs = read_token_row(value)
        return Row(token_ids=ids, trained_runs=runs, unused=_unused(value, TOKEN_COLUMNS))
    (column,) = shape.columns
    return Row(text=read_text(read_cell(value, column), column), unused=_unused(value, (column,)))


def _with_turns(value: Mapping[str, Any], shape: Format) -> Mapping[str, Any]:
    """Return a row with the turns that its texts have as JSON.

    After a prompt that is text, a completion that is JSON is text too.
    """
    found = {name: turns_in_text(value.get(name)) for name in shape.columns}
    turns = {name: cell for name, cell in found.items() if cell is not None}
    first = shape.columns[0]
    if shape.preferences != "pairs" and isinstance(value.get(first), str) and first not in turns:
        return value
    return {**value, **turns}


def _conversation(value: Mapping[str, Any], shape: Format) -> Row:
    num_prompt, turns = shape.turns(value)
    used = (*shape.columns, "system")
    plain = num_prompt == 1 and isinstance(value[shape.columns[0]], str)
    return _talk(value, num_prompt, turns, used, plain=plain)


def _row(value: Mapping[str, Any], shape: Format) -> Row:
    """Return a row of preferences: its first answer, with the second beside it."""
    read = shape.preference(value)
    rows = [
        _talk(value, len(read.prompt), [*read.prompt, *answer], read.used, plain=read.is_plain)
        for answer in read.answers
    ]
    rows = [replace(row, joined=read.is_joined) for row in rows]
    rejected = rows[1] if len(rows) > 1 else None
    return replace(rows[0], rejected=rejected, desirable=read.desirable)


def _talk(
    value: Mapping[str, Any],
    num_prompt: int,
    turns: Sequence[Turn],
    used: Sequence[str],
    *,
    plain: bool,
) -> Row:
    """Return these turns with what else the row has for the template."""
    if not any(turn.message["role"] == "assistant" for turn in turns[num_prompt:]):
        raise BadRow(NO_ANSWER)
    return replace(
        row_extras(value, turns),
        plain=plain,
        num_prompt=num_prompt,
        untrained=frozenset(n for n, turn in enumerate(turns) if not turn.is_trained),
        unused=_unused(value, (*used, *TOOL_COLUMNS, _KWARGS, *COLUMNS)),
    )


def row_extras(value: Mapping[str, Any], turns: Sequence[Turn]) -> Row:
    """Return turns with the tools and arguments that a row has for the template. Raises BadRow."""
    messages, media = _with_media(turns, read_columns(value))
    return Row(
        messages=messages,
        media=media,
        tools=_tools(value),
        template_kwargs=_template_kwargs(value),
        others=tuple(dict.fromkeys(key for turn in turns for key in turn.others)),
    )


def _with_media(
    turns: Sequence[Turn], given: Sequence[Medium]
) -> tuple[tuple[Message, ...], tuple[Medium, ...]]:
    """Return the messages, of a row with media with parts as their contents, and its media."""
    messages = tuple(turn.message for turn in turns)
    if not given and not any(turn.parts for turn in turns):
        return messages, ()
    said = [
        turn.parts or (None if turn.message["content"] is None else (turn.message["content"],))
        for turn in turns
    ]
    filled, media = put_in_place(said, [message["role"] for message in messages], given)
    return tuple(
        message if parts is None else {**message, "content": as_content(parts)}
        for message, parts in zip(messages, filled, strict=True)
    ), media


def _tools(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the row's tools; a bare function, the old form, becomes a tool."""
    given = [tool for name in TOOL_COLUMNS for tool in _optional_list(value, name)]
    found = [read_mapping(tool, "a tool") for tool in given]
    found = [
        {"type": "function", "function": tool}
        if "name" in tool and not {"type", "function"} & tool.keys()
        else tool
        for tool in found
    ]
    if found:
        check_encodable(found, "tools")
    return tuple(found)


def _optional_list(value: Mapping[str, Any], name: str) -> Sequence[Any]:
    cell = value.get(name)
    return () if cell is None or cell == "" else read_list(cell, name)


def _template_kwargs(value: Mapping[str, Any]) -> Mapping[str, Any]:
    cell = decoded(value.get(_KWARGS))
    if cell is None or cell == "":
        return {}
    kwargs = read_mapping(cell, _KWARGS)
    for name in kwargs:
        if name in RESERVED:
            raise BadRow(WRONG_TYPE, f"{_KWARGS} has {name}, which no row can set")
    check_encodable(kwargs, _KWARGS)
    return {name: given for name, given in kwargs.items() if given is not None}


def _unused(value: Mapping[str, Any], used: Sequence[str]) -> tuple[str, ...]:
    cells = ((str(name), cell) for name, cell in value.items() if name not in used)
    return tuple(
        name
        for name, cell in cells
        if cell is not None and not (isinstance(cell, str | list) and not cell)
    )
