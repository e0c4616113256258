"""Media of a row: an image or a sound, as the model's own processor gives it.

An item is known by its content everywhere: two rows with the same picture share what is kept of it.

Laws (tests/test_media.py)
    1. A digest tells apart kinds, names, dtypes, shapes and bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

MediaKind = Literal["image", "audio"]
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "audio": 3}
"""The type of a token that stands for a part of an item, as in transformers; text has 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One image or sound."""

    kind: MediaKind
    tensors: Mapping[str, Tensor]
    """What a processor makes of it alone, by the names that `get_image_features` and its like
    have."""
    digest: str
    """Of kind and tensors."""

    @classmethod
    def of(cls, kind: MediaKind, tensors: Mapping[str, Tensor]) -> Self:
        """Return an item of these tensors, with their digest."""
        return cls(kind=kind, tensors=tensors, digest=digest_of_tensors(kind, tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMedia:
    """The items of a text, and which of its tokens stand for them."""

    items: Sequence[MediaItem]
    """In the order of their tokens."""
    token_types: Sequence[int]
    """Of each token: 0 for text, else one of TOKEN_TYPES."""


def digest_of_tensors(kind: MediaKind, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest by which an item is known."""
    digest = hashlib.sha256(kind.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


MEDIA = "media"
"""The name of the items among the arguments of a front."""
