"""Conversations as text, and which characters of it are trained.

A turn is trained in the very context the model will meet it in:

    prompt(i)  = template(messages before turn i, with the generation prompt)
    through(i) = template(messages up to and with turn i)
    trained    = what through(i) has beyond prompt(i): the answer and its end-of-turn token

This needs no tags in the template, but it needs true prefixes, and that is checked: through(i)
must begin with prompt(i). A conversation is one text if every through(i) begins it. Some templates
rewrite earlier turns (a thinking model's thoughts are removed once the user speaks again); then no
single text shows each turn as it was generated, and the conversation becomes several texts, each
of which trains the turns it shows truly. Every assistant turn is trained exactly once.

Where the template has `{% generation %}` tags the same is derived from them (see masks.py), and
both must agree.

Laws (tests/data/test_chat.py)
    1. Every assistant turn's content and end-of-turn token is trained, once, and nothing else is.
    2. The text before a trained span is what the model is given at inference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.data.rows import Message
from megatrain.data.skipped import BadRow

TrainOn = Literal["assistant", "all"]
Span = tuple[int, int]

REFUSED = "chat template refuses the row"
NO_PREFIX = "generation prompt is no prefix of the turn"

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One text of a conversation."""

    text: str
    messages: tuple[Message, ...]
    """What the template was given for it."""
    spans: tuple[Span, ...]
    """Trained characters, one span for each trained turn, in order."""
    begins_at: int
    """Assistant turns that end before this character are trained in another text."""


def has_generation_tags(template: str) -> bool:
    return _GENERATION_TAG.search(template) is not None


def render(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    """Return the template's text. Raises BadRow if the template raises: it is foreign code."""
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise whatever they like, on purpose and by mistake
        raise BadRow(REFUSED, f"{type(error).__name__}: {error}"[:120]) from error
    if not isinstance(text, str):
        raise BadRow(REFUSED, f"it gave {type(text).__name__}, not text")
    return text


def render_all(tokenizer: Any, messages: Sequence[Message]) -> Rendered:
    """Return the whole conversation as one text, all of it trained."""
    text = render(tokenizer, messages)
    return Rendered(text=text, messages=tuple(messages), spans=((0, len(text)),), begins_at=0)


def render_assistant(tokenizer: Any, messages: Sequence[Message]) -> list[Rendered]:
    """Return the fewest texts that show each assistant turn as it would be generated.

    What follows the last assistant turn trains nothing and is left out. Raises BadRow if the
    template refuses the conversation, or writes a turn otherwise than its own prompt begins it.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    texts: list[Rendered] = []
    spans: list[Span] = []
    whole, end = "", 0
    for turn in reversed(turns):
        prompt = render(tokenizer, messages[:turn], add_generation_prompt=True)
        through = render(tokenizer, messages[: turn + 1])
        if not through.startswith(prompt):
            raise BadRow(NO_PREFIX, _difference(prompt, through, turn))
        if not (spans and whole.startswith(through)):
            if spans:
                texts.append(_rendered(whole, messages[:end], spans))
            whole, end, spans = through, turn + 1, []
        spans.append((len(prompt), len(through)))
    texts.append(_rendered(whole, messages[:end], spans, is_first=True))
    return texts[::-1]


def _rendered(
    text: str, messages: Sequence[Message], spans: Sequence[Span], is_first: bool = False
) -> Rendered:
    ordered = tuple(reversed(spans))
    begins_at = 0 if is_first else ordered[0][0]
    return Rendered(text=text, messages=tuple(messages), spans=ordered, begins_at=begins_at)


def _difference(prompt: str, through: str, turn: int) -> str:
    pairs = enumerate(zip(prompt, through, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(through)))
    return (
        f"turn {turn}: the prompt goes on with {prompt[at : at + 20]!r}, "
        f"the turn with {through[at : at + 20]!r}"
    )
