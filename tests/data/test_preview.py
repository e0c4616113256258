"""Rows shown to people: trained tokens can be told without color, and characters stay whole."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from megatrain.data.preview import SHOWN_TOKENS, show_rows


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


def test_a_long_answer_shows_where_it_begins_and_ends() -> None:
    shown = _shown("How far? ", "from" + "b" * 992 + "end<>")
    assert "How far? {+frombbb" in shown
    assert "bbbend<>+}\n" in shown
    assert f" ... {1001 - SHOWN_TOKENS[True]} more tokens ... " in shown


def test_control_sequences_of_a_row_are_shown_and_not_sent() -> None:
    row = "hi \x1b[31mRED\x1b]0;pwned\x07", "ok\x1b[2J\u202e"
    assert "hi \\x1b[31mRED\\x1b]0;pwned\\x07{+ok\\x1b[2J\\u202e+}" in _shown(*row)
    on_a_terminal = _shown(*row, force_terminal=True, color_system="standard")
    assert "\x1b]0;" not in on_a_terminal
    assert "\x1b[2J" not in on_a_terminal
    assert "\x1b[1;4;32m" in on_a_terminal  # the color is ours
