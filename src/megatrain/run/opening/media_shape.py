"""The media of a run as sizes, for the plan: how dense rows are, and what their items cost.

Tokens of every item are known from the rows. What an item is in bytes grows with its tokens, so a
few items of each kind tell of all others: the smallest, the largest, and some between.

Laws (tests/run/opening/test_media_shape.py)
    1. No rows of so many tokens have more media than the shape says.
    2. Planned bytes of the cache are those that are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.data.media.placed import DocumentMedia
from megatrain.data.training_rows import TrainingRows
from megatrain.media import MediaItem, MediaKind
from megatrain.models.decoder import Decoder
from megatrain.models.probing.feature_cost import feature_cost
from megatrain.models.towers import masks_by_type, sent_of
from megatrain.planning.model.shapes import MediaShape

_COUNTED = 10_000
"""Documents of each source that are looked at."""
_MIDDLES = 2
"""Items of each kind that are examined beside its smallest and its largest."""
_POINTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedMedia:
    """Tokens that stand for media, by document and by item."""

    documents: tuple[tuple[int, int], ...]
    """Tokens of each document, and how many of them stand for media."""
    items: Mapping[str, int]
    """Tokens of each item, by digest."""
    kinds: Mapping[str, MediaKind]
    num_items: int
    """Items of all documents, also of those that are not counted."""

    @property
    def largest(self) -> str:
        """The digest of the item with most tokens."""
        return max(self.items, key=self.items.__getitem__)

    def examined(self) -> list[str]:
        """Return a few items that tell of all: of each kind the smallest, the largest and some."""
        found: list[str] = []
        for kind in dict.fromkeys(self.kinds.values()):
            own = sorted(
                (digest for digest in self.items if self.kinds[digest] == kind),
                key=self.items.__getitem__,
            )
            last = len(own) - 1
            steps = _MIDDLES + 1
            found += dict.fromkeys(own[last * step // steps] for step in range(steps + 1))
        return found

    def extrapolated(self, known: Mapping[str, int]) -> int:
        """Return the bytes of all items, extrapolated from `known`, those of examined ones."""
        total = 0.0
        for kind in dict.fromkeys(self.kinds.values()):
            points = sorted(
                (self.items[digest], size)
                for digest, size in known.items()
                if self.kinds[digest] == kind
            )
            (few, small), (many, large) = points[0], points[-1]
            per_token = (large - small) / (many - few) if many > few else 0.0
            own = [tokens for digest, tokens in self.items.items() if self.kinds[digest] == kind]
            total += sum(small + per_token * (tokens - few) for tokens in own)
        return round(total * self.num_items / len(self.items))

    @property
    def tokens(self) -> float:
        """Tokens of all items, each counted once."""
        return sum(self.items.values()) * self.num_items / len(self.items)


def counted_media(rows: TrainingRows) -> CountedMedia:
    """Return the tokens of media of a run's rows, which have some."""
    documents: list[tuple[int, int]] = []
    items: dict[str, int] = {}
    kinds: dict[str, MediaKind] = {}
    for source in rows.prepared:
        kinds |= {item.digest: item.kind for item in source.media_items}
        for number in range(min(len(source.lengths), _COUNTED)):
            media = source.media(number)
            tokens = () if media is None else _tokens(media)
            documents.append((int(source.lengths[number]), sum(tokens)))
            if media is not None:
                items |= zip(media.digests, tokens, strict=True)
    return CountedMedia(
        documents=tuple(documents),
        items=items,
        kinds={digest: kinds[digest] for digest in items},
        num_items=len(rows.media_digests),
    )


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


def media_shape(
    decoder: Decoder,
    documents: Iterable[tuple[int, int]],
    items: Sequence[tuple[MediaItem, int]],
) -> MediaShape:
    """Return the shape of media without frozen towers, of a few items and their tokens.

    Items have outputs, if towers are frozen.
    """
    assert decoder.towers is not None
    item, tokens = max(items, key=lambda one: one[1])
    cost = feature_cost(decoder, item)
    sent = (sum(one.nbytes for one in sent_of(item).values()) / count for item, count in items)
    return MediaShape(
        densest=densest(documents),
        sent_bytes=max(sent),
        item_tokens=tokens,
        held_bytes=cost.held_bytes,
        forward_flops=cost.forward_flops,
        backward_flops=cost.backward_flops,
        masked=masks_by_type(decoder.model, decoder.towers),
        num_levels=cost.num_levels,
    )
