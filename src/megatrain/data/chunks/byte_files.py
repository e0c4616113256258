"""Files on a disk and objects in a bucket, read by position.

    for file in byte_files("s3://bucket/tokens", (".bin",)):
        file.read(0, 1024)

Nothing is mapped, copied or kept: each read asks for its own bytes, and an object of a bucket is
read in ranges. A file is known by its size and by bytes of it at 64 places, an object by the mark
that its bucket gives it.

Laws (tests/data/chunks/test_byte_files.py)
    1. A read gives exactly the bytes that are asked for, or a DataError with the file and the byte.
    2. The mark changes with the size, and with the bytes at its beginning and end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from megatrain.data.rows.reading import no_such_data
from megatrain.errors import DataError
from megatrain.fetched import url_of
from megatrain.places import Place, open_place

_HEAD_BYTES = 2**20
_SAMPLE_BYTES = 2**12
_NUM_SAMPLES = 62


class ByteFile(Protocol):
    """Bytes by position."""

    @property
    def name(self) -> str:
        """Its path or URL."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of a span. Raises DataError or PlaceError."""

    def mark(self) -> str:
        """Return a text that changes with the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file on a disk of this machine."""

    path: Path
    num_bytes: int

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, start: int, stop: int) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as file:
                parts, at = [], start
                while at < stop and (part := os.pread(file.fileno(), stop - at, at)):
                    parts.append(part)
                    at += len(part)
        except OSError as error:
            raise DataError(f"{self.path}: cannot read byte {start:,}: {error.strerror}") from error
        if at < stop:
            raise DataError(
                f"{self.path} ends at byte {at:,}, and had {self.num_bytes:,} bytes when the run "
                "was opened. Restore it; the run can then be resumed."
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def mark(self) -> str:
        digest = xxhash.xxh3_128(self.read(0, min(_HEAD_BYTES, self.num_bytes)))
        digest.update(self.read(max(0, self.num_bytes - _HEAD_BYTES), self.num_bytes))
        for number in range(1, _NUM_SAMPLES + 1):
            start = number * self.num_bytes // (_NUM_SAMPLES + 1)
            digest.update(self.read(start, min(start + _SAMPLE_BYTES, self.num_bytes)))
        return f"{self.num_bytes}-{digest.hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFile:
    """An object of a bucket."""

    place: Place
    key: str
    num_bytes: int
    etag: str
    """As the bucket marks its bytes."""

    @property
    def name(self) -> str:
        return f"{self.place.url}/{self.key}"

    def read(self, start: int, stop: int) -> bytes:
        found = self.place.read(self.key, range(start, stop))
        if found is None or len(found) != stop - start:
            had = "is gone" if found is None else f"gave {len(found):,} of {stop - start:,} bytes"
            raise DataError(f"{self.name} {had} at byte {start:,}: it changed during the run.")
        return found

    def mark(self) -> str:
        return f"{self.num_bytes}-{self.etag}"


def byte_files(path: str | Path, suffixes: Sequence[str]) -> list[ByteFile]:
    """Return the file of a path or URL, or those of a folder with one of the suffixes, by name.

    Raises DataError if there is none, or PlaceError.
    """
    url = url_of(path)
    if url is None or url.startswith("file://"):
        return local_files(Path(path if url is None else url.removeprefix("file://")), suffixes)
    place = open_place(url)
    found = [one for one in place.listed() if one.key.endswith(tuple(suffixes))]
    above, _, last = url.rpartition("/")
    if not found and above.count("/") > 1:  # s3://bucket/name: a single object
        place = open_place(above)
        found = [one for one in [place.stat(last)] if one is not None]
    if not found:
        raise DataError(f"{url}: there is no object here with {' or '.join(suffixes)}.")
    return [
        BucketFile(place=place, key=one.key, num_bytes=one.num_bytes, etag=one.mark)
        for one in found
    ]


def local_files(path: Path, suffixes: Sequence[str]) -> list[ByteFile]:
    """Return a file, or those of a folder. Raises DataError."""
    if not path.exists():
        raise no_such_data(path)
    found = [path]
    if path.is_dir():
        seen = sorted(one for one in path.iterdir() if not one.name.startswith("."))
        found = [one for one in seen if one.suffix.lower() in suffixes and one.is_file()]
    if not found:
        raise DataError(f"{path}: the folder has no {' or '.join(suffixes)} file.")
    return [LocalFile(path=one, num_bytes=one.stat().st_size) for one in found]
