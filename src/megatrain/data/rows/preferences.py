"""Rows that prefer: a prompt with a chosen and a rejected answer, or an answer with its mark.

The prompt is a column, or the beginning that chosen and rejected share: their first turns up to the
first that differs, or their first characters. Then the space before the first difference belongs
to the answers, as most tokenizers join it with the word behind it. All of this is as in TRL.

Laws (tests/data/rows/test_preferences.py)
    1. The same preference in any shape gives the same rows.
    2. Of answers that begin with the prompt, the prompt is the part that TRL finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.data.rows.cells import WRONG_TYPE, read_cell, read_flag, read_text
from megatrain.data.rows.messages import Turn, read_turn
from megatrain.data.rows.skipped import BadRow
from megatrain.data.rows.turns import (
    ALPACA,
    TALKS,
    alpaca_prompt,
    plain_turn,
    read_turns,
    turn_keys,
    with_system,
)

NO_PROMPT = "no shared prompt"
CHOSEN, REJECTED = "chosen", "rejected"
MARKS = ("label", "kto_tag")
"""Names of the column that says whether a completion is desirable."""
_INSTRUCTION = "instruction"
_PROMPTS = ("prompt", "question", "query", *TALKS, _INSTRUCTION)
_COMPLETIONS = ("completion", "response", "answer", "output")

_Found = tuple[tuple[str, ...], tuple[str, str]]
"""Columns, and the keys of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and what may follow it."""

    prompt: tuple[Turn, ...]
    answers: tuple[tuple[Turn, ...], ...]
    """Chosen and rejected; of a marked completion, that alone."""
    used: tuple[str, ...]
    """Columns that were read."""
    desirable: bool | None = None
    """The mark of a completion."""
    is_plain: bool = False
    """Prompt and answers are plain text."""
    is_joined: bool = False
    """The prompt was cut off the answers: no turn of a chat template is to come between them."""


def find_pairs(value: Mapping[str, Any], columns: set[str]) -> Iterator[_Found]:
    """Yield the columns of a row with two answers: the prompt's, if there is one, and theirs."""
    if {CHOSEN, REJECTED} <= columns:
        asked = next((name for name in _PROMPTS if name in columns), None)
        found = (CHOSEN, REJECTED) if asked is None else (asked, CHOSEN, REJECTED)
        yield found, turn_keys(value[CHOSEN])


def find_marked(value: Mapping[str, Any], columns: set[str]) -> Iterator[_Found]:
    """Yield the columns of a row with a mark: the prompt's, the completion's and its own.

    A conversation is both prompt and completion.
    """
    mark = next((name for name in MARKS if name in columns), None)
    asked = next((name for name in _PROMPTS if name in columns), None)
    given = next((name for name in _COMPLETIONS if name in columns), None)
    if mark is None or asked is None:
        return
    if given is not None:
        yield (asked, given, mark), turn_keys(value[given])
    elif asked in TALKS:
        yield (asked, mark), turn_keys(value[asked])


def read_pair(
    value: Mapping[str, Any], columns: Sequence[str], keys: tuple[str, str]
) -> Preference:
    """Return the prompt with both answers. Raises BadRow."""
    chosen, rejected = (_answer(value, name, keys) for name in (CHOSEN, REJECTED))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if len(columns) == len((CHOSEN, REJECTED)):
            return _joined(chosen, rejected)
        prompt, is_plain = _prompt(value, columns[0])
        said = tuple((plain_turn("assistant", text),) for text in (chosen, rejected))
        return _asked(value, prompt, said, is_plain, columns)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise BadRow(WRONG_TYPE, f"one of {CHOSEN} and {REJECTED} is text, the other is not")
    answers = (tuple(chosen), tuple(rejected))
    if len(columns) > len((CHOSEN, REJECTED)):
        prompt, is_text = _prompt(value, columns[0])
        if not _repeat(answers, prompt, is_text):
            return _asked(value, prompt, answers, False, columns)
        if is_text and not all(prompt[0] in answer for answer in answers):
            columns = columns[1:]  # said in other words than in the answers, which are complete
    at = _shared(chosen, rejected)
    if at == 0:
        raise BadRow(NO_PROMPT, f"{CHOSEN} and {REJECTED} differ in their first turn")
    left = tuple(answer[at:] for answer in answers)
    return _asked(value, chosen[:at], left, False, columns)


def _repeat(answers: Sequence[Sequence[Turn]], prompt: list[Turn], is_text: bool) -> bool:
    """Return whether the answers are conversations that begin with the prompt.

    They may have a system prompt before it that the prompt lacks.
    """
    if is_text:
        return any(answer[0].message["role"] != "assistant" for answer in answers)
    return all(
        list(answer[at : at + len(prompt)]) == prompt
        for answer in answers
        for at in [int(answer[0].message["role"] == "system" != prompt[0].message["role"])]
    )


def read_marked(
    value: Mapping[str, Any], columns: Sequence[str], keys: tuple[str, str]
) -> Preference:
    """Return the prompt with its completion and mark. Raises BadRow."""
    *asked, mark = columns
    desirable = read_flag(read_cell(value, mark), mark)
    if len(asked) == 1:
        turns = read_turns(read_cell(value, asked[0]), asked[0], keys)
        if len(turns) < 2:
            raise BadRow(NO_PROMPT, f"{asked[0]} has one turn")
        return _asked(value, turns[:-1], (tuple(turns[-1:]),), False, columns, desirable)
    prompt, is_plain = _prompt(value, asked[0])
    given = _answer(value, asked[1], keys)
    is_text = isinstance(given, str)
    answer = [plain_turn("assistant", given)] if isinstance(given, str) else given
    return _asked(value, prompt, (tuple(answer),), is_plain and is_text, columns, desirable)


def _asked(
    value: Mapping[str, Any],
    prompt: Sequence[Turn],
    answers: tuple[tuple[Turn, ...], ...],
    is_plain: bool,
    columns: Sequence[str],
    desirable: bool | None = None,
) -> Preference:
    before = tuple(with_system(value, list(prompt)))
    beside = ALPACA if columns[0] == _INSTRUCTION else ("system",)
    return Preference(
        prompt=before,
        answers=answers,
        used=(*columns, *beside),
        desirable=desirable,
        is_plain=is_plain and len(before) == 1,
    )


def _joined(chosen: str, rejected: str) -> Preference:
    """Return texts that begin with their prompt, cut where they differ."""
    at = _shared(chosen, rejected)
    if chosen[at] != rejected[at] and chosen[:at].endswith(" "):
        at -= 1
    if not chosen[:at].strip():
        raise BadRow(NO_PROMPT, f"{CHOSEN} and {REJECTED} differ from the beginning")
    answers = tuple((plain_turn("assistant", text[at:]),) for text in (chosen, rejected))
    return Preference(
        prompt=(plain_turn("user", chosen[:at]),),
        answers=answers,
        used=(CHOSEN, REJECTED),
        is_plain=True,
        is_joined=True,
    )


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first parts are the same; each has at least one more."""
    most = min(len(one), len(other)) - 1
    return next((at for at in range(most) if one[at] != other[at]), most)


def _prompt(value: Mapping[str, Any], name: str) -> tuple[list[Turn], bool]:
    """Return the turns of a prompt, and whether it is plain text."""
    if name == _INSTRUCTION:
        return alpaca_prompt(value), False
    cell = read_cell(value, name)
    if name not in TALKS and not isinstance(cell, list):
        return [plain_turn("user", read_text(cell, name))], True
    return read_turns(cell, name, turn_keys(cell)), False


def _answer(value: Mapping[str, Any], name: str, keys: tuple[str, str]) -> str | list[Turn]:
    """Return an answer as text or as turns; one turn may stand without a list."""
    cell = read_cell(value, name)
    if isinstance(cell, Mapping):
        return [read_turn(cell, 0, keys)]
    if isinstance(cell, list):
        return read_turns(cell, name, keys)
    return read_text(cell, name)
