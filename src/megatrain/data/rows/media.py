"""Images and sounds that a row names or holds, and their places among its words.

    {"messages": [...{"type": "image"}...], "images": [...]}              as TRL has it
    {"messages": ["<image> What is it?", ...], "images": ["a.png"]}       as LLaMA-Factory has it
    {"type": "image_url", "image_url": {"url": "data:image/png;..."}}     as OpenAI has it
    {"type": "image", "image": "a.png"}                                   as transformers has it

A place without a medium takes the next of its column. If a row has a column and no place for it,
its media come before the words of the first user turn, as in TRL. The contents of all turns of a
row with media are lists of parts, which is how processors' templates read them.

Laws (tests/data/rows/test_media.py)
    1. The same row in any of these forms gives the same messages and media.
    2. As many places as media, and no video, or the row is a BadRow.
    3. Nothing is read or fetched here.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.data.rows.cells import IS_NULL, MEDIA, decoded, kind_of
from megatrain.data.rows.skipped import BadRow

Kind = Literal["image", "audio"]
COLUMNS: Mapping[str, Kind] = {
    "image": "image", "images": "image", "audio": "audio", "audios": "audio",
}  # fmt: skip
_VIDEOS = ("video", "videos")
PLACES_DIFFER = "media and their places differ in number"
NO_MEDIUM = "medium that is not a path, a data URL or bytes"
_PART = re.compile(r"(?:input_)?(image|audio|video)(?:_url)?")
_MARK = re.compile(r"<(image|audio)>")
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.ASCII)
_KEYS = ("url", "path", "base64", "data")
"""Keys under which a part, or an object inside of it, has its medium."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """An image or a sound, as the row has it."""

    kind: Kind
    name: str = ""
    """Path or URL."""
    data: bytes | None = None
    """Its bytes, if they are in the row."""

    @property
    def is_place(self) -> bool:
        """Whether it is a place that waits for a medium of a column."""
        return not self.name and self.data is None


def is_media(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a content is an image, a sound or a video."""
    return _PART.fullmatch(str(part.get("type"))) is not None


def read_part(part: Mapping[str, Any], name: str) -> Medium:
    """Return the medium of a part, or the place that it is. Raises BadRow."""
    found = _PART.fullmatch(str(part["type"]))
    assert found is not None
    if found[1] == "video":
        raise BadRow(MEDIA, "videos are not read")
    kind: Kind = found[1]  # type: ignore[assignment]
    own = (part["type"], kind, f"{kind}_url", *_KEYS)
    cell = next((part[key] for key in own if part.get(key) is not None and key != "type"), None)
    return Medium(kind=kind) if cell is None else _medium(cell, kind, name)


def read_columns(value: Mapping[str, Any]) -> list[Medium]:
    """Return the media in the columns of a row, in order. Raises BadRow."""
    if any(value.get(name) for name in _VIDEOS):
        raise BadRow(MEDIA, "videos are not read")
    media: list[Medium] = []
    for name, kind in COLUMNS.items():
        cell = value.get(name)
        cells = decoded(cell) if isinstance(cell, str) and cell.startswith("[") else cell
        if cells is None or cells == "" or (isinstance(cells, Sequence) and len(cells) == 0):
            continue
        many = cells if isinstance(cells, list | tuple) else [cells]
        media += [_medium(one, kind, f"column {name}") for one in many]
    return media


def _medium(cell: object, kind: Kind, name: str) -> Medium:
    """Return the medium of a cell. Raises BadRow."""
    if cell is None:
        raise BadRow(IS_NULL, name)
    if isinstance(cell, bytes | bytearray | memoryview):
        return Medium(kind=kind, data=bytes(cell))
    if isinstance(cell, str):
        if _DATA.match(cell):
            return Medium(kind=kind, data=_from_base64(cell[cell.index(",") + 1 :], name))
        if not cell.strip() or "\x00" in cell:
            raise BadRow(NO_MEDIUM, f"{name} is {cell[:40]!r}")
        return Medium(kind=kind, name=cell)
    if isinstance(cell, Mapping):
        return _held(cell, kind, name)
    if hasattr(cell, "save") and hasattr(cell, "tobytes"):
        return Medium(kind=kind, data=_as_png(cell))
    raise BadRow(NO_MEDIUM, f"{name} is {kind_of(cell)}")


def _held(cell: Mapping[str, Any], kind: Kind, name: str) -> Medium:
    """Return the medium of an object: of `datasets`, or of an API."""
    if isinstance(cell.get("bytes"), bytes | bytearray):
        return Medium(kind=kind, data=bytes(cell["bytes"]))
    for key in ("base64", "data"):  # without the head of a data URL
        if isinstance(text := cell.get(key), str) and not _DATA.match(text):
            return Medium(kind=kind, data=_from_base64(text, name))
    inner = next((cell[key] for key in _KEYS if isinstance(cell.get(key), str)), None)
    if inner is None:
        raise BadRow(NO_MEDIUM, f"{name} has {', '.join(map(str, cell))[:60] or 'nothing'}")
    return _medium(inner, kind, name)


def _from_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRow(NO_MEDIUM, f"{name}: broken base64") from None


def _as_png(image: Any) -> bytes:
    """Return an image that a program gives, with all its pixels."""
    out = io.BytesIO()
    (image if image.mode in ("1", "L", "RGB", "RGBA") else image.convert("RGB")).save(out, "PNG")
    return out.getvalue()


Parts = Sequence[str | Medium]
"""What a turn says: words, media, and places for media."""


def put_in_place(
    talk: Sequence[Parts | None], roles: Sequence[str], given: Sequence[Medium]
) -> tuple[list[Parts | None], tuple[Medium, ...]]:
    """Return the contents of turns with a medium in each place, and all media in their order.

    `talk` has the parts of each turn, None for one without a content. Raises BadRow.
    """
    waiting = {kind: [one for one in given if one.kind == kind] for kind in COLUMNS.values()}
    turns = [None if parts is None else _split(parts, waiting) for parts in talk]
    for kind, media in waiting.items():
        places = (part for parts in turns for part in parts or () if part == Medium(kind=kind))
        if media and next(places, None) is None:
            first = next((n for n, role in enumerate(roles) if role == "user"), None)
            if first is None:
                raise BadRow(PLACES_DIFFER, f"{len(media)} of {kind}, and no turn of a user")
            turns[first] = [*media, *(turns[first] or ())]
            waiting[kind] = []
    filled = [None if parts is None else [_filled(p, waiting) for p in parts] for parts in turns]
    if left := [f"{len(media)} of {kind}" for kind, media in waiting.items() if media]:
        raise BadRow(PLACES_DIFFER, f"{' and '.join(left)} without a place")
    used = [part for parts in filled for part in parts or () if isinstance(part, Medium)]
    return list(filled), tuple(used)


def _split(parts: Parts, waiting: Mapping[Kind, Sequence[Medium]]) -> list[str | Medium]:
    """Return the parts with a place for each mark of a kind that a column has."""
    found: list[str | Medium] = []
    for part in parts:
        if isinstance(part, Medium):
            found.append(part)
            continue
        at = 0
        for mark in _MARK.finditer(part):
            kind: Kind = mark[1]  # type: ignore[assignment]
            if waiting[kind]:
                found += [part[at : mark.start()], Medium(kind=kind)]
                at = mark.end()
        found.append(part[at:])
    return [part for part in found if part != ""]


def _filled(part: str | Medium, waiting: Mapping[Kind, list[Medium]]) -> str | Medium:
    if isinstance(part, str) or not part.is_place:
        return part
    if not waiting[part.kind]:
        raise BadRow(PLACES_DIFFER, f"a place for {part.kind} is left")
    return waiting[part.kind].pop(0)


def as_content(parts: Parts) -> list[dict[str, str]]:
    """Return parts as a template reads them."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in parts
    ]


def words_of(content: object) -> str:
    """Return the words of a message's content, without its media."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content if isinstance(content, str) else ""
