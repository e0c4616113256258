"""Data shown to people: the card in words, and rows with their trained tokens coloured."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from megatrain.data.documents import Documents
from megatrain.data.notes import remarks

MAX_TOKENS = 400


def show_card(card: dict[str, Any], console: Console | None = None) -> None:
    """Print what the data holds, what was left out and why."""
    out = console or Console()

    def say(text: str) -> None:
        out.print(text, markup=False, highlight=False)

    say(f"{card['source']}: {card['format']}")
    trained = card["trained_tokens"] / max(1, card["tokens"])
    say(
        f"{card['rows']:,} rows, {card['documents']:,} documents, {card['tokens']:,} tokens, "
        f"{trained:.0%} of them trained"
    )
    points = ", ".join(f"{p}% {length:,}" for p, length in card["percentiles"].items())
    say(f"lengths in tokens: {points}, longest {card['longest']:,}")
    for what in ("bad", "dropped"):
        for reason, count in card[what].items():
            places = ", ".join(map(str, card[f"{what}_places"].get(reason, ())))
            say(f"{what}: {count:,} x {reason} ({places})")
    for what in ("truncated", "split"):
        if card[what]:
            say(f"{what}: {card[what]:,}")
    for remark in remarks(card):
        say(remark)


def show_rows(
    documents: Documents, tokenizer: Any, count: int, console: Console | None = None
) -> None:
    """Print some documents: trained tokens in green, the others as they are."""
    out = console or Console()
    for number in range(min(count, len(documents.lengths))):
        ids, trained = documents.tokens(number)
        text = Text(f"--- document {number}: {len(ids)} tokens, {int(trained.sum())} trained\n")
        for token, is_trained in zip(ids[:MAX_TOKENS], trained, strict=False):
            style = "bold green" if is_trained else "dim"
            text.append(tokenizer.decode([int(token)]), style=style)
        out.print(text)
