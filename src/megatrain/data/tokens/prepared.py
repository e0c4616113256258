"""Prepared data: documents in an Arrow file that is mapped, never loaded, and a card about them.

    <folder>/documents.arrow    input_ids: list<int32>, trained: list<int32> (begin, end, begin...),
                                row: int64, the row of the source that the document came from
                                desirable: bool, the mark of a completion; null without one
    <folder>/media.*            media of rows, if there are any (data/media/prepared_media.py)
    <folder>/card.json          rows, documents, tokens, lengths, rows left out and why, and a
                                digest of all documents: the same tokens, trained alike, in order

The folder appears by one rename when it is complete. A file of up to 64 GiB (16 billion tokens) is
hashed whenever it is opened, so that a flipped bit is found before it is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from megatrain import files
from megatrain.choices import PreferenceFormat
from megatrain.data.chat.spans import mask_of
from megatrain.data.media.placed import DocumentMedia
from megatrain.data.media.prepared_media import MediaWriter, PreparedMedia, StoredItem
from megatrain.data.steps.order import Indices
from megatrain.data.tokens.documents import Lengths
from megatrain.data.tokens.encoding import EncodedChunk
from megatrain.errors import DataError, DiskError

Card = dict[str, Any]

_FILE, _CARD = "documents.arrow", "card.json"
_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "trained": pa.list_(pa.int32()),
        "row": pa.int64(),
        "desirable": pa.bool_(),
    }
)
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_HASHED_BYTES = 64 * 2**30
_PIECE_BYTES = 2**22
_BATCH_TOKENS = 2**20
"""Tokens in one Arrow batch: few batches to search, little to hold while writing."""


class PreparedData:
    """Documents of one source by number; open as often as you like, it costs a mapping."""

    def __init__(self, folder: Path) -> None:
        """Raise DataError if the folder is damaged."""
        self.folder = folder
        try:
            self.card: Card = json.loads((folder / _CARD).read_text())
            if self.card["file_digest"] != _file_digest(folder / _FILE):
                raise ValueError("its hash does not match")
            table = pa.ipc.open_stream(pa.memory_map(str(folder / _FILE))).read_all()
            self._ids = table.column("input_ids").chunks
            self._runs = table.column("trained").chunks
            self._rows = table.column("row").chunks
            self._desirable = table.column("desirable")
            self._media = PreparedMedia(folder) if self.card.get("media") else None
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise DataError(
                f"{folder}: the prepared data is damaged ({error}). Delete the folder; the next "
                "run prepares it again."
            ) from error
        self._firsts = np.cumsum([0, *(len(chunk) for chunk in self._ids)])

    @property
    def dataset(self) -> Any:
        """The same as a `datasets.Dataset`, for inspection."""
        from datasets import Dataset

        return Dataset.from_file(str(self.folder / _FILE))

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of each document. (documents,)"""
        parts = [np.diff(chunk.offsets.to_numpy()) for chunk in self._ids]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)

    @property
    def rows(self) -> Indices:
        """The row of the source that each document came from, counted from 0. (documents,)"""
        return np.concatenate([np.zeros(0, np.int64), *(chunk.to_numpy() for chunk in self._rows)])

    @property
    def preferences(self) -> PreferenceFormat | None:
        """Which preferences the rows have; None: they have none."""
        found: PreferenceFormat | None = self.card.get("preferences")
        return found

    @property
    def desirable(self) -> NDArray[np.bool_]:
        """The mark of each document, if documents are marked completions. (documents,)"""
        return np.asarray(self._desirable.to_numpy(), dtype=np.bool_)

    @cached_property
    def prompt_lengths(self) -> Lengths:
        """Tokens before the first trained one of each document. (documents,)"""
        firsts = [chunk.values.to_numpy()[chunk.offsets.to_numpy()[:-1]] for chunk in self._runs]
        return np.concatenate([np.zeros(0, dtype=np.int64), *firsts]).astype(np.int64)

    @cached_property
    def row_starts(self) -> Indices:
        """The first document of each row, and the number of documents. (rows + 1,)"""
        rows = self.rows
        return np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))

    @property
    def media_items(self) -> tuple[StoredItem, ...]:
        """All media of the documents, each once."""
        return () if self._media is None else self._media.items

    @property
    def is_current(self) -> bool:
        """Whether files of media that rows name are as they were."""
        return self._media is None or self._media.are_there

    def media(self, document: int) -> DocumentMedia | None:
        """Return the media of a document; None: it has none."""
        if self._media is None:
            return None
        return self._media.media(document, int(self.lengths[document]))

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        chunk = int(np.searchsorted(self._firsts, document, side="right")) - 1
        place = document - int(self._firsts[chunk])
        ids = self._ids[chunk][place].values.to_numpy()
        return ids, mask_of(self._runs[chunk][place].values.to_numpy(), len(ids))


class PreparedWriter:
    """Writes beside the final place; `publish` puts it there."""

    def __init__(self, folder: Path) -> None:
        self._final = folder
        # Not the number of this process: containers that share a cache all have the same few.
        self._folder = files.temporary_name(folder)
        files.clear_remains(folder.parent)
        files.make_folder(self._folder)
        self._sink = files.open_new(self._folder / _FILE)
        self._writer = pa.ipc.new_stream(self._sink, _SCHEMA)
        self._waiting: list[EncodedChunk] = []
        self._waiting_tokens = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._content = [xxhash.xxh3_128() for _ in range(4)]
        self._marks: list[NDArray[np.bool_]] = []
        self._media = MediaWriter(self._folder)
        self._num_documents = 0
        self.total, self.num_tokens = EncodedChunk(), 0

    def add(self, encoded: EncodedChunk) -> None:
        """Add a chunk's documents; they are on disk some 2**20 tokens later."""
        total = self.total
        encoded.rows += total.num_rows  # from a number within the chunk to one within the source
        total.num_rows += encoded.num_rows
        total.num_kept += encoded.num_kept
        total.num_truncated += encoded.num_truncated
        total.num_split += encoded.num_split
        total.num_valid_tokens += encoded.num_valid_tokens
        total.num_open += encoded.num_open
        total.longest_read = max(total.longest_read, encoded.longest_read)
        total.longest = total.longest.or_later(encoded.longest)
        total.largest_id = total.largest_id.or_later(encoded.largest_id)
        total.bad.merge(encoded.bad)
        total.dropped.merge(encoded.dropped)
        total.notes.merge(encoded.notes)
        self._lengths.append(encoded.lengths)
        for number, media, types in encoded.media:
            self._media.add(self._num_documents + number, media, types)
        self._num_documents += len(encoded.lengths)
        columns = (encoded.ids, encoded.lengths, encoded.edges, encoded.num_edges)
        for content, column in zip(self._content, columns, strict=True):
            content.update(np.ascontiguousarray(column, dtype=np.int32).data)
        self._marks.append(encoded.desirable)
        self._waiting.append(encoded)
        self._waiting_tokens += len(encoded.ids)
        self.num_tokens += len(encoded.ids)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._flush()

    def publish(self, about: Card, folder: Path | None = None) -> PreparedData:
        """Finish the files, give them their name, open them.

        `folder` is the name of data that could not be named before it was read.
        """
        self._final = folder or self._final
        self._flush()
        self._writer.close()
        files.close_durably(self._sink)
        media = self._media.publish()
        card = about | self._card(media) | {"file_digest": _file_digest(self._folder / _FILE)}
        files.write_file(self._folder / _CARD, json.dumps(card, indent=1).encode())
        try:
            files.rename(self._folder, self._final)
        except DiskError:
            if not self._final.is_dir():
                raise
            files.remove_folder(self._folder)  # another run prepared the same meanwhile
        return PreparedData(self._final)

    def discard(self) -> None:
        """Remove the files."""
        with suppress(OSError):  # there may be no room for what it still holds
            self._sink.close()
        self._media.discard()
        files.remove_folder(self._folder)

    def _flush(self) -> None:
        waiting = self._waiting
        if self._waiting_tokens:
            arrays = [
                _lists([one.ids for one in waiting], [one.lengths for one in waiting]),
                _lists([one.edges for one in waiting], [one.num_edges for one in waiting]),
                pa.array(np.concatenate([one.rows for one in waiting])),
                _marks([one.desirable for one in waiting], sum(len(one.rows) for one in waiting)),
            ]
            self._writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
        self._waiting, self._waiting_tokens = [], 0

    def _card(self, media: Card) -> Card:
        total = self.total
        lengths = np.concatenate([np.zeros(0, dtype=np.int32), *self._lengths])
        marks = np.concatenate([np.zeros(0, dtype=np.bool_), *self._marks])
        marked = [xxhash.xxh3_128_hexdigest(marks.tobytes())] if len(marks) else []
        marked += [media["media_digest"]] if media else []
        points = np.percentile(lengths, PERCENTILES) if len(lengths) else np.zeros(7)
        return {
            "rows": total.num_rows,
            "kept": total.num_kept,
            "documents": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "trained_tokens": total.num_valid_tokens,
            "turns_without_end": total.num_open,
            "longest": int(lengths.max(initial=0)),
            "longest_place": total.longest.place,
            "longest_read": total.longest_read,
            "largest_id": total.largest_id.value,
            "largest_id_place": total.largest_id.place,
            "percentiles": {str(p): int(x) for p, x in zip(PERCENTILES, points, strict=True)},
            "truncated": total.num_truncated,
            "split": total.num_split,
            "bad": total.bad.counts,
            "bad_places": total.bad.places,
            "dropped": total.dropped.counts,
            "dropped_places": total.dropped.places,
            **total.notes.card(),
            **media,
            **({"desirable": int(marks.sum())} if len(marks) else {}),
            "digest": digest_of([*(content.hexdigest() for content in self._content), *marked]),
        }


def _file_digest(path: Path) -> str:
    """Return a digest of a file's bytes, or of its size alone if it is too large to read each time.

    xxh3 runs at memory speed, and the pages it reads stay in the page cache for training.
    """
    size = path.stat().st_size
    if size > _HASHED_BYTES:
        return f"{size} bytes"
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def digest_of(parts: Sequence[str]) -> str:
    """Return one digest for several, in their order."""
    return xxhash.xxh3_128_hexdigest("|".join(parts).encode())


def _marks(values: Sequence[NDArray[np.bool_]], count: int) -> pa.Array:
    """Return the marks of documents, or as many nulls where they have none."""
    found = np.concatenate(values)
    return pa.array(found) if len(found) else pa.nulls(count, pa.bool_())


def _lists(
    values: Sequence[NDArray[np.int32]], counts: Sequence[NDArray[np.int32]]
) -> pa.ListArray:
    """Return values, end to end, as lists of so many each."""
    offsets = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values)))
