"""What other ranks have to say: rank 0 prints its notes, and of the others what differs."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.ranks.ranks import Ranks


def other_notes(ranks: Ranks, notes: Sequence[str]) -> list[str]:
    """Return, on rank 0, the notes of other ranks that are not its own, each with its rank.

    Ranks that say the same are named together.
    """
    if ranks.owner.is_alone:
        return []
    heard = ranks.agree({"notes": list(notes)})
    if not ranks.owner.leads:
        return []
    said: dict[str, list[int]] = {}
    for rank, one in enumerate(heard):
        for note in one["notes"]:
            if note not in notes:
                said.setdefault(note, []).append(rank)
    return [f"rank {', '.join(map(str, of))}: {note}" for note, of in said.items()]
