"""Documents of chunks that are read and dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatrain.data.chunks.chunks import (
    KEPT_CHUNKS,
    Chunk,
    ChunkedDocuments,
    HeldDocuments,
    without_held,
)
from megatrain.errors import DataError
from testkit.made_chunks import MadeChunks


def test_a_document_is_the_same_whenever_it_is_read() -> None:
    sources = [MadeChunks(150), MadeChunks(5, seed=1)]
    documents = ChunkedDocuments(sources)
    first = {int(n): documents.tokens(int(n))[0].tolist() for n in documents.numbers(3)}
    documents.expect(range(150))
    assert len(documents._read) == KEPT_CHUNKS
    last = int(documents.numbers(152)[0])
    assert documents.tokens(last)[0].tolist() == sources[1].read(2).tokens(0)[0].tolist()
    assert {n: documents.tokens(n)[0].tolist() for n in first} == first
    numbers = np.array([*first, last])[::-1]
    expected = [len(documents.tokens(int(number))[0]) for number in numbers]
    assert documents.lengths_of(numbers).tolist() == expected
    documents.close()
    assert documents.tokens(last)[0].tolist() == sources[1].read(2).tokens(0)[0].tolist()
    documents.close()


def test_a_chunk_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MadeChunks(3)
    documents = ChunkedDocuments([source])
    read = source.read

    def fail(chunk: int) -> Chunk:
        raise DataError(f"chunk {chunk}")

    monkeypatch.setattr(source, "read", fail)
    with pytest.raises(DataError, match="chunk 1"):
        documents.chunk(1)
    monkeypatch.setattr(source, "read", read)
    assert len(documents.chunk(1).lengths)
    documents.close()


@pytest.mark.parametrize(("size", "count"), [(1, 0), (10, 3), (200, 17)])
def test_chunks_are_trained_on_or_held_out(size: int, count: int) -> None:
    kept = without_held(100, size, count, seed=7)
    trained = kept.chunks(np.arange(kept.num_chunks))
    assert len(kept.held) == count
    assert sorted([*trained.tolist(), *(100 + kept.held).tolist()]) == list(range(100, 100 + size))
    assert sorted(trained.tolist()) == trained.tolist()  # in order, for data that is not shuffled


def test_held_documents_are_read_as_far_as_they_are_needed() -> None:
    source: Any = MadeChunks(9)
    documents = ChunkedDocuments([source])
    held = HeldDocuments(documents, [2, 5, 7], most=5)
    assert len(held.lengths) == 5
    assert source.seen <= {2, 5}
    whole = HeldDocuments(documents, [2, 5, 7])
    assert whole.tokens(0)[0].tolist() == source.read(2).tokens(0)[0].tolist()
    assert whole.lengths.tolist() == [len(whole.tokens(n)[0]) for n in range(len(whole.lengths))]
    documents.close()
