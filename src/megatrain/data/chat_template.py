"""A tokenizer's chat template, compiled once and rendered many times.

The environment is the one that transformers gives a template: the sandbox, its block trimming, its
filters and functions. What is the same for every row is looked up once, which halves the time of a
short text; `check` holds the two against each other on real rows.

Laws (tests/data/test_chat_template.py)
    1. A text is what `tokenizer.apply_chat_template` gives.
    2. Tagged characters are those between `{% generation %}` and `{% endgeneration %}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatrain.data.rows import Message
from megatrain.data.skipped import BadRow
from megatrain.errors import DataError

Span = tuple[int, int]

REFUSED = "chat template refuses the row"

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Conversations to text. Raises BadRow where the template raises: it is foreign code."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._source: str = tokenizer.get_chat_template()
        self._given = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
        self._compiled: Template | None = None
        self.has_tags = has_generation_tags(self._source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the conversation's text."""
        try:
            return self._template(messages).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._given
            )
        except Exception as error:  # templates raise whatever they like, on purpose and by mistake
            raise _refusal(error) from error

    def render_tagged(self, messages: Sequence[Message]) -> tuple[str, tuple[Span, ...]]:
        """Return the text, and the characters between generation tags."""
        try:
            template = self._template(messages)
            notes = template.environment.extensions[_GenerationTags.identifier]
            assert isinstance(notes, _GenerationTags)
            notes.begin()
            pieces = template.generate(
                messages=list(messages), add_generation_prompt=False, **self._given
            )
            return "".join(map(notes.passed, pieces)), tuple(notes.spans)
        except Exception as error:
            raise _refusal(error) from error

    def check(self, messages: Sequence[Message]) -> None:
        """Raise DataError if the library writes this conversation otherwise than we do.

        Raises BadRow if one of the two refuses it.
        """
        ours = self.render(messages)
        try:
            theirs = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        except Exception as error:
            raise _refusal(error) from error
        if ours != theirs:
            raise DataError(
                f"the chat template writes {ours[:200]!r} here and {theirs[:200]!r} when the model "
                "is used; it must not depend on anything but the conversation"
            )

    def _template(self, messages: Sequence[Message]) -> Template:
        if not messages:
            raise ValueError("nothing is said before the first answer")
        if self._compiled is None:
            self._compiled = _compiled(self._source)
        return self._compiled


def has_generation_tags(template: str) -> bool:
    return _GENERATION_TAG.search(template) is not None


def _refusal(error: Exception) -> BadRow:
    return BadRow(REFUSED, f"{type(error).__name__}: {error}"[:120])


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = environment.from_string(source)
    # A chain of two mappings, which every rendering would copy key by key.
    template.globals = dict(template.globals)
    return template


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter writes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _GenerationTags(Extension):
    """Notes where the text between generation tags begins and ends."""

    tags = {"generation"}  # noqa: RUF012, the base class has it so

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.begin()

    def begin(self) -> None:
        self.spans: list[Span] = []
        self._at = 0

    def passed(self, piece: str) -> str:
        """Count a piece of text that was written; each comes before the next tag is met."""
        self._at += len(piece)
        return piece

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.spans.append((self._at, self._at + len(text)))
        return text
