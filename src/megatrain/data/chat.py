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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatrain.data.chat_template import ChatTemplate, Span
from megatrain.data.rows import Message
from megatrain.data.skipped import BadRow

TrainOn = Literal["assistant", "all"]

NO_PREFIX = "generation prompt is no prefix of the turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One text of a conversation."""

    text: str
    spans: tuple[Span, ...]
    """Trained characters, one span for each trained turn, in order."""
    tags: tuple[Span, ...] | None = None
    """The same by the template's own tags, of all turns of the text; None if it has no tags."""
    begins_at: int = 0
    """Assistant turns that end before this character are trained in another text."""


def render_all(template: ChatTemplate, messages: Sequence[Message]) -> Rendered:
    """Return the whole conversation as one text, all of it trained."""
    text = template.render(messages)
    return Rendered(text=text, spans=((0, len(text)),))


def render_assistant(template: ChatTemplate, messages: Sequence[Message]) -> list[Rendered]:
    """Return the fewest texts that show each assistant turn as it would be generated.

    What follows the last assistant turn trains nothing and is left out. Raises BadRow if the
    template refuses the conversation, or writes a turn otherwise than its own prompt begins it.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    texts: list[Rendered] = []
    spans: list[Span] = []
    whole, tags = "", None
    for turn in reversed(turns):
        prompt = template.render(messages[:turn], add_generation_prompt=True)
        # What is looked for as a beginning needs no tags; a text of its own does.
        through = template.render(messages[: turn + 1]) if spans else None
        if through is None or not whole.startswith(through):
            if spans:
                texts.append(_rendered(whole, spans, tags))
            whole, tags = _through(template, messages[: turn + 1])
            through, spans = whole, []
        if not through.startswith(prompt):
            raise BadRow(NO_PREFIX, _difference(prompt, through, turn))
        spans.append((len(prompt), len(through)))
    texts.append(_rendered(whole, spans, tags, is_first=True))
    return texts[::-1]


def _through(
    template: ChatTemplate, messages: Sequence[Message]
) -> tuple[str, tuple[Span, ...] | None]:
    if template.has_tags:
        return template.render_tagged(messages)
    return template.render(messages), None


def _rendered(
    text: str, spans: Sequence[Span], tags: tuple[Span, ...] | None, is_first: bool = False
) -> Rendered:
    ordered = tuple(reversed(spans))
    begins_at = 0 if is_first else ordered[0][0]
    return Rendered(text=text, spans=ordered, tags=tags, begins_at=begins_at)


def _difference(prompt: str, through: str, turn: int) -> str:
    pairs = enumerate(zip(prompt, through, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(through)))
    return (
        f"turn {turn}: the prompt goes on with {prompt[at : at + 20]!r}, "
        f"the turn with {through[at : at + 20]!r}"
    )
