"""Facts to report about prepared rows besides their number: counted here, then put in words.

No content of a file is left out or changed without a remark. Each count is on the card;
`remarks` turns those that are not zero into sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.chat.masks import Tokens
from megatrain.data.chat.render import EMPTY_THOUGHT, LOST_THOUGHT, LOST_WORDS, UNOPENED_THOUGHT
from megatrain.data.chat.template import ChatTemplate
from megatrain.data.rows.messages import REASONING
from megatrain.data.rows.rows import Row
from megatrain.text import counted

_TEMPLATED, _JOINED = "pairs_in_template", "pairs_joined"
_SAME = "same_answers"
THOUGHTLESS = "rows_that_lose_thoughts"
_ROWS, _DOCUMENTS, _TOKENS, _REPEATED = (
    "rewritten_rows", "rewritten_documents", "rewritten_tokens", "repeated_tokens",
)  # fmt: skip
_COUNTS = (
    _TEMPLATED, _JOINED, _SAME, _ROWS, _DOCUMENTS, _TOKENS, _REPEATED,
    EMPTY_THOUGHT, LOST_THOUGHT, THOUGHTLESS, LOST_WORDS, UNOPENED_THOUGHT,
)  # fmt: skip


_NO_WORDS = {"role", "content", "tool_call_id"}
"""Keys of a message that every template knows, or that have no text to train on."""


@dataclass(slots=True, kw_only=True)
class Notes:
    """Counts over rows. Those by name count each row once for each name."""

    counts: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    """Keys of messages that we do not know and passed to the template."""
    unread: Counter[str] = field(default_factory=Counter)
    """Contents of rows that the template never reads."""
    unused: Counter[str] = field(default_factory=Counter)
    """Columns that nothing reads."""

    def add(self, row: Row, documents: Sequence[Tokens], template: ChatTemplate | None) -> None:
        """Count a row that is used."""
        self.unused.update(row.unused)
        if not row.messages:
            return
        self.others.update(row.others)
        self.unread.update(_unread(row, template))
        if row.plain:
            self.counts[_JOINED if template is None or row.joined else _TEMPLATED] += 1
        lengths = [len(document.input_ids) for document in documents]
        if row.rejected is not None:
            self.counts[_SAME] += row.messages == row.rejected.messages
        elif len(lengths) > 1:
            self.counts[_ROWS] += 1
            self.counts[_DOCUMENTS] += len(lengths)
            self.counts[_TOKENS] += sum(lengths)
            self.counts[_REPEATED] += sum(lengths) - max(lengths)
        for document in documents:
            self.counts.update(document.notes)
        self.counts[THOUGHTLESS] += any(LOST_THOUGHT in doc.notes for doc in documents)

    def merge(self, later: Notes) -> None:
        """Add the counts of a later part of the same data."""
        for name in ("counts", "others", "unread", "unused"):
            getattr(self, name).update(getattr(later, name))

    def card(self) -> dict[str, Any]:
        """Return the counts as a part of the card, in an order that no worker decides."""
        return {
            "notes": {name: self.counts[name] for name in _COUNTS if self.counts[name]},
            "passed_through": dict(sorted(self.others.items())),
            "unread": dict(sorted(self.unread.items())),
            "unused_columns": dict(sorted(self.unused.items())),
        }


def _unread(row: Row, template: ChatTemplate | None) -> Iterable[str]:
    """Yield the names of contents of a row that the template does not read."""
    keys = {key for message in row.messages for key in message} - _NO_WORDS
    thoughts = keys.intersection(REASONING)
    keys -= thoughts
    keys |= set(row.template_kwargs) | ({"tools"} if row.tools else set())
    yield from (key for key in sorted(keys) if template is None or not template.reads(key))
    if thoughts and (template is None or not any(map(template.reads, REASONING))):
        yield REASONING[0]


def remarks(card: Mapping[str, Any]) -> list[str]:
    """Return the remarks about prepared rows, one sentence each."""
    found = [
        sentence.format(count=count)
        for name, sentence in _SENTENCES.items()
        if (count := card["notes"].get(name))
    ]
    if rows := card["notes"].get(_ROWS):
        found.append(_rewritten(rows, card["notes"]))
    if open_turns := card["turns_without_end"]:
        found.append(
            f"{open_turns:,} trained turns do not end with a control token: the model may not "
            "learn to stop; set data.chat_template to a template that ends turns with one"
        )
    read = {k: n for k, n in card["passed_through"].items() if k not in card["unread"]}
    for counts, words in (
        (card["unread"], "not read by the chat template, so not trained on"),
        (read, "unknown keys of messages, which the chat template reads"),
        (card["unused_columns"], "columns that are not used"),
    ):
        if names := ", ".join(
            f"{name} ({counted(count, 'row')})" for name, count in counts.items()
        ):
            found.append(f"{words}: {names}")
    return found


def _rewritten(rows: int, notes: Mapping[str, int]) -> str:
    factor = notes[_TOKENS] / (notes[_TOKENS] - notes[_REPEATED])
    return (
        f"{rows:,} conversations became {notes[_DOCUMENTS]:,} documents and {factor:.1f} times the "
        "tokens, because the chat template rewrites earlier turns; data.train_on: last trains "
        "only the last answer of each"
    )


_SENTENCES = {
    _TEMPLATED: "{count:,} prompts and completions go through the chat template; "
    "data.chat_template: none joins them without it",
    _JOINED: "{count:,} prompts and completions are joined without a chat template",
    _SAME: "{count:,} rows have the same answer as chosen and as rejected; they prefer nothing",
    EMPTY_THOUGHT: "{count:,} trained answers begin with an empty thought; this teaches a "
    "thinking model not to think; data.template_kwargs: {{enable_thinking: false}} makes it part "
    "of the prompt, if the template supports it",
    LOST_THOUGHT: "{count:,} trained answers have a thought that the chat template leaves out; "
    "set data.chat_template to a template that writes it",
    LOST_WORDS: "{count:,} trained answers differ from the text of the row; the "
    "chat template changes or omits it",
    UNOPENED_THOUGHT: "{count:,} trained answers begin without the thought that the generation "
    "prompt opens, because the chat template does not write it in a turn",
}
