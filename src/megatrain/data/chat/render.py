"""Conversations as text, and which characters of it are trained.

A turn is trained in the context that the model will see at inference:

    prompt(i)  = template(messages before turn i, with the generation prompt)
    through(i) = template(messages up to and with turn i)
    trained    = the part of through(i) after prompt(i): the answer and its end-of-turn token

This needs no tags in the template, but it needs true prefixes, and that is checked: through(i)
must begin with prompt(i). One exception: a generation prompt may open a thought that the template
does not write in the turn itself; then the answer begins where the thought would. A conversation is
one text if every through(i) begins it. Some templates rewrite earlier turns (a thinking model's
thoughts are removed once the user speaks again); then no single text shows each turn as it was
generated, and the conversation becomes several texts, each of which trains the turns it shows
truly. Every assistant turn is trained exactly once. If writing a turn rewrites text that its
prompt shows, the text is that prompt followed by the turn.

Where the template has `{% generation %}` tags the same is derived from them (see masks.py), and
both must agree. Tags may also hold the header of a turn: the model does not write it, so it is not
trained.

Where a template closes no turn, the control token that opens the next one is its end (`end_of` in
template.py). At the end of a text it is written, as the model writes it at inference.

Laws (tests/data/chat/test_render.py)
    1. Every chosen turn's content and end-of-turn token is trained, once, and nothing else is.
    2. The text before a trained span is the model's input at inference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatrain.data.chat.spans import without
from megatrain.data.chat.template import CharSpan, ChatTemplate
from megatrain.data.media.placed import PlacedMedium
from megatrain.data.rows.media import words_of
from megatrain.data.rows.messages import REASONING, Message
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow

TrainOn = Literal["assistant", "last", "completion", "all"]

NO_PREFIX = "generation prompt is not a prefix of the turn"
NO_CALLS = "chat template cannot write tool calls"
REWRITTEN = "chat template rewrites a turn that is not trained"

EMPTY_THOUGHT = "empty_thoughts"
LOST_THOUGHT = "lost_thoughts"
LOST_WORDS = "lost_words"
UNOPENED_THOUGHT = "unopened_thoughts"

_THOUGHT = r"(?:<[\w:]*(?:think|thinking|thought|reasoning)>|\[THINK\])"
_THOUGHT_END = r"(?:</[\w:]*(?:think|thinking|thought|reasoning)>|\[/THINK\])"
_OPENED = re.compile(rf"{_THOUGHT}\s*(?:{_THOUGHT_END}\s*)?\Z")
_SPEAKS_OF_THINKING = re.compile("think|thought|reason", re.IGNORECASE)
_IS_EMPTY = re.compile(rf"\s*{_THOUGHT}\s*{_THOUGHT_END}")
_BEGIN, _END = re.compile(_THOUGHT), re.compile(_THOUGHT_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedText:
    """One text of a conversation."""

    text: str
    spans: tuple[CharSpan, ...]
    """Trained characters, in order."""
    tags: tuple[CharSpan, ...] | None = None
    """Assistant turns by the template's own tags; None if there is nothing to compare."""
    shown: tuple[CharSpan, ...] = ()
    """The turns to be tagged: assistant turns from `begins_at` on, also untrained ones."""
    begins_at: int = 0
    """Assistant turns that end before this character are trained in another text."""
    notes: tuple[str, ...] = ()
    """Remarks about its turns, one per turn."""
    media: tuple[PlacedMedium, ...] = ()
    """Media, and the characters that stand for them."""


def render_row(template: ChatTemplate, row: Row, train_on: TrainOn) -> list[RenderedText]:
    """Return the fewest texts that show each trained turn as it would be generated.

    Turns after the last trained turn are left out. Raises BadRow if the template
    refuses the conversation, or writes a turn that does not begin with its own prompt.
    """
    if any("tool_calls" in message for message in row.messages) and not template.reads(
        "tool_calls"
    ):
        raise BadRow(NO_CALLS, "it never reads tool_calls; set data.chat_template to another")
    talk = _Talk(template, row)
    if train_on == "all":
        return [talk.whole(len(row.messages))]
    answers = [n for n, m in enumerate(row.messages) if m["role"] == "assistant"]
    chosen = [n for n in answers if n >= row.num_prompt]
    if row.untrained.issuperset(chosen[-1:] if train_on == "last" else chosen):
        return [RenderedText(text=template.render(row), spans=())]
    if train_on == "completion":
        return [talk.whole(chosen[-1] + 1, _completion_begins(row, chosen))]
    if train_on == "last":
        chosen = chosen[-1:]
    chosen = [n for n in chosen if n not in row.untrained]
    turns = [n for n in answers if chosen[0] <= n <= chosen[-1]]
    return talk.by_turns(turns, is_first=turns[0] == answers[0])


def _completion_begins(row: Row, answers: Sequence[int]) -> int:
    """Return the first answer of the completion: of a conversation, after its last question."""
    if row.num_prompt:
        return answers[0]
    asked = [n for n in range(answers[-1]) if row.messages[n]["role"] == "user"]
    return next(n for n in answers if not asked or n > asked[-1])


class _Talk:
    """One row and its template."""

    def __init__(self, template: ChatTemplate, row: Row) -> None:
        self._template, self._row = template, row
        self._notes: list[str] = []

    def through(self, turn: int) -> str:
        return self._template.render(self._row, turn + 1)

    def begin_of(self, turn: int, text: str) -> int:
        """Return where the model starts to write `turn` in a text that includes it."""
        prompt = self._template.render(self._row, turn, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        head = _OPENED.sub("", prompt)
        if head == prompt or not text.startswith(head):
            head = prompt[: self._thought_begins_at(prompt, turn)]
        # A prompt that nothing asks for stands after every text, behind its last turn too.
        if head == prompt or not self._template.reads("add_generation_prompt"):
            raise BadRow(NO_PREFIX, _difference(prompt, text, turn))
        self._notes.append(UNOPENED_THOUGHT)
        return len(head)

    def _thought_begins_at(self, prompt: str, turn: int) -> int:
        """Return where a prompt opens a thought in marks or words of its family, or its length.

        The turn has the header before it, but not the thought. It is one if it speaks of
        thinking and ends the prompt of every conversation: `<|channel>thought\n<channel|>`.
        """
        before = self._template.render(self._row, turn)
        rows = (self._row, _reworded(self._row, turn))  # an answer may begin as the thought does
        at = min(_first_difference(prompt, self._template.render(row, turn + 1)) for row in rows)
        at = self._template.mark_begins_at(prompt, at)
        any_row = replace(self._row, messages=({"role": "user", "content": "x"},))
        any_prompt = self._template.render(any_row, add_generation_prompt=True)
        is_thought = _SPEAKS_OF_THINKING.search(prompt, at) and any_prompt.endswith(prompt[at:])
        return at if is_thought and prompt[len(before) : at].strip() else len(prompt)

    def whole(self, end: int, first: int | None = None) -> RenderedText:
        """Return the messages before `end` as one text, trained from the turn `first` on."""
        text = self._template.render(self._row, end)
        begin = 0 if first is None else self.begin_of(first, text)
        last = self._row.messages[end - 1]
        if first is not None:
            self._notes += _remarks(self._row.messages[first], text[begin:], first)
        elif last["role"] == "assistant" and _loses_thought(last, text):
            self._notes.append(LOST_THOUGHT)
        holes = [
            self._place_of(turn, text)
            for turn in sorted(self._row.untrained)
            if turn < end and self._row.messages[turn]["role"] == "assistant"
        ]
        if last["role"] == "assistant" and end - 1 not in self._row.untrained:
            text += self._template.end_of(last)
        spans = without([(begin, len(text))], holes)
        return RenderedText(text=text, spans=spans, notes=tuple(self._notes))

    def _place_of(self, turn: int, text: str) -> CharSpan:
        through = self.through(turn)
        if not text.startswith(through):
            raise BadRow(REWRITTEN, f"turn {turn}")
        return self.begin_of(turn, through), self._end_in(text, len(through))

    def _end_in(self, text: str, end: int) -> int:
        """Return the end of a turn, with the control token behind it if that ends the turn."""
        ends = (mark for mark in self._template.next_marks if mark and text.startswith(mark, end))
        return end + max(map(len, ends), default=0)

    def by_turns(self, turns: Sequence[int], *, is_first: bool) -> list[RenderedText]:
        """Return the texts of these assistant turns; without those that train nothing."""
        texts: list[RenderedText] = []
        shown: list[tuple[int, CharSpan]] = []
        whole, tags = "", None
        for turn in reversed(turns):
            # A text that only serves as a prefix needs no tags; a separate text does.
            through = self._shown(turn, whole) if shown else None
            if through is None:
                if shown:
                    texts.append(self._rendered(whole, shown, tags))
                whole, tags = self._tagged(turn)
                through, shown = whole, []
            try:
                shown.append((turn, (self.begin_of(turn, through), len(through))))
            except BadRow as bad:
                if shown:
                    texts.append(self._rendered(whole, shown, tags))
                texts.append(self._after_its_prompt(turn, bad))
                shown = []
        if shown:
            texts.append(self._rendered(whole, shown, tags, is_first=is_first))
        return [text for text in reversed(texts) if text.spans]

    def _after_its_prompt(self, turn: int, bad: BadRow) -> RenderedText:
        """Return a text for a turn whose prompt the template rewrites.

        It is the prompt, followed by the template's text for the turn. Raises `bad` if the start of
        that text cannot be found.
        """
        prompt = self._template.render(self._row, turn, add_generation_prompt=True)
        before = self._template.render(self._row, turn)
        header = prompt.removeprefix(before) if prompt.startswith(before) else ""
        core = _OPENED.sub("", header)
        text = self.through(turn)
        at, same = self._header(core, self._row, turn)
        # A turn that the template joins to the one before has no header.
        other_at, other_same = self._header(core, _reworded(self._row, turn - 1), turn)
        if not core.strip() or at < 0 or same - at != other_same - other_at:
            raise bad
        if not text.startswith(header, at):
            prompt, header = prompt.removesuffix(header) + core, core
        whole = prompt + text[at + len(header) :]
        return self._rendered(whole, [(turn, (len(prompt), len(whole)))], None)

    def _header(self, header: str, row: Row, turn: int) -> tuple[int, int]:
        """Return where a turn's generation prompt is in the text through it, and its words."""
        texts = [self._template.render(one, turn + 1) for one in (row, _reworded(row, turn))]
        same = _first_difference(*texts)
        return texts[0].rfind(header, 0, same), same

    def _shown(self, turn: int, whole: str) -> str | None:
        """Return the text through `turn` if `whole` begins with it, or with all but its end."""
        through = self.through(turn)
        if not whole.startswith(through):
            through = self._template.without_end(through)
        return through if whole.startswith(through) else None

    def _tagged(self, turn: int) -> tuple[str, tuple[CharSpan, ...] | None]:
        if self._template.has_tags:
            return self._template.render_tagged(self._row, turn + 1)
        return self.through(turn), None

    def _rendered(
        self,
        text: str,
        turns: Sequence[tuple[int, CharSpan]],
        tags: tuple[CharSpan, ...] | None,
        is_first: bool = False,
    ) -> RenderedText:
        shown = tuple(span for _, span in reversed(turns))
        text += self._template.end_of(self._row.messages[turns[0][0]])
        trained = [(n, span) for n, span in reversed(turns) if n not in self._row.untrained]
        notes = [*self._notes]
        for number, (begin, end) in trained:
            notes += _remarks(self._row.messages[number], text[begin:end], number)
        self._notes.clear()
        return RenderedText(
            text=text,
            spans=tuple((begin, self._end_in(text, end)) for _, (begin, end) in trained),
            tags=None if tags is None else self._without_headers(tags, text, turns),
            shown=shown,
            begins_at=0 if is_first else shown[0][0],
            notes=tuple(notes),
        )

    def _without_headers(
        self, tags: Sequence[CharSpan], text: str, turns: Sequence[tuple[int, CharSpan]]
    ) -> tuple[CharSpan, ...]:
        """Return the tags without what the generation prompt writes at the begin of a turn."""
        found = list(tags)
        for number, (begin, _) in turns:
            for n, (tag_begin, tag_end) in enumerate(found):
                if tag_begin < begin < tag_end:
                    before = self._template.render(self._row, number)
                    if text.startswith(before) and len(before) <= tag_begin:
                        found[n] = (begin, tag_end)
        return tuple(found)


def _remarks(message: Message, trained: str, turn: int) -> list[str]:
    """Return the remarks about a trained turn. Raises BadRow if its calls are lost."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in trained:
            raise BadRow(NO_CALLS, f"turn {turn}: {call['function']['name']:.40} is left out")
    said, _ = _said_and_thought(message)
    notes = [] if said.strip() in trained else [LOST_WORDS]
    if _loses_thought(message, trained):
        return [*notes, LOST_THOUGHT]
    return [*notes, EMPTY_THOUGHT] if _IS_EMPTY.match(trained) else notes


def _loses_thought(message: Message, trained: str) -> bool:
    """Return whether a turn has a thought that is not in the text that is trained."""
    _, thought = _said_and_thought(message)
    return bool(thought) and thought.strip() not in trained


def _said_and_thought(message: Message) -> tuple[str, str]:
    """Return the words of a turn and its thought, which may stand in the content."""
    said, thought = words_of(message["content"]), message.get("reasoning_content")
    # Two searches and no pattern around both: text without an end would be searched repeatedly.
    if (
        thought is None
        and (begin := _BEGIN.search(said))
        and (end := _END.search(said, begin.end()))
    ):
        said, thought = said[end.end() :], said[begin.end() : end.start()]
    return said, thought or ""


def _reworded(row: Row, turn: int) -> Row:
    """Return the row with other words in a turn, from their first letter on."""
    message = dict(row.messages[turn])
    for key in ("content", *REASONING):
        if message.get(key) is not None:
            message[key] = _other_content(message[key])
    if calls := message.get("tool_calls"):
        function = calls[0]["function"]
        renamed = {**function, "name": _other_word(function["name"])}
        message["tool_calls"] = [{**calls[0], "function": renamed}, *calls[1:]]
    return replace(row, messages=(*row.messages[:turn], message, *row.messages[turn + 1 :]))


def _other_content(content: Any) -> Any:
    if isinstance(content, str):
        return _other_word(content)
    first = next((n for n, part in enumerate(content) if part["type"] == "text"), len(content))
    words = _other_word(words_of(content[first : first + 1]))
    return [*content[:first], {"type": "text", "text": words}, *content[first + 1 :]]


def _other_word(text: str) -> str:
    return ("z" if text.lstrip().startswith("y") else "y") + text


def _difference(prompt: str, through: str, turn: int) -> str:
    at = _first_difference(prompt, through)
    return (
        f"turn {turn}: the prompt continues with {prompt[at : at + 20]!r}, "
        f"the turn with {through[at : at + 20]!r}; set data.chat_template to a template that "
        "writes an answer as its add_generation_prompt begins one"
    )


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
