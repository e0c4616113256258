"""Files that are tokens already, end to end: .bin and .npy, as pre-training tools write them.

    .bin    ids alone (nanoGPT, OLMo): the source says their dtype; or with the header of llm.c; or
            with Megatron's .idx beside it, which has the dtype and where documents begin
    .npy    ids in one dimension, or rows of equal length in two

A file is cut into chunks of some 2**17 tokens by position alone, and nothing of it is copied. A
document ends with the end token, where the .idx says so, or with a row of two dimensions. One that
is longer than `max_length` is cut into pieces, and one that crosses into the next chunk is cut
there: one in a hundred, if documents have a thousand tokens. Every token is trained but the first
of a document.

Laws (tests/data/chunks/test_token_files.py)
    1. All tokens of the files are in documents, in order, but pieces of a single one.
    2. No document is longer than `max_length`, has an end token before its end, or a token that is
       not below the vocabulary size: that is a DataError with the file and the position.
    3. ids that were written in another dtype than the source says are refused, not trained.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain.data.chunks.byte_files import BucketFile, ByteFile, byte_files
from megatrain.data.chunks.choice import TOKEN_FILES
from megatrain.data.chunks.chunks import Chunk
from megatrain.data.steps.order import Indices
from megatrain.errors import ConfigError, DataError
from megatrain.fetched import local_path

_CHUNK_TOKENS = 2**17
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""First number of a file of llm.c, and its dtype. 256 numbers of 4 bytes are its header."""
_LLM_C_HEADER = struct.Struct("<3i")
_LLM_C_BYTES = 1024
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "<u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NPY_HEAD_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of ids."""

    file: ByteFile
    dtype: np.dtype[Any]
    offset: int
    """Bytes before the first id."""
    num_tokens: int
    width: int | None = None
    """Tokens of a row, if it has rows."""
    begins: NDArray[np.int64] | None = None
    """Bytes before each document, mapped from an .idx file, if there is one."""

    def ids(self, start: int, stop: int) -> NDArray[Any]:
        """Return the ids of a span. Raises DataError."""
        size = self.dtype.itemsize
        data = self.file.read(self.offset + start * size, self.offset + stop * size)
        # Pages of their own go back to the system; the heaps of eight threads would keep some.
        pages = mmap.mmap(-1, max(1, len(data)))
        pages[: len(data)] = data
        return np.frombuffer(pages, self.dtype, stop - start)

    def borders(self, start: int, stop: int) -> Indices:
        """Return where documents begin inside of a span, as far as the file says it.

        Raises DataError.
        """
        if self.begins is not None:
            size = self.dtype.itemsize
            # By bisect: numpy would copy the whole of an array that is not aligned.
            first, last = (bisect_left(self.begins, at) for at in (start * size + 1, stop * size))
            found = np.asarray(self.begins[first:last], dtype=np.int64)
            bounds = np.concatenate([[start * size], found, [stop * size]])
            if np.any(np.diff(bounds) < 0) or np.any(found % size):
                raise DataError(
                    f"{self.file.name}: its .idx does not say where documents begin, one after "
                    f"another, between tokens {start:,} and {stop:,}: it is damaged, or of another "
                    "file."
                )
            return found // size
        if self.width is not None:
            return np.arange(-(-(start + 1) // self.width), -(-stop // self.width)) * self.width
        return np.zeros(0, dtype=np.int64)


class TokenFiles:
    """A source of token files, in chunks."""

    def __init__(
        self, name: str, files: Sequence[TokenFile], *, max_length: int, end: int | None
    ) -> None:
        """`end`: the id that ends a document; None: none does. Raises DataError if it is empty."""
        self._files = tuple(files)
        self._max_length, self._end = max_length, end
        # A multiple of `max_length`, so that a file without documents gives full rows.
        self._span = max_length * max(1, _CHUNK_TOKENS // max_length)
        counts = [-(-one.num_tokens // self._span) for one in files]
        self._firsts = np.cumsum([0, *counts])
        self._vocab_size: int | None = None
        self.num_tokens = sum(one.num_tokens for one in files)
        if self.num_tokens < 2:
            raise DataError(f"{name} has no tokens.")
        self.card: dict[str, Any] = {
            "source": name,
            "format": self._format(),
            "preferences": None,
            "files": len(self._files),
            "tokens": self.num_tokens,
            "trained_tokens": self.num_tokens,
            "chunks": self.num_chunks,
            "longest": min(max_length, self.num_tokens),
            "digest": self._digest(),
        }
        if (missing := self._missing_end()) is not None:
            self.card["remark"] = missing

    @property
    def num_chunks(self) -> int:
        return int(self._firsts[-1])

    def require_below(self, vocab_size: int) -> None:
        """Refuse ids that are not below this: of the first chunk now, of others when read."""
        self._vocab_size = vocab_size
        self.read(0)

    def read(self, chunk: int) -> Chunk:
        """Return the documents of a chunk. Raises DataError."""
        number = int(np.searchsorted(self._firsts, chunk, side="right")) - 1
        file = self._files[number]
        start = (chunk - int(self._firsts[number])) * self._span
        stop = min(start + self._span, file.num_tokens)
        ids = file.ids(start, stop)
        self._check(file, ids, start)
        borders = [np.zeros(1, np.int64), file.borders(start, stop) - start]
        if self._end is not None and file.begins is None:
            borders.append(np.flatnonzero(ids == self._end) + 1)
        starts, lengths = _pieces(np.concatenate(borders), len(ids), self._max_length)
        return Chunk(lengths=lengths, starts=starts, ids=ids)

    def close(self) -> None:
        """Nothing works ahead."""

    def _check(self, file: TokenFile, ids: NDArray[Any], start: int) -> None:
        most = self._vocab_size
        least = int(ids.min()) if ids.dtype.kind == "i" else 0
        if least >= 0 and (most is None or int(ids.max()) < most):
            return
        wrong = ids < 0 if least < 0 else ids >= (most or 0)
        at = int(np.argmax(wrong))
        raise DataError(
            f"{file.file.name}: token {start + at:,} (byte "
            f"{file.offset + (start + at) * file.dtype.itemsize:,}) is {int(ids[at]):,}, and the "
            f"model's embedding has {most or 0:,} rows. The file was written as another dtype than "
            f"{_name(file.dtype)}, or with the tokenizer of another model."
        )

    def _format(self) -> str:
        first = self._files[0]
        ends = "no document ends before the file"
        if first.begins is not None:
            ends = "documents of .idx"
        elif self._end is not None:
            ends = f"documents end with {self._end}"
        return f"token ids ({_name(first.dtype)}, {ends}, cut after {self._max_length:,} tokens)"

    def _missing_end(self) -> str | None:
        """Return a remark if the first chunk has no end token."""
        first = self.read(0)
        if self._end is None or self._files[0].begins is not None or np.any(first.ids == self._end):
            return None
        return (
            f"the first {len(first.ids):,} tokens have no {self._end}, so no document ends in "
            "them; if documents end with another token, set eos of this source"
        )

    def _digest(self) -> str:
        parts = [f"{one.file.mark()} {one.dtype.str} {one.offset}" for one in self._files]
        text = f"{parts} {self._max_length} {self._end}"
        return xxhash.xxh3_128_hexdigest(text.encode())


def open_token_files(
    path: str, *, max_length: int, dtype: str | None, end: int | None
) -> TokenFiles:
    """Return the token files of a path or URL, or of a folder.

    Raises DataError if one cannot be read, ConfigError if its dtype is not known.
    """
    found = byte_files(path, TOKEN_FILES)
    files = [_opened(file, dtype) for file in found]
    return TokenFiles(path, files, max_length=max_length, end=end)


def _pieces(borders: Indices, size: int, max_length: int) -> tuple[Indices, Indices]:
    """Return begin and length of each document: between borders, and no longer than allowed."""
    bounds = np.unique(np.append(borders, size))
    lengths = np.diff(bounds)
    counts = -(-lengths // max_length)
    before = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(before, counts)
    starts = np.repeat(bounds[:-1], counts) + within * max_length
    cut = np.minimum(np.repeat(bounds[1:], counts) - starts, max_length)
    kept = cut > 1  # a single token has no successor to predict
    return starts[kept], cut[kept]


def _opened(file: ByteFile, dtype: str | None) -> TokenFile:
    if file.name.lower().endswith(".npy"):
        found = _npy(file)
        if dtype is not None and np.dtype(dtype) != found.dtype:
            raise ConfigError(
                f"{file.name} has ids of {_name(found.dtype)}, and dtype of this source is {dtype}."
            )
        return found
    index = _index_of(file)
    if index is not None:
        return _megatron(file, index)
    if file.num_bytes >= _LLM_C_BYTES:
        magic, _, count = _LLM_C_HEADER.unpack(file.read(0, _LLM_C_HEADER.size))
        kind = np.dtype(_LLM_C.get(magic, "<u2"))
        if magic in _LLM_C and count * kind.itemsize + _LLM_C_BYTES == file.num_bytes:
            return TokenFile(file=file, dtype=kind, offset=_LLM_C_BYTES, num_tokens=count)
    if dtype is None:
        raise ConfigError(
            f"{file.name} has no header that says how its ids are written. Set dtype of this "
            f'source: data.train: {{path: "{file.name}", dtype: uint16}}, or uint32 or int32.'
        )
    kind = np.dtype(dtype).newbyteorder("<")
    if file.num_bytes % kind.itemsize:
        raise DataError(
            f"{file.name} has {file.num_bytes:,} bytes, which is no number of {dtype}: it was cut, "
            "or its dtype is another."
        )
    return _wide_enough(
        TokenFile(file=file, dtype=kind, offset=0, num_tokens=file.num_bytes // kind.itemsize)
    )


def _wide_enough(file: TokenFile) -> TokenFile:
    """Return the file. Raises DataError if every other id is 0, as of wider ids read as uint16."""
    if file.dtype.itemsize > 2:
        return file
    ids = file.ids(0, min(file.num_tokens, _CHUNK_TOKENS))
    odd, even = ids[1::2], ids[::2]
    if len(odd) > 1 and not odd.any() and even.any():
        raise DataError(
            f"{file.file.name}: every other id of the first {len(ids):,} is 0, so they were "
            "written in 4 bytes, not 2. Set dtype of this source to uint32."
        )
    return file


def _npy(file: ByteFile) -> TokenFile:
    """Return the ids of an array of numpy. Raises DataError."""
    head = io.BytesIO(file.read(0, min(_NPY_HEAD_BYTES, file.num_bytes)))
    try:
        version = np.lib.format.read_magic(head)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read(head)
    except Exception as error:  # numpy's tokenizer and parser have errors of their own
        raise DataError(f"{file.name} is not an array of numpy: {str(error)[:100]}") from error
    is_one = len(shape) == 1 or (len(shape) == 2 and not is_fortran)
    if dtype.kind not in "iu" or not is_one or min(shape) < 0:
        raise DataError(
            f"{file.name} has an array of {_name(dtype)} with shape {shape}. Ids are whole numbers "
            "in one dimension, or rows of equal length in two, in C order."
        )
    count = math.prod(shape)  # of Python: numpy's would overflow
    if head.tell() + count * dtype.itemsize != file.num_bytes:
        raise DataError(
            f"{file.name} has {file.num_bytes:,} bytes, and its header says {count:,} ids of "
            f"{_name(dtype)}: it was cut."
        )
    width = int(shape[1]) if len(shape) == 2 else None
    return TokenFile(
        file=file, dtype=dtype, offset=head.tell(), num_tokens=count, width=width or None
    )


def _index_of(file: ByteFile) -> Path | None:
    """Return Megatron's .idx beside a .bin; one in a bucket is fetched, because it is searched."""
    name = f"{file.name.removesuffix('.bin')}.idx"
    if not isinstance(file, BucketFile):
        return Path(name) if Path(name).is_file() else None
    has_index = file.place.stat(f"{file.key.removesuffix('.bin')}.idx") is not None
    return local_path(name) if has_index else None


def _megatron(file: ByteFile, index: Path) -> TokenFile:
    """Return a file with documents where its index says. Raises DataError."""
    try:
        with index.open("rb") as opened:
            head = opened.read(_MEGATRON_HEADER.size)
        magic, version, code, count, _ = _MEGATRON_HEADER.unpack(head)
        if magic != _MEGATRON or version != 1 or code not in _MEGATRON_DTYPES:
            raise ValueError("it is not an index of Megatron, version 1, of whole numbers")
        if _MEGATRON_HEADER.size + 12 * count > index.stat().st_size:
            raise ValueError(f"it was cut: its header says {count:,} documents")
        begins = np.memmap(
            index, "<i8", "r", offset=_MEGATRON_HEADER.size + 4 * count, shape=(count,)
        )
    except (OSError, ValueError, struct.error) as error:
        raise DataError(f"{index}: cannot read it: {error}") from error
    kind = np.dtype(_MEGATRON_DTYPES[code])
    if count == 0 or int(begins[-1]) >= file.num_bytes or file.num_bytes % kind.itemsize:
        raise DataError(f"{index} does not belong to {file.name}: their sizes do not agree.")
    return TokenFile(
        file=file,
        dtype=kind,
        offset=0,
        num_tokens=file.num_bytes // kind.itemsize,
        begins=begins,
    )


def _name(dtype: np.dtype[Any]) -> str:
    return dtype.newbyteorder("=").name
