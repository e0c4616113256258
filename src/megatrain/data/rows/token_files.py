"""Files that are tokens already, end to end: .bin and .npy, as pre-training tools write them.

    .bin    ids alone (nanoGPT, OLMo): the source says their dtype; or with the header of llm.c; or
            with Megatron's .idx beside it, which has the dtype and the length of each document
    .npy    ids in one dimension, or rows of equal length in two

Files are mapped, and each document is a row of tokens (tokens.py) that is prepared as all others. A
document ends with the end token, where the .idx says so, or with a row of two dimensions. One that
is longer than `max_length` is cut into pieces.

Laws (tests/data/rows/test_token_files.py)
    1. All tokens of the files are in rows, in order, but pieces of a single one.
    2. ids that were written in another dtype than the source says are refused, not trained.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import ConfigError, DataError
from megatrain.progress import Advance

TOKEN_FILES = (".bin", ".npy")
_BESIDE = (".idx", ".json", ".md")
"""Other files of a folder of ids."""
_SPAN_TOKENS = 2**22
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""First number of a file of llm.c, and its dtype. 256 numbers of 4 bytes are its header."""
_LLM_C_BYTES = 1024
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "<u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_Where = TypeVar("_Where")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """Files of ids, and how to read them."""

    path: str
    """The file, or the folder of the files."""
    dtype: str | None
    """The dtype of a .bin without a header."""
    end: int | None
    """The token that ends a document; None: none does."""
    max_length: int

    def __str__(self) -> str:
        return self.path

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that decides the rows: the files, and the .idx beside them."""
        found = token_files(self.path)
        indices = (path.with_suffix(".idx") for path in found if path.suffix.lower() == ".bin")
        return (*found, *(index for index in indices if index.is_file()))

    def values(self, advance: Advance) -> Iterator[tuple[str, object]]:
        """Yield each row with its place, `web.bin:17`; report bytes to `advance`.

        Raises DataError, or ConfigError for a dtype that is missing or wrong.
        """
        for path in token_files(self.path):
            number = begin = 0
            ids, stops = _opened(path, self.dtype, self.end)
            for stop in stops:
                for start in range(begin, stop, self.max_length):
                    piece = ids[start : min(start + self.max_length, stop)]
                    if len(piece) > 1:  # a single token has no successor to predict
                        number += 1
                        yield f"{path.name}:{number}", {"input_ids": piece}
                advance((stop - begin) * ids.itemsize)
                begin = stop


def token_files(path: str | Path) -> tuple[Path, ...]:
    """Return the file of ids, or those of a folder by name; none if it has data of another kind."""
    path = Path(path)
    seen = sorted(path.iterdir()) if path.is_dir() else [path]
    by_kind = {one: one.suffix.lower() for one in seen if not one.name.startswith(".")}
    if not {*by_kind.values()} <= {*TOKEN_FILES, *_BESIDE}:
        return ()
    return tuple(one for one, kind in by_kind.items() if kind in TOKEN_FILES)


def as_token_files(
    where: _Where, tokenizer: Any, max_length: int, *, dtype: str | None, eos: int | None
) -> _Where | TokenFiles:
    """Return how to read the files of ids that a source is; any other source unchanged.

    `eos`: the token that ends a document; None: that of the tokenizer.
    """
    if not isinstance(where, str | Path) or not token_files(where):
        return where
    end = tokenizer.eos_token_id if eos is None else eos
    return TokenFiles(path=str(where), dtype=dtype, end=end, max_length=max_length)


def _opened(path: Path, dtype: str | None, end: int | None) -> tuple[NDArray[Any], Iterator[int]]:
    """Return the ids of a file, mapped, and where its documents end."""
    try:
        if path.suffix.lower() == ".npy":
            found = np.lib.format.open_memmap(path, mode="r")
            if dtype is not None and found.dtype != np.dtype(dtype):
                raise ConfigError(
                    f"{path} has ids of {found.dtype}, and dtype of this source is {dtype}."
                )
            if found.dtype.kind not in "iu" or found.ndim > 2 or not found.flags.c_contiguous:
                raise ValueError(f"an array of {found.dtype} with shape {found.shape} is no ids")
            ids = np.asarray(found).reshape(-1)
            return ids, _ends(ids, end, width=found.shape[1] if found.ndim == 2 else None)
        if (index := path.with_suffix(".idx")).is_file():
            return _megatron(path, index)
        return (ids := _binary(path, dtype)), _ends(ids, end)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # numpy's parser of headers has errors of its own
        raise DataError(f"{path}: cannot read its token ids: {str(error)[:100]}") from error


def _ends(ids: NDArray[Any], end: int | None, width: int | None = None) -> Iterator[int]:
    """Yield the place after each end token, and after each row of `width` ids."""
    span = width or _SPAN_TOKENS
    for start in range(0, len(ids), span):
        stop = min(start + span, len(ids))
        if end is not None:
            yield from (np.flatnonzero(ids[start:stop] == end) + start + 1).tolist()
        if width or stop == len(ids):
            yield stop


def _megatron(path: Path, index: Path) -> tuple[NDArray[Any], Iterator[int]]:
    with index.open("rb") as file:
        magic, version, code, count, _ = _MEGATRON_HEADER.unpack(file.read(_MEGATRON_HEADER.size))
    if magic != _MEGATRON or version != 1 or code not in _MEGATRON_DTYPES:
        raise DataError(f"{index} is not an index of Megatron, version 1, of whole numbers.")
    lengths = np.memmap(index, "<i4", "r", offset=_MEGATRON_HEADER.size, shape=(count,))
    ids = np.asarray(np.memmap(path, _MEGATRON_DTYPES[code], "r"))
    if lengths.min() < 0 or lengths.sum(dtype=np.int64) != len(ids):
        raise DataError(f"{index} does not belong to {path}: their sizes do not agree.")
    return ids, iter(np.cumsum(lengths, dtype=np.int64).tolist())


def _binary(path: Path, dtype: str | None) -> NDArray[Any]:
    size = path.stat().st_size
    if size >= _LLM_C_BYTES:
        magic, _, count = np.fromfile(path, "<i4", 3).tolist()
        kind = np.dtype(_LLM_C.get(magic, "<u2"))
        if magic in _LLM_C and count * kind.itemsize + _LLM_C_BYTES == size:
            return np.asarray(np.memmap(path, kind, "r", offset=_LLM_C_BYTES))
    if dtype is None:
        raise ConfigError(
            f"{path} has no header that says how its ids are written. Set dtype of this source: "
            f'data.train: {{path: "{path}", dtype: uint16}}, or uint32 or int32.'
        )
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, which is no number of {dtype}: it was cut, or its dtype "
            "is another."
        )
    ids = np.asarray(np.memmap(path, kind, "r"))
    first = ids[:_SPAN_TOKENS]
    if kind.itemsize == 2 and len(ids) > 2 and first[::2].any() and not first[1::2].any():
        raise DataError(
            f"{path}: every other id of the first {len(first):,} is 0, so they were written in 4 "
            "bytes, not 2. Set dtype of this source to uint32."
        )
    return ids
