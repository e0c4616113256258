"""Windows of chunks: each document once an epoch, and any position without what is before it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatrain.data.chunks.chunks import WINDOW_CHUNKS, ChunkedDocuments, without_held
from megatrain.data.steps.chunk_windows import ChunkOrder
from megatrain.data.steps.steps import Position, Steps
from megatrain.errors import ConfigError, DataError
from testkit.made_chunks import MadeChunks


def _order(source: MadeChunks, *, weight: float = 1.0, held: int = 0, seed: int = 3,
           shuffle: bool = True) -> ChunkOrder:  # fmt: skip
    kept = without_held(0, source.num_chunks, held, seed)
    return ChunkOrder([kept], [weight], seed, shuffle=shuffle)


def _steps(
    source: MadeChunks, order: ChunkOrder, *, packing: bool = True, shuffle: bool = True
) -> Steps:
    return Steps(
        ChunkedDocuments([source]), order, batch_tokens=64, micro_batch_tokens=32, max_length=16,
        packing=packing, shuffle=shuffle, seed=3,
    )  # fmt: skip


def _epoch(steps: Steps, epoch: int = 0) -> list[list[int]]:
    """The documents of each step of an epoch."""
    position, found = Position(epoch=epoch), []
    while position.epoch == epoch:
        rows, position = steps.rows(position)
        found.append([int(number) for row in rows for number in row])
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_document_comes_once_per_epoch(packing: bool, shuffle: bool) -> None:
    source = MadeChunks(3 * WINDOW_CHUNKS + 5)
    order = _order(source, held=4, shuffle=shuffle)
    steps = _steps(source, order, packing=packing, shuffle=shuffle)
    chunks = order.rows(0, 0, order.size).tolist()
    assert len(set(chunks)) == source.num_chunks - 4
    expected = [
        (chunk << 24) + number
        for chunk in chunks
        for number in range(len(source.read(chunk).lengths))
    ]
    first, second = _epoch(steps), _epoch(steps, 1)
    seen = [number for step in first for number in step]
    assert sorted(seen) == sorted(expected)
    assert (seen == expected) is not shuffle
    assert (first == second) is not shuffle
    steps.documents.close()  # type: ignore[union-attr]


def test_a_position_needs_its_own_chunks_alone() -> None:
    source = MadeChunks(20 * WINDOW_CHUNKS)
    steps = _steps(source, _order(source))
    position = Position()
    while position.window < 12:
        _, position = steps.rows(position)
    state = steps.state(position)
    expected = [steps.batch(position)[0][0].input_ids.tolist()]
    fresh = MadeChunks(20 * WINDOW_CHUNKS)
    again = _steps(fresh, _order(fresh))
    assert [again.batch(again.position(state))[0][0].input_ids.tolist()] == expected
    assert len(fresh.seen) <= 3 * WINDOW_CHUNKS  # its window, and what is read ahead
    other = MadeChunks(20 * WINDOW_CHUNKS, seed=1)
    with pytest.raises(DataError, match="the saved position belongs to other data"):
        _steps(other, _order(other)).position(state)
    for one in (steps, again):
        one.documents.close()  # type: ignore[union-attr]


def test_rows_of_a_window_come_from_all_of_its_chunks() -> None:
    source = MadeChunks(4 * WINDOW_CHUNKS)
    steps = _steps(source, _order(source))
    apart = [len({number >> 24 for number in step}) / len(step) for step in _epoch(steps)[:20]]
    assert np.mean(apart) > 0.6
    steps.documents.close()  # type: ignore[union-attr]


def test_weights_count_chunks() -> None:
    source = MadeChunks(40)
    times = Counter(_order(source, weight=2.5).rows(0, 0, 1000).tolist())
    assert sorted(Counter(times.values()).items()) == [(2, 20), (3, 20)]


def test_rows_are_not_counted_before_they_are_read() -> None:
    source = MadeChunks(4)
    with pytest.raises(ConfigError, match=r"train.batch_rows is 8, and rows of data that is read"):
        Steps(ChunkedDocuments([source]), _order(source), batch_rows=8, micro_batch_tokens=32,
              max_length=16)  # fmt: skip
