"""Turns from the cells of a row: lists of messages, and the columns of alpaca.

Rows with other names than ours are brought to ours first, by `Names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
from megatrain.data.rows.messages import ROLES, Turn, read_turn
from megatrain.data.rows.skipped import BadRow

TURN_KEYS = (
    ("role", "content"),
    ("from", "value"),
    ("role", "value"),
    ("from", "content"),
    *product(("role", "from", "speaker", "author", "sender"), ("text", "message")),
    *product(("speaker", "author", "sender"), ("content", "value")),
)
"""Keys of role and content in a turn, the most common ones first."""
TALKS = ("messages", "conversations", "conversation")
ALPACA = ("instruction", "input", "output", "system", "history")


_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of a file for what has another name here."""

    columns: tuple[tuple[tuple[str, ...], str], ...] = ()
    """The path of a cell in a row, like ("body", "messages"), and the column that it is here."""
    role: str | None = None
    """The key of a turn's role, if it is an odd one; else it is found."""
    content: str | None = None
    roles: tuple[tuple[str, str], ...] = ()
    """A role of the file, in lower case, and ours."""
    keyed: bool = False
    """Whether a turn has its role as a key, and a question and its answer may be one turn."""

    def read(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row under our names. A column whose name is taken from it gets another."""
        row = dict(value)
        for path, _ in self.columns:
            row.pop(path[0], None)
        for _, name in self.columns:
            if name in row:
                row[f"{name} (of the file)"] = row.pop(name)
        for path, name in self.columns:
            cell = value.get(path[0], _ABSENT) if len(path) == 1 else _cell_at(value, path)
            if cell is not _ABSENT:
                row[name] = cell
        if self.role or self.content or self.roles or self.keyed:
            for name in (*TALKS, "prompt", "completion", "chosen", "rejected"):
                if name in row:
                    row[name] = self._turns(row[name])
        return row

    def _turns(self, cell: object) -> object:
        if isinstance(cell, str) and not cell.lstrip().startswith("["):
            return cell
        turns = decoded(cell)
        if isinstance(turns, Mapping):
            return self._turn(turns)
        if not isinstance(turns, list):
            return cell
        if self.keyed:
            return [one for turn in turns for one in by_role(turn) or [turn]]
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: object) -> object:
        if not isinstance(turn, Mapping):
            return turn
        found = turn_keys(turn)
        keys = {self.role or found[0]: "role", self.content or found[1]: "content"}
        turn = {keys.get(key, key): part for key, part in turn.items()}
        role = turn.get("role")
        if isinstance(role, str):
            turn["role"] = dict(self.roles).get(role.strip().lower(), role)
        return turn


_KEYED = {
    "system": "system",
    **dict.fromkeys(("user", "human", "question", "input", "prompt"), "user"),
    **dict.fromkeys(("assistant", "gpt", "answer", "output", "bot"), "assistant"),
}
"""Keys of turns that are roles, in the order of a conversation."""


def by_role(turn: object) -> list[dict[str, Any]]:
    """Return the turns of `{"human": "Hi", "assistant": "Hello"}`; none if it is not such."""
    if not isinstance(turn, Mapping) or not all(str(key).lower() in _KEYED for key in turn):
        return []
    said = {_KEYED[str(key).lower()]: part for key, part in turn.items() if part}
    order = dict.fromkeys(_KEYED.values())
    return [{"role": role, "content": said[role]} for role in order if role in said]


def _cell_at(value: object, path: Sequence[str]) -> object:
    """Return the cell at the end of a path through objects and lists, or _ABSENT."""
    for part in path:
        value = decoded(value)
        if isinstance(value, Mapping):
            value = value.get(part, _ABSENT)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


def turn_keys(turns: object) -> tuple[str, str]:
    """Return the keys of role and content in a turn, or in the first of several."""
    turns = decoded(turns)
    first = turns[0] if isinstance(turns, list) and turns else turns
    for keys in TURN_KEYS:
        if isinstance(first, Mapping) and all(first.get(key) is not None for key in keys):
            return keys
    return TURN_KEYS[0]


def turns_in_text(cell: object) -> list[Any] | None:
    """Return the turns that a text has as JSON, as tables keep them; None: it is another text."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return None
    turns = decoded(cell)
    if not isinstance(turns, list) or not turns:
        return None
    role, content = turn_keys(turns)
    for turn in turns:
        if not isinstance(turn, Mapping) or not {content, "tool_calls"} & turn.keys():
            return None
        if str(turn.get(role)).strip().lower() not in ROLES:
            return None
    return turns


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
