"""Data for display: the card as text, and rows with their trained tokens marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from megatrain.data.chat.notes import remarks
from megatrain.data.media.placed import DocumentMedia, media_of
from megatrain.data.steps.answers import PER_ROW
from megatrain.data.steps.order import Indices
from megatrain.data.tokens.documents import Documents
from megatrain.data.tokens.limits import bad_rows, dropped_rows
from megatrain.data.tokens.prepared import PreparedData
from megatrain.text import counted, printable

MAX_TOKENS = 400
"""Tokens shown of a document. A longer one is cut, first where nothing is trained."""
SHOWN_TOKENS = {False: 60, True: 240}
"""The most tokens of a stretch in a document that is cut, by whether it is trained."""
_PERCENTILES = (5, 50, 95)
"""Those of a card that are shown."""
_KINDS = {1: "image", 3: "sound"}
"""Names of what a token stands for, by its type."""
BEGIN, END = "{+", "+}"
"""Around trained tokens where nothing can be colored, as in a log or a pipe."""


def card_lines(card: Mapping[str, Any], most_reasons: int | None = None) -> list[str]:
    """Return the contents of one source, and the rows left out by reason, most common first."""
    lines = [f"{card['source']}: {card['format']}", f"  {_rows(card)}", f"  {_tokens(card)}"]
    for what, skipped in (("bad", bad_rows(card)), ("dropped", dropped_rows(card))):
        reasons = [line.strip() for line in str(skipped).splitlines()]
        lines += [f"  {what}: {reason}" for reason in reasons[:most_reasons]]
        if more := len(reasons) - len(reasons[:most_reasons]):
            lines.append(f"  {what}: {more} more reasons in data_card.json")
    return lines + [f"  {remark}" for remark in remarks(card)]


def _rows(card: Mapping[str, Any]) -> str:
    bad, dropped = bad_rows(card).total, dropped_rows(card).total
    in_part = dropped - (card["rows"] - bad - card["kept"])
    counts = {
        "bad": bad,
        "dropped": dropped - in_part,
        "dropped in part": in_part,
        "truncated": card["truncated"],
        "split": card["split"],
    }
    said = [f"{count:,} {what}" for what, count in counts.items() if count]
    per_row = card["documents"] / max(1, card["kept"])
    documents = counted(card["documents"], "document")
    documents += "" if per_row == 1 or card.get("preferences") else f" ({per_row:.1f} a row)"
    if "desirable" in card:
        documents += f", {card['desirable']:,} of them desirable"
    return ", ".join(
        [f"{counted(card['rows'], 'row')} read, {card['kept']:,} kept", *said, documents]
    )


def _tokens(card: Mapping[str, Any]) -> str:
    share = card["trained_tokens"] / max(1, card["tokens"])
    trained = f", {share:.0%} of them trained" if share else ""  # of prompts none is
    shown = {p: length for p, length in card["percentiles"].items() if int(p) in _PERCENTILES}
    points = ", ".join(f"{p}% {length:,}" for p, length in shown.items())
    lengths = f"lengths {points}, longest {card['longest']:,}"
    return f"{card['tokens']:,} tokens{trained}{_media_tokens(card)}; {lengths}"


def _media_tokens(card: Mapping[str, Any]) -> str:
    """Return how many media there are, and how many tokens stand for them."""
    if not card.get("media"):
        return ""
    kinds = {"audio": "sound"}
    uses = [counted(count, kinds.get(kind, kind)) for kind, count in card["media"].items()]
    share = card["media_tokens"] / max(1, card["tokens"])
    return f", {share:.0%} of them stand for {' and '.join(uses)}"


def show_prepared(
    prepared: PreparedData, tokenizer: Any, num_rows: int, *, whole: bool = False
) -> None:
    """Print the first rows; of preferences each answer, under its name. `whole`: uncut."""
    marks = prepared.desirable if prepared.preferences == "kto" else None

    def title(number: int) -> str:
        if marks is not None:
            return f"row {number}, {'desirable' if marks[number] else 'undesirable'}"
        return f"row {number // PER_ROW}, {('chosen', 'rejected')[number % PER_ROW]}"

    if prepared.preferences is None:
        show_rows(prepared, tokenizer, num_rows, whole=whole)
    else:
        count = num_rows * (PER_ROW if marks is None else 1)
        show_rows(prepared, tokenizer, count, title=title, whole=whole)


def show_rows(
    documents: Documents,
    tokenizer: Any,
    count: int,
    console: Console | None = None,
    title: Callable[[int], str] = "document {}".format,
    *,
    whole: bool = False,
) -> None:
    """Print some documents: trained tokens underlined in green, or in marks if there is no color.

    Tokens are decoded in stretches, because a character may consist of several. A long document is
    cut in the middle of its stretches, so that every trained stretch shows where it begins and
    ends; `whole` documents are not cut. No character of a row reaches a terminal as a control.
    """
    out = console or Console()
    marked = out.color_system is None or out.no_color
    if count > 0 and marked:
        out.print(f"trained tokens are between {BEGIN} and {END}", markup=False)
    for number in range(min(count, len(documents.lengths))):
        ids, trained = documents.tokens(number)
        counts = f"{len(ids):,} tokens, {int(trained.sum()):,} trained"
        text = Text(f"--- {title(number)}: {counts}\n")
        for stretch in stretches(documents, number, tokenizer, whole=whole):
            shown = f"[{stretch.text}]" if stretch.digest else stretch.text
            if stretch.is_trained and marked:
                shown = f"{BEGIN}{shown}{END}"
            text.append(shown, style=stretch.style)
        out.print(text, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens of a document that are trained or not, or that stand for a medium."""

    text: str
    """What can be printed of them; of a medium, its kind, its number and its tokens."""
    is_trained: bool
    digest: str = ""
    """Of the medium; empty: it is text."""

    @property
    def style(self) -> str:
        if self.digest:
            return "bold cyan"
        return "bold underline green" if self.is_trained else "dim"


def stretches(
    documents: Documents, number: int, tokenizer: Any, *, whole: bool = False
) -> Iterator[Stretch]:
    """Yield a document in stretches, long ones without their middle if it is not `whole`."""
    ids, trained = documents.tokens(number)
    return _stretches(ids, trained, media_of(documents, number), tokenizer, whole=whole)


def shown_text(tokens: Sequence[int], media: DocumentMedia | None, tokenizer: Any) -> str:
    """Return a text with each medium as its kind, its number and its tokens."""
    if media is None:
        return str(tokenizer.decode(list(tokens)))
    ids = np.array(tokens)
    found = _stretches(ids, np.zeros(len(ids), dtype=np.bool_), media, tokenizer, whole=True)
    return "".join(f"[{one.text}]" if one.digest else one.text for one in found)


def _stretches(
    ids: NDArray[np.integer],
    trained: NDArray[np.bool_],
    media: DocumentMedia | None,
    tokenizer: Any,
    *,
    whole: bool,
) -> Iterator[Stretch]:
    items = _items(media, len(ids))
    marked = zip(ids.tolist(), trained.tolist(), items.tolist(), strict=True)
    for (is_trained, item), part in groupby(marked, key=lambda one: one[1:]):
        tokens = [token for token, *_ in part]
        if item and media is not None:
            kind = _KINDS[int(media.token_types[items == item][0])]
            text = f"{kind} {item}: {counted(len(tokens), 'token')}"
            yield Stretch(text=text, is_trained=False, digest=media.digests[item - 1])
            continue
        most = len(tokens) if whole or len(ids) <= MAX_TOKENS else SHOWN_TOKENS[is_trained]
        yield Stretch(text=_decoded(tokens, tokenizer, most), is_trained=is_trained)


def _items(media: DocumentMedia | None, length: int) -> Indices:
    """Return the medium that each token stands for, counted from 1; 0 is text."""
    items = np.zeros(length, dtype=np.int64)
    if media is not None:
        ends = (*media.begins[1:], length)
        for item, (begin, end) in enumerate(zip(media.begins, ends, strict=True), 1):
            items[begin:end][media.token_types[begin:end] != 0] = item
    return items


def _decoded(tokens: list[int], tokenizer: Any, most: int) -> str:
    """Return the text of a stretch; of one with more than `most` tokens its beginning and end."""
    if len(tokens) <= most:
        return printable(tokenizer.decode(tokens))
    half = most // 2
    ends = [printable(tokenizer.decode(part)) for part in (tokens[:half], tokens[-half:])]
    return f" ... {len(tokens) - 2 * half:,} more tokens ... ".join(ends)
