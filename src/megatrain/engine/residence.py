"""Which layers stay on the device while a model only generates, and how much is left for caches.

A pass over all layers gives one token of each text. A layer that streams crosses the link in every
pass; one that stays crosses once, but takes room from keys and values, and texts that have none
wait for a later pass.

Laws (tests/engine/test_residence.py)
    1. Layers and caches never take more than the room.
    2. All layers stay if they fit beside all texts; else what takes the least time is chosen.
    3. A longest text that fits without layers always fits.
"""

from __future__ import annotations

from dataclasses import dataclass

LINK_OVER_MEMORY = 1 / 32
"""Speed of the link over that of device memory, which a layer that stays is read from. It differs
between machines (1/16 to 1/60), and matters only where all layers nearly fit."""


ROOM_LEFT = 0.05
"""Share of free device memory that generation leaves: gaps between pieces of many sizes."""
MOST_READ = 2048
"""Tokens of prompts that are read at once: enough for products to be fast."""
WORKING_HIDDEN = 32
"""What a layer has at once while it reads tokens, in units of its input: keys, values and three
times the MLP's width, for up to eight experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """What stays on the device."""

    num_layers: int
    cached_tokens: int
    """Tokens that may be in caches at a time; 0: none can."""


def room_for(free_bytes: int, read_bytes: int) -> int:
    """Return the room for layers and caches: what is free, without the working memory of a read.

    `read_bytes` are those of the hidden states that are read at a time.
    """
    return int(free_bytes * (1 - ROOM_LEFT)) - read_bytes * WORKING_HIDDEN


def choose_residence(
    room_bytes: int,
    *,
    num_layers: int,
    layer_bytes: int,
    token_bytes: int,
    wanted_tokens: int,
    longest: int,
) -> Residence:
    """Return what takes the least time for texts of `wanted_tokens`, of `longest` at most each."""
    best, least = Residence(num_layers=0, cached_tokens=0), float("inf")
    for stay in range(num_layers, -1, -1):
        tokens = min(wanted_tokens, (room_bytes - stay * layer_bytes) // token_bytes)
        if tokens < longest:
            continue
        passes = max(1.0, wanted_tokens / max(1, tokens))
        time = (num_layers - stay + stay * LINK_OVER_MEMORY) * passes
        if time < least:
            best, least = Residence(num_layers=stay, cached_tokens=tokens), time
    return best
