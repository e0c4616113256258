"""Rows of large files in chunks, tokenized by other processes while the run goes on.

    .jsonl, .ndjson, .txt    a chunk is the lines that begin in a stretch of 256 KiB
    .parquet                 a chunk is a row group

How many chunks there are is known from sizes and footers alone, so the first step waits for its own
window and for nothing else. Nothing is written: tokens are made again when a chunk is read again,
which costs less than a disk full of them. Limits on bad and dropped rows are those of all rows that
were read so far.

Laws (tests/data/chunks/test_row_chunks.py)
    1. The documents of all chunks are those that `prepare` makes, in its order.
    2. Any number of processes gives the same documents.
    3. A row that cannot be used is counted with its place, and too many of them end the run.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatrain.data.chunks.byte_files import ByteFile, local_files
from megatrain.data.chunks.choice import IN_CHUNKS
from megatrain.data.chunks.chunks import Chunk
from megatrain.data.rows.formats import Format
from megatrain.data.rows.reading import LONGEST_LINE_BYTES, JsonLine, batch_rows
from megatrain.data.rows.skipped import BadRow
from megatrain.data.tokens.encoding import (
    Chunk as RawRows,
)
from megatrain.data.tokens.encoding import (
    ChunkEncoder,
    EncodedChunk,
    Settings,
    begin_worker,
    encode_chunk,
)
from megatrain.data.tokens.limits import check_limits
from megatrain.errors import DataError

_CHUNK_BYTES = 2**18
_BLOCK_BYTES = 2**16
_LEAST_ROWS = 2000
"""Rows after which limits on bad rows are looked at; a file with fewer is read to its end."""


class RowChunks:
    """A source of row files, in chunks. Close it to end its processes."""

    def __init__(
        self,
        name: str,
        files: list[Path],
        tokenizer: Any,
        shape: Format,
        settings: Settings,
        *,
        limits: Mapping[str, float],
        num_workers: int,
    ) -> None:
        """`limits` are those of `check_limits`. Raises DataError if a file cannot be read."""
        self._name, self._limits = name, limits
        self._begin = (tokenizer, shape, settings)
        self._parts = [_part_of(path) for path in files]
        self._firsts = np.cumsum([0, *(one.num_chunks for one in self._parts)])
        self._encoder = ChunkEncoder(*self._begin)
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()
        self._total, self._num_read = EncodedChunk(), 0
        self._vocab_size: int | None = None
        self._first = self._encoder.encode(self._rows(0))
        parts = self._parts
        rate = len(self._first.ids) / max(parts[0].size_of_first, 1)
        self.num_tokens = max(1, int(rate * sum(one.size for one in parts)))
        self.card: dict[str, Any] = {
            "source": name,
            "format": str(shape),
            "preferences": None,
            "files": len(files),
            "tokens": self.num_tokens,
            "chunks": self.num_chunks,
            "longest": settings["max_length"],
            "remark": "tokens are estimated from the first chunk; rows are tokenized as they are "
            "reached",
            "digest": self._digest(),
        }

    @property
    def num_chunks(self) -> int:
        return int(self._firsts[-1])

    def require_below(self, vocab_size: int) -> None:
        """Refuse ids that are not below this: of the first chunk now, of others when read."""
        self._vocab_size = vocab_size
        self._check(self._first)

    def read(self, chunk: int) -> Chunk:
        """Return the documents of a chunk; waits until it is tokenized. Raises DataError."""
        encoded = self._encoded(self._rows(chunk))
        self._check(encoded)
        with self._lock:
            self._count(encoded)
        lengths = encoded.lengths.astype(np.int64)
        return Chunk(
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,
            ids=encoded.ids,
            runs=tuple(np.split(encoded.edges, np.cumsum(encoded.num_edges)[:-1])),
        )

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _encoded(self, rows: RawRows) -> EncodedChunk:
        if self._num_workers <= 1:
            with self._lock:
                return self._encoder.encode(rows)
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self._num_workers,
                    multiprocessing.get_context("spawn"),
                    begin_worker,
                    self._begin,
                )
            future = self._pool.submit(encode_chunk, rows)
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise DataError(
                f"{self._name}: a tokenizing process was killed, most likely because memory ran "
                "out. Resume the run, or set data.prepare: first."
            ) from error

    def _rows(self, chunk: int) -> RawRows:
        number = int(np.searchsorted(self._firsts, chunk, side="right")) - 1
        return self._parts[number].rows(chunk - int(self._firsts[number]))

    def _check(self, encoded: EncodedChunk) -> None:
        largest = encoded.largest_id
        if self._vocab_size is not None and largest.value >= self._vocab_size:
            raise DataError(
                f"{largest.place} has token id {largest.value:,}, but the model's embedding has "
                f"{self._vocab_size:,} rows (vocab_size of config.json). The tokenizer has tokens "
                "that the model does not know: use the tokenizer of this model."
            )

    def _count(self, encoded: EncodedChunk) -> None:
        """Add what a chunk lost, and raise DataError if it is more than the limits allow."""
        total = self._total
        self._num_read += 1
        total.num_rows += encoded.num_rows
        total.longest_read = max(total.longest_read, encoded.longest_read)
        total.bad.merge(encoded.bad)
        total.dropped.merge(encoded.dropped)
        total.notes.merge(encoded.notes)
        if total.num_rows < _LEAST_ROWS and self._num_read < self.num_chunks:
            return
        card = {
            **self.card,
            "rows": total.num_rows,
            "bad": total.bad.counts,
            "bad_places": total.bad.places,
            "dropped": total.dropped.counts,
            "dropped_places": total.dropped.places,
            "longest_read": total.longest_read,
            "documents": 1,
            **total.notes.card(),
        }
        check_limits(card, **self._limits)

    def _digest(self) -> str:
        tokenizer, shape, settings = self._begin
        about = [
            [one.mark for one in self._parts],
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            repr(shape),
            settings,
        ]
        text = json.dumps(about, sort_keys=True, default=str)
        return xxhash.xxh3_128_hexdigest(text.encode())


class _LineChunks:
    """A file of lines, in stretches of bytes."""

    def __init__(self, file: ByteFile, *, is_json: bool) -> None:
        self._file, self._is_json = file, is_json
        self.num_chunks = -(-file.num_bytes // _CHUNK_BYTES)
        self.size, self.mark = file.num_bytes, file.mark()
        self.size_of_first = min(_CHUNK_BYTES, file.num_bytes)

    def rows(self, chunk: int) -> RawRows:
        """Return the lines that begin in a stretch."""
        name = Path(self._file.name).name
        found: RawRows = []
        for at, line in self._lines(chunk * _CHUNK_BYTES):
            place = f"{name}:byte {at}"
            if isinstance(line, BadRow):
                found.append((place, line))
                continue
            try:
                text = line.decode("utf-8-sig" if at == 0 else "utf-8")
            except UnicodeDecodeError as error:
                found.append((place, BadRow("not UTF-8", f"byte {error.start}")))
                continue
            if text.strip():
                text = text.rstrip("\r\n")
                found.append((place, JsonLine(text) if self._is_json else {"text": text}))
        return found

    def _lines(self, start: int) -> Iterator[tuple[int, bytes | BadRow]]:
        stop = min(start + _CHUNK_BYTES, self._file.num_bytes)
        # The byte before tells whether a line begins here.
        data = self._file.read(max(0, start - 1), stop)
        at = max(0, start - 1)
        if start:
            cut = data.find(b"\n") + 1
            if not cut:
                return
            data, at = data[cut:], at + cut
        end = stop
        while data and not data.endswith(b"\n") and end < self._file.num_bytes:
            more = self._file.read(end, min(end + _BLOCK_BYTES, self._file.num_bytes))
            cut = more.find(b"\n") + 1
            data += more[:cut] if cut else more
            end += len(more)
            if cut or len(data) > LONGEST_LINE_BYTES + _CHUNK_BYTES:
                break
        for line in data.split(b"\n"):
            if len(line) > LONGEST_LINE_BYTES:
                yield at, BadRow("line too long", f"over {LONGEST_LINE_BYTES >> 20} MiB")
            else:
                yield at, line
            at += len(line) + 1


class _GroupChunks:
    """A Parquet file, by row groups."""

    def __init__(self, file: ByteFile) -> None:
        from pyarrow.parquet import ParquetFile

        self._file = file
        with ParquetFile(file.name) as opened:
            self.num_chunks = opened.num_row_groups
            self._rows = [opened.metadata.row_group(n).num_rows for n in range(self.num_chunks)]
        self.size, self.mark = sum(self._rows), file.mark()
        self.size_of_first = self._rows[0] if self._rows else 0

    def rows(self, chunk: int) -> RawRows:
        """Return the rows of a group."""
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        name, first = Path(self._file.name).name, sum(self._rows[:chunk])
        try:
            with ParquetFile(self._file.name) as opened:
                batches = opened.read_row_group(chunk).to_batches()
                values = [value for batch in batches for value in batch_rows(batch)]
        except (ArrowException, ValueError, OverflowError, OSError) as error:
            raise DataError(
                f"{self._file.name}: broken Parquet in row group {chunk}: {error}"
            ) from error
        return [(f"{name}:{first + number}", value) for number, value in enumerate(values, 1)]


def _part_of(path: Path) -> _LineChunks | _GroupChunks:
    (file,) = local_files(path, IN_CHUNKS)
    kind = path.suffix.lower()
    return _GroupChunks(file) if kind == ".parquet" else _LineChunks(file, is_json=kind != ".txt")
