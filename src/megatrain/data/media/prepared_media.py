"""The media of prepared documents, on disk beside their tokens.

    <folder>/media.json     of each item its kind, its digest, its size and where its bytes are
    <folder>/media.npz      which documents have which items at which token, and types of tokens
    <folder>/media.bin      the bytes of items that were inside of rows or at a place, end to end

Files stay where they are: an item names its path, size and time of change, and if one of them has
changed the data is prepared again. What a processor makes of an item is computed from its bytes
whenever it is asked for: as numbers it would take a hundred times as much disk.

Laws (tests/data/media/test_prepared_media.py)
    1. Documents get back their items and types, in order.
    2. Equal items are kept once.
    3. An item whose bytes have changed is never given out under its old digest.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain import files
from megatrain.data.media.placed import DocumentMedia, PlacedMedium, TypeRun, UsedMedium
from megatrain.data.rows.media import Kind
from megatrain.errors import DataError

_ITEMS, _USES, _BYTES = "media.json", "media.npz", "media.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """An item, and where its bytes are."""

    kind: Kind
    digest: str
    num_bytes: int
    path: str = ""
    """Of its file; empty: it is in media.bin, from `offset` on."""
    mtime_ns: int = 0
    offset: int = 0

    def read(self, folder: Path) -> bytes:
        """Return its bytes. Raises DataError."""
        path = Path(self.path) if self.path else folder / _BYTES
        try:
            with path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.num_bytes)
        except OSError as error:
            raise DataError(f"{path}: cannot read a medium: {error.strerror}") from error
        if len(data) != self.num_bytes:
            raise DataError(f"{path} has changed since the rows were prepared. Start again.")
        return data

    @property
    def is_there(self) -> bool:
        """Whether its file is as it was."""
        if not self.path:
            return True
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.num_bytes, self.mtime_ns)


class MediaWriter:
    """Writes the media of documents as they are added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self._items: list[StoredItem] = []
        self._uses: list[tuple[int, int, int]] = []
        self._types: list[tuple[int, int, int, int]] = []
        self._bytes: BinaryIO | None = None
        self._offset = 0

    def add(self, document: int, media: Sequence[PlacedMedium], types: Sequence[TypeRun]) -> None:
        """Add the media of a document; documents come in order."""
        for one in media:
            number = self._numbers.setdefault(one.medium.digest, len(self._items))
            if number == len(self._items):
                self._items.append(self._stored(one.medium))
            self._uses.append((document, number, one.begin))
        self._types += [(document, *run) for run in types]

    def _stored(self, medium: UsedMedium) -> StoredItem:
        item = StoredItem(kind=medium.kind, digest=medium.digest, num_bytes=medium.num_bytes)
        if medium.path:
            return replace(item, path=medium.path, mtime_ns=medium.mtime_ns)
        if self._bytes is None:
            self._bytes = files.open_new(self._folder / _BYTES)
        self._bytes.write(medium.data)
        stored = replace(item, offset=self._offset)
        self._offset += medium.num_bytes
        return stored

    def publish(self) -> dict[str, Any]:
        """Finish the files; return what the card says of them: nothing without media."""
        if not self._items:
            return {}
        if self._bytes is not None:
            files.close_durably(self._bytes)
        items = [asdict(item) for item in self._items]
        files.write_file(self._folder / _ITEMS, json.dumps(items).encode())
        uses = np.array(self._uses, dtype=np.int64).reshape(-1, 3)
        types = np.array(self._types, dtype=np.int64).reshape(-1, 4)
        files.write_file(self._folder / _USES, _npz(uses=uses, types=types))
        digest = xxhash.xxh3_128("|".join(item.digest for item in self._items).encode())
        digest.update(uses.tobytes())
        kinds = [self._items[number].kind for _, number, _ in self._uses]
        return {
            "media": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "media_items": len(items),
            "media_tokens": int((types[:, 2] - types[:, 1]).sum()),
            "media_bytes": sum(item.num_bytes for item in self._items),
            "media_digest": digest.hexdigest(),
        }

    def discard(self) -> None:
        """Close the file."""
        if self._bytes is not None:
            with suppress(OSError):  # there may be no room for what it still holds
                self._bytes.close()


class PreparedMedia:
    """The media of prepared documents, by number."""

    def __init__(self, folder: Path) -> None:
        """Raise OSError, ValueError, KeyError or TypeError for files that are damaged."""
        self._folder = folder
        listed = json.loads((folder / _ITEMS).read_bytes())
        self.items = tuple(StoredItem(**item) for item in listed)
        with np.load(folder / _USES, allow_pickle=False) as found:
            self._uses: NDArray[np.int64] = found["uses"]
            self._types: NDArray[np.int64] = found["types"]

    def media(self, document: int, length: int) -> DocumentMedia | None:
        """Return the media of a document of `length` tokens; None: it has none."""
        uses = self._uses[_rows_of(self._uses, document)]
        if len(uses) == 0:
            return None
        types = np.zeros(length, dtype=np.uint8)
        for _, begin, end, kind in self._types[_rows_of(self._types, document)].tolist():
            types[begin:end] = kind
        return DocumentMedia(
            digests=tuple(self.items[number].digest for number in uses[:, 1].tolist()),
            begins=tuple(uses[:, 2].tolist()),
            token_types=types,
        )

    @property
    def are_there(self) -> bool:
        """Whether every file of an item is as it was."""
        return all(item.is_there for item in self.items)


def _rows_of(table: NDArray[np.int64], document: int) -> slice:
    begin, end = np.searchsorted(table[:, 0], [document, document + 1])
    return slice(int(begin), int(end))


def _npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()
