"""A tokenizer's chat template, compiled once and rendered many times.

The environment is the one that transformers gives a template: the sandbox, its block trimming, its
filters and functions. Values shared by all rows are looked up once, which halves the time of a
short text; `check` compares the two on real rows.

Laws (tests/data/chat/test_template.py)
    1. A text is equal to the result of `tokenizer.apply_chat_template`.
    2. Tagged characters are those between `{% generation %}` and `{% endgeneration %}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatrain.data.rows.messages import Message
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError

CharSpan = tuple[int, int]

TEMPLATE_REFUSED = "chat template refuses the row"
FORMATTED = "prompt is already in the form of the chat template"

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Conversations to text. Raises BadRow where the template raises: it is untrusted code."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """`kwargs` are arguments for every row; a row's own take precedence."""
        self._tokenizer = tokenizer
        self._given = {
            **tokenizer.special_tokens_map, "tools": None, "documents": None, **(kwargs or {}),
        }  # fmt: skip
        self._kwargs = dict(kwargs or {})
        self._sources = {
            with_tools: _source(tokenizer, with_tools=with_tools) for with_tools in (False, True)
        }
        self._words = {word for s in self._sources.values() for word in re.findall(r"\w+", s)}
        self._compiled: dict[str, Template] = {}
        self._marks = tuple({str(mark) for mark in tokenizer.added_tokens_decoder.values()})
        self._eos = str(tokenizer.special_tokens_map.get("eos_token") or "")
        self.has_tags = any(map(has_generation_tags, self._sources.values()))

    def reads(self, name: str) -> bool:
        """Return whether the template names a variable or a key of a message."""
        return name in self._words

    def end_of(self, message: Message) -> str:
        """Return what ends an assistant turn that the template leaves open; "" if it closes turns.

        GLM's templates close no turn. Generation stops at the control token that opens the next
        one: `<|user|>` behind an answer, `<|observation|>` behind a call. So the turn ends with it.
        """
        answer, call = self.next_marks
        return call if message.get("tool_calls") else answer

    @cached_property
    def next_marks(self) -> tuple[str, str]:
        """The control tokens that open the turns behind an open answer and behind a call, or ""."""
        question: Message = {"role": "user", "content": "x"}
        answer = self._mark_between({"role": "assistant", "content": "call_me"}, question)
        return answer, self._mark_between(_CALLING, _AFTER_CALL[0]) if answer else ""

    def _mark_between(self, turn: Message, later: Message) -> str:
        try:
            alone, followed = (
                self.render(Row(messages=({"role": "user", "content": "x"}, turn, *rest)))
                for rest in ((), (later,))
            )
        except BadRow:
            return ""
        end, others = alone.partition("call_me")[2], followed.partition("call_me")[2]
        marks = [mark for mark in self._marks if mark.strip()]
        # A call has marks of its own, which do not close its turn.
        closing = [self._eos] if "tool_calls" in turn else marks
        is_closed = any(mark and mark in end for mark in closing)
        if is_closed or not others.startswith(end):
            return ""
        others = others[len(end) :]
        space = others[: len(others) - len(others.lstrip())]
        found = [mark for mark in marks if others.startswith(mark, len(space))]
        return space + max(found, key=len) if found else ""

    def mark_begins_at(self, text: str, at: int) -> int:
        """Return where the control token around a character begins; if there is none, `at`."""
        marks = (mark for mark in self._marks if mark.strip())
        begins = (text.find(m, max(0, at - len(m) + 1), at + len(m) - 1) for m in marks)
        return min((begin for begin in begins if begin >= 0), default=at)

    def without_end(self, text: str) -> str:
        """Return a text without the end of sequence that follows another control token.

        Some templates write it once, after the last turn: no turn but the last shows it.
        """
        if not self._eos or not text.rstrip().endswith(self._eos):
            return text
        short = text.rstrip().removesuffix(self._eos)
        return short if short.rstrip().endswith(self._marks) else text

    def render(
        self, row: Row, end: int | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a row's messages before `end`, or of all."""
        try:
            return self._template(row, end).render(
                messages=self._messages(row, end),
                add_generation_prompt=add_generation_prompt,
                **self._arguments(row),
            )
        except Exception as error:  # templates raise any exception, on purpose and by mistake
            raise _refusal(error) from error

    def render_tagged(self, row: Row, end: int | None = None) -> tuple[str, tuple[CharSpan, ...]]:
        """Return the text, and the characters between generation tags."""
        try:
            template = self._template(row, end)
            notes = template.environment.extensions[_GenerationTags.identifier]
            assert isinstance(notes, _GenerationTags)
            notes.begin()
            pieces = template.generate(
                messages=self._messages(row, end),
                add_generation_prompt=False,
                **self._arguments(row),
            )
            return "".join(map(notes.passed, pieces)), tuple(notes.spans)
        except Exception as error:
            raise _refusal(error) from error

    def check(self, row: Row) -> None:
        """Raise DataError if the library renders this conversation differently.

        Raises BadRow if one of the two refuses it.
        """
        ours = self.render(row)
        try:
            theirs = self._tokenizer.apply_chat_template(
                self._messages(row, None),
                tools=list(row.tools) or None,
                tokenize=False,
                **{**self._kwargs, **row.template_kwargs},
            )
        except Exception as error:
            raise _refusal(error) from error
        if ours != theirs:
            raise DataError(
                f"the chat template writes {ours[:200]!r} here and {theirs[:200]!r} at "
                "inference; it must depend on the conversation only"
            )

    def check_unformatted(self, prompt: str) -> None:
        """Raise BadRow for a prompt that already has the control tokens of the template."""
        if mark := next((mark for mark in self._frame if mark in prompt), None):
            raise BadRow(
                FORMATTED, f"the prompt has {mark}; data.chat_template: none joins rows without it"
            )

    @cached_property
    def _frame(self) -> list[str]:
        """The control tokens that the template writes around a question."""
        try:
            question = Row(messages=({"role": "user", "content": "x"},))
            text = self.render(question, add_generation_prompt=True)
        except BadRow:
            return []
        return sorted(mark for mark in self._marks if mark.strip() and mark in text)

    def _template(self, row: Row, end: int | None) -> Template:
        if not row.messages[:end]:
            raise ValueError("no turn comes before the first answer")
        source = self._sources[bool(row.tools)]
        if source not in self._compiled:
            self._compiled[source] = compile_template(source)
        return self._compiled[source]

    def _arguments(self, row: Row) -> dict[str, Any]:
        if not row.tools and not row.template_kwargs:
            return self._given
        return {**self._given, "tools": list(row.tools) or None, **row.template_kwargs}

    def _messages(self, row: Row, end: int | None) -> list[Message]:
        return [_in_form(m, self._form) if "tool_calls" in m else m for m in row.messages[:end]]

    @cached_property
    def _form(self) -> _Form:
        """The form of a call that the template can write: some fail on others, or write `None`.

        It should do for earlier calls too: QwQ's takes null in the last turn only. A template that
        writes no results of tools has to write the call alone.
        """
        able = [form for form in _FORMS if self._writes_call(form)] or [_FORMS[1]]
        return next((form for form in able if self._writes_call(form, *_AFTER_CALL)), able[0])

    def _writes_call(self, form: _Form, *later: Message) -> bool:
        try:
            text = compile_template(self._sources[False]).render(
                messages=[{"role": "user", "content": "x"}, _in_form(_CALLING, form), *later],
                add_generation_prompt=False,
                **self._given,
            )
        except Exception:
            return False
        return "call_me" in text and "None" not in text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a turn that calls a tool is given to a template."""

    content: str | None
    """Content instead of null."""
    has_objects: bool
    """Arguments are an object, not JSON text."""


_FORMS = [
    _Form(content=content, has_objects=has_objects)
    for has_objects in (True, False)
    for content in (None, "")
]
_CALLING: Message = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": "callid001", "type": "function",
                    "function": {"name": "call_me", "arguments": {"x": 1}}}],
}  # fmt: skip
_AFTER_CALL: tuple[Message, ...] = (
    {"role": "tool", "content": "x", "name": "call_me", "tool_call_id": "callid001"},
    {"role": "assistant", "content": "y"},
)


def _in_form(message: Message, form: _Form) -> Message:
    content = form.content if message["content"] is None else message["content"]
    if form.has_objects:
        return {**message, "content": content}
    return {**message, "content": content, "tool_calls": list(map(_as_text, message["tool_calls"]))}


def _as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**call["function"], "arguments": _to_json(arguments)}}


def _source(tokenizer: Any, *, with_tools: bool) -> str:
    """Return the template for rows with or without tools: a tokenizer may have one for each."""
    try:
        return str(tokenizer.get_chat_template(tools=[] if with_tools else None))
    except ValueError as error:
        raise DataError(f"cannot use the tokenizer's chat template: {error}") from error


def check_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise DataError for an argument that the chat template never reads."""
    for name in kwargs:
        if not tokenizer.chat_template:
            raise DataError(
                f"data.template_kwargs: {name} is given, but there is no chat template to read it"
            )
        if not ChatTemplate(tokenizer).reads(name):
            raise DataError(
                f"data.template_kwargs: the chat template does not read {name}. Remove it, or "
                "correct its name."
            )


def open_text(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that is to be continued: without the end that some add."""
    tokens = list(tokenizer(text)["input_ids"])
    return tokens[:-1] if tokens and tokens[-1] == tokenizer.eos_token_id else tokens


def has_generation_tags(template: str) -> bool:
    return _GENERATION_TAG.search(template) is not None


def _refusal(error: Exception) -> BadRow:
    return BadRow(TEMPLATE_REFUSED, f"{type(error).__name__}: {error}"[:120])


def compile_template(source: str) -> Template:
    """Return the template in its sandbox. Raises TemplateSyntaxError."""
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
    """Plain JSON; jinja's own filter escapes it for HTML."""
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
        self.spans: list[CharSpan] = []
        self._at = 0

    def passed(self, piece: str) -> str:
        """Count a piece of text that was written; each comes before the next tag."""
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
