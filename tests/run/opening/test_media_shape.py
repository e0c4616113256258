"""Media as sizes: no rows are denser than the shape says."""

from __future__ import annotations

import random

from megatrain.planning.model.shapes import MediaShape
from megatrain.run.opening.media_shape import densest

SHAPE = MediaShape(
    densest=((10, 8), (110, 48)),
    sent_bytes=1.0,
    item_tokens=4,
    held_bytes=(100, 180, 230),
    forward_flops=0.0,
    backward_flops=0.0,
)


def test_no_rows_have_more_media_than_the_densest() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(5, 400) for _ in range(300)]
    documents = [(length, draw.randint(0, length)) for length in lengths]
    shape = MediaShape(
        densest=densest(documents), sent_bytes=1.0, item_tokens=4, held_bytes=(1, 1, 1),
        forward_flops=0.0, backward_flops=0.0,
    )  # fmt: skip
    for count in (1, 3, 20, 299, 300):
        chosen = sorted(documents, key=lambda one: one[1] / one[0])[-count:]
        tokens, media = (sum(column) for column in zip(*chosen, strict=True))
        assert media <= 1.02 * shape.most_tokens(tokens) < 1.1 * media
    assert len(shape.densest) < 50
    assert shape.most_tokens(2 * tokens) == 2 * media, "a step may have rows twice"


def test_media_between_two_points_and_items_beyond_the_third() -> None:
    assert [SHAPE.most_tokens(tokens) for tokens in (5, 10, 60, 220)] == [4, 8, 28, 96]
    assert [SHAPE.most_held(tokens) for tokens in (1, 5, 10, 110)] == [100, 100, 180, 680]
