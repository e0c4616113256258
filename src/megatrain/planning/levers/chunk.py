"""Chunks of the head: tokens whose logits exist at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.planning.levers.lever import Lever, as_tokens
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search

CHUNKS = (4096, 2048, 1024, 512, 256)


class ChunkTokens(Lever):
    """The tokens whose logits exist at a time."""

    name = "chunk_tokens"
    key = "memory.chunk_tokens"
    is_kept = True
    changes_forward = True
    turns = (3, 2, 1)

    def choices(self, search: Search) -> tuple[int, ...]:
        return CHUNKS

    def reason(self, search: Search, settings: StepSettings) -> str:
        if settings.chunk_tokens >= settings.micro_batch_tokens:
            return "all logits of a micro-batch at once"
        larger = settings.changed(chunk_tokens=2 * settings.chunk_tokens)
        if settings.chunk_tokens >= 4096:
            return "large enough for full speed"
        return f"{larger.chunk_tokens} {search.compared(settings, larger)}"

    def read(self, training: Mapping[str, Any]) -> int:
        return as_tokens(training["chunk_tokens"])


def chunk_of(settings: StepSettings, tokens: int) -> int:
    """Return how many of a micro-batch's tokens have their logits at a time."""
    return min(tokens, settings.chunk_tokens)


def num_chunks(settings: StepSettings, tokens: int) -> int:
    """Return how often the head projects a part of a micro-batch."""
    return -(-tokens // settings.chunk_tokens)
