"""Media as sizes: no rows are denser than the shape says, and the cache is as large as planned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatrain.planning.memory.predicted import TOWER_OUTPUTS
from megatrain.planning.model.shapes import MediaShape
from megatrain.run.opening.media_shape import CountedMedia, densest
from megatrain.run.trainer import Trainer
from testkit.media_runs import media_run_config, write_media_world

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


def test_a_few_items_tell_of_all() -> None:
    items = {str(tokens): tokens for tokens in range(10, 60)} | {"sound": 7}
    kinds = dict.fromkeys(items, "image") | {"sound": "audio"}
    counted = CountedMedia(documents=(), items=items, kinds=kinds, num_items=102)  # type: ignore[arg-type]
    examined = counted.examined()
    assert {"10", "59", "sound"} < set(examined)
    assert len(examined) <= 5
    sizes = {name: 1000 + 24 * tokens for name, tokens in items.items()}
    assert counted.extrapolated({n: sizes[n] for n in examined}) == 2 * sum(sizes.values())


@pytest.mark.merge
@pytest.mark.parametrize("media", ["frozen", "projector"])
def test_the_cache_has_as_many_bytes_as_planned(
    media: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    write_media_world(tmp_path, num_rows=30)
    with Trainer(media_run_config(tmp_path, tmp_path / "run", model={"media": media})) as trainer:
        (planned,) = [x for x in trainer.plan.ledger.lines if x.purpose == TOWER_OUTPUTS]
    files = [path for path in (tmp_path / "cache").rglob("towers-*/*/*") if path.is_file()]
    assert len(files) == 5, "one more than is examined"
    assert len({path.stat().st_size for path in files}) > 1
    assert sum(path.stat().st_size for path in files) == planned.num_bytes
