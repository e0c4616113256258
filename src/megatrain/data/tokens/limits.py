"""How many rows may be lost before it is an error: `data.max_bad` and `data.max_dropped`.

A bad row cannot be used at all; a dropped row could, but is too long or has nothing to train. Both
are counted by row. A row that became several documents and lost one of them is dropped too.

A row may also be trained without the thought of an answer, because the chat template leaves it out
where the model would write it: `data.max_lost_thoughts`. A template that removes thoughts of
earlier turns is not meant: each of them is trained where it is the last turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.data.chat.notes import THOUGHTLESS
from megatrain.data.rows.skipped import SkippedRows
from megatrain.data.tokens.encoding import NO_TARGET, TOO_LONG
from megatrain.errors import DataError


def bad_rows(card: Mapping[str, Any]) -> SkippedRows:
    """Return a card's bad rows as they were counted."""
    return SkippedRows(counts=card["bad"], places=card["bad_places"])


def dropped_rows(card: Mapping[str, Any]) -> SkippedRows:
    """Return a card's dropped rows as they were counted."""
    return SkippedRows(counts=card["dropped"], places=card["dropped_places"])


def check_limits(
    card: Mapping[str, Any], *, max_bad: float, max_dropped: float, max_lost_thoughts: float
) -> None:
    """Raise DataError if more rows are lost than the keys allow, or none is left."""
    rows, bad, dropped = card["rows"], bad_rows(card), dropped_rows(card)
    if bad.total > max_bad * rows:
        raise DataError(
            f"{card['source']}: {bad.total:,} of {rows:,} rows cannot be used "
            f"({_percent(bad.total, rows)}, data.max_bad allows {100 * max_bad:g} %):\n{bad}\n"
            "  Fix or remove them, or raise data.max_bad."
        )
    if dropped.total > max_dropped * rows:
        raise DataError(
            f"{card['source']}: {dropped.total:,} of {rows:,} rows would be dropped "
            f"({_percent(dropped.total, rows)}, data.max_dropped allows {100 * max_dropped:g} %)"
            f":\n{dropped}\n  {_ways_out(card, dropped)}raise data.max_dropped."
        )
    thoughtless = card["notes"].get(THOUGHTLESS, 0)
    if thoughtless > max_lost_thoughts * rows:
        raise DataError(
            f"{card['source']}: {thoughtless:,} of {rows:,} rows would be trained without their "
            f"thoughts ({_percent(thoughtless, rows)}, data.max_lost_thoughts allows "
            f"{100 * max_lost_thoughts:g} %): the chat template leaves them out of the answer.\n"
            "  Set data.chat_template to a template that writes them. To train the answers alone, "
            "set data.max_lost_thoughts: 1."
        )
    if card["documents"] == 0:
        lost = "\n".join(str(skipped) for skipped in (bad, dropped) if skipped.total)
        raise DataError(f"{card['source']}: no row is left of {rows:,}:\n{lost}")


def _percent(count: int, rows: int) -> str:
    return f"{100 * count / max(rows, 1):.1f} %"


def _ways_out(card: Mapping[str, Any], dropped: SkippedRows) -> str:
    """Return the ways to keep the rows, cheapest first."""
    ways = []
    if TOO_LONG in dropped.counts:
        ways.append(f"set data.max_length to {card['longest_read']} to keep all of them")
        ways.append("cut them with data.overlong: truncate")
        if card["format"].endswith(("text (text)", "tokens (input_ids)")):
            ways[-1] = "cut them into pieces with data.overlong: split"
    if NO_TARGET in dropped.counts:
        ways.append("check data.train_on and data.overlong: these rows have no trained token")
    text = ", ".join([*ways, "or "])
    return text[0].upper() + text[1:]
