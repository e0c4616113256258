"""Answers of a model as they are printed, token by token.

A character of several tokens is printed once it is complete, and characters that a terminal would
obey are shown (`megatrain.text.printable`). Special tokens are left out; within an answer one ends
the line. Nothing is left of an empty thought (`<think>`, newlines, `</think>`), nor of blank lines
at both ends.

Laws (tests/cli/test_printed.py)
    1. The pieces together are the text of all tokens.
    2. No piece ends within a character, and none holds a control character but a line break or tab.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatrain.run.evaluation.conversation import special_tokens
from megatrain.text import printable

_EMPTY_THOUGHT = "<think></think>"
_UNKNOWN = "\ufffd"
"""Stands for bytes that are no character, or none yet."""


class PrintedAnswer:
    """One answer, from its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._tokens: list[int] = []
        """The tokens since the last special one."""
        self._decoded = ""
        """The characters of `_tokens` that were passed on."""
        self._held = ""
        """The beginning of the answer, while it may be an empty thought."""
        self._begins = True
        self._breaks = 0
        """Line breaks that are printed if text follows."""
        self._has_text = False

    def add(self, token: int) -> str:
        """Return the text that a token completes, which may be none."""
        if token in self._special:
            text = self._passed(self._rest_of_tokens())
            self._breaks = max(self._breaks, 1)
            return text
        self._tokens.append(token)
        whole = self._text()
        ready = whole.rstrip(_UNKNOWN)
        if not ready.startswith(self._decoded):  # it is a run of bytes that does not end here
            return ""
        new, self._decoded = ready[len(self._decoded) :], ready
        return self._passed(new)

    def end(self) -> str:
        """Return the rest of the text."""
        text = self._passed(self._rest_of_tokens())
        held, self._held, self._begins = self._held, "", False
        return text + self._in_lines(held)

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return str(decode(self._tokens, clean_up_tokenization_spaces=False))

    def _rest_of_tokens(self) -> str:
        whole, known = self._text() if self._tokens else "", self._decoded
        self._tokens, self._decoded = [], ""
        # A stray byte can turn a run of bytes, printed before, into characters that are none.
        return whole[len(known) :] if whole.startswith(known) else _UNKNOWN

    def _passed(self, text: str) -> str:
        """Return the text to print, without an empty thought at the beginning."""
        if not self._begins:
            return self._in_lines(text)
        self._held += text
        dense = "".join(self._held.split())
        if dense != _EMPTY_THOUGHT and _EMPTY_THOUGHT.startswith(dense):
            return ""
        held, self._held, self._begins = self._held, "", False
        return "" if dense == _EMPTY_THOUGHT else self._in_lines(held)

    def _in_lines(self, text: str) -> str:
        """Return the text to print, without blank lines at the beginning and the end."""
        body = text.strip("\n")
        if not body:
            self._breaks += len(text)
            return ""
        breaks = self._breaks + len(text) - len(text.lstrip("\n"))
        before = "\n" * breaks if self._has_text else ""
        self._has_text = True
        self._breaks = len(text) - len(text.rstrip("\n"))
        return printable(before + body)


def printed_answer(tokenizer: Any, tokens: Iterable[int]) -> str:
    """Return a whole answer as it is printed."""
    answer = PrintedAnswer(tokenizer)
    return "".join(map(answer.add, tokens)) + answer.end()
