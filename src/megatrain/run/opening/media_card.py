"""What a run made of the media of its rows, for its report: `media.json` in the run's folder.

    items, tokens    every image and sound counted once, and the tokens that stand for them
    trained          what is trained of towers: model.media
    towers           of frozen ones: items that were computed and that were there, seconds, bytes
    samples          a few rows in stretches, with the pixels of small pictures in base64

Pictures are those of the process that decodes media. No byte of a file of the rows is kept.

Law (tests/run/opening/test_media_card.py): the card of a run has what the run did, and pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from megatrain.data.media.store import MediaStore
from megatrain.data.preview import Stretch, stretches
from megatrain.data.rows.skipped import BadRow
from megatrain.data.tokens.prepared import PreparedData
from megatrain.data.training_rows import TrainingRows
from megatrain.errors import DataError

_SAMPLES = 4
_PICTURES = 8
"""Of one row."""
_LOOKED_AT = 200
"""Rows of a source that are looked at for samples."""


def samples_of(rows: TrainingRows, store: MediaStore, tokenizer: Any) -> list[dict[str, Any]]:
    """Return a few rows with media, each with its title and its stretches."""
    found: list[dict[str, Any]] = []
    for source in rows.prepared:
        for number in range(min(len(source.lengths), _LOOKED_AT)):
            media = source.media(number)
            if media is None or len(media.digests) > _PICTURES:
                continue
            found.append(
                {
                    "title": f"{source.card['source']}, document {number}",
                    "stretches": list(_stretches(source, number, store, tokenizer)),
                }
            )
            if len(found) == _SAMPLES:
                return found
    return found


def _stretches(
    source: PreparedData, number: int, store: MediaStore, tokenizer: Any
) -> Iterator[dict[str, Any]]:
    for stretch in stretches(source, number, tokenizer):
        yield {"text": stretch.text, "trained": stretch.is_trained, **_picture(stretch, store)}


def _picture(stretch: Stretch, store: MediaStore) -> dict[str, Any]:
    """Return the small picture of a stretch that stands for an image."""
    if not stretch.digest:
        return {}
    picture = None
    with suppress(BadRow, DataError):  # a step that needs it will say so
        picture = store.thumbnail(stretch.digest)
    if picture is None:
        return {"medium": True}
    rgb = base64.b64encode(picture.rgb).decode()
    return {"medium": True, "width": picture.width, "height": picture.height, "rgb": rgb}
