"""`megatrain sample` without a prompt: a conversation on standard input and output.

Laws (tests/cli/test_conversing.py)
    1. An answer is the model's after the turns so far, from a pipe and from a terminal.
    2. Nothing but answers goes to standard output; a message that cannot be answered is an error.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from megatrain.engine.compute.drawing import SamplingParams
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continuations
from megatrain.errors import DataError
from megatrain.media import TextMedia
from megatrain.models.multimodal import text_part
from megatrain.models.rope import num_positions
from megatrain.run.evaluation.conversation import (
    Turn,
    has_template,
    ordinary_texts,
    printed_answer,
)

ReadTalks = Callable[[Sequence[Sequence[Turn]]], tuple[list[list[int]], list[TextMedia]]]
"""Returns the text before the answer to each conversation, in tokens, and its media."""


def converse(
    engine: Engine,
    tokenizer: Any,
    eos_token_ids: frozenset[int],
    before: Sequence[Turn],
    read_talks: ReadTalks,
    max_new_tokens: int,
    drawing: SamplingParams,
) -> None:
    """Answer each line of standard input, with the turns so far, until the input ends.

    Raises DataError if the template refuses the turns, or if no position is left for an answer.
    """
    turns, max_positions = list(before), num_positions(text_part(engine.model_config))
    is_typed = sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines, and recalls earlier ones)
        print("Ctrl-D ends the conversation.", file=sys.stderr, flush=True)
    if not has_template(tokenizer):
        note = "The model has no chat template: each message is continued alone."
        print(note, file=sys.stderr, flush=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # no tokenizer takes halves of surrogate pairs
    while True:
        try:
            message = input("> " if is_typed else "")
        except EOFError:
            return
        if not message.strip():
            continue
        turns.append({"role": "user", "content": message})
        (prompt,), media = read_talks([turns])
        room = max_new_tokens
        if max_positions is not None:
            room = min(room, max_positions - len(prompt))
        if room < 1:
            raise DataError(
                f"the conversation has {len(prompt):,} tokens, and the model {max_positions:,} "
                "positions. Begin a new one."
            )
        printer = _Printer(tokenizer)
        (made,) = continuations(
            engine, [prompt], room, eos_token_ids, drawing, printer.show, media=media
        )
        printer.finish(made.tokens)
        if made.tokens[-1] not in eos_token_ids:
            note = f"[cut after {room:,} tokens; --max-new-tokens allows more]"
            print(note, file=sys.stderr, flush=True)
        # Later prompts have what follows the last special token: those end thoughts and channels.
        content = [text.strip("\n") for text in ordinary_texts(tokenizer, made.tokens)][-1:]
        turns.append({"role": "assistant", "content": "".join(content)})


class _Printer:
    """Prints an answer while it is made."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._printed = ""

    def show(self, tokens: Sequence[int]) -> bool:
        """Print what a token adds; return False, because the answer is not over."""
        text = printed_answer(self._tokenizer, tokens)
        is_begun = "<think></think>".startswith("".join(text.split()))  # it may be an empty thought
        if not is_begun and not text.endswith("\ufffd"):  # a character may lack bytes
            self._print(text)
        return False

    def finish(self, tokens: Sequence[int]) -> None:
        self._print(printed_answer(self._tokenizer, tokens))
        print("\n", flush=True)

    def _print(self, text: str) -> None:
        if text.startswith(self._printed):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text
