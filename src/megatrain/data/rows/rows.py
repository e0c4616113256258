"""One canonical row, whatever the file's shape: a list of messages, or plain text.

Laws (tests/data/rows/test_rows.py)
    1. The same conversation in any shape gives the same row.
    2. Any contents give a Row, or a BadRow with one of the reasons of cells.py.
    3. Every column of a row is used, or named as unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.rows.cells import (
    EMPTY,
    IS_NULL,
    MEDIA,
    NO_ANSWER,
    OTHER_SHAPE,
    WRONG_TYPE,
    check_encodable,
    decoded,
    kind_of,
    read_list,
    read_mapping,
    read_text,
)
from megatrain.data.rows.formats import Format
from megatrain.data.rows.messages import Message, Turn, read_turn
from megatrain.data.rows.skipped import BadRow

RESERVED = (
    "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
"""Variables that the renderer passes to a chat template; no argument of a row replaces them."""

_MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
_TOOLS, _FUNCTIONS, _KWARGS = "tools", "functions", "chat_template_kwargs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Either a conversation or a text."""

    messages: tuple[Message, ...] = ()
    text: str = ""
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


def canonical(value: object, shape: Format) -> Row:
    """Return the row of a raw value. Raises BadRow, and nothing else."""
    if isinstance(value, BadRow):
        raise value
    if value is None:
        raise BadRow(IS_NULL, "the row")
    if not isinstance(value, Mapping):
        raise BadRow(WRONG_TYPE, f"the row is {kind_of(value)}")
    if shape.kind == "text":
        text = read_text(_cell(value, shape.columns[0]), shape.columns[0])
        return Row(text=text, unused=_unused(value, shape.columns))
    return _conversation(value, shape)


def _conversation(value: Mapping[str, Any], shape: Format) -> Row:
    for name in _MEDIA_COLUMNS:
        if value.get(name):
            raise BadRow(MEDIA, f"column {name}")
    num_prompt, turns = _turns_of(value, shape)
    if not any(turn.message["role"] == "assistant" for turn in turns[num_prompt:]):
        raise BadRow(NO_ANSWER)
    used = (*shape.columns, "system", _TOOLS, _FUNCTIONS, _KWARGS)
    return Row(
        messages=tuple(turn.message for turn in turns),
        plain=num_prompt == 1 and isinstance(value[shape.columns[0]], str),
        num_prompt=num_prompt,
        untrained=frozenset(n for n, turn in enumerate(turns) if not turn.is_trained),
        tools=_tools(value),
        template_kwargs=_template_kwargs(value),
        others=tuple(dict.fromkeys(key for turn in turns for key in turn.others)),
        unused=_unused(value, used),
    )


def _turns_of(value: Mapping[str, Any], shape: Format) -> tuple[int, list[Turn]]:
    """Return the number of turns that are the prompt of a prompt and completion, and all turns."""
    if shape.kind == "alpaca":
        return 0, _alpaca(value)
    if shape.kind == "messages":
        return 0, _with_system(value, _turns(_cell(value, shape.columns[0]), shape))
    prompt, answer = _pair(value, shape)
    prompt = _with_system(value, prompt)
    return len(prompt), [*prompt, *answer]


def _with_system(value: Mapping[str, Any], turns: list[Turn]) -> list[Turn]:
    """Prepend the system prompt that some tools keep in its own column."""
    system = _optional(value, "system") if turns[0].message["role"] != "system" else ""
    return [_said("system", system), *turns] if system.strip() else turns


def _pair(value: Mapping[str, Any], shape: Format) -> tuple[list[Turn], list[Turn]]:
    prompt, answer = (_cell(value, name) for name in shape.columns)
    if isinstance(prompt, list) and isinstance(answer, list):
        return _turns(prompt, shape), _turns(answer, shape)
    said = [
        _said(role, read_text(cell, name))
        for role, cell, name in zip(
            ("user", "assistant"), (prompt, answer), shape.columns, strict=True
        )
    ]
    return said[:1], said[1:]


def _turns(value: object, shape: Format) -> list[Turn]:
    turns = read_list(value, shape.columns[0])
    if not turns:
        raise BadRow(EMPTY, f"{shape.columns[0]} has no turns")
    return [read_turn(turn, number, shape.turn_keys) for number, turn in enumerate(turns)]


def _alpaca(value: Mapping[str, Any]) -> list[Turn]:
    turns = []
    if system := _optional(value, "system"):
        turns.append(_said("system", system))
    for number, pair in enumerate(_history(value.get("history"))):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRow(WRONG_TYPE, f"history {number} is not a pair")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append(_said(role, read_text(text, f"history {number}")))
    instruction = read_text(_cell(value, "instruction"), "instruction")
    extra = _optional(value, "input")
    turns.append(_said("user", f"{instruction}\n{extra}" if extra else instruction))
    turns.append(_said("assistant", read_text(_cell(value, "output"), "output")))
    return turns


def _history(value: object) -> Sequence[Any]:
    return () if value is None or value == "" else read_list(value, "history")


def _tools(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the row's tools; a bare function, the old form, becomes a tool."""
    given = (*_optional_list(value, _TOOLS), *_optional_list(value, _FUNCTIONS))
    found = [read_mapping(tool, "a tool") for tool in given]
    found = [
        {"type": "function", "function": tool}
        if "name" in tool and not {"type", "function"} & tool.keys()
        else tool
        for tool in found
    ]
    if found:
        check_encodable(found, _TOOLS)
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
    return tuple(name for name, cell in cells if cell is not None and cell != "" and cell != [])


def _cell(value: Mapping[str, Any], name: str) -> object:
    if name not in value:
        raise BadRow(OTHER_SHAPE, f"no {name}")
    if value[name] is None:
        raise BadRow(IS_NULL, name)
    return value[name]


def _optional(value: Mapping[str, Any], name: str) -> str:
    cell = value.get(name)
    return "" if cell is None else read_text(cell, name, allow_empty=True)


def _said(role: str, content: str) -> Turn:
    return Turn(message={"role": role, "content": content})
