"""Turns from the cells of a row: lists of messages, and the columns of alpaca."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

TURN_KEYS = (("role", "content"), ("from", "value"), ("role", "value"), ("from", "content"))
ALPACA = ("instruction", "input", "output", "system", "history")


def turn_keys(turns: object) -> tuple[str, str]:
    """Return the keys of role and content in a turn, or in the first of several."""
    turns = decoded(turns)
    first = turns[0] if isinstance(turns, list) and turns else turns
    for keys in TURN_KEYS:
        if isinstance(first, Mapping) and all(first.get(key) is not None for key in keys):
            return keys
    return TURN_KEYS[0]


def plain_turn(role: str, content: str) -> Turn:
    """Return a turn of text alone."""
    return Turn(message={"role": role, "content": content})


def read_turns(value: object, name: str, keys: tuple[str, str]) -> list[Turn]:
    """Return the turns of a column. Raises BadRow."""
    turns = read_list(value, name)
    if not turns:
        raise BadRow(EMPTY, f"{name} has no turns")
    return [read_turn(turn, number, keys) for number, turn in enumerate(turns)]


def with_system(value: Mapping[str, Any], turns: list[Turn]) -> list[Turn]:
    """Prepend the system prompt that some tools keep in its own column."""
    system = optional_text(value, "system") if turns[0].message["role"] != "system" else ""
    return [plain_turn("system", system), *turns] if system.strip() else turns


def alpaca_prompt(value: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of instruction, input, system and history. Raises BadRow."""
    turns = []
    if system := optional_text(value, "system"):
        turns.append(plain_turn("system", system))
    for number, pair in enumerate(_history(value.get("history"))):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRow(WRONG_TYPE, f"history {number} is not a pair")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append(plain_turn(role, read_text(text, f"history {number}")))
    instruction = read_text(read_cell(value, "instruction"), "instruction")
    extra = optional_text(value, "input")
    turns.append(plain_turn("user", f"{instruction}\n{extra}" if extra else instruction))
    return turns


def _history(value: object) -> Sequence[Any]:
    return () if value is None or value == "" else read_list(value, "history")
