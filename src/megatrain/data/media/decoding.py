"""Bytes of media: read below one folder, and decoded as `datasets` decodes its columns.

A path counts from the folder of the rows, or from the one that the config names; no `..` and no
link leads out of it. A URL is refused by its name: nothing is fetched because a row says so.

Laws (tests/data/media/test_decoding.py)
    1. No byte outside of the folder is read.
    2. Bytes that cannot be decoded are a BadRow with its reason.
    3. Where a package is missing, the error names it.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatrain.data.rows.media import Kind, Medium
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import MissingPackage
from megatrain.text import printable

LINK = "link to a medium, which is not fetched"
OUTSIDE = "medium outside of the folder of media"
ABSENT = "no such medium"
BROKEN = "medium cannot be decoded"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumBytes:
    """The bytes of a medium, and where they are if they are not in the row."""

    data: bytes
    path: str = ""
    """Of a file; empty: it is in the row."""
    mtime_ns: int = 0


def read_medium(medium: Medium, folder: Path | None) -> MediumBytes:
    """Return the bytes of a medium, which may be in a file below `folder`. Raises BadRow."""
    if medium.data is not None:
        return MediumBytes(data=medium.data)
    shown = printable(medium.name if len(medium.name) <= 60 else f"{medium.name[:60]}...")
    if _SCHEME.match(medium.name):
        raise BadRow(LINK, f"{shown}: save it in a file")
    if folder is None:
        raise BadRow(ABSENT, f"{shown}: set `media` of these rows to its folder")
    root = folder.resolve()
    try:
        path = (root / medium.name).resolve()
        if not path.is_relative_to(root):
            raise BadRow(OUTSIDE, f"{shown}: set `media` of these rows to its folder")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe might never return
            raise BadRow(ABSENT, f"{shown} is not a regular file")
        data = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadRow(ABSENT, f"{shown}: {why}"[:160]) from None
    return MediumBytes(data=data, path=str(path), mtime_ns=status.st_mtime_ns)


def require_package(kind: Kind) -> None:
    """Raise MissingPackage without what `datasets` decodes media of a kind with."""
    package, extra = ("PIL", "media") if kind == "image" else ("torchcodec", "audio")
    try:
        import_module(package)
    except (ImportError, RuntimeError) as error:  # torchcodec without FFmpeg is a RuntimeError
        raise MissingPackage(
            f"rows with {kind} need {package}, which cannot be imported "
            f"({' '.join(str(error).split())[:200]}). Run `pip install megatrain[{extra}]`."
        ) from error


def decode_image(data: bytes) -> Any:
    """Return an image of Pillow, upright and in RGB. Raises BadRow."""
    from datasets import Image

    try:
        return Image(mode="RGB").decode_example({"path": None, "bytes": data})
    except Exception as error:  # decoders raise any
        raise _broken(error) from error


def decode_sound(data: bytes, rate: int) -> Any:
    """Return `rate` samples a second of a sound, the mean of its channels. Raises BadRow."""
    from datasets import Audio

    require_package("audio")
    try:
        return Audio(sampling_rate=rate).decode_example({"path": None, "bytes": data})["array"]
    except Exception as error:  # decoders raise any
        raise _broken(error) from error


def _broken(error: Exception) -> BadRow:
    return BadRow(BROKEN, f"{type(error).__name__}: {error}"[:120])
