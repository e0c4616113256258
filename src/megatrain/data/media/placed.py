"""Media in their places: in a text that was rendered, and among the tokens of a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.rows.media import Kind

TypeRun = tuple[int, int, int]
"""Tokens from begin to end, and their type: 1 for images, 3 for sounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedMedium:
    """A medium that a processor has taken, by the digest of what it made of it."""

    kind: Kind
    digest: str
    """As `MediaItem` has it."""
    num_bytes: int
    path: str = ""
    """Of its file; empty: `data` has its bytes."""
    mtime_ns: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMedium:
    """A medium, and the characters or tokens that stand for it."""

    begin: int
    end: int
    medium: UsedMedium


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMedia:
    """The media of a document."""

    digests: tuple[str, ...]
    """In the order of their tokens."""
    begins: tuple[int, ...]
    """The first token of each."""
    token_types: NDArray[np.uint8]
    """0 for text, 1 for images, 3 for sounds, of each token."""


def media_before(media: DocumentMedia | None, end: int) -> DocumentMedia | None:
    """Return the media of a document's first tokens, up to `end`; None: they are text alone."""
    if media is None:
        return None
    begins = tuple(begin for begin in media.begins if begin < end)
    if not begins:
        return None
    return DocumentMedia(
        digests=media.digests[: len(begins)], begins=begins, token_types=media.token_types[:end]
    )


def media_of(documents: Any, document: int) -> DocumentMedia | None:
    """Return the media of a document; None: it is text alone."""
    ask = getattr(documents, "media", None)
    found: DocumentMedia | None = None if ask is None else ask(document)
    return found
