"""Rows as a page: pictures in their places, as data; no text of a row is markup."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np

from megatrain.data.media.decoder import Picture
from megatrain.data.media.placed import DocumentMedia
from megatrain.report.data_page import data_page


class _Words:
    """A tokenizer whose tokens are words."""

    words = ("look", "<script>alert(1)</script>", "cat", "pad")

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


class _Prepared:
    """One document with a picture, a sound and a trained word."""

    card: ClassVar[dict[str, Any]] = {
        "source": "rows <b>", "format": "messages", "rows": 1, "kept": 1, "documents": 1,
        "tokens": 8, "trained_tokens": 1, "percentiles": {"50": 8}, "longest": 8, "truncated": 0,
        "split": 0, "bad": {}, "bad_places": {}, "dropped": {}, "dropped_places": {},
        "notes": {}, "turns_without_end": 0, "passed_through": {}, "unread": {},
        "unused_columns": {}, "media": {"audio": 1, "image": 1}, "media_tokens": 4,
    }  # fmt: skip
    lengths = np.array([8])

    def tokens(self, document: int) -> tuple[Any, Any]:
        ids = np.array([0, 3, 3, 1, 3, 3, 1, 2], dtype=np.int32)
        return ids, ids == 2

    def media(self, document: int) -> DocumentMedia:
        types = np.array([0, 1, 1, 0, 3, 3, 0, 0], dtype=np.uint8)
        return DocumentMedia(digests=("a", "b"), begins=(1, 4), token_types=types)


def test_media_stand_in_their_places_and_text_is_text() -> None:
    sources: Any = [_Prepared()]
    pictures = {"a": Picture(width=1, height=1, rgb=b"rgb"), "b": None}
    page = data_page(sources, _Words(), 5, pictures.__getitem__)
    assert "<script>" not in page
    assert "<b>" not in page
    shown = re.sub(r"<(?!img|mark|/mark)[^>]*>", "", page.partition('class="tokens">')[2])
    places = ["look", "<img", "[image 1: 2 tokens]", "alert(1)", "[sound 2: 2 tokens]", "<mark>cat"]
    assert [shown.find(place) for place in places] == sorted(shown.find(place) for place in places)
    assert all(place in shown for place in places)
    assert page.count("<img ") == 1
    assert 'src="data:image/png;base64,iVBORw' in page
    assert "img-src data:" in page
    assert "50% of them stand for 1 sound and 1 image" in page
