"""Parts of a data set that is larger than memory, read and dropped as steps need them.

A source says how many chunks it has before it has read any of them; the documents of a chunk are
known when it is read, and are the same whenever it is. Document n of chunk c has the number
c * 2**24 + n, so nothing that grows with the data has to be kept.

    documents = ChunkedDocuments([TokenFiles(...), ...])
    documents.expect(chunks)           # reading begins, in threads
    documents.tokens(number)           # waits for its chunk

Laws (tests/data/chunks/test_chunks.py)
    1. A document has the same tokens whenever, and in whatever order, chunks are read.
    2. Held-out chunks are never among those that are trained on, and all others are.
    3. No more than `KEPT_CHUNKS` chunks are in memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatrain.data.chat.spans import mask_of
from megatrain.data.steps.order import Indices, Permutation
from megatrain.data.tokens.documents import Documents, Lengths

WINDOW_CHUNKS = 32
"""Chunks whose documents are packed and shuffled together."""
KEPT_CHUNKS = 3 * WINDOW_CHUNKS
"""Chunks in memory: those of the window that is trained on, of the next, and of an evaluation."""
_DOCUMENT_BITS = 24
_FEW = 8
_AT_A_TIME = 8
"""Chunks that are read at the same time: enough to hide the answers of a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The documents of a chunk."""

    lengths: Lengths
    """Tokens of each document. (documents,)"""
    starts: Indices
    """The first token of each in `ids`; some tokens may be of none. (documents,)"""
    ids: NDArray[Any]
    """All tokens, in the dtype of the file. (tokens,)"""
    runs: tuple[NDArray[np.int32], ...] | None = None
    """Begin and end of each run of trained tokens of each document; None: all are trained."""

    @property
    def row_starts(self) -> Indices:
        """Each document is a row of its own. (documents + 1,)"""
        return np.arange(len(self.lengths) + 1, dtype=np.int64)

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        start, length = int(self.starts[document]), int(self.lengths[document])
        ids = self.ids[start : start + length].astype(np.int32)
        if self.runs is None:
            return ids, np.ones(length, dtype=np.bool_)
        return ids, mask_of(self.runs[document], length)


@runtime_checkable
class ChunkSource(Protocol):
    """One source in chunks."""

    card: dict[str, Any]
    """Facts for the user, and a digest of everything that decides the documents."""

    @property
    def num_chunks(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks; an estimate where they are not counted before they are read."""

    def require_below(self, vocab_size: int) -> None:
        """Refuse tokens that are not below this, now or when they are read. Raises DataError."""

    def read(self, chunk: int) -> Chunk:
        """Return the documents of a chunk. Called from several threads. Raises DataError."""

    def close(self) -> None:
        """End what works ahead."""


class ChunkedDocuments:
    """The documents of several sources by number, chunk after chunk. Close it when done."""

    def __init__(self, sources: Sequence[ChunkSource]) -> None:
        self.sources = tuple(sources)
        self._firsts = np.cumsum([0, *(source.num_chunks for source in sources)])
        self._read: OrderedDict[int, Future[Chunk]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def mark(self) -> str:
        """Digest of everything that decides the documents."""
        return "|".join(f"{one.card['digest']} {one.num_chunks}" for one in self.sources)

    def expect(self, chunks: Iterable[int]) -> None:
        """Begin to read these chunks, and keep them; the ones used longest ago are dropped."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="chunks")
            for chunk in map(int, chunks):
                if chunk in self._read:
                    self._read.move_to_end(chunk)
                else:
                    self._read[chunk] = self._pool.submit(self._chunk_of, chunk)
            while len(self._read) > KEPT_CHUNKS:
                self._read.popitem(last=False)

    def chunk(self, number: int) -> Chunk:
        """Return a chunk; waits until it is read. Raises what reading it raised."""
        with self._lock:
            found = self._read.get(number)
        if found is None:
            self.expect([number])
            with self._lock:
                found = self._read.get(number)
        if found is None:  # others pushed it out meanwhile
            return self._chunk_of(number)
        try:
            return found.result()
        except BaseException:
            with self._lock:
                self._read.pop(number, None)  # a later try reads it again
            raise

    def numbers(self, chunk: int) -> Indices:
        """Return the numbers of a chunk's documents."""
        count = len(self.chunk(chunk).lengths)
        return (chunk << _DOCUMENT_BITS) + np.arange(count, dtype=np.int64)

    def lengths_of(self, numbers: Indices) -> Lengths:
        """Return the tokens of each of these documents."""
        if len(numbers) <= _FEW:  # the documents of a packed row
            places = (divmod(int(number), 1 << _DOCUMENT_BITS) for number in numbers)
            return np.array([self.chunk(chunk).lengths[place] for chunk, place in places])
        chunks = numbers >> _DOCUMENT_BITS
        within = numbers & ((1 << _DOCUMENT_BITS) - 1)
        found = np.empty(len(numbers), dtype=np.int64)
        for chunk in np.unique(chunks):
            chosen = chunks == chunk
            found[chosen] = self.chunk(int(chunk)).lengths[within[chosen]]
        return found

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        chunk, number = divmod(document, 1 << _DOCUMENT_BITS)
        return self.chunk(chunk).tokens(number)

    def close(self) -> None:
        """Drop all chunks, and end the threads; they begin again when they are needed."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._read.clear()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        for source in self.sources:
            source.close()

    def _chunk_of(self, number: int) -> Chunk:
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.sources[source].read(number - int(self._firsts[source]))


def lengths_of(documents: Documents | ChunkedDocuments, numbers: Indices) -> Lengths:
    """Return the tokens of each of these documents."""
    if isinstance(documents, ChunkedDocuments):
        return documents.lengths_of(numbers)
    return documents.lengths[numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The chunks of one source that are trained on: all but some that are held out."""

    first: int
    """Number of its first chunk."""
    num_chunks: int
    """How many are trained on."""
    held: Indices
    """Those that are held out, in order, counted in the source."""

    def chunks(self, places: Indices) -> Indices:
        """Return the numbers of the chunks at these places among those that are trained on."""
        before = self.held - np.arange(len(self.held), dtype=np.int64)
        return self.first + places + np.searchsorted(before, places, side="right")


def without_held(first: int, size: int, count: int, seed: int) -> Kept:
    """Return a source's chunks without `count` of them, chosen by the seed."""
    chosen = np.arange(0, dtype=np.int64)
    if count:
        chosen = np.sort(Permutation(size, seed, -2)(np.arange(count, dtype=np.int64)))
    return Kept(first=first, num_chunks=size - count, held=chosen)


class HeldDocuments:
    """The documents of some chunks, numbered from 0, for evaluations."""

    def __init__(
        self, documents: ChunkedDocuments, chunks: Iterable[int], most: int | None = None
    ) -> None:
        """Read the chunks, as far as `most` documents need them."""
        self._documents = documents
        numbers: list[Indices] = []
        count = 0
        for chunk in chunks:
            if most is not None and count >= most:
                break
            numbers.append(documents.numbers(int(chunk)))
            count += len(numbers[-1])
        self._numbers = np.concatenate([np.zeros(0, dtype=np.int64), *numbers])[:most]
        self.lengths: Lengths = documents.lengths_of(self._numbers)
        self.row_starts: Indices = np.arange(len(self._numbers) + 1, dtype=np.int64)

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        return self._documents.tokens(int(self._numbers[document]))
