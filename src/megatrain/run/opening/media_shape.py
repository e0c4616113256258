"""The media of a run as sizes, for the plan: how dense rows are, and what their items cost.

Tokens of every item are known from the rows. What an item takes grows with its tokens, so the
largest tells of all others.

Law (tests/run/opening/test_media_shape.py): no rows of so many tokens have more media than the
shape says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.data.media.placed import DocumentMedia
from megatrain.data.training_rows import TrainingRows
from megatrain.media import MediaItem
from megatrain.models.decoder import Decoder
from megatrain.models.probing.feature_cost import feature_cost
from megatrain.models.towers import masks_by_type
from megatrain.planning.model.shapes import MediaShape

_COUNTED = 10_000
"""Documents of each source that are looked at."""
_POINTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedMedia:
    """Tokens that stand for media."""

    documents: tuple[tuple[int, int], ...]
    """Tokens of each document, and how many of them stand for media."""
    largest: str
    """The digest of the item with most tokens."""
    largest_tokens: int


def counted_media(rows: TrainingRows) -> CountedMedia:
    """Return the tokens of media of a run's rows, which have some."""
    documents: list[tuple[int, int]] = []
    items: dict[str, int] = {}
    for source in rows.prepared:
        for number in range(min(len(source.lengths), _COUNTED)):
            media = source.media(number)
            tokens = () if media is None else _tokens(media)
            documents.append((int(source.lengths[number]), sum(tokens)))
            if media is not None:
                items |= zip(media.digests, tokens, strict=True)
    largest = max(items, key=items.__getitem__)
    return CountedMedia(documents=tuple(documents), largest=largest, largest_tokens=items[largest])


def _tokens(media: DocumentMedia) -> list[int]:
    """Return how many tokens stand for each item of a document."""
    ends = [*media.begins[1:], len(media.token_types)]
    return [
        int((media.token_types[begin:end] != 0).sum())
        for begin, end in zip(media.begins, ends, strict=True)
    ]


def densest(documents: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the tokens of the densest documents, added up, and those that stand for media."""
    ordered = sorted(documents, key=lambda one: one[1] / one[0], reverse=True)
    points, tokens, media = list[tuple[int, int]](), 0, 0
    for own, of_media in ordered:
        tokens, media = tokens + own, media + of_media
        points.append((tokens, media))
    whole = points[-1][0]
    kept: dict[int, tuple[int, int]] = {}
    for number, point in enumerate(points):  # at equal ratios of tokens
        share = (point[0] / whole) ** (1 / 8)
        kept.setdefault(0 if number == 0 else 1 + int(share * _POINTS), point)
    return tuple(dict.fromkeys([*kept.values(), points[-1]]))


def media_shape(decoder: Decoder, counted: CountedMedia, largest: MediaItem) -> MediaShape:
    """Return the shape of the media of rows, whose largest item is given."""
    assert decoder.towers is not None
    cost = feature_cost(decoder, largest)
    sent = sum(one.nbytes for one in largest.tensors.values())
    return MediaShape(
        densest=densest(counted.documents),
        sent_bytes=sent / counted.largest_tokens,
        item_tokens=counted.largest_tokens,
        held_bytes=cost.held_bytes,
        forward_flops=cost.forward_flops,
        backward_flops=cost.backward_flops,
        masked=masks_by_type(decoder.model, decoder.towers),
        num_levels=cost.num_levels,
    )
