"""Where the media of rows may be read: below one folder or one place, and nowhere else.

    MediaFolder("data")                    # the folder of the rows, or another in the config
    MediaFolder("s3://bucket/images")      # a place in the config

A path counts from the folder, or is below it; no `..` and no link leads out of it. A URL must be
below the place that the config names. Any other URL is refused by its name: rows are not trusted,
and nothing is fetched because a row says so.

Laws (tests/data/media/test_sources.py)
    1. No byte outside of the named folder or place is read.
    2. No more bytes are read than the limit allows.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatrain.data.media.decoder import TOO_MANY_BYTES
from megatrain.data.rows.media import Medium
from megatrain.data.rows.skipped import BadRow
from megatrain.places import Place, is_key, is_url, open_place
from megatrain.text import printable

LINK = "link to a medium, which is not fetched"
OUTSIDE = "medium outside of the folder of media"
ABSENT = "no such medium"
_FOLDER = "file://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumBytes:
    """The bytes of a medium, and where they are if they are not in the row."""

    data: bytes
    path: str = ""
    """Of a file; empty: it is in the row, or at a place."""
    mtime_ns: int = 0


class MediaFolder:
    """A folder, or a place, with media that rows name."""

    def __init__(self, where: str | Path | None) -> None:
        """None: rows name no media, but may hold them."""
        self._url = str(where).rstrip("/") if where is not None and is_url(str(where)) else None
        self._folder = where

    @cached_property
    def _root(self) -> Path | None:
        """The folder; None: there is none, or the media are in a bucket."""
        if self._url is None:
            return None if self._folder is None else Path(self._folder).resolve()
        is_folder = self._url.startswith(_FOLDER)
        return Path(self._url.removeprefix(_FOLDER)).resolve() if is_folder else None

    @cached_property
    def _place(self) -> Place | None:
        return None if self._url is None or self._root is not None else open_place(self._url)

    def read(self, medium: Medium, most: int) -> MediumBytes:
        """Return the bytes of a medium, `most` of them at most. Raises BadRow."""
        if medium.data is not None:
            _check_size(len(medium.data), most)
            return MediumBytes(data=medium.data)
        name = medium.name if self._url is None else medium.name.removeprefix(f"{self._url}/")
        if self._place is not None:
            return MediumBytes(data=_from_place(self._place, name, most))
        if _SCHEME.match(name):
            raise BadRow(
                LINK, f"{_short(name)}: save it in a file, or name its place in `media` of the data"
            )
        if self._root is None:
            raise BadRow(ABSENT, f"{_short(name)}: set `media` of these rows to its folder")
        return _from_folder(self._root, name, most)


def _from_folder(root: Path, name: str, most: int) -> MediumBytes:
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise BadRow(OUTSIDE, f"{_short(name)}: set `media` of these rows to its folder")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadRow(ABSENT, f"{_short(name)} is not a regular file")
        _check_size(status.st_size, most)
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadRow(ABSENT, f"{_short(name)}: {why}"[:160]) from None
    _check_size(len(data), most)
    return MediumBytes(data=data, path=str(path), mtime_ns=status.st_mtime_ns)


def _from_place(place: Place, key: str, most: int) -> bytes:
    if _SCHEME.match(key) or not is_key(key):
        raise BadRow(LINK, f"{_short(key)} is not below {place.url}")
    found = place.stat(key)
    if found is None:
        raise BadRow(ABSENT, f"{_short(key)} at {place.url}")
    _check_size(found.num_bytes, most)
    return place.read(key, range(found.num_bytes)) or b""


def _check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise BadRow(TOO_MANY_BYTES, f"{num_bytes:,}, {most:,} are allowed")


def _short(name: str) -> str:
    return printable(name if len(name) <= 60 else f"{name[:60]}...")
