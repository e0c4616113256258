"""Data shown to people: the card in words, and rows with their trained tokens coloured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from megatrain.data.documents import Documents
from megatrain.data.limits import bad_rows, dropped_rows
from megatrain.data.notes import remarks

MAX_TOKENS = 400


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """Return what one source holds, what was left out and why."""
    lines = [f"{card['source']}: {card['format']}", f"  {_rows(card)}", f"  {_tokens(card)}"]
    for what, skipped in (("bad", bad_rows(card)), ("dropped", dropped_rows(card))):
        lines += [f"  {what}: {line.strip()}" for line in str(skipped).splitlines()]
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
    documents = f"{card['documents']:,} documents"
    documents += "" if per_row == 1 else f" ({per_row:.1f} a row)"
    return ", ".join([f"{card['rows']:,} rows read, {card['kept']:,} kept", *said, documents])


def _tokens(card: Mapping[str, Any]) -> str:
    trained = card["trained_tokens"] / max(1, card["tokens"])
    points = ", ".join(f"{p}% {length:,}" for p, length in card["percentiles"].items())
    return (
        f"{card['tokens']:,} tokens, {trained:.0%} of them trained; lengths {points}, "
        f"longest {card['longest']:,}"
    )


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
