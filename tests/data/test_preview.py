"""Rows shown to people: trained tokens can be told without color, and characters stay whole."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from megatrain.data.preview import MAX_TOKENS, SHOWN_TOKENS, card_lines, show_rows


class _Bytes:
    """A tokenizer whose tokens are bytes, so that a character may be several."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class _OneDocument:
    row_starts = np.array([0, 1])

    def __init__(self, prompt: str, answer: str) -> None:
        self._ids = np.frombuffer((prompt + answer).encode(), np.uint8).astype(np.int32)
        self._num_prompt = len(prompt.encode())
        self.lengths = np.array([len(self._ids)])

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        return self._ids, np.arange(len(self._ids)) >= self._num_prompt


def _shown(prompt: str, answer: str, **settings: object) -> str:
    whole = bool(settings.pop("whole", False))
    console = Console(file=io.StringIO(), width=60, **settings)  # type: ignore[arg-type]
    show_rows(_OneDocument(prompt, answer), _Bytes(), 1, console, whole=whole)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_trained_tokens_are_marked_where_nothing_is_colored() -> None:
    shown = _shown("<user>How far? ", "42 [km] away\n<end>")
    assert shown == (
        "trained tokens are between {+ and +}\n"
        "--- document 0: 33 tokens, 18 trained\n"
        "<user>How far? {+42 [km] away\n<end>+}\n"
    )
    assert "{+42" in _shown("How far? ", "42", force_terminal=True, no_color=True)


def test_on_a_terminal_they_are_underlined_too() -> None:
    shown = _shown("How far? ", "42", force_terminal=True, color_system="standard")
    assert "{+" not in shown
    assert "\x1b[1;4;32m42\x1b[0m" in shown  # bold, underlined, green
    assert "\x1b[2mHow far? \x1b[0m" in shown


def test_a_character_of_several_tokens_is_whole() -> None:
    assert "{+größer, 火+}" in _shown("Wie groß? ", "größer, 火")


def test_long_lines_are_not_broken() -> None:
    assert "a" * 100 + "{+" + "b" * (MAX_TOKENS - 100) + "+}\n" in _shown("a" * 100, "b" * 300)


def test_a_long_prompt_is_cut_in_the_middle_and_the_answer_is_not() -> None:
    shown = _shown("<" + "a" * 998 + ">", "42 km<end>")
    half = SHOWN_TOKENS[False] // 2
    cut = f" ... {1000 - 2 * half} more tokens ... "
    assert "<" + "a" * (half - 1) + cut + "a" * (half - 1) + ">{+42 km<end>+}\n" in shown


def test_a_long_answer_shows_where_it_begins_and_ends() -> None:
    shown = _shown("How far? ", "from" + "b" * 992 + "end<>")
    assert "How far? {+frombbb" in shown
    assert "bbbend<>+}\n" in shown
    assert f" ... {1001 - SHOWN_TOKENS[True]} more tokens ... " in shown


def test_whole_rows_are_not_cut() -> None:
    assert "a" * 1000 + "{+" + "b" * 1000 + "+}\n" in _shown("a" * 1000, "b" * 1000, whole=True)


def test_control_sequences_of_a_row_are_shown_and_not_sent() -> None:
    row = "hi \x1b[31mRED\x1b]0;pwned\x07", "ok\x1b[2J\u202e"
    assert "hi \\x1b[31mRED\\x1b]0;pwned\\x07{+ok\\x1b[2J\\u202e+}" in _shown(*row)
    on_a_terminal = _shown(*row, force_terminal=True, color_system="standard")
    assert "\x1b]0;" not in on_a_terminal
    assert "\x1b[2J" not in on_a_terminal
    assert "\x1b[1;4;32m" in on_a_terminal  # the color is ours


def test_a_card_has_three_lengths_and_counts_in_words() -> None:
    percentiles = {str(p): p for p in (1, 5, 25, 50, 75, 95, 99)}
    card = {
        "source": "a.jsonl", "format": "detected: text", "rows": 1, "kept": 1, "documents": 1,
        "tokens": 10, "trained_tokens": 5, "percentiles": percentiles, "longest": 100,
        "truncated": 0, "split": 0, "bad": {}, "bad_places": {}, "dropped": {},
        "dropped_places": {}, "notes": {}, "turns_without_end": 0, "unread": {},
        "passed_through": {}, "unused_columns": {},
    }  # fmt: skip
    _, rows, tokens = card_lines(card)
    assert rows == "  1 row read, 1 kept, 1 document"
    assert tokens.endswith("; lengths 5% 5, 50% 50, 95% 95, longest 100")
