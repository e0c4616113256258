"""Data tokenized once: source -> chunks -> workers -> Arrow, in the order of the rows.

    prepared = prepare("train.jsonl", tokenizer, cache_dir=..., max_length=2048)

The result is found again by its fingerprint. Memory is bounded by the few chunks in flight,
whatever the size of the data. Workers are spawned processes that hold the tokenizer and nothing
else; one that dies or hangs ends the preparation with an error.

Laws (tests/data/tokens/test_prepare.py)
    1. Any number of workers gives the same bytes.
    2. The same data, tokenizer and settings are not tokenized twice; any other are.
    3. A preparation that fails leaves nothing that a later one would take for complete.
    4. Rows that a program gives need no other process to import it
       (tests/data/rows/test_in_memory.py).
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatrain import files
from megatrain.cache import cache_full
from megatrain.choices import RowFormat
from megatrain.data.chat.render import TrainOn
from megatrain.data.chat.template import check_kwargs
from megatrain.data.rows.hub_rows import Where
from megatrain.data.rows.media import COLUMNS
from megatrain.data.rows.reading import JsonLine
from megatrain.data.rows.source import RowSource, open_source
from megatrain.data.tokens.children import program_hidden, require_children
from megatrain.data.tokens.encoding import (
    Chunk,
    ChunkEncoder,
    EncodedChunk,
    NoTarget,
    Overlong,
    Settings,
    begin_worker,
    encode_chunk,
)
from megatrain.data.tokens.fingerprint import fingerprint
from megatrain.data.tokens.limits import check_limits
from megatrain.data.tokens.prepared import PreparedData, PreparedWriter
from megatrain.errors import ConfigError, DataError, DiskError, DiskFull
from megatrain.progress import Advance, byte_progress

if TYPE_CHECKING:
    from megatrain.data.media.processing import MediaSettings

_CHUNK_ROWS = 256
_CHUNK_CHARS = 2**22
_CHUNK_LIMIT_S = 600.0
_MEDIUM_CHARS = _CHUNK_CHARS // 16
"""What an image or a sound counts as: so few of a chunk end within its limit, however slow."""
_MEDIA_WORDS = ('"image', '"audio')
_MANY_ROWS = 2**14
"""Rows from which on a program's rows are split among processes: fewer are tokenized before the
others have started."""
_PLAIN = (str, bytes, int, float, bool, type(None))
_HOPELESS_ROWS = 2000
"""If this many first rows are all bad, the rest is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """How much of a stream a run needs: so many tokens, or so many rows, that are kept."""

    tokens: int | None = None
    rows: int | None = None

    def has(self, writer: PreparedWriter) -> bool:
        """Return whether what was written is enough."""
        by_tokens = self.tokens is not None and writer.num_tokens >= self.tokens
        return by_tokens or (self.rows is not None and writer.total.num_kept >= self.rows)


def prepare(
    path: Where,
    tokenizer: Any,
    *,
    cache_dir: str | Path,
    max_length: int,
    train_on: TrainOn = "assistant",
    template_kwargs: Mapping[str, Any] | None = None,
    overlong: Overlong = "drop",
    no_target: NoTarget = "drop",
    max_bad: float = 0.01,
    max_dropped: float = 0.2,
    max_lost_thoughts: float = 0.01,
    num_workers: int = 1,
    wanted: RowFormat = "auto",
    columns: Mapping[str, str] = MappingProxyType({}),
    roles: Mapping[str, Sequence[str]] = MappingProxyType({}),
    max_rows: int | None = None,
    enough: Enough | None = None,
    media: MediaSettings | None = None,
) -> PreparedData:
    """Return the documents of a file, folder or Hub dataset, from the cache if they are there.

    Of rows that a program gives, streams and small lists are prepared in this process; of a stream,
    as many as are `enough`.
    `media`: how images and sounds of rows are read; without, such rows are bad.
    `wanted` names the format of the rows, `columns` and `roles` the file's names for ours; the
    first `max_rows` are read. Raises DataError if they do not have the format, too many are
    bad, dropped or without their thoughts, none is left, or the chat template contradicts itself.
    """
    if max_length < 2:
        raise ConfigError(f"max_length {max_length}: a document needs at least two tokens")
    source = open_source(path, wanted, columns=columns, roles=roles, max_rows=max_rows)
    if source.format.preferences and train_on == "all":
        raise ConfigError(
            f"data.train_on is all, and the rows of {source.name} are {source.format.kind}: only "
            "answers are compared. Set it to assistant, last or completion."
        )
    settings: Settings = {
        "max_length": max_length,
        "train_on": train_on,
        "template_kwargs": dict(template_kwargs or {}),
        "overlong": overlong,
        "no_target": no_target,
    }
    if source.format.is_conversation:
        check_kwargs(tokenizer, settings["template_kwargs"])
    if source.given is not None and (source.given.num_rows or 0) < _MANY_ROWS:
        num_workers = 1
    named = source.given is None or not source.given.is_stream
    media = media and media.beside(source.folder)
    mark = "" if media is None else media.mark()
    name = fingerprint(source, tokenizer, settings, mark) if named else source.name
    folder = Path(cache_dir) / name
    prepared = PreparedData(folder) if named and folder.is_dir() else None
    if prepared is not None and not prepared.is_current:
        files.remove_folder(folder)
        prepared = None
    if prepared is None:
        if num_workers > 1:
            require_children(needs_program=source.given is None)
        prepared = _prepared(source, tokenizer, settings, folder, num_workers, enough, media)
    check_limits(
        prepared.card,
        max_bad=max_bad,
        max_dropped=max_dropped,
        max_lost_thoughts=max_lost_thoughts,
    )
    return prepared


def _prepared(
    source: RowSource,
    tokenizer: Any,
    settings: Settings,
    folder: Path,
    num_workers: int,
    enough: Enough | None,
    media: MediaSettings | None,
) -> PreparedData:
    """Prepare the rows in `folder`; a stream beside it, under the name of what was read."""
    stream = source.given if source.given is not None and source.given.is_stream else None
    total_bytes = sum(path.stat().st_size for path in source.files)
    writer = PreparedWriter(folder)
    try:
        with byte_progress(f"preparing {source.name}", total_bytes) as advance:
            for encoded in _encoded(source, tokenizer, settings, num_workers, advance, media):
                writer.add(encoded)
                if writer.total.num_rows >= _HOPELESS_ROWS:
                    _check_hope(source.name, writer.total)
                if stream is not None and enough is not None and enough.has(writer):
                    break
        about = {"source": source.name, "format": str(source.format), **settings}
        about["preferences"] = source.format.preferences
        if source.hub is not None:
            about["commit"] = source.hub.commit
        if stream is None:
            return writer.publish(about)
        about["stream_state"] = stream.state()
        mark = "" if media is None else media.mark()
        name = fingerprint(source, tokenizer, settings, mark)
        return writer.publish(about, folder.parent / name)
    except (OSError, DiskFull) as error:
        writer.discard()
        if isinstance(error, DiskFull) or files.is_full(error):
            raise cache_full(
                f"{folder.parent} has no room for the prepared rows of {source.name}",
                "free some space",
            ) from error
        raise DiskError(f"{folder.parent}: cannot write to it: {error.strerror}") from error
    except BaseException:
        writer.discard()
        raise


def _check_hope(name: str, total: EncodedChunk) -> None:
    if total.bad.total == total.num_rows:
        raise DataError(
            f"{name}: none of the first {total.num_rows:,} rows can be used:\n{total.bad}"
        )


def _chunks(values: Iterable[tuple[str, object]]) -> Iterator[Chunk]:
    chunk: Chunk = []
    chars = 0
    for value in values:
        chunk.append(value)
        chars += _num_chars(value[1])
        if len(chunk) == _CHUNK_ROWS or chars >= _CHUNK_CHARS:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


def _num_chars(value: object) -> int:
    """Return the characters of a row; a medium that it names counts as many."""
    if isinstance(value, JsonLine):
        return len(value) + _MEDIUM_CHARS * sum(map(value.count, _MEDIA_WORDS))
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        named = [cell for name, cell in value.items() if name in (*COLUMNS, "image_url") and cell]
        count = sum(len(cell) if isinstance(cell, list) else 1 for cell in named)
        return sum(map(_num_chars, value.values())) + _MEDIUM_CHARS * count
    return sum(map(_num_chars, value)) if isinstance(value, list) else 1


def _encoded(
    source: RowSource,
    tokenizer: Any,
    settings: Settings,
    num_workers: int,
    advance: Advance,
    media: MediaSettings | None,
) -> Iterator[EncodedChunk]:
    chunks = _chunks(source.values(advance))
    begin = (tokenizer, source.format, settings, media)
    if num_workers <= 1:
        yield from map(ChunkEncoder(*begin).encode, chunks)
        return
    with ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), begin_worker, begin
    ) as pool:
        own = None if source.given is None else ChunkEncoder(*begin)
        try:
            yield from _in_order(pool, chunks, most=2 * num_workers, own=own)
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenizing process was killed, most likely because memory ran "
                "out. Fewer workers need less memory."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _submitted(
    pool: ProcessPoolExecutor, chunk: Chunk, own: ChunkEncoder | None
) -> Future[EncodedChunk]:
    """Let another process encode the chunk.

    With an encoder of our `own` that process has not imported the program; rows with objects that
    it might lack are then encoded here.
    """
    if own is None:
        return pool.submit(encode_chunk, chunk)
    if all(_is_plain(value) for _, value in chunk):
        with program_hidden():  # it may be started now
            return pool.submit(encode_chunk, chunk)
    done: Future[EncodedChunk] = Future()
    done.set_result(own.encode(chunk))
    return done


def _is_plain(value: object) -> bool:
    """Return whether a value is made of what JSON has, in Python's own types."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict) and type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return False


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[Chunk], most: int, own: ChunkEncoder | None = None
) -> Iterator[EncodedChunk]:
    """Yield results in the order of the chunks, with at most `most` of them in flight."""
    under_way: deque[Future[EncodedChunk]] = deque()
    for chunk in chunks:
        under_way.append(_submitted(pool, chunk, own))
        if len(under_way) == most:
            yield _result(under_way.popleft(), pool)
    while under_way:
        yield _result(under_way.popleft(), pool)


def _result(future: Future[EncodedChunk], pool: ProcessPoolExecutor) -> EncodedChunk:
    try:
        return future.result(_CHUNK_LIMIT_S)
    except TimeoutError:
        for process in list(pool._processes.values()):  # no public way before Python 3.14
            process.kill()
        raise DataError(
            f"{_CHUNK_ROWS} rows were not tokenized in {_CHUNK_LIMIT_S:g} s: the chat "
            "template may loop without end on one of them."
        ) from None
