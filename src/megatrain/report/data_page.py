"""Rows as one HTML file: trained tokens marked, and pictures in their places, small.

Pictures are made anew of pixels (drawing/picture.py): no byte of a file of the rows is in it.

Law (tests/report/test_data_page.py): each medium stands where its tokens do, and no text of a row
is markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatrain.data.media.decoder import Picture
from megatrain.data.preview import Stretch, card_lines, stretches
from megatrain.data.tokens.prepared import PreparedData
from megatrain.report.drawing.document import document, signs
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.picture import TOKENS_STYLE, picture

_NAME = "MegaTrain data"
DATA_PAGE_SIGNS = signs(_NAME)
Thumbnail = Callable[[str], Picture | None]
"""Returns a small picture of a medium by its digest; None: it is not an image."""


def data_page(
    sources: Sequence[PreparedData], tokenizer: Any, count: int, thumbnail: Thumbnail
) -> Html:
    """Return the page of the first `count` documents of each source."""
    sections = {
        str(source.card["source"]): join_html(
            [
                TOKENS_STYLE,
                tag("pre", "\n".join(card_lines(source.card))),
                *(
                    _document(source, number, tokenizer, thumbnail)
                    for number in range(min(count, len(source.lengths)))
                ),
            ]
        )
        for source in sources
    }
    return document("Rows", _NAME, sections, has_pictures=True)


def _document(source: PreparedData, number: int, tokenizer: Any, thumbnail: Thumbnail) -> Html:
    ids, trained = source.tokens(number)
    title = f"Document {number}: {len(ids):,} tokens, {int(trained.sum()):,} trained"
    parts = (_stretch(one, thumbnail) for one in stretches(source, number, tokenizer))
    return join_html([tag("h3", title), tag("p", *parts, class_="tokens")])


def _stretch(stretch: Stretch, thumbnail: Thumbnail) -> str:
    if not stretch.digest:
        return tag("mark", stretch.text) if stretch.is_trained else stretch.text
    found, name = thumbnail(stretch.digest), tag("code", f"[{stretch.text}]")
    if found is None:
        return name
    return join_html([picture(found.width, found.height, found.rgb, stretch.text), name])
